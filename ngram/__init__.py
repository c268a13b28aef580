"""Numba indexes over token streams: tokens in, candidates out, no tensors."""
