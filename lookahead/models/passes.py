"""How a target scores trees faster than by calling the model: compiled code, CUDA graphs, and when not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.drafting.cost_model import padded_nodes
from lookahead.drafting.tree import TokenTree
from lookahead.models.attention_scope import AttentionScope
from lookahead.models.cache import TreeCache
from lookahead.models.compiled import CompiledForward, Shape, compiled_forward, forward
from lookahead.models.cuda_graphs import Capture, CudaGraphs, Graph, graph_shortcoming
from lookahead.models.fixed_shape import Run, StaticPass, padded_rows, padded_slots
from lookahead.models.model_state import state_of

CAPTURE_AT = 3  # the use of a shape at which it is recorded: one that is used once is not worth it
# Of the norm of what a pass gives one node. The same kernels on the same numbers give the same bits but where they add
# in any order; a number that was frozen changes it by many times that.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2}
_FINE_TOLERANCE = 1e-4

_log = logging.getLogger(__name__)


class _PassTimes:
    """A static pass and what runs it: the model's forward, its compiled code, or a graph of either."""

    def __init__(self, static: StaticPass, arguments: tuple[Any, ...], compiled: CompiledForward | None) -> None:
        self.static = static
        self.graph: Graph | None = None
        self.is_heard = False  # whether a replay was seen to give what the pass gives by hand
        self.uses = 0
        self._compiled = compiled
        self._arguments = arguments
        self._run: Run | None = None if compiled is not None else partial(forward, *arguments)

    def run(self) -> tuple[Tensor, ...]:
        """Run the pass by its function, with masks of its own."""
        try:
            if self._run is not None:
                return self._run()
            assert self._compiled is not None
            self._run, outputs = self._compiled.bind(*self._arguments)
            return outputs
        finally:
            self.static.forget_masks()


