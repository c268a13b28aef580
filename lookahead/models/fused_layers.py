"""Decoder layers whose small operators are fused in the passes of drafting, for one model and within a block.

A pass over a few tokens on a CPU calls some fifty operators and modules a layer, of which seven multiply and one
attends. The others take a third of its time, nearly all of it in their calls (`lookahead.kernels.layer_ops`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.models.replaced import replaced

_FAMILIES = {
    (f"transformers.models.{family.lower()}.modeling_{family.lower()}", f"{family}DecoderLayer"): family
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = frozenset(("q_proj", "k_proj", "v_proj", "o_proj"))
_HEAD_NORMS = frozenset(("q_norm", "k_norm"))
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_LINEARS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
_NORMS = {(module, f"{family}RMSNorm") for (module, _), family in _FAMILIES.items()}
_DTYPES = torch.float32, torch.bfloat16
_MOST = 1 << 17  # numbers of the hidden states that are served
_MOST_SHARED = 1 << 15  # where torch would share them among threads; the kernels run on one
_RECORDS_OUTPUTS = "transformers.utils.output_capturing"
_ROWS = 32  # whose mean squares are compared
_TOLERANCE = 1e-4  # of float32, relative to the largest output

_thread = local()
_probed: dict[Any, bool] = {}


class _Parts(NamedTuple):
    """The modules of a decoder layer, and what its attention is called with."""

    layer: Any
    attention: Any
    query: Any
    key: Any
    value: Any
    out: Any
    gate: Any
    up: Any
    down: Any
    norms: tuple[Any, ...]  # in front of attention, in front of the MLP, and of the heads of queries and keys
    eager: Callable[..., Any]
    options: dict[str, Any]


class LayerScope:
    """Lets a model's decoder layers fuse their operators on the threads that run a pass of ours, and on no other.

    In bfloat16 they keep the bits of the model's own code: layers are compared with it when their class and sizes are
    first met. Layers that are hooked, adapted, offloaded, in training, not on the CPU or of a class not known here
    stay as they are.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Let the layers look for passes of ours until the last open block of any thread ends."""
        with torch.inference_mode():
            forwards = _forwards_of(self._model)
        with replaced("forward", forwards):
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within `serving`, fuse operators on this thread until the block ends."""
        outer = getattr(_thread, "most", 0), getattr(_thread, "attends", None)
        is_served = not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        _thread.most = (_MOST if torch.get_num_threads() == 1 else _MOST_SHARED) if is_served else 0
        _thread.attends = {}
        try:
            yield
        finally:
            _thread.most, _thread.attends = outer


def _forwards_of(model: nn.Module) -> list[tuple[nn.Module, None, Callable[..., Any]]]:
    """The modules that can be fused, and what takes the place of their `forward`, for `replaced`."""
    modules = list(model.modules())
    is_hooked = modules_of_torch._global_forward_hooks or modules_of_torch._global_forward_pre_hooks
    if is_hooked or "forward" in model.__dict__ or any(each._compiled_call_impl is not None for each in modules):
        return []
    layers = [_parts_of(each) for each in modules if _name_of(each) in _FAMILIES]
    right = [parts for parts in layers if parts is not None and _is_right(parts)]
    # The last norm of a model, and those of layers that have something else in them.
    inside = {norm for parts in right for norm in parts.norms}
    norms: list[Any] = [each for each in modules if each not in inside and _is_plain_norm(each)]
    return [(parts.layer, None, partial(_layer_forward, parts)) for parts in right] + [
        (norm, None, partial(_norm_forward, norm))
        for norm in norms
        if _keeps_means(norm.weight.dtype, len(norm.weight))
    ]


def _name_of(module: nn.Module) -> tuple[str, str]:
    kind = type(module)
    return kind.__module__, kind.__qualname__


def _is_ours(module: nn.Module) -> bool:
    """Whether a module runs the code of its class, or ours."""
    forward = module.__dict__.get("forward")
    return forward is None or getattr(forward, "func", None) in (_layer_forward, _norm_forward)


def _is_bare(module: nn.Module, kind: Any) -> bool:
    """Whether calling a module does what its class does, and nothing else."""
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    # Those of transformers record outputs that our passes do not ask for.
    is_hooked = any(getattr(hook, "__module__", None) != _RECORDS_OUTPUTS for hook in hooks)
    return type(module) is kind and not is_hooked and not module.training and _is_ours(module)


