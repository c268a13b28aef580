"""Why decoding was as fast as it was, step by step."""