class FastPasses:
    """Scores the trees of a target in passes of few fixed shapes.

    Args:
        model: The model, in service whenever a pass runs.
        cache: Where the rows stand.
        device: Where the model takes its tokens.
        most_nodes: Nodes of the largest tree to expect, its root counted.
        hidden_layers: Which hidden states are wanted.
        scope: Lets the model call tree attention; None where it takes prepared masks.
        compiles: Whether to compile the model.
        captures: Whether to record CUDA graphs.
        capture: What records a pass; that of CUDA when None.

    Attributes:
        is_cold: Whether the newest pass compiled, recorded or will yet be recorded, so that its time tells nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        device: torch.device,
        *,
        most_nodes: int,
        hidden_layers: tuple[int, ...],
        scope: AttentionScope | None,
        compiles: bool,
        captures: bool,
        capture: Capture | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._most_nodes = most_nodes
        self._hidden_layers = hidden_layers
        self._scope = scope
        self._mask_dtype = model.dtype if scope is None else None
        self._lanes: dict[tuple[int, int], _PassTimes] = {}
        self._made_at = -1  # allocations of the cache when the lanes were made
        self.is_cold = False
        failed = state_of(model).failed
        self._compiles = compiles and "compile" not in failed
        self._capture = capture
        if captures and capture is None and "capture" not in failed:
            problem = graph_shortcoming(model, device)
            if problem is None:
                self._capture = CudaGraphs(device, is_watched=not self._compiles)
            else:
                self._give_up("capture", problem)

    def score(self, trees: Sequence[TokenTree], *, has_softcap: bool) -> tuple[Tensor, ...] | None:
        """Logits `[active, nodes of the largest tree, vocab]` and hidden states likewise; None where it cannot be done.

        Args:
            trees: One per active row.
            has_softcap: As for `TreePass`.
        """
        self.is_cold = False
        if not (self._compiles or self._capture) or not self._cache.layers:
            return None
        slots, nodes = self._cache.slots, max(map(len, trees))
        width = padded_nodes(nodes, self._most_nodes)
        rows = padded_rows(len(trees), len(slots.lengths))
        needed = int(slots.lengths[: len(trees)].max()) + width
        # Compiled code is for one number of slots, and is to meet few; of recordings each call makes its own.
        self._cache.reserve(padded_slots(max(needed, slots.capacity)) if self._compiles else needed)
        if self._made_at != slots.allocations:
            self._lanes.clear()  # the KV moved, and recorded passes know where it was
            self._made_at = slots.allocations
        lane = self._lanes.get((rows, width))
        if lane is None:
            lane = self._lanes[rows, width] = self._open(rows, width, has_softcap)
        lane.static.fill(trees)
        runs = nullcontext() if self._scope is None else self._scope.running(lane.static)
        with slots.fixed(rows, width, lane.static.index), runs:
            outputs = self._run(lane)
        if outputs is None:
            return None
        return tuple(each[: len(trees), :nodes] for each in outputs)

    def _open(self, rows: int, width: int, has_softcap: bool) -> _PassTimes:
        """A lane for passes of a shape that is new since the KV moved."""
        slots = self._cache.slots
        static = StaticPass(slots, rows, width, self._device, has_softcap=has_softcap)
        compiled = None
        if self._compiles:
            shape = Shape(len(slots.lengths), slots.capacity, rows, width, self._hidden_layers)
            compiled, self.is_cold = compiled_forward(self._model, shape)
        return _PassTimes(static, (self._model, self._cache, static, self._hidden_layers, self._mask_dtype), compiled)

    def _run(self, lane: _PassTimes) -> tuple[Tensor, ...] | None:
        """Run a pass whose buffers are filled; None where it failed and will not be tried again."""
        lane.uses += 1
        if lane.graph is not None:
            return self._replay(lane, lane.graph)
        try:
            outputs = lane.run()
        except Exception as error:
            # The model may well be fine: it is called by itself next, and whatever is wrong with it shows there.
            what = "compile" if self._compiles else "capture"
            self._compiles, self._capture = False, None
            self._lanes.clear()
            self._give_up(what, _in_short(error))
            return None
        if self._capture is not None:
            self.is_cold = True
            if lane.uses >= CAPTURE_AT:
                self._record(lane, self._capture)
        return outputs

    def _record(self, lane: _PassTimes, capture: Capture) -> None:
        """Record a pass that was just run; the next of its shape is its first replay."""
        try:
            lane.graph = capture(lane.run)
        except Exception as error:
            self._record_no_more(_in_short(error))

    def _replay(self, lane: _PassTimes, graph: Graph) -> tuple[Tensor, ...]:
        """Replay a graph; the first time by the side of the pass by hand, which serves if they differ.

        The first replay is of other trees than were recorded, behind another length: what Python read while it was
        recorded shows there.
        """
        # What was recorded writes over its outputs the next time, and whoever has them may keep them.
        outputs = tuple(map(torch.clone, graph.replay()))
        if lane.is_heard:
            return outputs
        self.is_cold = lane.is_heard = True
        wanted = lane.run()
        error = float(torch.stack(list(map(_largest_error, outputs, wanted))).max())
        if error <= _TOLERANCE.get(self._model.dtype, _FINE_TOLERANCE):
            return outputs
        self._record_no_more(f"a replay differs by {error:.2g} from the pass that was recorded")
        return wanted

    def _record_no_more(self, reason: str) -> None:
        """Go on by hand."""
        self._capture = None
        for lane in self._lanes.values():
            lane.graph = None
        self._give_up("capture", reason)

    def _give_up(self, what: str, reason: str) -> None:
        """Say once for a model why it is not compiled or recorded."""
        failed = state_of(self._model).failed
        if what not in failed:
            way = {"compile": "torch.compile", "capture": "CUDA graphs"}[what]
            _log.warning("%s is decoded without %s: %s", type(self._model).__name__, way, reason)
        failed.add(what)


def _largest_error(got: Tensor, want: Tensor) -> Tensor:
    """The largest error of a node, relative to the norm of what is right; NaN where only one is a number."""
    got, want = got.float(), want.float()
    is_same = (got == want) | (got.isnan() & want.isnan())
    errors = torch.where(is_same, 0, got - want).norm(dim=-1)
    largest: Tensor = (errors / want.nan_to_num().norm(dim=-1).clamp_min(1e-6)).max()
    return largest


def _in_short(error: Exception) -> str:
    """The first line of what went wrong, and what to do about the likeliest cause."""
    if type(error).__name__ == "InvalidCxxCompiler" or "InvalidCxxCompiler" in str(error):
        return "there is no C++ compiler; install g++ or clang++, or name one in the environment variable CXX"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
