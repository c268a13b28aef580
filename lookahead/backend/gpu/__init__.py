"""Passes on GPUs: CUDA graphs, kernels that were tested."""
