"""The forward of a model, compiled for one shape after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import RLock
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.models.attention import Reach
from lookahead.models.cache import TreeCache
from lookahead.models.fixed_shape import Run, StaticPass
from lookahead.models.model_state import state_of

_BACKEND = "inductor"


class Shape(NamedTuple):
    """What a compiled forward is good for.

    Attributes:
        batch: Rows of the cache.
        capacity: Slots a row of the cache has.
        rows: Rows of the pass.
        width: Nodes of a row.
        hidden_layers: Which hidden states are returned.
    """

    batch: int
    capacity: int
    rows: int
    width: int
    hidden_layers: tuple[int, ...]


def forward(
    model: Any, cache: TreeCache, static: StaticPass, hidden_layers: tuple[int, ...], mask_dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """One pass of a model over a static pass that runs.

    Args:
        model: A causal language model.
        cache: Holds the pass.
        static: The pass.
        hidden_layers: Which hidden states are wanted beside the logits.
        mask_dtype: Of the mask, where the model takes prepared ones; None where its attention is ours.

    Returns:
        Logits `[rows, width, vocab]`, and those hidden states, `[rows, width, size]`.
    """
    options: dict[str, Any] = {}
    if mask_dtype is not None:
        options["attention_mask"] = static.mask(1, Reach(), mask_dtype, static.tokens.device)
    if hidden_layers:
        options["output_hidden_states"] = True
    output = model(
        input_ids=static.tokens, position_ids=static.positions, past_key_values=cache, use_cache=True, **options
    )
    return (output.logits, *(output.hidden_states[layer] for layer in hidden_layers))


class CompiledForward:
    """`forward`, compiled for one shape when it is first called."""

    def __init__(self, shape: Shape) -> None:
        # Compiled code belongs to a code object, and so many shapes to one are too many for Dynamo: a copy for each.
        code = forward.__code__.replace(co_name=f"forward_{shape.rows}x{shape.width}")
        copy = FunctionType(code, forward.__globals__, code.co_name)
        self._guarded: Any = torch.compile(copy, backend=self._compile, fullgraph=True, dynamic=False)
        self._lock = RLock()  # threads that share a model share its compiled code
        self._newest: tuple[Callable[..., Sequence[Tensor]], Sequence[Any], Sequence[Tensor]] | None = None

    def bind(self, *arguments: Any) -> tuple[Run, tuple[Tensor, ...]]:
        """Run once, and give what runs it again on the same arguments, whatever their tensors hold by then.

        Dynamo checks at every call that nothing has changed that the code was compiled for, which takes as long as
        a layer of a small model. While one call of the library decodes nothing has, and every tensor of a static pass
        stays where it is: the compiled code can be called with them at once.

        Args:
            *arguments: Those of `forward`.

        Returns:
            What runs it again, and what `forward` returned.
        """
        with self._lock:
            outputs = self._call(*arguments)
            newest, self._newest = self._newest, None
        if newest is None:
            return partial(self._call, *arguments), outputs
        compiled, inputs, results = newest
        places = {id(each): place for place, each in enumerate(results)}
        order = [places[id(output)] for output in outputs if id(output) in places]
        if len(order) < len(outputs):  # Dynamo made an output of what the code gave
            return partial(self._call, *arguments), outputs

        def run() -> tuple[Tensor, ...]:
            results = compiled(*inputs)
            return tuple(results[place] for place in order)

        return run, outputs

    def _call(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Call what Dynamo guards."""
        with self._lock:
            self._newest = None  # it would keep a cache alive
            outputs: tuple[Tensor, ...] = self._guarded(*arguments)
        return outputs

    def _compile(self, graph: Any, examples: Sequence[Any]) -> Callable[..., Sequence[Tensor]]:
        """What Dynamo calls to compile: Inductor, which keeps what it makes on disk for later processes."""
        from torch._dynamo import lookup_backend

        compiled = lookup_backend(_BACKEND)(graph, list(examples))

        def call(*inputs: Any) -> Sequence[Tensor]:
            results = compiled(*inputs)
            self._newest = (compiled, inputs, results)
            return results

        return call


def compiled_forward(model: PreTrainedModel, shape: Shape) -> tuple[CompiledForward, bool]:
    """The forward of a model for one shape, common to all calls, and whether it is still to be compiled."""
    known: dict[Shape, CompiledForward] = state_of(model).compiled
    is_new = shape not in known
    if is_new:
        known[shape] = CompiledForward(shape)
    return known[shape], is_new
