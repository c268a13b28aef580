"""Encoder-decoder models: what the core asks of a `ModelKind`, answered for a decoder behind an encoder."""
