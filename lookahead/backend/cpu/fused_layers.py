"""Decoder layers with fused small operators, for the drafted passes of one model within a block.

A pass over a few tokens on a CPU calls about fifty operators and modules per layer, of which seven multiply and one
attends. The others take a third of its time, nearly all of it call overhead (`lookahead.kernels.layer_ops`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lookahead.backend.cpu.cpu_pass import running_pass
from lookahead.backend.cpu.layer_jobs import (
    LINEARS,
    LayerParts,
    Positions,
    Space,
    jobs_after,
    jobs_before,
    jobs_of_heads,
    norm_of,
)
from lookahead.backend.cpu.linears import packed_weights
from lookahead.errors import with_place
from lookahead.kernels import layer_ops
from lookahead.kernels.jobs import run
from lookahead.loading.quantized import QuantizedLinear
from lookahead.model.attention import registered_attention
from lookahead.model.call_caches import CACHE
from lookahead.model.facts import SILU, attention_name, is_offloaded
from lookahead.model.known_code import (
    arithmetic_flags,
    code_of,
    global_hooks,
    is_set_by_user,
    multiplies_as_shipped,
    working_hooks_of,
)

FAMILIES = {
    (f"transformers.models.{family.lower()}.modeling_{family.lower()}", f"{family}DecoderLayer"): family
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = frozenset(("q_proj", "k_proj", "v_proj", "o_proj"))
_HEAD_NORMS = "q_norm", "k_norm"
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_NORMS = {(module, f"{family}RMSNorm") for (module, _), family in FAMILIES.items()}
_DTYPES = torch.float32, torch.bfloat16
_ROWS = 32  # rows whose mean squares are compared
_TOLERANCE = 1e-4  # in float32, relative to the largest output

_log = logging.getLogger(__name__)
_probed: dict[Any, bool] = {}


class FusedLayers(NamedTuple):
    """The modules of a model that can be fused."""

    forwards: list[tuple[nn.Module, None, Callable[..., Any]]]  # for `patched_attribute`
    layers: list[LayerParts]  # the fused decoder layers
    norms: list[Any]  # fused norms outside of these layers
    total: int = 0  # decoder layers of a class that can be fused
    reason: str = ""  # why some or all are not fused


def find_fused(model: nn.Module) -> FusedLayers:
    """The decoder layers and norms whose operators can be fused, and the replacements of their `forward`.

    In bfloat16 they keep the bits of the model's own code, which is checked first. Layers that are hooked, adapted,
    offloaded, in training, not on the CPU or of an unknown class stay as they are.
    """
    modules = list(model.modules())
    is_called_otherwise = bool(global_hooks()) or any(module._compiled_call_impl is not None for module in modules)
    found = [module for module in modules if name_of(module) in FAMILIES]
    reason = ""
    if not found:
        reason = f"they are for {', '.join(sorted(FAMILIES.values()))}"
    elif torch.is_autocast_enabled("cpu"):  # products have another type than their inputs
        reason = "autocast is on"
    elif is_called_otherwise or "forward" in model.__dict__:
        reason = "hooks for all modules, a forward of their own or a compiled module surround them"
    if reason:
        return FusedLayers([], [], [], len(found), reason)
    layers = [_parts_of(each) for each in found]
    kinds = {type(part) for parts in layers if parts is not None for part in parts.reimplemented}
    kinds |= {type(module) for module in modules if name_of(module) in _NORMS}
    code = code_of(frozenset(kinds))
    # Another package may have replaced a function that the kernels reimplement.
    if code.foreign or not multiplies_as_shipped():
        return FusedLayers([], [], [], len(found), "the code that they replace is not as shipped")
    right = [parts for parts in layers if parts is not None and _is_right(parts, code.number)]
    # The last norm of the model, and the norms of layers that are not fused as a whole.
    inside = {norm for parts in right for norm in parts.norms}
    norms: list[Any] = [module for module in modules if module not in inside and _is_plain_norm(module)]
    norms = [norm for norm in norms if _keeps_means(norm.weight.dtype, len(norm.weight))]
    forwards: list[tuple[nn.Module, None, Callable[..., Any]]] = [
        *((parts.layer, None, partial(_layer_forward, parts)) for parts in right),
        *((norm, None, partial(_norm_forward, norm)) for norm in norms),
    ]
    reason = "" if len(right) == len(found) else "parts of others are not plain, or differ"
    return FusedLayers(forwards, right, norms, len(found), reason)


def name_of(module: nn.Module) -> tuple[str, str]:
    """The module name and the qualified name of a module's class."""
    kind = type(module)
    return kind.__module__, kind.__qualname__


