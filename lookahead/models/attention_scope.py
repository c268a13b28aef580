"""Which attention a model calls: tree attention on a thread that runs one of our passes, its own on all others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock, local
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lookahead.models.attention import ATTENTION_NAME, TreePass, running
from lookahead.models.model_state import state_of

_guard = Lock()
_uses: dict[int, int] = {}  # blocks in which a module serves, by its id; their scopes keep it alive
_views: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by the id of their configuration, which they keep alive
_thread = local()


class AttentionScope:
    """The modules of a model that ask a configuration which attention to call.

    While the model is in service they hold a view of their configuration instead. It is of the same type, shares all
    values with it, and names tree attention on threads that run a pass over it. No configuration changes, so neither
    other threads that call the model nor other models of the same configuration notice.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # Nothing chooses an attention by the configuration of the whole model, which its users read.
        modules = [each for each in model.modules() if each is not model and _config_of(each) is not None]
        with _guard:
            configs = [_real(_config_of(module)) for module in modules]
            self._modules = [(*each, _view_of(each[1])) for each in zip(modules, configs, strict=True)]
            self._own_views = tuple({id(view): view for _, _, view in self._modules}.values())
        state_of(model).views = self._own_views  # compiled code is for certain views

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Let the modules hold views until the block ends and no other thread's block goes on."""
        with _guard:
            for module, _, view in self._modules:
                _uses[id(module)] = _uses.get(id(module), 0) + 1
                module.__dict__["config"] = view
        try:
            yield
        finally:
            with _guard:
                for module, config, _ in self._modules:
                    uses = _uses.pop(id(module)) - 1
                    if uses:
                        _uses[id(module)] = uses
                    else:
                        module.__dict__["config"] = config

    @contextmanager
    def running(self, tree_pass: TreePass) -> Iterator[None]:
        """Within `serving`, let the modules call tree attention for `tree_pass` on this thread until the block ends."""
        outer = getattr(_thread, "views", ())
        _thread.views = self._own_views
        try:
            with running(tree_pass):
                yield
        finally:
            _thread.views = outer


def _config_of(module: nn.Module) -> Any:
    """The configuration a module holds, or None."""
    config = module.__dict__.get("config")
    return config if isinstance(config, PretrainedConfig) else None


def _view_of(config: Any) -> Any:
    """The view of a configuration, common to all modules of all models that hold it."""
    config = _real(config)
    view = _views.get(id(config))
    if view is None:
        kind: Any = type(config)
        view = object.__new__(_view_class(kind))
        object.__setattr__(view, "__dict__", config.__dict__)
        object.__setattr__(view, "_viewed", config)
        _views[id(config)] = view
    return view


def _real(config: Any) -> Any:
    """What a view shows, and any other configuration itself."""
    return config._viewed if isinstance(config, _View) else config


class _View:
    """A configuration whose attention depends on the thread that asks. A copy of it is one of the configuration."""

    __slots__ = ()
    _viewed: Any

    def __copy__(self) -> Any:
        return copy.copy(self._viewed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._viewed, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _real, (self._viewed,)

    @property
    def _attn_implementation(self) -> str | None:
        """Tree attention on a thread that runs a pass over the configuration."""
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
    """The class of views of configurations of a class."""
    names = {"__slots__": ("_viewed", "__weakref__"), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_View, kind), names)
