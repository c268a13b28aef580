"""Files, and fingerprints of tokenizers and weights."""
