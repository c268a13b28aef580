"""Exact verification of token trees, sampling, and stopping."""
