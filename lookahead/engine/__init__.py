"""The decoding loop and the state of one output."""
