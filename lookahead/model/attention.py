"""Tree attention for a HuggingFace model: the registered attention function, and the threads that use it.

The running pass of a thread decides what the function computes (`lookahead.backend.pass_attention`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock, local
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookahead.model.facts import Attention
from lookahead.model.model_state import pass_local

ATTENTION_NAME = "lookahead_tree"
Attend = Callable[..., Tensor]
"""Attention of a layer for module, queries, keys, values and options; returns `[rows, width, heads, dim]`."""

_guard = RLock()
_views: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by the id of the configuration, kept alive by the view
_thread = pass_local(local)


class AttentionScope:
    """Switches a model to tree attention, only on threads that run one of our passes.

    While a backend serves, the modules of the model hold a view of their configuration. It has the same type and
    values, but names tree attention on threads that run a pass. The configuration itself, which other models may
    share, is unchanged.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # The model keeps its own configuration: users read it, and no module chooses attention by it.
        configs = [(module, module.__dict__.get("config")) for module in model.modules() if module is not model]
        with _guard:
            # For `patched_attribute`, as long as a thread is in service.
            self.views = [
                (module, real_config(config), _view_of(real_config(config)))
                for module, config in configs
                if isinstance(config, PretrainedConfig)
            ]
            self._own_views = tuple({id(view): view for _, _, view in self.views}.values())

    @contextmanager
    def running(self, attend: Attend) -> Iterator[None]:
        """While a backend serves, let the modules attend by `attend` on this thread until the block ends."""
        outer = getattr(_thread, "views", ()), getattr(_thread, "attend", None)
        _thread.views, _thread.attend = self._own_views, attend
        try:
            yield
        finally:
            _thread.views, _thread.attend = outer


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


def real_config(config: Any) -> Any:
    """The configuration behind a view; other configurations unchanged."""
    return config._viewed if isinstance(config, _View) else config


class _View:
    """A configuration whose attention depends on the calling thread. Copying a view copies its configuration."""

    __slots__ = ()
    _viewed: Any

    def __copy__(self) -> Any:
        return copy.copy(self._viewed)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return real_config, (self._viewed,)

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


def registered_attention(config: Any, eager: Attention) -> Attention:
    """The attention function that a layer with this configuration calls; `eager` is its file's eager function."""
    own: Attention = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
    return own


def tree_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of the thread's running pass, with the signature of transformers' attention functions.

    Args:
        module: The calling attention layer.
        query: `[rows, heads, width, dim]`, of the nodes of the pass.
        key: `[rows, kv_heads, slots, dim]`, from the cache.
        value: `[rows, kv_heads, slots, value_dim]`.
        attention_mask: Unused; the pass knows what a node sees.
        **options: Options of the layer, such as `scaling`, `sliding_window` or `softcap`.

    Returns:
        `[rows, width, heads, value_dim]`, and None for the weights.
    """
    attended: Tensor = _thread.attend(module, query, key, value, **options)
    return attended, None


AttentionInterface.register(ATTENTION_NAME, tree_attention)