def _is_plain_norm(module: nn.Module) -> bool:
    """Whether a module is an RMSNorm that the kernel computes."""
    if _name_of(module) not in _NORMS or not _is_bare(module, type(module)):
        return False
    weight: Any = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.dtype in _DTYPES
        and weight.device.type == "cpu"
        and weight.is_contiguous()
    )


def _takes_over(linear: Any) -> bool:
    """Whether a product, called as a module whatever its weight is, may be overwritten: no hook has kept it."""
    is_hooked = linear._forward_pre_hooks or linear._forward_hooks or "_hf_hook" in linear.__dict__
    return isinstance(linear, nn.Linear) and not is_hooked


def _parts_of(layer: Any) -> _Parts | None:
    """The parts of a decoder layer; None where one of them is not plain."""
    family, namespace = _FAMILIES[_name_of(layer)], vars(sys.modules[type(layer).__module__])
    if set(layer._modules) != _LAYER or layer.training or not _is_ours(layer):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    heads = _HEAD_NORMS if family == "Qwen3" else frozenset()
    if set(attention._modules) != _ATTENTION | heads or set(mlp._modules) != _MLP:
        return None
    norms += [attention._modules[name] for name in sorted(heads, reverse=True)]
    inner = attention._modules | mlp._modules
    is_plain = (
        _is_bare(attention, namespace[f"{family}Attention"])
        and _is_bare(mlp, namespace[f"{family}MLP"])
        and type(mlp.act_fn) in (SiLUActivation, nn.SiLU)
        and _is_bare(mlp.act_fn, type(mlp.act_fn))
        and all(_is_plain_norm(norm) and norm.weight.dtype == norms[0].weight.dtype for norm in norms)
        and all(_takes_over(inner[name]) for name in _LINEARS)
        and attention.config._attn_implementation in ("sdpa", "eager")
    )
    if not is_plain:
        return None
    options: dict[str, Any] = {"dropout": 0.0, "scaling": attention.scaling}
    if family == "Mistral":
        options["sliding_window"] = getattr(attention.config, "sliding_window", None)
    elif family != "Llama":
        options["sliding_window"] = attention.sliding_window
    linears = (inner[name] for name in _LINEARS)
    return _Parts._make((layer, attention, *linears, tuple(norms), namespace["eager_attention_forward"], options))


def _layer_forward(parts: _Parts, *args: Any, **kwargs: Any) -> Any:
    """The layer's `forward`; fused for a few tokens on a thread that runs a pass."""
    if len(args) != 1 or kwargs.get("position_embeddings") is None or not _is_served(args[0], parts.norms[0]):
        return type(parts.layer).forward(parts.layer, *args, **kwargs)
    return _fused(parts, args[0], **kwargs)


def _norm_forward(norm: Any, x: Tensor) -> Tensor:
    """The norm's `forward`; one call for a few tokens on a thread that runs a pass."""
    own: Tensor = _norm(norm, x) if _is_served(x, norm) else type(norm).forward(norm, x)
    return own


def _is_served(x: Tensor, norm: Any) -> bool:
    """Whether a pass of ours runs on this thread, and the kernels take its hidden states."""
    return (
        not torch.compiler.is_compiling()
        and 0 < x.numel() <= getattr(_thread, "most", 0)
        and x.dtype == norm._parameters["weight"].dtype
        and x.is_contiguous()
    )


@cache
def _ops() -> Any:
    """The kernels."""
    from lookahead.kernels import layer_ops

    return layer_ops


def _norm(norm: Any, x: Tensor) -> Tensor:
    normed: Tensor = _ops().rms_norm(x, norm._parameters["weight"], norm.variance_epsilon)
    return normed


def _fused(
    parts: _Parts,
    hidden: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Tensor:
    """A decoder layer, `[rows, tokens, size]`."""
    ops, attention, between = _ops(), parts.attention, parts.norms[1]
    query, key, value = _project(parts, _norm(parts.norms[0], hidden), *position_embeddings)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, attention.layer_idx)
    attended = _attention_of(attention, parts.eager)(
        attention, query, key, value, attention_mask, **parts.options, **kwargs
    )[0]
    delta = parts.out(attended.reshape(*hidden.shape[:-1], -1).contiguous())
    total, x = ops.add_rms_norm(hidden, delta, between._parameters["weight"], between.variance_epsilon)
    out: Tensor = total.add_(parts.down(ops.gated_silu(parts.gate(x), parts.up(x))))
    return out