def is_bare(module: nn.Module) -> bool:
    """Whether calling a module runs only the code of its class, or ours."""
    forward = module.__dict__.get("forward")
    return (
        (forward is None or getattr(forward, "func", None) in (_layer_forward, _norm_forward))
        and "_call_impl" not in module.__dict__
        and not working_hooks_of(module)
    )


def _is_plain_norm(module: Any) -> bool:
    """Whether a module is an RMSNorm that the kernel supports."""
    return (
        name_of(module) in _NORMS
        and is_bare(module)
        and type(module.weight) is nn.Parameter
        and module.weight.dtype in _DTYPES
        and module.weight.device.type == "cpu"
        and module.weight.is_contiguous()
    )


def _parts_of(layer: Any) -> LayerParts | None:
    """The parts of a decoder layer; None if one of them is not plain."""
    family, code = FAMILIES[name_of(layer)], vars(sys.modules[type(layer).__module__])
    if set(layer._modules) != _LAYER or not is_bare(layer):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    heads = _HEAD_NORMS if family == "Qwen3" else ()
    if set(attention._modules) != _ATTENTION.union(heads) or set(mlp._modules) != _MLP:
        return None
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *(attention._modules[name] for name in heads)]
    inner = attention._modules | mlp._modules
    linears = tuple(inner[name] for name in LINEARS)
    kinds = [type(each) for each in (attention, mlp)]
    is_plain = (
        kinds == [code[f"{family}Attention"], code[f"{family}MLP"]]
        and type(mlp.act_fn) in SILU
        and all(map(is_bare, (attention, mlp, mlp.act_fn)))
        and all(_is_plain_norm(norm) and norm.weight.dtype == norms[0].weight.dtype for norm in norms)
        # Products are called as modules whatever their weights, and overwritten: no hook may keep them.
        and all(type(linear) in (nn.Linear, QuantizedLinear) and not is_offloaded(linear) for linear in linears)
        and not any(is_set_by_user(linear) for linear in linears)
        and not any(linear._forward_pre_hooks or linear._forward_hooks for linear in linears)
        and all("weight" in linear._parameters for linear in linears)  # a parametrization computes it at every call
        and attention_name(attention.config) in ("sdpa", "eager")
    )
    if not is_plain:
        return None
    options: dict[str, Any] = {"dropout": 0.0, "scaling": attention.scaling}
    if family != "Llama":
        owner = attention.config if family == "Mistral" else attention
        options["sliding_window"] = getattr(owner, "sliding_window", None)
    return LayerParts(layer, attention, linears, tuple(norms), code["eager_attention_forward"], options, {})


def takes(x: Tensor, norm: Any) -> bool:
    """Whether this thread runs one of our passes, and fused layers accept its hidden states, `[rows, tokens, size]`."""
    mode = running_pass()
    return (
        mode is not None
        and 0 < x.numel() <= mode.most_elements
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")  # a user's function may enter it within the pass
        and x.dtype == norm._parameters["weight"].dtype
        and x.is_contiguous()
    )


def _norm_forward(norm: Any, x: Tensor) -> Tensor:
    """The norm's `forward`, as one kernel call for a few tokens on a thread that runs a pass."""
    if not takes(x, norm):
        own: Tensor = type(norm).forward(norm, x)
        return own
    out = torch.empty_like(x)
    run(norm_of(norm, x, out))
    return out


def _layer_forward(parts: LayerParts, *args: Any, **kwargs: Any) -> Any:
    """The layer's `forward`, fused for a few tokens on a thread that runs a pass."""
    positions, cache = kwargs.get("position_embeddings"), kwargs.get(CACHE)
    # A cache under another name would be ignored.
    if len(args) != 1 or positions is None or cache is None or not takes(args[0], parts.norms[0]):
        return type(parts.layer).forward(parts.layer, *args, **kwargs)
    return _fused(parts, args[0], **kwargs)


