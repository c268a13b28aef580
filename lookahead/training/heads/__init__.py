"""Training of heads that guess several tokens at once, for any causal language model."""
