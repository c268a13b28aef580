"""Latent attention, whose cache holds what keys and values are made of: those of a text's heads are made once.

A model makes them in every pass, for all tokens. Here they are kept beside the latents of a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lookahead.backend.cpu.attention_inputs import cancelling
from lookahead.backend.cpu.exact_attention import PerNodeAttention
from lookahead.backend.cpu.layer_jobs import LayerJobs
from lookahead.loading.quantized import QuantizedLinear
from lookahead.model.attention import real_config
from lookahead.model.cache import TreeCache
from lookahead.model.facts import Attention, is_sdpa, own_attention
from lookahead.model.families.operations import Called
from lookahead.model.known_code import arithmetic_flags, is_set_by_user
from lookahead.model.slots import Origin, shared_tokens, zeros
from lookahead.utils.machine import memory_bytes

_BUFFERS = "query", "latents", "shared key", "heads"
_SHARE_OF_MEMORY = 0.125  # most of the machine's memory that keys and values of heads take


def project(part: Called, x: Tensor) -> list[Tensor]:
    """Queries `[rows, tokens, heads * dim]`, latents and shared keys `[rows, tokens, size]` of rows of tokens."""
    module = part.module
    if module.q_lora_rank is None:
        query = module.q_proj(x)
    else:
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x)))
    latents, key = module.kv_a_proj_with_mqa(x).split([module.kv_lora_rank, module.qk_rope_head_dim], -1)
    return [query, module.kv_a_layernorm(latents.contiguous()), key]


def add_projections(part: Called, jobs: LayerJobs, x: Tensor) -> None:
    """Add the jobs that do the same, and make keys and values of the latents; results are in `_BUFFERS`."""
    _, query, latents, key, heads, *more = part.latent_products
    inputs, name = (query, latents, key), "before query" if more else "query"
    outs = [jobs.take(name, one.outputs) for name, one in zip((name, *_BUFFERS[1:]), inputs, strict=False)]
    before, rows, _ = jobs.products(inputs, x, outs)
    of_latents, *norms = part.norms
    jobs.norm(of_latents, rows, rows)
    for norm, second in zip(norms, more, strict=True):
        jobs.norm(norm, before, before)
        jobs.products([second], before, [jobs.take("query", second.outputs)])
    jobs.products([heads], rows, [jobs.take("heads", heads.outputs)])


def add_output(part: Called, jobs: LayerJobs, out: Tensor) -> Tensor:
    """Add the job of the product after attention."""
    output, *_ = part.latent_products
    return jobs.products([output], jobs.take("attended", output.module.in_features), [out])[0]


def projected(part: Called, take: Callable[[str, int], Tensor], tokens: int) -> list[Tensor]:
    """What these jobs have made of the first tokens: queries, latents, shared keys, and keys and values."""
    _, query, latents, key, heads, *more = part.latent_products
    sizes = [one.outputs for one in (*more, query)[:1]] + [one.outputs for one in (latents, key, heads)]
    return [take(name, size)[:, :tokens] for name, size in zip(_BUFFERS, sizes, strict=True)]


def attend_alone(part: Called, x: Tensor, positions: Any, attention: Attention) -> Tensor:
    """The result of latent attention to the rows themselves, `[rows, tokens, size]`."""
    module = part.module
    query, latents, key = project(part, x)
    query, key = _rotated(part, query, key, positions)
    keys, values = (x.new_empty(*x.shape[:2], module.num_heads, size) for size in _sizes(module))
    _expand(module, module.kv_b_proj(latents), key[:, 0], keys, values)
    pair = keys.transpose(1, 2).contiguous(), values.transpose(1, 2)
    attended = attention(module, query, *pair, None, scaling=module.scaling)[0]
    out: Tensor = module.o_proj(attended.flatten(2))
    return out


def attend(
    part: Called,
    rows: Sequence[Tensor],
    positions: Any,
    cache: TreeCache,
    attention: Attention,
    per_node: PerNodeAttention | None,
) -> Tensor:
    """What the nodes of a row attend to, `[1, tokens, heads * value_dim]`. They are added to the cache.

    Args:
        part: The attention.
        rows: See `project`, or `projected`.
        positions: As its own code takes them.
        cache: The cache, within a pass over one row.
        attention: The registered attention function.
        per_node: How the nodes attend, if each attends alone.
    """
    module, (query, latents, key, *heads), dtype = part.module, rows, rows[0].dtype
    is_wide = per_node is not None and dtype == torch.bfloat16 and _is_wide(module)
    query, key = _rotated(part, query, key, positions)
    pair = cache.update(latents[:, None], key, module.layer_idx)
    kept = _kept(module, torch.float32 if is_wide else dtype, cache)
    if kept is None:
        pair = module.expand_kv(*pair)
    else:
        keys, values = kept.filled_from(cache, heads[0] if heads else None)
        if is_wide and per_node is not None:
            return _attend_wide(query, keys, values, math.sqrt(module.scaling), per_node).to(dtype)
        pair = keys.transpose(1, 2), values.transpose(1, 2)
    return attention(module, query, *pair, None, scaling=module.scaling)[0].flatten(2)


def _rotated(part: Called, query: Tensor, key: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
    """Rotated queries `[rows, heads, tokens, dim]` and shared keys `[rows, 1, tokens, size]`."""
    assert part.rotate is not None
    query = query.unflatten(-1, (part.module.num_heads, -1)).transpose(1, 2)
    still, turned = query.split([part.module.qk_nope_head_dim, part.module.qk_rope_head_dim], -1)
    turned, key = part.rotate(turned, key[:, None], positions)
    return torch.cat((still, turned), -1), key


def _kept(module: Any, dtype: torch.dtype, cache: TreeCache) -> HeadSlots | None:
    """The keys and values that are kept for a module; None if they must not be, or take too much memory."""
    numbers = cache.slots.capacity * module.num_heads * sum(_sizes(module))
    size = numbers * dtype.itemsize * module.config.num_hidden_layers
    if size > _SHARE_OF_MEMORY * memory_bytes() or not _may_keep(module):
        cache.heads.clear()
        return None
    if (module, dtype) not in cache.heads:
        cache.heads[module, dtype] = HeadSlots(module, dtype)
    kept: HeadSlots = cache.heads[module, dtype]
    return kept


class HeadSlots:
    """Keys and values of the heads of a layer, for the slots of the first row of a cache.

    Float32 ones beside latents in bfloat16 are for `_attend_wide`, with scaled keys.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        self._filled, self._origin = 0, Origin()  # committed slots whose keys and values are here, and their text
        self._made_by: tuple[Any, ...] = ()  # the weight and its version
        self._pair: list[Tensor] = []

    def filled_from(self, cache: TreeCache, heads: Tensor | None) -> Sequence[Tensor]:
        """The keys and values `[1, slots, heads, dim]` of the running pass, made where they are not known.

        A slot is known if it was committed at an earlier pass, and its text is the same: whatever else writes slots
        gives their row another origin. Nodes of trees move when they are committed, so theirs are made anew.

        Args:
            cache: The cache, which has the latents of the pass.
            heads: What the product makes of the latents of the pass, if it is known.
        """
        module, slots, layer = self._module, cache.slots, cache.layers[self._module.layer_idx]
        weight = module.kv_b_proj._parameters["weight"]
        made_by = weight, weight._version, module.scaling
        is_known = bool(self._made_by) and self._made_by[0] is weight and self._made_by[1:] == made_by[1:]
        first = min(self._filled, shared_tokens(self._origin, slots.origins[0])) if is_known else 0
        self._filled, self._made_by = 0, made_by  # an interrupted pass leaves nothing
        if not self._pair or self._pair[0].shape[1] < slots.capacity:
            self._grow(layer.keys, slots.capacity, first)
        start, end = slots.kv_length if heads is None else slots.start, slots.kv_length
        if first < start:
            self._write(first, start, module.kv_b_proj(layer.keys[:1, first:start, 0]), layer)
        if heads is not None:
            self._write(start, end, heads, layer)
        self._filled, self._origin = int(slots.lengths[0]), slots.origins[0]
        return [states[:, :end] for states in self._pair]

    def _write(self, first: int, end: int, heads: Tensor, layer: Any) -> None:
        keys, values = (states[:, first:end] for states in self._pair)
        _expand(self._module, heads, layer.values[:1, first:end, 0], keys, values)
        if self._dtype != heads.dtype:
            keys *= math.sqrt(self._module.scaling)

    def _grow(self, like: Tensor, capacity: int, used: int) -> None:
        like, old = like.new_empty(0, dtype=self._dtype), self._pair
        self._pair = [zeros(like, (1, capacity, self._module.num_heads, size)) for size in _sizes(self._module)]
        for new, kept in zip(self._pair, old, strict=False):
            new[:, :used] = kept[:, :used]


