"""Privacy: the mechanism, how its batches are drawn, its noise, and what it costs."""