def _fused(
    parts: LayerParts,
    hidden: Tensor,
    position_embeddings: Positions,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """A decoder layer, `[rows, tokens, size]`. Consecutive kernels run in one call."""
    attention, (before, between, *_) = parts.attention, parts.norms
    weights, linears = packed_weights(parts.linears, hidden, parts.known), parts.linears
    (rows, tokens, _), cache, normed = hidden.shape, kwargs.pop(CACHE, None), torch.empty_like(hidden)
    cos, sin = (embedding.expand(rows, -1, -1).contiguous() for embedding in position_embeddings)
    first = norm_of(before, hidden, normed)
    if weights:
        space = Space.of(hidden, weights, tokens)._replace(normed=normed)
        query, (key, value) = space.query, (hidden.new_empty(rows, tokens, weight.outputs) for weight in weights[1:3])
        run(*jobs_before(parts, weights, first, space, key, value, (cos, sin)))
    else:
        run(first)
        query, key, value = (linear(normed) for linear in linears[:3])
        run(*jobs_of_heads(parts, query, key, (cos, sin)))
    query, key, value = (each.view(rows, tokens, -1, cos.shape[-1]).transpose(1, 2) for each in (query, key, value))
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)
    by_model = registered_attention(attention.config, parts.eager)
    attended = by_model(attention, query, key, value, attention_mask, **parts.options, **kwargs)[0]
    attended = attended.contiguous().view(rows, tokens, -1)
    if weights:
        run(*jobs_after(parts, weights, hidden, space._replace(attended=attended)))
        return space.total.add_(space.change)
    total = torch.empty_like(hidden)
    run(norm_of(between, hidden, normed, delta=linears[3](attended), total=total))
    gate, up = linears[4](normed), linears[5](normed)
    run(layer_ops.gating(gate, up))
    return total.add_(linears[6](gate))


def _is_right(parts: LayerParts, code: int) -> bool:
    """Whether a fused layer computes the same as the layer itself; compared once per class, code and sizes."""
    kind = (
        type(parts.layer), code, arithmetic_flags(),
        parts.attention.head_dim, parts.norms[0].weight.dtype, torch.get_num_threads(),
        *((norm.weight.shape, norm.variance_epsilon) for norm in parts.norms),
        *(
            (type(each), type(weight), weight.dtype, weight.shape, getattr(parameters.get("bias"), "dtype", None))
            for each in parts.linears
            for parameters in (each._parameters,)
            for weight in (parameters["weight"],)
        ),
    )  # fmt: skip
    if kind not in _probed:
        _probed[kind] = _computes_the_same(parts) and all(
            _keeps_means(norm.weight.dtype, len(norm.weight)) for norm in parts.norms
        )
    return _probed[kind]


def _computes_the_same(parts: LayerParts) -> bool:
    """Compare a layer, its norm and its rotation with their fused forms on two rows of three tokens."""
    norm, dim = parts.norms[0], parts.attention.head_dim
    weight, source = norm.weight, torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, len(weight), generator=source, dtype=torch.float32, device="cpu").to(weight.dtype)
    angles, query, key = (
        torch.randn(2, 3, *size, dim, generator=source, dtype=torch.float32, device="cpu") for size in ((), (2,), (1,))
    )
    query, key = query.to(weight.dtype), key.to(weight.dtype)
    places = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)
    rotate = vars(sys.modules[type(parts.layer).__module__])["apply_rotary_pos_emb"]
    try:
        rotated = rotate(query, key, *places, unsqueeze_dim=2)
        normed = torch.empty_like(x)
        run(layer_ops.rotation(query, key, *places), layer_ops.norm(x, weight, normed, norm.variance_epsilon))
        pairs = [
            (type(parts.layer).forward(parts.layer, x, position_embeddings=places), _fused(parts, x, places)),
            (type(norm).forward(norm, x), normed),
            *zip(rotated, (query, key), strict=True),
        ]
    except (RuntimeError, TypeError, ValueError) as error:  # e.g. an unknown transformers version or an unusual weight
        _log.warning("layers of %s are not fused: %s", type(parts.layer).__name__, with_place(error))
        return False
    if weight.dtype == torch.bfloat16:
        return all(torch.equal(*pair) for pair in pairs) and _keeps_silu()
    return all(bool((own - fused).abs().max() <= _TOLERANCE * own.abs().max()) for own, fused in pairs)


@lru_cache(maxsize=64)
@torch.inference_mode()
def _keeps_means(dtype: torch.dtype, size: int) -> bool:
    """Whether the kernel sums squares in torch's order, which the bits of a bfloat16 norm seldom show."""
    x = torch.randn(_ROWS, size, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(
        dtype
    )
    means = torch.empty(_ROWS, dtype=torch.float32, device="cpu")
    run(layer_ops.norm(x, x[0], torch.empty_like(x), 0.0, means=means))
    return torch.equal(means, x.float().pow(2).mean(-1)) or dtype != torch.bfloat16


@lru_cache(maxsize=1)
@torch.inference_mode()
def _keeps_silu() -> bool:
    """Whether the kernel has torch's bits for every bfloat16 value."""
    x = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
    own, fused = nn.functional.silu(x), x.clone()
    run(layer_ops.gating(fused, torch.ones_like(x)))
    return torch.equal(own.isnan(), fused.isnan()) and torch.equal(own.nan_to_num(0), fused.nan_to_num(0))
