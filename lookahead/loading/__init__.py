"""Models from names and files: checkpoints, GGUF, quantized layers."""
