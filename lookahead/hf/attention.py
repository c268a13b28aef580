"""Tree attention for a HuggingFace model: the registered attention function, and the threads that use it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lookahead.backend.cpu.exact_attention import PerNodeAttention, attend_per_node, attends_by_kernel, own_attention
from lookahead.backend.tree_pass import AttentionSpan, FixedShapePass, TreePass
from lookahead.hf.cache import TreeLayer
from lookahead.hf.model_state import pass_local, patched_attribute
from lookahead.kernels import dispatch

ATTENTION_NAME = "lookahead_tree"

_guard = RLock()
_views: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by the id of the configuration, which a view keeps
_thread = pass_local()  # no ContextVar: torch.compile cannot look into one


class AttentionScope:
    """Switches a model to tree attention on the threads that run a pass of ours, and on no other.

    Within `serving` the modules of the model hold a view of their configuration, which has its type and values, and
    names tree attention on threads that run a pass. The configuration itself does not change, nor other models with it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._facts: dict[Any, Any] = {}
        # The model itself keeps its configuration: users read it, and no module chooses its attention by it.
        held = [(each, each.__dict__.get("config")) for each in model.modules() if each is not model]
        with _guard:
            self._modules = [
                (module, _real(config), _view_of(_real(config)))
                for module, config in held
                if isinstance(config, PretrainedConfig)
            ]
            self._own_views = tuple({id(view): view for _, _, view in self._modules}.values())

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Let the modules hold views until the last open block of any thread ends."""
        self._facts.clear()
        with patched_attribute("config", self._modules):
            yield

    @contextmanager
    def running(self, tree_pass: TreePass) -> Iterator[None]:
        """Within `serving`, let the modules call tree attention for `tree_pass` on this thread until the block ends."""
        outer = getattr(_thread, "views", ()), getattr(_thread, "tree_pass", None), getattr(_thread, "facts", None)
        _thread.views, _thread.tree_pass, _thread.facts = self._own_views, tree_pass, self._facts
        try:
            yield
        finally:
            _thread.views, _thread.tree_pass, _thread.facts = outer


def _view_of(config: Any) -> Any:
    """The view of a configuration, shared by all modules of all models that hold it."""
    view = _views.get(id(config))
    if view is None:
        kind: Any = type(config)
        view = object.__new__(_view_class(kind))
        object.__setattr__(view, "__dict__", config.__dict__)
        object.__setattr__(view, "_viewed", config)
        _views[id(config)] = view
    return view


def _real(config: Any) -> Any:
    """The configuration behind a view; any other configuration itself."""
    return config._viewed if isinstance(config, _View) else config


class _View:
    """A configuration whose attention depends on the calling thread. Copying a view copies its configuration."""

    __slots__ = ()
    _viewed: Any

    def __copy__(self) -> Any:
        return copy.copy(self._viewed)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _real, (self._viewed,)

    @property
    def _attn_implementation(self) -> str | None:
        """Tree attention on a thread that runs a pass."""
        for view in getattr(_thread, "views", ()):
            if view is self:
                return ATTENTION_NAME
        own: str | None = self._viewed._attn_implementation
        return own

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        self._viewed._attn_implementation = value


@cache
def _view_class(kind: Any) -> Any:
    names = {"__slots__": ("_viewed", "__weakref__"), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_View, kind), names)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the thread's running `TreePass`, with the signature of transformers' attention functions.

    Trees go to a kernel where one supports them. Otherwise the query heads that share a KV head are packed into query
    rows, so that torch's attention reads keys and values once. The pass makes the mask.
    The window or chunk of the layer applies where the arguments have none.
    """
    tree_pass: TreePass = _thread.tree_pass
    if tree_pass.cross is not None and not _is_of(key, tree_pass.cross.own.layers[module.layer_idx].keys):
        options = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, "position_bias": position_bias, **kwargs}
        return _attend_across(module, query, key, value, tree_pass, options), None
    if softcap is not None and _real(module.config)._attn_implementation == "sdpa":
        softcap = None  # which transformers' SDPA attention does not apply
    slots, is_compiling = key.shape[2], torch.compiler.is_compiling()
    span = (None if is_compiling else _thread.facts.get(id(module))) or _limits_of(module, is_compiling)
    if "sliding_window" in kwargs and kwargs["sliding_window"] != span.window:
        span = AttentionSpan(kwargs["sliding_window"], span.chunk)
    if tree_pass.is_exact:
        options = {"softcap": softcap, "s_aux": s_aux, "scaling": scaling, "position_bias": position_bias, **kwargs}
        return attend_per_node(
            module, query, key, value, tree_pass.per_node, window=_within(span, slots + 1).window,
            # Not by layer: the last layers of some models have no cache of their own and read one with the same window.
            crops=_within(span, slots + 1).window in (tree_pass.windows or ()),
            own=own_attention(module, _real(module.config)),
            options={name: option for name, option in options.items() if option is not None},
        ), None  # fmt: skip
    if position_bias is not None:
        return dispatch.masked_attention(query, key, value, tree_pass.biased_mask(position_bias), scaling), None
    if tree_pass.scores_trees and not is_compiling:
        kernel = _kernel_of(tree_pass, query, key, value, span, scaling, softcap, s_aux)
        if kernel is not None:
            return kernel(query, key.transpose(1, 2), value.transpose(1, 2), sinks=s_aux), None
    reached, groups = _within(span, slots), query.shape[1] // key.shape[1]
    is_plain = softcap is None and s_aux is None and reached == AttentionSpan()
    if is_plain and tree_pass.is_causal and (tree_pass.is_from_empty or dispatch.takes_flash(query, key, value)):
        # Causal attention from an empty cache needs no mask, and SDPA skips half of the work. Nor does a further part
        # of a prompt, where flash attention aligns the last query with the last key.
        if tree_pass.is_from_empty:
            out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        else:
            last = causal_lower_right(query.shape[2], slots)
            out = scaled_dot_product_attention(query, key, value, attn_mask=last, scale=scaling, enable_gqa=groups > 1)
        return out.transpose(1, 2).contiguous(), None
    return _by_torch(tree_pass, query, key, value, reached, scaling, softcap, s_aux), None


