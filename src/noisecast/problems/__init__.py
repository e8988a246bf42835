"""What is trained: synthetic losses of the theory, linear models on data, and any JAX loss.

Nothing is imported here: reading a data set does not wait for JAX. `noisecast` itself offers the names.
"""
