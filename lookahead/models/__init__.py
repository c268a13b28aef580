"""HuggingFace models as verification targets: loading, KV cache, tree attention, fixed-shape passes, step costs."""
