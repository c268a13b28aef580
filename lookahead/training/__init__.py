"""Training of the small extractive summarizer that ships with lookahead."""
