"""HuggingFace models and transformers: loading, caches, hooks; the only room that uses its private names."""
