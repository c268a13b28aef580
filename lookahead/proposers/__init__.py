"""The sources of drafts, and their files."""
