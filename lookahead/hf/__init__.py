"""HuggingFace models: loading, caches, hooks. Only this package uses private names of transformers."""
