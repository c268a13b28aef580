"""Attention of a pass: by a kernel, by torch under a mask, or for each node alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from lookahead.backend.cpu.exact_attention import attend_per_node, attend_prompts
from lookahead.backend.tree_pass import AttentionSpan, PackedPrompts, TreePass
from lookahead.errors import UnsupportedModelError
from lookahead.kernels import dispatch
from lookahead.model.attention import real_config
from lookahead.model.facts import attention_name, is_sdpa, own_attention

EVERYTHING = AttentionSpan()
"""The span of a query that sees all earlier tokens."""
Spans = dict[int, AttentionSpan]
"""The attention spans of the layers by module id, filled on first use within `serving`."""


def attend(
    tree_pass: TreePass,
    spans: Spans,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention of a layer in a pass, `[rows, width, heads, value_dim]`.

    Trees go to a kernel if one supports them. Otherwise the query heads that share a KV head are packed into query
    rows, so that torch's attention reads keys and values once. The layer's window or chunk applies unless an argument
    sets another window.

    Args:
        tree_pass: The pass.
        spans: Known spans of the model; the layer's span is added.
        module: The attention layer.
        query: `[rows, heads, width, dim]`.
        key: `[rows, kv_heads, slots, dim]`.
        value: `[rows, kv_heads, slots, value_dim]`.
        scaling: Factor of the scores; `dim ** -0.5` if None.
        softcap: Bound of the scores, or None.
        s_aux: Attention sinks `[heads]`: scores without a value.
        position_bias: Biases of the scores by slot, `[1, heads, width, slots]`.
        **kwargs: Other arguments of the layer, such as `sliding_window`.
    """
    if tree_pass.cross is not None and not _is_of(key, tree_pass.cross.own.layers[module.layer_idx].keys):
        options = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, "position_bias": position_bias, **kwargs}
        attended: Tensor = tree_pass.cross.attend(module, query, key, value, tree_pass, options)
        return attended
    if softcap is not None and attention_name(real_config(module.config)) == "sdpa":
        softcap = None  # transformers' SDPA attention does not apply it
    slots = key.shape[2]
    span = span_of(module, spans)
    if "sliding_window" in kwargs and kwargs["sliding_window"] != span.window:
        span = AttentionSpan(kwargs["sliding_window"], span.chunk)
    if isinstance(tree_pass, PackedPrompts):
        options = {"softcap": softcap, "s_aux": s_aux, "scaling": scaling, "position_bias": position_bias, **kwargs}
        return _attend_apart(tree_pass, module, query, key, value, span, options)
    if tree_pass.attends_per_node:
        options = {"softcap": softcap, "s_aux": s_aux, "scaling": scaling, "position_bias": position_bias, **kwargs}
        window = _within(span, slots + 1).window
        # Checked over all layers: the last layers of some models share the cache of another layer with the same window.
        crops = window in (tree_pass.windows or ())
        own = own_attention(module, real_config(module.config))
        options = {"window": window, "crops": crops, "own": own, "options": _but_none(options)}
        return attend_per_node(module, query, key, value, tree_pass.per_node, **options)
    if position_bias is not None:
        return dispatch.masked_attention(query, key, value, tree_pass.biased_mask(position_bias), scaling)
    if tree_pass.scores_trees and not torch.compiler.is_compiling():
        kernel = _kernel_of(tree_pass, query, key, value, span, scaling, softcap, s_aux)
        if kernel is not None:
            return kernel(query, key.transpose(1, 2), value.transpose(1, 2), sinks=s_aux)
    reached = _within(span, slots)
    is_plain = softcap is None and s_aux is None and reached == EVERYTHING
    if is_plain and tree_pass.is_causal:
        if tree_pass.is_from_empty or dispatch.takes_flash(query, key, value):
            return _causal(tree_pass, query, key, value, scaling)
        if dispatch.takes_parts(query, key, value) and not torch.compiler.is_compiling():
            return dispatch.causal_in_parts(query, key, value, scaling)
    return _by_torch(tree_pass, query, key, value, reached, scaling, softcap, s_aux)


def _attend_apart(
    packed: PackedPrompts,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: AttentionSpan,
    options: dict[str, Any],
) -> Tensor:
    """Attention of packed prompts: one call of the model's own function for each, with transformers' mask for it."""
    outs = list[Tensor]()
    for row, (queries, start) in enumerate(zip(query.split(packed.sizes, 2), packed.starts, strict=True)):
        end = start + queries.shape[2]
        keys, values = (states[row : row + 1, :, :end] for states in (key, value))
        outs.append(attend_alone(module, queries, keys, values, span=span, as_whole=packed.has_copies, **options))
    return torch.cat(outs, 1)