def _is_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors share their memory."""
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _attend_across(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, tree_pass: TreePass, options: dict[str, Any]
) -> Tensor:
    """Attention of nodes to what the encoder has read, by the model's own function; `[rows, width, heads, dim]`."""
    assert tree_pass.cross is not None
    own = own_attention(module, _real(module.config))
    options = {name: option for name, option in options.items() if option is not None}

    def attend(nodes: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        mask = None if mask is None else mask.to(query.device)
        if mask is not None and own is not sdpa_attention_forward:
            mask = query.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
        return own(module, nodes, keys, values, mask, **options)[0]

    if not tree_pass.is_exact:
        return attend(query, key, value, tree_pass.cross.mask, **options)
    rows, heads, width, _ = query.shape
    out, bias = query.new_zeros(rows, width, heads, value.shape[3]), options.get("position_bias")
    per_node = tree_pass.per_node
    for row, (tokens, mask) in enumerate(tree_pass.cross.alone):
        one = slice(row, row + 1)
        nodes = slice(len(per_node.trees[row]) - per_node.scored[row])  # padding attends to nothing
        keys, values = key[one, :, :tokens], value[one, :, :tokens]
        if bias is not None:
            options["position_bias"] = bias[one if len(bias) > 1 else slice(1), :, -1:, :tokens]
        alone = [attend(node, keys, values, mask, **options) for node in query[one, :, nodes].split(1, 2)]
        out[one, nodes] = torch.cat(alone, 1)
    return out


def per_node_by_kernel(
    module: nn.Module, layer: TreeLayer, heads: int, options: Mapping[str, Any]
) -> PerNodeAttention | None:
    """The per-node attention of the running pass, if it has trees and `kernels.row_attention` takes its layer.

    `options` are those of the call of `tree_attention` that the kernel stands for.
    """
    tree_pass: TreePass | None = getattr(_thread, "tree_pass", None)
    if tree_pass is None or not tree_pass.has_trees:
        return None
    span = _thread.facts.get(id(module)) or _limits_of(module, False)
    window, own = options.get("sliding_window", span.window), own_attention(module, _real(module.config))
    per_node, slots = tree_pass.per_node, (layer.keys, layer.values)
    return per_node if attends_by_kernel(own, *slots, heads, window, per_node, is_exact=tree_pass.is_exact) else None


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
    """The kernel of the layers of a pass that are alike, bound to the trees of the pass."""
    layouts = query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride()
    kind = (*layouts, query.device, query.dtype, span, scaling, softcap, s_aux is None)
    if kind not in tree_pass.kernels:
        options = {**_within(span, key.shape[2])._asdict(), "scaling": scaling, "softcap": softcap, "sinks": s_aux}
        later = frozenset(name for name, limit in span._asdict().items() if limit is not None)
        is_eager = not isinstance(tree_pass, FixedShapePass)
        buffers = key.transpose(1, 2), value.transpose(1, 2)  # as the cache holds them
        kernel = dispatch.attention_for(query, *buffers, options, is_eager, later)
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
    """Torch's attention, under a mask of the slots that not every node sees, or of all."""
    mask = None
    if span != AttentionSpan() or not tree_pass.sees_all:
        start, is_plain = 0, softcap is None and sinks is None and span == AttentionSpan()
        if is_plain and not torch.compiler.is_compiling():  # which would make the length a constant
            start = dispatch.unmasked(query, key, value, tree_pass.prefix)
        mask = tree_pass.mask(query.shape[1] // key.shape[1], span, query.dtype, query.device, start)
    return dispatch.masked_attention(query, key, value, mask, scaling, softcap, sinks)


def _within(span: AttentionSpan, slots: int) -> AttentionSpan:
    """A span without limits that so few slots do not reach."""
    return AttentionSpan(*(None if limit is None or limit >= slots else limit for limit in span))


def _limits_of(module: Any, is_compiling: bool) -> AttentionSpan:
    """The window of a layer that is told none, and its chunk.

    They are read once in a block of `serving`: configurations take microseconds to answer.
    """
    config: Any = getattr(module, "config", None)
    window: int | None = getattr(module, "sliding_window", None)
    if window is None and not hasattr(config, "layer_types"):
        # Some models put the window into masks only: Qwen2-MoE in some layers, PhiMoE in all.
        window = getattr(config, "sliding_window", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    # Llama 4 does not tell attention functions which of its layers look at chunks only.
    if chunk is not None and config.layer_types[module.layer_idx] != "chunked_attention":
        chunk = None
    limits = AttentionSpan(window, chunk)
    if not is_compiling:
        _thread.facts[id(module)] = limits
    return limits


AttentionInterface.register(ATTENTION_NAME, tree_attention)
