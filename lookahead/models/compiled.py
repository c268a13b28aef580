"""Fixed-shape passes of a target: compiled code, CUDA graphs, and when to fall back to the model's own forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.drafting.cost_model import padded_nodes
from lookahead.drafting.tree import TokenTree
from lookahead.models.attention import AttentionScope
from lookahead.models.cache import CACHE, TreeCache
from lookahead.models.cuda_graphs import CudaGraphs, Graph, Run, graph_shortcoming
from lookahead.models.model_state import state_of
from lookahead.models.tree_pass import AttentionSpan, FixedShapePass, padded_rows, padded_slots

CAPTURE_AT = 3  # uses of a shape before it is recorded: a shape that is used once is not worth it
_BACKEND = "inductor"
# Largest error of a replay, relative to the norm of a node's output. The same kernels on the same numbers give the same
# bits unless they add in any order; a number frozen into a graph changes the output by many times the tolerance.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2}
_TOLERANCE_FP32 = 1e-4

_log = logging.getLogger(__name__)


def forward(
    model: Any, cache: TreeCache, static: FixedShapePass, hidden_layers: tuple[int, ...], mask_dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """Run a model on the buffers of a fixed-shape pass: logits `[rows, width, vocab]`, and some of the hidden states.

    The mask has a type for a model that takes prepared masks, and none for one that calls tree attention.
    """
    options: dict[str, Any] = {CACHE: cache}
    if mask_dtype is not None:
        options["attention_mask"] = static.mask(1, AttentionSpan(), mask_dtype, static.tokens.device)
    if hidden_layers:
        options["output_hidden_states"] = True
    output = model(input_ids=static.tokens, position_ids=static.positions, use_cache=True, **options)
    return (output.logits, *(output.hidden_states[layer] for layer in hidden_layers))


class CompiledForward:
    """`forward`, compiled for one shape when it is first called."""

    def __init__(self, rows: int, width: int) -> None:
        # Dynamo limits the compiled variants of one code object, so each shape gets a copy.
        code = forward.__code__.replace(co_name=f"forward_{rows}x{width}")
        copy = FunctionType(code, forward.__globals__, code.co_name)
        self._guarded: Any = torch.compile(copy, backend=self._compile, fullgraph=True, dynamic=False)
        self._lock = Lock()  # threads that share a model share its compiled code
        self._calls: list[tuple[Callable[..., Sequence[Tensor]], Sequence[Any], Sequence[Tensor]]] = []

    def bind(self, *arguments: Any) -> tuple[Run, tuple[Tensor, ...]]:
        """Run once, and return a function that runs again on the same tensors without Dynamo's guards.

        Guards take a tenth of a small model's pass, and nothing they check changes while one call decodes.
        """
        with self._lock:
            self._calls.clear()
            outputs: tuple[Tensor, ...] = self._guarded(*arguments)
            calls = self._calls.copy()
            self._calls.clear()  # they would keep a cache alive
        places = {id(each): place for *_, results in calls[-1:] for place, each in enumerate(results)}
        if any(id(output) not in places for output in outputs):
            return lambda: self.bind(*arguments)[1], outputs  # Dynamo makes an output outside of the compiled code
        compiled, inputs, _ = calls[-1]
        order = [places[id(output)] for output in outputs]

        def run() -> tuple[Tensor, ...]:
            results = compiled(*inputs)
            return tuple(results[place] for place in order)

        return run, outputs

    def _compile(self, graph: Any, examples: Sequence[Any]) -> Callable[..., Sequence[Tensor]]:
        """Compile with Inductor, which caches its code on disk, and remember the call."""
        from torch._dynamo import lookup_backend

        compiled = lookup_backend(_BACKEND)(graph, list(examples))

        def call(*inputs: Any) -> Sequence[Tensor]:
            results = compiled(*inputs)
            self._calls.append((compiled, inputs, results))
            return results

        return call


@dataclass(slots=True)
class _ShapeRunner:
    """A fixed-shape pass, and what runs it: the model's forward, its compiled code, or a graph of either."""

    static: FixedShapePass
    arguments: tuple[Any, ...]  # of `forward`
    compiled: CompiledForward | None
    bound: Run | None = None
    graph: Graph | None = None
    is_checked: bool = False  # whether a replay was compared with the pass itself
    uses: int = 0

    def run(self) -> tuple[Tensor, ...]:
        """Run the pass without its graph, with new masks."""
        try:
            if self.compiled is None:
                return forward(*self.arguments)
            if self.bound is not None:
                return self.bound()
            self.bound, outputs = self.compiled.bind(*self.arguments)
            return outputs
        finally:
            self.static.forget()


