"""Outputs that follow a grammar, and drafts of the tokens that it forces."""
