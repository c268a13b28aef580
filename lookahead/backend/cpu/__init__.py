"""Passes on CPUs: packed weights, fused layers, attention of single nodes."""
