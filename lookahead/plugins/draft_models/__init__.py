"""Drafts of smaller models."""
