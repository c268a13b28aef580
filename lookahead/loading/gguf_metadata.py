"""Checks of the sizes in a GGUF file's metadata, before a model of these sizes is made.

For a missing key transformers uses the default of a configuration, which belongs to another model. So a file must state
the keys that transformers reads, in whole numbers that fit its tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

from lookahead.errors import UnsupportedModelError

_GENERAL = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.tokens")
_SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
# Optional keys: their defaults do not depend on the model, or follow from other keys and from tensors.
_OPTIONAL = re.compile(
    r"rope\..*|vocab_size|.*head_count_kv|.*(key|value|expert_feed_forward)_length|.*sliding_window|.*_id|.*gating_func"
)
_SIZE = re.compile(r".*(_count|_count_kv|_length|_size|_kernel|_rank|l_cache|dimension_count)")
_NUMBER = re.compile(r".*(_epsilon|freq_base)")
_EPSILON = re.compile(r"attention\.layer_norm_(rms_)?epsilon")  # transformers' tables use either for some models
_BLOCK = re.compile(r"(?:enc\.)?blk\.(\d+)\.")
_NO_DIMENSIONS = ("block_count", "context_length")  # other sizes are at most the largest dimension of a tensor
_MAX_INT32 = (1 << 31) - 1


def check_metadata(name: str, reader: Any) -> None:
    """Raise UnsupportedModelError, naming the key, unless a `GGUFReader`'s metadata fit its tensors."""
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    shapes = {tensor.name: [*map(int, tensor.shape)] for tensor in reader.tensors}
    for problem in _problems(values, shapes, {*reader.fields}):
        raise UnsupportedModelError(f"model {name}: {problem}")


def _problems(values: dict[str, Any], shapes: dict[str, list[int]], keys: set[str]) -> Iterator[str]:
    yield from (f"its metadata lacks {key}" for key in _GENERAL if key not in keys)
    architecture = values["general.architecture"]
    if not isinstance(architecture, str):
        yield f"general.architecture must be the name of an architecture, got {architecture!r}"
    needed = _keys_of(architecture)
    own = {key: f"{architecture}.{key}" for key in needed or _SIZES}
    for key in needed:
        is_there = own[key] in values
        if _EPSILON.fullmatch(key):
            is_there = any(_EPSILON.fullmatch(value.removeprefix(f"{architecture}.")) for value in values)
        if not is_there and not _OPTIONAL.fullmatch(key):
            yield f"its metadata lacks {own[key]}"
    largest = max((size for shape in shapes.values() for size in shape), default=1)
    for key, full in own.items():
        if full in values:
            yield from _problem_of_value(full, values[full], _MAX_INT32 if key in _NO_DIMENSIONS else largest)
    yield from _problems_of_tensors(architecture, values, shapes)


def _keys_of(architecture: str) -> Sequence[str]:
    """The keys that transformers reads from a file, without the architecture prefix.

    Empty if transformers has no table for it: it then reports missing keys itself, or does not read the architecture.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    # Files write `qwen2moe` and `gpt-oss` where transformers has `qwen2_moe` and `gpt_oss`.
    plain = re.sub("[-_]", "", architecture)
    tables = {re.sub("[-_]", "", name): table for name, table in cast(Any, GGUF_CONFIG_MAPPING).items()}
    table = tables.get(plain.removesuffix("encoder"), {})
    return [key for key, renamed in table.items() if renamed is not None]


def _problem_of_value(key: str, value: Any, most: int) -> Iterator[str]:
    if _NUMBER.fullmatch(key):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            yield f"{key} must be a positive number, got {value!r}"
    elif _SIZE.fullmatch(key):
        # Some architectures have a number per block, 0 for a block without that part.
        least, numbers = (0, value) if isinstance(value, list) else (1, [value])
        if not numbers or any(type(number) is not int or not least <= number <= most for number in numbers):
            yield f"{key} must be a whole number from 1 to {most}, got {value!r}"


def _problems_of_tensors(architecture: str, values: dict[str, Any], shapes: dict[str, list[int]]) -> Iterator[str]:
    """Contradictions between the metadata and the shapes of tensors, innermost dimension first."""
    predicting = values.get(f"{architecture}.nextn_predict_layers")
    blocks = 1 + max((int(match.group(1)) for name in shapes if (match := _BLOCK.match(name))), default=-1)
    stated = values.get(f"{architecture}.block_count", blocks)
    if blocks > 0 and not stated - (predicting if type(predicting) is int else 0) <= blocks <= stated:
        yield f"{architecture}.block_count must be {blocks}, the number of blocks among its tensors, got {stated}"
    for key, tensor in (("embedding_length", "token_embd"), ("feed_forward_length", "blk.0.ffn_down")):
        shape, stated = shapes.get(f"{tensor}.weight"), values.get(f"{architecture}.{key}")
        if shape is not None and isinstance(stated, int) and stated != shape[0]:
            yield f"{architecture}.{key} must be {shape[0]}, as {tensor}.weight has it, got {stated}"
