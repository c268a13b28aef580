"""Small networks that guess several tokens at once from a model's hidden states, and their files."""
