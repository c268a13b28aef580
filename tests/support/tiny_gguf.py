"""A tiny model in a GGUF file, and tensors in GGUF blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "cd"]


# Bytes per block, offsets of its float16 values, weights per block, and the scale for weights like the tiny model's.
BLOCKS = {
    "Q4_0": (18, (0,), 32, 0.05), "Q4_1": (20, (0, 2), 32, 0.05), "Q5_0": (22, (0,), 32, 0.03),
    "Q5_1": (24, (0, 2), 32, 0.03), "Q8_0": (34, (0,), 32, 4e-3), "Q4_K": (144, (0, 2), 256, 1e-3),
    "Q5_K": (176, (0, 2), 256, 5e-4), "Q6_K": (210, (208,), 256, 2e-4), "Q3_K": (110, (108,), 256, 4e-3),
    "IQ4_NL": (18, (0,), 32, 4e-3), "IQ4_XS": (136, (0,), 256, 2e-4), "MXFP4": (17, (), 32, 0),
    "Q2_K": (84, (80, 82), 256, 2e-2),
}  # fmt: skip
NORMS = {  # of a block, by architecture
    "gemma2": ("attn", "post_attention", "ffn", "post_ffw"),
    "gemma3": ("attn", "post_attention", "ffn", "post_ffw", "attn_q", "attn_k"),
    "qwen3moe": ("attn", "ffn", "attn_q", "attn_k"),
}
_ZERO = {"Q4_1": -8, "Q5_1": -16, "Q4_K": 8, "Q5_K": 16}  # a minimum in steps, for weights around 0


def blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random valid blocks `[outputs, bytes]` of a type."""
    generator = np.random.default_rng(seed)
    nbytes, places, size, scale = BLOCKS[kind]
    made = generator.integers(0, 256, (outputs, inputs // size, nbytes), dtype=np.uint8)
    steps = generator.normal(0, scale, (outputs, inputs // size, 1))
    for place, factor in zip(places, (1, _ZERO.get(kind, 1)), strict=False):
        made[..., place : place + 2] = (factor * steps).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        made[..., 0] = 124 + made[..., 0] % 3
    return made.reshape(outputs, -1)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    seed: int = 0,
    edit: Callable[[Any], None] = lambda writer: None,
    size: int = 32,
    kinds: Mapping[str, str] | None = None,
    depth: int = 1,
) -> Path:
    """A tiny random Llama, or Gemma with its tied head, with a tokenizer of letters.

    It is in fp32, except tensors with a block type in `kinds`, by their names with or without the layer.
    `edit` may change the content of the `GGUFWriter`.
    """
    import gguf

    inner = 48 if size == 32 else size

    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_block_count(depth)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(["a b", "c d"])  # old releases of transformers cannot read a list of one
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_token_scores([0.0] * len(WORDS))
    writer.add_key_length(size // 2)
    writer.add_value_length(size // 2)
    writer.add_sliding_window(16)
    heads = ("token_embd",) if architecture.startswith("gemma") else ("token_embd", "output")
    shapes: dict[str, tuple[int, int]] = dict.fromkeys(heads, (len(WORDS), size))
    for block in (f"blk.{i}." for i in range(depth)):
        shapes |= {f"{block}attn_{each}": (size, size) for each in ("q", "k", "v", "output")}
        shapes |= {f"{block}ffn_{each}": (inner, size) for each in ("gate", "up")}
        shapes[f"{block}ffn_down"] = size, inner
    for name, shape in shapes.items():
        kind = (kinds or {}).get(name, (kinds or {}).get(name.split(".")[-1]))
        if kind is None or kind == "F16":
            values = generator.normal(0, 0.3, shape)
            writer.add_tensor(f"{name}.weight", values.astype(np.float16 if kind else np.float32))
        else:
            raw = blocks(kind, *shape, seed)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    norms = NORMS.get(architecture, ("attn", "ffn"))
    for name in ("output_norm", *(f"blk.{i}.{each}_norm" for i in range(depth) for each in norms)):
        of_a_head = name.endswith(("attn_q_norm", "attn_k_norm"))
        writer.add_tensor(f"{name}.weight", np.ones(size // 2 if of_a_head else size, np.float32))
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
