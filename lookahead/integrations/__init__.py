"""Drafts inside other engines."""
