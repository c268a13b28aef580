"""Backends, which score token trees: one protocol, with implementations in plain torch, for CPUs and for GPUs."""
