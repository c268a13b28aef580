"""Decoder layers whose small operators run in few kernel calls, for the drafted passes of one model within a block.

A pass over a few tokens on a CPU calls about fifty operators and modules per layer, of which seven multiply and one
attends. The others take a third of its time, nearly all of it call overhead (`lookahead.kernels.layer_ops`). What a
layer computes is declared (`lookahead.model.families`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Conv1D

from lookahead.backend.cpu.activations import ACTIVATIONS, has_formula
from lookahead.backend.cpu.cpu_pass import CpuPass, thread
from lookahead.backend.cpu.latents import attend_alone
from lookahead.backend.cpu.layer_checks import is_right, keeps_means
from lookahead.backend.cpu.layer_jobs import (
    DeclaredLayer,
    HiddenSum,
    LayerJobs,
    Positions,
)
from lookahead.backend.cpu.linears import packed_weights
from lookahead.backend.cpu.product_parts import has_own_panels
from lookahead.backend.cpu.routing import Routing, multiplies, serves
from lookahead.backend.protocol import BitPolicy
from lookahead.kernels import layer_ops
from lookahead.kernels.jobs import run
from lookahead.kernels.norm_rows import LAYER_STEP
from lookahead.kernels.packed_product import prepared_rows
from lookahead.loading.quantized import QuantizedLinear
from lookahead.loading.quantized_experts import QuantizedExperts
from lookahead.model.attention import registered_attention
from lookahead.model.facts import CACHE, attention_name, is_offloaded
from lookahead.model.families import FAMILIES, family_of
from lookahead.model.families.family import Family
from lookahead.model.families.operations import (
    Called,
    Experts,
    Norm,
    Recurrence,
    SelfAttention,
    UndeclaredError,
)
from lookahead.model.known_code import (
    code_of,
    global_hooks,
    is_set_by_user,
    multiplies_as_shipped,
    working_hooks_of,
)

_DTYPES = torch.float32, torch.bfloat16
_KNOWN = {*ACTIVATIONS, nn.LayerNorm, nn.Linear, Conv1D, QuantizedExperts}  # classes besides those of a family's file
_OF_ATTENTION = "position_ids", "use_cache"  # what layers do not pass to recurrent modules


class FusedLayers(NamedTuple):
    """The modules of a model that can be fused."""

    forwards: list[tuple[nn.Module, None, Callable[..., Any]]]  # for `patched_attribute`
    layers: list[DeclaredLayer]  # the fused decoder layers
    norms: list[Norm]  # fused norms outside of these layers
    total: int = 0  # decoder layers of a declared class
    reason: str = ""  # why some or all are not fused


def find_fused(model: nn.Module) -> FusedLayers:
    """The decoder layers and norms whose operators can be fused, and the replacements of their `forward`.

    In bfloat16 they keep the bits of the model's own code, which is checked first. Layers that are hooked, adapted,
    offloaded, in training, not on the CPU or of a class without a declaration stay as they are.
    """
    modules = list(model.modules())
    is_called_otherwise = bool(global_hooks()) or any(module._compiled_call_impl is not None for module in modules)
    declared = [(module, family) for module in modules if (family := family_of(module)) is not None]
    reason = ""
    if not declared:
        reason = f"they are for {', '.join(sorted(family.name for family in FAMILIES))}"
    elif torch.is_autocast_enabled("cpu"):  # products have another type than their inputs
        reason = "autocast is on"
    elif is_called_otherwise or "forward" in model.__dict__:
        reason = "hooks for all modules, a forward of their own or a compiled module surround them"
    if reason:
        return FusedLayers([], [], [], len(declared), reason)
    layers, reasons = list[DeclaredLayer](), dict[str, None]()
    for at, (module, family) in enumerate(declared):
        try:
            layers.append(_declared(module, family))
        except (UndeclaredError, AttributeError, KeyError, TypeError) as error:
            reasons[f"layer {at}: {error}"] = None
    family = declared[0][1]
    norm_class = vars(sys.modules[family.file]).get(f"{family.name}RMSNorm", nn.LayerNorm)
    outer = [family.norm(module) for module in modules if type(module) is norm_class and _is_plain_norm(module)]
    kinds = {type(part) for layer in layers for part in layer.parts} | {type(norm.module) for norm in outer}
    code = code_of(frozenset(kinds))
    # Another package may have replaced a function that the kernels reimplement.
    if code.foreign or not multiplies_as_shipped():
        return FusedLayers([], [], [], len(declared), "the code that they replace is not as shipped")
    right = [layer for layer in layers if is_right(layer, code.number, _fused)]
    if len(right) < len(layers):
        reasons["some compute differently from their declaration"] = None
    # The last norm of the model, and the norms of layers that are not fused as a whole.
    inside = {id(norm.module) for layer in right for norm in layer.norms}
    norms = [norm for norm in outer if id(norm.module) not in inside]
    norms = [norm for norm in norms if keeps_means(norm.weight.dtype, len(norm.weight), norm.kind)]
    forwards: list[tuple[nn.Module, None, Callable[..., Any]]] = [
        *((layer.module, None, partial(_layer_forward, layer)) for layer in right),
        *((norm.module, None, partial(_norm_forward, norm)) for norm in norms),
    ]
    return FusedLayers(forwards, right, norms, len(declared), "; ".join(reasons))


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


def _is_plain_norm(module: Any, ones: Tensor | None = None) -> bool:
    """Whether the kernel supports an RMSNorm; `ones` is the weight of one that has none."""
    weight, bias = module._parameters.get("weight", ones), module._parameters.get("bias")
    return (
        is_bare(module)
        and weight is not None
        and type(weight) is (nn.Parameter if ones is None else Tensor)
        and weight.dtype in _DTYPES
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous()))
        and not (type(module) is nn.LayerNorm and (weight.dim() > 1 or len(weight) % LAYER_STEP))
    )


def _is_plain_linear(linear: Any) -> bool:
    # Products are called as modules whatever their weights, and overwritten: no hook may keep them.
    return (
        type(linear) in (nn.Linear, Conv1D, QuantizedLinear)
        and not is_offloaded(linear)
        and not is_set_by_user(linear)
        and not (linear._forward_pre_hooks or linear._forward_hooks)
        and "weight" in linear._parameters  # a parametrization computes it at every call
    )


def _is_passive(module: nn.Module) -> bool:
    """Whether a module returns its input."""
    return type(module) is nn.Dropout and is_bare(module) and (module.p == 0 or not module.training)


def _declared(module: Any, family: Family) -> DeclaredLayer:
    """The declared operations of a decoder layer; raises UndeclaredError if it has, or does, more."""
    residuals = family.layer(module)
    layer = DeclaredLayer(module, family, residuals, vars(sys.modules[family.file])["eager_attention_forward"])
    names = {id(part): name or "itself" for name, part in module.named_modules()}
    called = () if layer.called is None else layer.called.module.modules()
    declared = {id(part) for part in (*layer.parts, *layer.linears, *layer.gates, *called)}
    faults = [names[id(part)] for part in module.modules() if id(part) not in declared and not _is_passive(part)]
    if faults:
        raise UndeclaredError(f"{faults[0]} is not declared")
    own = set[int]()
    if layer.attention is not None:
        own = {id(tensor) for tensor in layer.attention.options.values() if isinstance(tensor, Tensor)}
    if mixture := layer.experts:
        own |= set(map(id, (*mixture.tensors, *(tensor for part in mixture.of_router for tensor in part.parameters()))))
    mixing = () if layer.recurrence is None else layer.recurrence.parts  # as a module, or checked by `tree_mixers`
    for part in (part for part in layer.parts if part not in mixing):
        of_file = type(part).__module__ == family.file or type(part) in _KNOWN
        is_norm = any(part is norm.module for norm in layer.norms)
        more = [tensor for tensor in part._parameters.values() if tensor is not None and id(tensor) not in own]
        if not (of_file and is_bare(part)) or (more and not is_norm):
            raise UndeclaredError(f"{names[id(part)]} is more than its class says")
    norm_weights = [norm.weight for norm in layer.norms]
    if not all(_is_plain_norm(norm.module, norm.ones) for norm in layer.norms):
        raise UndeclaredError("a norm is hooked, or of an unsupported type or size")
    if len({weight.dtype for weight in norm_weights}) > 1:
        raise UndeclaredError("its norms have several types of numbers")
    for linear in (*layer.linears, *layer.gates):
        if not _is_plain_linear(linear):
            raise UndeclaredError(f"{names[id(linear)]} is hooked, adapted or offloaded")
    products = [product for part in residuals for product in part.mixer.products]
    if not all(map(has_own_panels, products)):
        raise UndeclaredError("parts of a weight begin within a panel of the packed weight")
    if layer.attention and attention_name(layer.attention.module.config) not in ("sdpa", "eager"):
        raise UndeclaredError("its attention is neither sdpa nor eager")
    if not all(map(has_formula, layer.activations)):
        raise UndeclaredError("its activation has no kernel")
    if mixture and not multiplies(mixture):
        raise UndeclaredError("the kernels do not multiply by the weights of its experts")
    return layer


def _takes(mode: CpuPass, x: Tensor, norm: Norm, experts: Experts | None = None) -> bool:
    """Whether fused layers accept the hidden states of nodes, `[rows, tokens, size]`."""
    return (
        x.numel() > 0
        # By its own code a mixture has other bits for several rows than for one.
        and (x.numel() <= mode.most_elements or (experts is not None and _keeps_bits(mode)))
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")  # a user's function may enter it within the pass
        and x.dtype == norm.weight.dtype
        and x.is_contiguous()
    )


def _keeps_bits(mode: CpuPass) -> bool:
    return mode.most_elements > 0 and mode.policy is BitPolicy.SOLO


def _norm_forward(norm: Norm, x: Tensor) -> Tensor:
    """The norm's `forward`, as one kernel call for a few tokens on a thread that runs a pass."""
    mode = thread.running
    if mode is None or mode.is_prompt or not _takes(mode, x, norm):
        own: Tensor = type(norm.module).forward(norm.module, x)
        return own
    out = torch.empty_like(x)
    run(layer_ops.norm(x, norm.weight, out, norm.eps, kind=norm.kind, bias=norm.bias))
    return out