class CompiledRunner:
    """Scores trees in fixed-shape passes that are compiled or recorded; `Target` has its options.

    Without a `scope` the model takes prepared masks.
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
    ) -> None:
        self._model, self._cache, self._device, self._scope = model, cache, device, scope
        self._most_nodes, self._hidden_layers = most_nodes, hidden_layers
        self._mask_dtype = model.dtype if scope is None else None
        self._runners: dict[tuple[int, int], _ShapeRunner] = {}
        self._made_at = -1  # allocations of the cache when the runners were made
        self.is_cold = False  # whether the newest pass compiled, recorded or is yet to be, so that its time is no cost
        failed = state_of(model).failed
        self._compiles = compiles and "compile" not in failed
        self._capture: CudaGraphs | None = None
        if captures and "capture" not in failed:
            problem = graph_shortcoming(model, device)
            if problem is None:
                self._capture = CudaGraphs(device, is_watched=not self._compiles)
            else:
                self._stop("capture", problem)

    def score(self, trees: Sequence[TokenTree]) -> tuple[Tensor, ...] | None:
        """Logits `[active, nodes of the largest tree, vocab]` and hidden states likewise; None if passes failed."""
        self.is_cold = False
        if not (self._compiles or self._capture) or not self._cache.layers:
            return None
        slots, nodes = self._cache.slots, max(map(len, trees))
        width = padded_nodes(nodes, self._most_nodes)
        rows = padded_rows(len(trees), len(slots.lengths))
        needed = int(slots.lengths[: len(trees)].max()) + width
        # Code is compiled for one number of slots, so there should be few. Each call records its own graphs.
        self._cache.reserve(padded_slots(max(needed, slots.capacity)) if self._compiles else needed)
        if self._made_at != slots.allocations:
            self._runners.clear()  # the KV moved, and recorded passes hold its old address
            self._made_at = slots.allocations
        runner = self._runners.get((rows, width))
        if runner is None:
            runner = self._runners[rows, width] = self._open(rows, width)
        runner.static.fill(trees)
        runs = nullcontext() if self._scope is None else self._scope.running(runner.static)
        with slots.fixed(rows, width, runner.static.index), runs:
            outputs = self._run(runner)
        if outputs is None:
            return None
        return tuple(each[: len(trees), :nodes] for each in outputs)

    def _open(self, rows: int, width: int) -> _ShapeRunner:
        """The runner of a shape that is new since the KV moved."""
        slots, compiled = self._cache.slots, None
        static = FixedShapePass(slots, rows, width, self._device)
        if self._compiles:
            shape = len(slots.lengths), slots.capacity, rows, width, self._hidden_layers
            known = state_of(self._model).compiled  # shared by all calls
            self.is_cold = shape not in known
            if self.is_cold:
                known[shape] = CompiledForward(rows, width)
            compiled = known[shape]
        return _ShapeRunner(static, (self._model, self._cache, static, self._hidden_layers, self._mask_dtype), compiled)

    def _run(self, runner: _ShapeRunner) -> tuple[Tensor, ...] | None:
        """Run a pass whose buffers are filled. None if it failed, and it is not tried again."""
        runner.uses += 1
        if runner.graph is not None:
            return self._replay(runner, runner.graph)
        try:
            outputs = runner.run()
        except Exception as error:
            # The model itself runs next. If it is broken, it raises there.
            self._stop("compile" if self._compiles else "capture", _in_short(error))
            return None
        if self._capture is not None:
            self.is_cold = True
            if runner.uses >= CAPTURE_AT:
                try:
                    runner.graph = self._capture(runner.run)  # the next pass of its shape is the first replay
                except Exception as error:
                    self._stop("capture", _in_short(error))
        return outputs

    def _replay(self, runner: _ShapeRunner, graph: Graph) -> tuple[Tensor, ...]:
        """Replay a graph. The first replay is compared with the pass itself, whose outputs count if they differ.

        It has other trees and another length than the recording, so a value that Python read then shows.
        """
        # The next replay overwrites its outputs, and callers may keep them.
        outputs = tuple(map(torch.clone, graph.replay()))
        if runner.is_checked:
            return outputs
        self.is_cold = runner.is_checked = True
        wanted = runner.run()
        error = float(torch.stack(list(map(_largest_error, outputs, wanted))).max())
        if error <= _TOLERANCE.get(self._model.dtype, _TOLERANCE_FP32):
            return outputs
        self._stop("capture", f"a replay differs by {error:.2g} from the pass that was recorded")
        return wanted

    def _stop(self, what: str, reason: str) -> None:
        """Record no more passes, nor compile any if that failed, and log once for a model why."""
        self._compiles, self._capture = self._compiles and what != "compile", None
        self._runners.clear()
        failed = state_of(self._model).failed
        if what not in failed:
            way = {"compile": "torch.compile", "capture": "CUDA graphs"}[what]
            _log.warning("%s is decoded without %s: %s", type(self._model).__name__, way, reason)
        failed.add(what)


def _largest_error(got: Tensor, want: Tensor) -> Tensor:
    """The largest error of a node, relative to the norm of `want`; NaN where only one of both is a number."""
    got, want = got.float(), want.float()
    is_same = (got == want) | (got.isnan() & want.isnan())
    errors = torch.where(is_same, 0, got - want).norm(dim=-1)
    largest: Tensor = (errors / want.nan_to_num().norm(dim=-1).clamp_min(1e-6)).max()
    return largest


def _in_short(error: Exception) -> str:
    """The first line of an error; for a missing compiler what to install."""
    if type(error).__name__ == "InvalidCxxCompiler" or "InvalidCxxCompiler" in str(error):
        return "there is no C++ compiler; install g++ or clang++, or name one in the environment variable CXX"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
