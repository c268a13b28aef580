"""Passes of a model, counted, or recorded as a stand-in for CUDA graphs on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lookahead.backend.self_check import keeps_solo_bits, kernels_agree
from lookahead.backend.support import support_of

Run = Callable[[], tuple[Tensor, ...]]


@contextmanager
def counted_passes(model: Any) -> Iterator[list[None]]:
    """A list with one element for every forward pass of a model within the block."""
    passes: list[None] = []  # the hook is code of a user's: `trust_user_code` lets our passes run it
    handle = model.register_forward_pre_hook(lambda *_: passes.append(None))
    probe(model)
    passes.clear()
    try:
        yield passes
    finally:
        handle.remove()


def probe(model: Any) -> None:
    """Find all verdicts on a model, so that later passes are only passes of decoding."""
    shape = support_of(model, shortest=1, max_length=8, trusted=True).shape
    keeps_solo_bits(model)
    if shape != "none" and not model.config.is_encoder_decoder:
        kernels_agree(model, shape)


class Recording(TorchDispatchMode):
    """The tensor operations of a pass, replayed on the same memory. Numbers that Python read in between are fixed.

    A tensor that the pass did not create stays the recorded one, even if it has been replaced since.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        self._kept: list[Any] = []  # keeps tensors alive, since they are known by their ids
        with self:
            self._outputs = run()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        self._steps.append((func, args, kwargs, made))
        self._kept.append(made)
        return made

    def replay(self) -> tuple[Tensor, ...]:
        known: dict[int, Tensor] = {}

        def now(tensor: Tensor) -> Tensor:
            return known.get(id(tensor), tensor)

        for func, args, kwargs, recorded in self._steps:
            made = func(*tree_map_only(Tensor, now, args), **tree_map_only(Tensor, now, kwargs))
            before, after = ((each,) if isinstance(each, Tensor) else tuple(each or ()) for each in (recorded, made))
            known.update({id(old): new for old, new in zip(before, after, strict=True) if isinstance(old, Tensor)})
        for output in self._outputs:
            output.copy_(now(output))  # into the memory where a graph would write it
        return self._outputs
