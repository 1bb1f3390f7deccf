"""Elementwise kernels that pass over the rows of a tensor once, and their forms on CPUs."""
