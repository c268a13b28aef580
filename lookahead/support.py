"""Which models can be decoded with token trees, found out from the model rather than from a list of names."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.target import Target, takes_registered_attention
from lookahead.tree import TokenTree

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_TOLERANCE = 0.05  # of the logits' norm: half precision stays below it, a wrong mask or position does not

_verdicts: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


def why_not_trees(model: PreTrainedModel, max_length: int) -> str | None:
    """Why a model cannot be decoded with token trees, in words; None where it can.

    Args:
        model: A causal language model.
        max_length: Tokens the longest row may reach; some position embeddings change their rule on the way.
    """
    config: Any = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if getattr(model, "_is_stateful", False) or layers:
        return "its state is sequential, so a rejected draft could not be taken back"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_length > limit:
            return f"its {rope['rope_type']} position embeddings change beyond {limit} tokens"
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and max_length > chunk:
        return f"its attention is cut into chunks of {chunk} tokens"
    if takes_registered_attention(model):
        return None
    if getattr(config, "alibi", False) or "local" in getattr(config, "attention_layers", ()):
        return "its attention depends on the slot of a token in the cache"
    if model not in _verdicts:
        _verdicts[model] = _probe(model)
    return _verdicts[model] or None


def _probe(model: PreTrainedModel) -> str:
    """Score a small tree in one pass and each of its paths alone; what is wrong, or an empty string."""
    prompt = np.array([1, 2, 3], np.int32)
    tree = TokenTree.from_parents([3, 4, 5, 4, 6], [0, 0, 1, 2, 0])
    target = Target(model, rows=1, capacity=8)
    causal_lm: Any = model
    try:
        with torch.inference_mode(), target.serving():
            target.prefill([prompt])
            logits = target.score([tree])[0]
    except Exception as error:
        # A model that takes no prepared mask fails in a way of its own.
        return f"it takes no prepared attention mask ({type(error).__name__})"
    for node, path in ((3, [3, 4, 5, 4]), (4, [3, 6])):
        with torch.inference_mode():
            expected = causal_lm(input_ids=torch.tensor([[1, 2, *path]], device=logits.device)).logits[0, -1]
        if not (logits[node] - expected).norm() <= _TOLERANCE * expected.norm():
            return "it does not heed prepared attention masks or positions"
    return ""