def _attention_of(attention: Any, eager: Callable[..., Any]) -> Any:
    """The attention function of a layer; looked up once in a pass for layers that share a configuration."""
    config = attention.config
    known = getattr(_thread, "attends", None)
    attend = None if known is None else known.get(id(config))
    if attend is None:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
        if known is not None:
            known[id(config)] = attend
    return attend


def _project(parts: _Parts, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[rows, heads, tokens, dim]`, the former two rotated."""
    rows, tokens, _ = x.shape
    shape = rows, tokens, -1, cos.shape[-1]
    query, key, value = parts.query(x).view(shape), parts.key(x).view(shape), parts.value(x).view(shape)
    if len(parts.norms) > 2:
        query, key = _norm(parts.norms[2], query), _norm(parts.norms[3], key)
    if len(cos) != rows:
        cos, sin = cos.expand(rows, -1, -1), sin.expand(rows, -1, -1)
    _ops().rotate(query, key, cos.contiguous(), sin.contiguous())
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _is_right(parts: _Parts) -> bool:
    """Whether a fused layer computes what the layer itself does; compared once per class and sizes."""
    linears = [parts.query, parts.key, parts.value, parts.out, parts.gate, parts.up, parts.down]
    kind = (
        type(parts.layer), parts.attention.head_dim, parts.norms[0].weight.dtype, torch.get_num_threads(),
        *((norm.weight.shape, norm.variance_epsilon) for norm in parts.norms),
        *((type(each), type(each.weight), each.weight.dtype, each.weight.shape) for each in linears),
    )  # fmt: skip
    if kind not in _probed:
        _probed[kind] = _computes_the_same(parts) and all(
            _keeps_means(norm.weight.dtype, len(norm.weight)) for norm in parts.norms
        )
    return _probed[kind]


def _computes_the_same(parts: _Parts) -> bool:
    """Compare a layer, its norm and its rotation with their fused forms, by two rows of three tokens."""
    norm, dim = parts.norms[0], parts.attention.head_dim
    weight, source = norm.weight, torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, len(weight), generator=source).to(weight.dtype)
    angles = torch.randn(2, 3, dim, generator=source)
    places = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)
    rotate = vars(sys.modules[type(parts.layer).__module__])["apply_rotary_pos_emb"]
    try:
        query, key, _ = _project(parts, x, *places)
        plain = _project(parts, x, torch.ones_like(places[0]), torch.zeros_like(places[1]))
        pairs = [
            (type(parts.layer).forward(parts.layer, x, position_embeddings=places), _fused(parts, x, places)),
            (type(norm).forward(norm, x), _norm(norm, x)),
            *zip(rotate(plain[0], plain[1], *places), (query, key), strict=True),
        ]
    except (RuntimeError, TypeError, ValueError):  # another version of transformers, or an unusual weight
        return False
    if weight.dtype == torch.bfloat16:
        return all(torch.equal(*pair) for pair in pairs) and _keeps_silu()
    return all(bool((own - fused).abs().max() <= _TOLERANCE * own.abs().max()) for own, fused in pairs)


@lru_cache(maxsize=64)
@torch.inference_mode()
def _keeps_means(dtype: torch.dtype, size: int) -> bool:
    """Whether the kernel sums squares in torch's order, whose bits a norm in bfloat16 seldom shows."""
    x = torch.randn(_ROWS, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    own: list[float] = x.float().pow(2).mean(-1, keepdim=True).flatten().tolist()
    return bool(_ops().mean_squares(x) == own) or dtype != torch.bfloat16


@lru_cache(maxsize=1)
@torch.inference_mode()
def _keeps_silu() -> bool:
    """Whether the kernel has the bits of torch for every bfloat16."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    own, fused = nn.functional.silu(x), _ops().gated_silu(x.clone(), torch.ones_like(x))
    return torch.equal(own.isnan(), fused.isnan()) and torch.equal(own.nan_to_num(0), fused.nan_to_num(0))
