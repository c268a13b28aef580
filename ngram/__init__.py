"""Numba indexes over token streams: tokens in, candidates out, without tensors."""