def _sizes(module: Any) -> tuple[int, int]:
    """Numbers of the keys and of the values of a head."""
    return module.qk_head_dim, module.v_head_dim


def _expand(module: Any, heads: Tensor, key: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values `[rows, tokens, heads, dim]` of made heads and shared keys `[rows, tokens, size]`."""
    still, heads = module.qk_nope_head_dim, heads.unflatten(-1, (module.num_heads, -1))
    keys[..., :still] = heads[..., :still]
    keys[..., still:] = key[:, :, None]
    values[:] = heads[..., still:]


def _may_keep(module: Any) -> bool:
    """Whether keys and values depend on latents and a known weight alone."""
    product, weight = module.kv_b_proj, module.kv_b_proj._parameters.get("weight")
    return (
        type(product) in (nn.Linear, QuantizedLinear)
        and weight is not None
        and not (weight.is_inference() or is_set_by_user(product))
    )


def _is_wide(module: Any) -> bool:
    """Whether `_attend_wide` has the bits of the module's own attention."""
    sizes = _sizes(module)
    return (
        sizes[0] != sizes[1]
        and is_sdpa(own_attention(module, real_config(module.config)))
        and _has_bits_in_float32(module.num_heads, *sizes, (torch.get_num_threads(), *arithmetic_flags()))
    )


def _attend_wide(query: Tensor, keys: Tensor, values: Tensor, factor: float, per_node: PerNodeAttention) -> Tensor:
    """Attention of the nodes of a row as torch computes that of one query if keys and values differ in size.

    It multiplies in float32, and scales queries and keys before; that of keys, and the conversion, is done here once.

    Args:
        query: bfloat16 `[1, heads, nodes, dim]`.
        keys: float32 `[1, slots, heads, dim]`, scaled.
        values: float32 `[1, slots, heads, value_dim]`.
        factor: Of queries.
        per_node: The tree.

    Returns:
        float32 `[1, nodes, heads * value_dim]`.
    """
    (start,), (scored,), (steps,) = per_node.starts, per_node.scored, per_node.steps
    query, out = query.float() * factor, list[Tensor]([query] * len(steps))
    # The next pass makes those of nodes anew, so they need not be moved back.
    copies = [(states, states[:, start : start + scored + len(steps)].clone()) for states in (keys, values)]
    by_head, of_head = keys.permute(0, 2, 3, 1), values.transpose(1, 2)
    for node, depth, first, moved in steps:
        end = start + depth + 1
        if moved is not None:
            for states, kept in copies:
                states[:, start + first : end] = kept[:, moved]
        scores = query[:, :, node - scored : node - scored + 1] @ by_head[..., :end]
        out[node - scored] = scores.softmax(-1) @ of_head[:, :, :end]
    return torch.cat(out, 2).transpose(1, 2).flatten(2)


@lru_cache(maxsize=64)
@torch.inference_mode()
def _has_bits_in_float32(heads: int, dim: int, value_dim: int, flags: tuple[Any, ...]) -> bool:
    """Whether torch attends so for these sizes. `flags` are its settings, and its threads."""
    for query, keys, values in cancelling(torch.bfloat16, heads, heads, max(dim, value_dim)):
        query, keys, values = query[..., :dim], keys[..., :dim], values[..., :value_dim]
        own = scaled_dot_product_attention(query, keys, values)
        factor = math.sqrt(dim**-0.5)
        slots = [states.float().transpose(1, 2).contiguous() for states in (keys, values)]
        slots[0] *= factor
        scores = query.float() * factor @ slots[0].permute(0, 2, 3, 1)
        if not torch.equal((scores.softmax(-1) @ slots[1].transpose(1, 2)).bfloat16(), own):
            return False
    return True
