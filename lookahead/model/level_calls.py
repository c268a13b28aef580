"""Calls of a recurrent module by tree depth, in which its linear layers run once for all nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from lookahead.model.cache import TreeCache
from lookahead.model.model_state import pass_local
from lookahead.model.state_layers import Levels

MixTrees = Callable[[Tensor, TreeCache], Tensor | None]
"""Computes a module for all nodes of a pass over trees, `[rows, width, size]`, and sets `after` of its cache layer.
Returns None if the module must be called by depth."""

thread = pass_local(local)
"""`cache` belongs to the pass over trees that the thread runs, or is None. A call gets `most` nodes or a depth, unless
one of `kernels` computes the module."""
_calls = pass_local(local)


class LevelCalls:
    """The calls of one module in a pass.

    Products of its input are computed for all nodes at the first use. The products that make its output are postponed
    to the end, once a call has shown which linear layer returns the module's output.

    Args:
        hidden: `[rows, width, size]`, the input of the module.
        levels: The nodes of the pass by depth.
        last: The linear layer that makes the output, if known.
    """

    def __init__(self, hidden: Tensor, levels: Levels, last: nn.Module | None) -> None:
        self._hidden, self._levels, self.last = hidden, levels, last
        self._products: dict[nn.Module, Tensor] = {}  # of all nodes
        self._given, self._nodes = hidden, torch.empty(0)
        self._newest: tuple[nn.Module, Tensor] | None = None  # the last product of the running call
        self._waiting: list[tuple[Tensor, Tensor]] = []  # nodes, and the input of the last product

    def run(self, cache: TreeCache, layers: list[int], most: int | None, call: Callable[[Tensor], Any]) -> Any:
        """Call the module for all nodes; returns its output, `[rows, width, ...]`, or a tuple of outputs."""
        whole: Any = None
        for depth, level in enumerate(self._levels.all):
            size = most or len(level.nodes)
            for nodes, parents in zip(level.nodes.split(size), level.parents.split(size), strict=True):
                for at in layers:
                    cache.layers[at].begin(depth, parents)
                self._nodes = nodes.to(self._hidden.device)
                self._given, self._newest = self._hidden.flatten(0, 1)[self._nodes][:, None], None
                with self._running():
                    made = call(self._given)
                for at in layers:
                    cache.layers[at].end(depth)
                whole = self._placed(whole, made)
                self._learn(made)
        return self._finished(whole)

    @contextmanager
    def _running(self) -> Iterator[None]:
        outer, _calls.newest = getattr(_calls, "newest", None), self
        try:
            yield
        finally:
            _calls.newest = outer

    def product(self, linear: nn.Module, x: Tensor) -> Tensor:
        """The product of a linear layer of the module with rows, `[nodes, 1, size]`."""
        if x is self._given:
            if linear not in self._products:
                self._products[linear] = linear(self._hidden)
            return self._products[linear].flatten(0, 1)[self._nodes][:, None]
        if linear is self.last:
            self._waiting.append((self._nodes, x))
            made = x.new_full((), torch.nan).expand(*x.shape[:-1], int(linear.out_features))  # type: ignore[arg-type]
        else:
            made = linear(x)
        self._newest = linear, made
        return made

    def _learn(self, made: Any) -> None:
        """Find out whether a linear layer returns the module's output."""
        output = made[0] if isinstance(made, tuple) else made
        is_last = self._newest is not None and output is self._newest[1]
        if self.last is None and self._newest is not None and is_last:
            self.last = self._newest[0]
        elif self.last is not None and not (is_last and self._newest is not None and self._newest[0] is self.last):
            raise RuntimeError("a module with states returns other products than it did")

    def _placed(self, whole: Any, part: Any) -> Any:
        """Scatter the output of a call, `[n, 1, ...]`, into the output of all nodes."""
        if isinstance(part, tuple):
            before = whole if whole is not None else [None] * len(part)
            return tuple(self._placed(former, new) for former, new in zip(before, part, strict=True))
        if not isinstance(part, Tensor):
            return part
        if whole is None:
            whole = part.new_zeros(*self._hidden.shape[:2], *part.shape[2:])
        whole.flatten(0, 1).index_copy_(0, self._nodes, part.flatten(0, 1))
        return whole

    def _finished(self, whole: Any) -> Any:
        """The output, with the postponed products computed."""
        if self._waiting and self.last is not None:
            self._nodes = torch.cat([nodes for nodes, _ in self._waiting])
            made = self.last(torch.cat([x for _, x in self._waiting]))
            first, *others = whole if isinstance(whole, tuple) else (whole,)
            first = self._placed(first.to(made.dtype), made)
            return (first, *others) if isinstance(whole, tuple) else first
        return whole


class SharedLinear:
    """Replaces a linear layer of a recurrent module; in a pass over trees it runs once for the nodes of all depths."""

    def __init__(self, linear: nn.Module) -> None:
        self._linear = linear

    def __getattr__(self, name: str) -> Any:
        return getattr(self._linear, name)

    def __call__(self, x: Tensor) -> Tensor:
        """The product with rows."""
        calls: LevelCalls | None = getattr(_calls, "newest", None)
        made: Tensor = self._linear(x) if calls is None else calls.product(self._linear, x)
        return made
