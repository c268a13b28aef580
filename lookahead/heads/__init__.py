"""Small networks that guess several tokens at once from what a model computes anyway, and their files."""
