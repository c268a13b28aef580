"""Training of the small extractive summarizer that the tests use. Not part of the installed package."""
