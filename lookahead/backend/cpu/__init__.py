"""Passes on CPUs: packed weights, fused layers, attention per node."""
