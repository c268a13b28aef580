"""Passes on GPUs: CUDA graphs and tested kernels."""
