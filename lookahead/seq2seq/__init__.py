"""Encoder-decoder models: what the encoder reads is drafted from, and the decoder verifies chains."""