def attend_alone(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    span: AttentionSpan = EVERYTHING,
    as_whole: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Attention of the last tokens of texts of one length, with the bits of the model's own passes over each alone.

    Args:
        module: The attention layer.
        query: `[rows, heads, width, dim]`.
        key: `[rows, kv_heads, slots, dim]`, of the whole texts.
        value: `[rows, kv_heads, slots, value_dim]`.
        span: The layer's window or chunk.
        as_whole: Whether the texts begin with copies of others, so that the bits must be those of a whole pass.
        **kwargs: Other arguments of the layer, such as `scaling`.

    Returns:
        `[rows, width, heads, value_dim]`.

    Raises:
        UnsupportedModelError: Texts begin with copies, and no kernel serves the layer.
    """
    own, options = own_attention(module, real_config(module.config)), _but_none(kwargs)
    slots, start = key.shape[2], key.shape[2] - query.shape[2]
    span = _within(span, slots)
    attended, as_whole = None, as_whole and start > 0
    if span == EVERYTHING:
        attended = attend_prompts(module, query, key, value, own, options, as_whole=as_whole)
    if as_whole and attended is None:
        raise UnsupportedModelError("a layer attends otherwise than the kernel for prompts")
    if attended is None:
        mask = _mask_alone(query, start, span, by_sdpa=is_sdpa(own))
        attended = own(module, query, key, value, mask, **options)[0]
    return attended


def _mask_alone(query: Tensor, start: int, span: AttentionSpan, *, by_sdpa: bool) -> Tensor | None:
    """The mask that transformers makes for the tokens of a single prompt from `start` on; None if it makes none."""
    width = query.shape[2]
    if span == EVERYTHING and ((by_sdpa and not start) or width == 1):
        return None
    own = torch.arange(start, start + width, device=query.device)[:, None]
    at = torch.arange(start + width, device=query.device)
    seen = at <= own
    if span.window is not None:
        seen &= at > own - span.window
    if span.chunk is not None:
        seen &= at >= own // span.chunk * span.chunk
    if by_sdpa:
        return seen[None, None]
    return query.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(query.dtype).min)[None, None]


def _causal(tree_pass: TreePass, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attention of a part of a prompt without a mask.

    From an empty cache SDPA skips half of the work. After other tokens flash attention aligns the last query with the
    last key.
    """
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] > key.shape[1]}
    if tree_pass.is_from_empty:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    else:
        last = causal_lower_right(query.shape[2], key.shape[2])
        out = scaled_dot_product_attention(query, key, value, attn_mask=last, **options)
    return out.transpose(1, 2).contiguous()


def _but_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: option for name, option in options.items() if option is not None}


def _is_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors share their memory."""
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _kernel_of(
    tree_pass: TreePass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: AttentionSpan,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Callable[..., Tensor] | None:
    """The kernel for layers of one shape in a pass, bound to the pass's trees."""
    layouts = query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride()
    kind = (*layouts, query.device, query.dtype, span, scaling, softcap, s_aux is None)
    if kind not in tree_pass.kernels:
        options = {**_within(span, key.shape[2])._asdict(), "scaling": scaling, "softcap": softcap, "sinks": s_aux}
        later = frozenset(name for name, limit in span._asdict().items() if limit is not None)
        buffers = key.transpose(1, 2), value.transpose(1, 2)  # as the cache holds them
        kernel = dispatch.attention_for(query, *buffers, options, later)
        if query.device.type == "cuda":
            tree_pass.unserved.add("" if kernel else dispatch.unserved_attention(query, *buffers, options))
        if kernel is not None:
            kernel = partial(kernel, **tree_pass.tensors(query.device)._asdict())
        tree_pass.kernels[kind] = kernel
    return tree_pass.kernels[kind]


def _by_torch(
    tree_pass: TreePass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: AttentionSpan,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Torch's attention, masking only the slots that not every node sees if possible."""
    mask = None
    if span != EVERYTHING or not tree_pass.sees_all:
        start, is_plain = 0, softcap is None and sinks is None and span == EVERYTHING
        if is_plain and not torch.compiler.is_compiling():  # compiling would make the length a constant
            start = dispatch.unmasked(query, key, value, tree_pass.prefix)
        mask = tree_pass.mask(query.shape[1] // key.shape[1], span, query.dtype, query.device, start)
    return dispatch.masked_attention(query, key, value, mask, scaling, softcap, sinks)


def _within(span: AttentionSpan, slots: int) -> AttentionSpan:
    """The span without limits of at least `slots`."""
    return AttentionSpan(*(None if limit is None or limit >= slots else limit for limit in span))


def span_of(module: Any, spans: Spans) -> AttentionSpan:
    """The window and chunk of a layer, for calls that do not pass a window.

    They are cached within a `serving` block: a configuration lookup takes microseconds.
    """
    if (former := spans.get(id(module))) is not None:
        return former
    config: Any = getattr(module, "config", None)
    window: int | None = getattr(module, "sliding_window", None)
    if window is None and not hasattr(config, "layer_types"):
        # Some models put the window into masks only: Qwen2-MoE in some layers, PhiMoE in all.
        window = getattr(config, "sliding_window", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    # Llama 4 does not pass to attention functions which layers are chunked.
    if chunk is not None and config.layer_types[module.layer_idx] != "chunked_attention":
        chunk = None
    span = AttentionSpan(window, chunk)
    if not torch.compiler.is_compiling():
        spans[id(module)] = span
    return span
