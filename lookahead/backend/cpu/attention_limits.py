"""What bounds the attention of a layer, and whether a kernel has the bits of its eager function on this CPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lookahead.backend.cpu.attention_inputs import cancelling, near_ties
from lookahead.backend.cpu.layer_jobs import DeclaredLayer
from lookahead.backend.pass_attention import span_of
from lookahead.kernels import eager_attention
from lookahead.kernels.row_attention import AttentionLimits, row_attention
from lookahead.model.attention import real_config
from lookahead.model.facts import Attention, attention_name, own_attention
from lookahead.model.known_code import arithmetic_flags, is_known

_NAME = "eager_attention_forward"
_MORE = 1, 10, 40, 101, 530, 1060  # keys beyond the fewest that are compared
_OPTIONS = {"dropout", "scaling", "softcap", "s_aux", "sliding_window"}  # what a layer may pass to the function


def limits_of(layer: DeclaredLayer) -> AttentionLimits | str:
    """What bounds the attention of a layer, or why the kernel does not support it."""
    if layer.called:
        return f"its attention {'keeps what it makes of latents' if layer.called.rotate else 'runs its own code'}"
    if (part := layer.attention) is None:
        return AttentionLimits()
    options = part.options
    span = span_of(part.module, {})
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if attention_name(real_config(part.module.config)) == "sdpa":
        softcap = None  # transformers' SDPA attention does not apply it
    if span.chunk is not None:
        return "its attention is by chunks"
    window = options.get("sliding_window", span.window) or 0
    if layer.norms[0].weight.dtype == torch.bfloat16:
        own = own_attention(part.module, real_config(part.module.config))
        if limits := _eager_limits(own, part.heads, part.dim, options, window):
            return limits
    if (softcap or sinks is not None) and layer.norms[0].weight.dtype != torch.float32:
        return "its attention has soft caps or sinks, whose bits the kernel does not have"
    return AttentionLimits(window, softcap or 0.0, sinks)


def _eager_limits(
    own: Attention, heads: tuple[int, int], dim: int, options: Mapping[str, Any], window: int
) -> AttentionLimits | None:
    """What bounds the attention of a layer, if the kernel has the bits of its eager function; else None.

    Args:
        own: The layer's attention function.
        heads: The heads of queries, and of keys and values.
        dim: Numbers of a head.
        options: What the layer passes to the function.
        window: Positions that a query sees; 0 for all.
    """
    scale, softcap, sinks = options.get("scaling"), options.get("softcap") or 0.0, options.get("s_aux")
    # For a single head torch would split the sums of a product among its threads.
    if not (_is_shipped(own) and options.keys() <= _OPTIONS and isinstance(scale, float) and heads[0] > 1):
        return None
    if sinks is not None and not (sinks.dtype == torch.bfloat16 and sinks.is_contiguous() and len(sinks) == heads[0]):
        return None
    if window and window < eager_attention.fewest_keys(heads[0], dim):
        return None
    if not has_bits_of_eager(own, heads, dim, scale, softcap, sinks is not None, arithmetic_flags()):
        return None
    return AttentionLimits(window, softcap, sinks, is_eager=True)


def _is_shipped(own: Attention) -> bool:
    """Whether a function is the eager one of a file of transformers, under its name there."""
    if type(own) is not FunctionType or not own.__module__.startswith("transformers.models."):
        return False
    return getattr(sys.modules.get(own.__module__), _NAME, None) is own and is_known(own)


@lru_cache(maxsize=64)
@torch.inference_mode()
def has_bits_of_eager(
    own: Attention,
    heads: tuple[int, int],
    dim: int,
    scale: float,
    softcap: float,
    has_sinks: bool,
    flags: tuple[Any, ...] = (),
) -> bool:
    """Whether the kernel has the bits of an eager function for single queries in bfloat16.

    Args:
        own: The function.
        heads: The heads of queries, and of keys and values.
        dim: Numbers of a head.
        scale: Factor of the scores.
        softcap: Bound of the scores; 0 for none.
        has_sinks: Whether layers have sinks.
        flags: Torch's settings, which choose its products.
    """
    ties = near_ties(eager_attention.scores_of(scale, softcap), 0.5 if has_sinks else None)
    fewest = eager_attention.fewest_keys(heads[0], dim)
    lengths = fewest, *(fewest + more for more in _MORE)
    for query, keys, values in chain(cancelling(torch.bfloat16, *heads, dim, lengths=lengths), ties):
        if not eager_attention.is_supported(query, keys, values):
            return False
        sinks = torch.full(query.shape[1:2], 0.5, dtype=torch.bfloat16, device="cpu") if has_sinks else None
        expected = _by_function(own, query, keys, values, {"scaling": scale, "softcap": softcap or None}, sinks)
        nodes, trees = (torch.zeros(1, *size, dtype=torch.int64, device="cpu") for size in ((2, 1), (3,)))
        trees[0, 0], trees[0, 1] = keys.shape[2] - 1, 1
        slots = [states.transpose(1, 2).contiguous() for states in (query, keys, values)]
        limits = AttentionLimits(0, softcap, sinks, is_eager=True)
        got = row_attention(*slots, nodes=nodes, trees=trees, scale=scale, limits=limits)
        if expected is None or not torch.equal(got, expected):
            return False
    return True


def _by_function(
    own: Attention, query: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any], sinks: Tensor | None
) -> Tensor | None:
    """The attention by the function, `[1, 1, heads, dim]`; None if it needs more of a layer than is usual."""
    module: Any = nn.Module()
    module.num_key_value_groups, module.sinks = query.shape[1] // keys.shape[1], sinks
    options = {name: value for name, value in options.items() if value is not None}
    try:
        attended: Tensor = own(module.eval(), query, keys, values, None, **options)[0]
    except (AttributeError, TypeError):
        return None
    return attended
