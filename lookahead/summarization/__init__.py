"""Summaries of documents of any length."""
