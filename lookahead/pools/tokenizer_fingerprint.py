"""What tells a tokenizer from others, as 64 bits."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import xxhash
from transformers import PreTrainedTokenizerBase

_TEXT_TO_IDS = ("added_tokens", "model", "normalizer", "pre_tokenizer")  # the rest is about special tokens and text

_known: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, int]] = WeakKeyDictionary()


def fingerprint_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """64 bits that are the same for tokenizers that give the same ids to the same text.

    What a tokenizer puts around a text, how it cuts and pads, and how it makes text of ids again do not count.
    Added tokens do. It is computed once for each tokenizer, and again when tokens were added.
    """
    size = len(tokenizer)
    known = _known.get(tokenizer)
    if known is None or known[0] != size:
        described = json.dumps(_describe(tokenizer), sort_keys=True, ensure_ascii=True)
        known = (size, xxhash.xxh3_64_intdigest(described.encode("ascii")))
        _known[tokenizer] = known
    return known[1]


def _describe(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What decides on the ids of a text, as JSON-ready values."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    whole = json.loads(backend.to_str())
    return {part: whole[part] for part in _TEXT_TO_IDS}
