"""Advice: which optimizer and settings to use at a privacy budget, and what that is based on.

`advise` forecasts a problem; `numbers` needs no data; `transfer` carries one learning rate to other noise; `probe`
spends a stated part of the budget on the numbers that `numbers` needs. Each is imported on its own: not all need JAX.
"""