def _layer_forward(layer: DeclaredLayer, *args: Any, **kwargs: Any) -> Any:
    """The layer's `forward`, fused for a few tokens on a thread that runs a pass."""
    mode = thread.running
    if mode is None or mode.is_prompt:  # whose time is that of products
        return type(layer.module).forward(layer.module, *args, **kwargs)
    if layer.family.beside and len(args) > 1:
        hidden, kwargs[layer.family.beside], *more = args
        args = hidden, *more
    positions, cache = kwargs.get("position_embeddings"), kwargs.get(layer.family.cache or CACHE)
    has_positions = not layer.angles or (positions is not None and positions[0].shape[-1] == layer.angles)
    reach, places = layer.reach, kwargs.get("position_ids")
    if reach is not None and (places is None or int(places.max()) >= reach):
        return type(layer.module).forward(layer.module, *args, **kwargs)
    # A cache under another name would be ignored.
    if len(args) != 1 or not has_positions or cache is None or not _takes(mode, args[0], layer.norms[0], layer.experts):
        return type(layer.module).forward(layer.module, *args, **kwargs)
    return _fused(layer, args[0], **kwargs)


class _CalledAttention:
    """Attention by the registered function, over the keys and values of a cache."""

    def __init__(
        self,
        layer: DeclaredLayer,
        cache: Any,
        mask: Tensor | None,
        positions: Any,
        shared: Any,
        options: dict[str, Any],
    ) -> None:
        self._layer, self._cache, self._mask, self._positions = layer, cache, mask, positions
        self._shared, self._options = shared, options

    def outputs(self, part: SelfAttention, jobs: LayerJobs) -> tuple[Tensor, Tensor]:
        width = part.heads[1] * part.dim
        return jobs.take("key", width), jobs.take("value", width)

    def attend(
        self, part: SelfAttention, jobs: LayerJobs, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> Tensor:
        jobs.run()
        module, (rows, tokens, size) = part.module, query.shape
        query, *pair = (
            numbers.view(rows, tokens, -1, part.dim).transpose(1, 2)
            for numbers in (query, key, value)
            if numbers is not None
        )
        if part.source is not None:
            pair = self._shared[part.shared]
        elif self._cache is not None:
            pair = self._cache.update(*pair, module.layer_idx)
        if part.shared:
            self._shared[part.shared] = tuple(pair)
        by_model = registered_attention(module.config, self._layer.eager)
        attended: Tensor = by_model(module, query, *pair, self._mask, **part.options, **self._options)[0]
        return attended.contiguous().view(rows, tokens, size)

    def gates(self, part: SelfAttention, jobs: LayerJobs, x: Tensor) -> list[Tensor]:
        jobs.run()
        return [gate(x).contiguous() for gate in part.gates]

    def call(self, part: Recurrence | Called, jobs: LayerJobs, x: Tensor) -> Tensor:
        jobs.run()
        if isinstance(part, Called):
            if self._cache is None and part.rotate is not None:  # a comparison
                by_model = registered_attention(part.module.config, self._layer.eager)
                return attend_alone(part, x, self._positions, by_model)
            name = self._layer.family.cache or CACHE
            own: Tensor = part.module(
                x, attention_mask=self._mask, position_embeddings=self._positions, **{name: self._cache},
                **self._options,
            )[0]  # fmt: skip
            return own.contiguous()
        options = {name: value for name, value in self._options.items() if name not in _OF_ATTENTION}
        made: Tensor = part.module(x, **{part.cache: self._cache}, attention_mask=self._mask, **options)
        return made


def _fused(
    layer: DeclaredLayer,
    hidden: Tensor,
    position_embeddings: Positions | None = None,
    attention_mask: Tensor | None = None,
    shared_kv_states: Any = None,
    **kwargs: Any,
) -> Tensor:
    """A decoder layer, `[rows, tokens, size]`. Consecutive kernels run in one call."""
    beside = kwargs.pop(layer.family.beside, None)
    linears, (rows, tokens, _), cache = layer.linears, hidden.shape, kwargs.pop(layer.family.cache or CACHE, None)
    weights = packed_weights(linears, hidden, layer.known)
    rope = layer.rope
    positions = {}
    if rope is not None and position_embeddings is not None:
        cos, sin = (embedding.expand(rows, -1, -1).contiguous() for embedding in position_embeddings)
        positions = {rope.kind: (cos, sin)}
    by_linear = dict(zip(map(id, linears), weights, strict=True)) if weights else {}
    prepared = prepared_rows(weights, rows * tokens) if weights else None
    attend = _CalledAttention(layer, cache, attention_mask, position_embeddings, shared_kv_states, kwargs)
    jobs = LayerJobs(
        lambda name, size: hidden.new_empty(rows, tokens, size),
        by_linear,
        prepared,
        positions,
        attend,
        partial(_routing, rows * tokens, hidden),
    )
    jobs.beside = None if beside is None else beside.contiguous()
    if layer.experts and serves(hidden.dtype, mode := thread.running):
        jobs.mixture = layer.mixture(packs=layer.packs_experts(mode))
    total, _ = jobs.normed(None, jobs.layer(layer.residuals, HiddenSum(hidden)), "")
    jobs.run()
    return total


def _routing(tokens: int, like: Tensor, part: Experts) -> Routing:
    return Routing(part, tokens, like.dtype)
