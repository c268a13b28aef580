"""Exact beam search over token trees."""
