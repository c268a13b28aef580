"""CUDA graphs: the kernels of a pass are recorded once and launched together at every step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lookahead.backend.pass_attention import Spans, attend
from lookahead.backend.tree_pass import AttentionSpan, FixedShapePass, padded_rows
from lookahead.drafting.cost_model import padded_nodes
from lookahead.drafting.tree import TokenTree
from lookahead.errors import first_line
from lookahead.kernels.topk import ranked
from lookahead.model.attention import AttentionScope
from lookahead.model.cache import TreeCache
from lookahead.model.facts import CACHE
from lookahead.model.model_state import ModelState, state_of

_FEWEST_SLOTS = 1024  # per row
_TOO_LARGE = 4  # times the slots that a call needs: such a cache is let go, for recorded passes look at all of it
_MOST_SHAPES = 64  # that are kept; the one that was not used for the longest time is let go
CAPTURE_AT = 3  # uses of a shape before it is recorded, since recording a rare shape does not pay
Run = Callable[[], tuple[Tensor, ...]]  # a pass over the contents of its static buffers

_aten = torch.ops.aten
_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # the host waits for a value
_COPYING = {_aten._to_copy, _aten.copy_}  # wait only between host and device
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_}  # wait only with a mask or indices on the host
_recording = RLock()  # torch records one graph at a time in a process
# Largest error of a replayed pass, relative to the norm of a node's output. Bits are equal unless the order of sums
# changes; a value frozen into a recording changes the output by many times this error.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2}
_TOLERANCE_FP32 = 1e-4
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Graph:
    """One recorded pass, which owns its outputs."""

    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]

    def replay(self) -> tuple[Tensor, ...]:
        """Run the recording on the static buffers; the next replay overwrites the returned tensors."""
        self.graph.replay()
        return self.outputs


def graphs_unsupported_reason(model: torch.nn.Module, device: torch.device) -> str | None:
    """Why passes of a model with inputs on `device` are not recorded, or None if they are."""
    if device.type != "cuda":
        return f"it is on {device}"
    if state_of(model).has_failed_capture:
        return "recording failed before"
    devices = {str(parameter.device) for parameter in model.parameters()}
    if devices != {str(device)}:
        return f"its weights are on {', '.join(sorted(devices))}, and a recording is of one GPU"
    return None


class Watch(TorchDispatchMode):
    """Refuses operations that synchronize with a device, on this thread, while it is entered.

    Such an operation would make a recording fail, and torch's allocator would consider the recording still active.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; raises RuntimeError if it synchronizes."""
        made = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", func)
        kinds = {leaf.device.type for leaf in tree_leaves((args, made)) if isinstance(leaf, Tensor)}
        waits = packet in _COPYING | _INDEXING and len(kinds) > 1
        if packet in _INDEXING:  # a mask is counted, indices are not
            waits |= any(
                isinstance(argument, Tensor) and argument.dtype in (torch.bool, torch.uint8) for argument in args[1]
            )
        else:
            waits |= packet is _aten.lift_fresh or not _WAITING_TAGS.isdisjoint(getattr(func, "tags", ()))
        if waits and self._kind in kinds:
            raise RuntimeError(f"{packet} waits for the device")
        return made


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for recordings on a device: only one, since cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Records passes as CUDA graphs that share one memory pool.

    No replay needs data that another left in the pool, so replays may run in any order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch = Watch(device)
        self._pool: Any = None
        self._living: WeakSet[Graph] = WeakSet()

    def __call__(self, run: Run) -> Graph:
        """Run a pass once to compile and allocate, then record it; raises RuntimeError if it synchronizes."""
        side = _side_stream(self._device)
        with torch.cuda.device(self._device), _recording:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side), self._watch:
                run()
            current.wait_stream(side)
            if not self._living:
                self._pool = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be used again
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile. A failed recording leaves its stream current; the outer block
            # restores the previous one.
            recording = torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local")
            with torch.cuda.stream(current), recording:
                outputs = run()
            recorded = Graph(graph, outputs)
            self._living.add(recorded)
        return recorded


class PassResult(NamedTuple):
    """What a pass returns, of the active rows and the nodes of the largest tree."""

    logits: Tensor  # `[active, nodes, vocab]`, or of no token
    ranks: Tensor | None  # `lookahead.kernels.topk.ranked` logits until the next replay, if a replay made them
    hidden: tuple[Tensor, ...]  # of the layers asked for, `[active, nodes, size]`


@dataclass(slots=True)
class _ShapeRunner:
    """A fixed-shape pass, and its graph once it is recorded, which writes its logits to `logits`."""

    static: FixedShapePass
    graph: Graph | None = None
    logits: Tensor | None = None
    is_checked: bool = False  # a replay was compared with the pass itself
    uses: int = 0
    has_memory: bool = True  # to be recorded


@dataclass(eq=False)
class KeptGraphs:
    """The graphs of a model, and the cache whose memory they use. One call owns them at a time.

    They are kept with the model between calls, and hold no reference to it.
    """

    kind: Hashable  # a later call can use them only with an equal kind and stamp
    stamp: int  # the number of the model's stamp
    cache: TreeCache
    # By rows, nodes, slots that queries may look at, and likeliest tokens that are read; the newest used last.
    runners: dict[tuple[int, int, int, int], _ShapeRunner] = field(default_factory=dict)
    logits: Tensor | None = None  # memory for the logits of a replay, shared by all graphs
    made_at: int = -1  # the cache's allocation count when the runners were made

    @classmethod
    def take(cls, model: PreTrainedModel, kind: Hashable, rows: int, capacity: int, windows: Any) -> KeptGraphs:
        """Take the graphs that the last call left, with an emptied cache, or make new ones.

        Slots are rounded up, so that a somewhat longer call can reuse them. The first replay of a call is compared with
        its pass again.

        Args:
            model: The model.
            kind: Options that must be equal for reuse.
            rows: Rows of the cache.
            capacity: Minimum slots per row.
            windows: Positions that each layer of the model's own cache keeps; None for all.
        """
        kept: KeptGraphs | None = vars(state_of(model)).pop("graphs", None)  # another thread may want them
        stamp = state_of(model).stamp_number
        slots = None if kept is None or (kept.kind, kept.stamp) != (kind, stamp) else kept.cache.slots
        least, capacity = capacity, max(_FEWEST_SLOTS, 1 << (capacity - 1).bit_length())
        fits = slots is not None and slots.rows == rows and least <= slots.capacity < _TOO_LARGE * capacity
        if kept is None or slots is None or not fits:
            return cls(kind, stamp, TreeCache(rows=rows, capacity=capacity, windows=windows))
        slots.lengths[:], slots.active = 0, rows
        with torch.inference_mode():
            for block in slots.blocks:
                block.whole[:, :, : slots.reached].zero_()  # NaN would spread from masked slots
        slots.reached = 0
        for runner in kept.runners.values():
            runner.is_checked = False
        return kept

    def room(self, logits: Tensor) -> Tensor:
        """Memory for logits like these. Graphs that were recorded with less keep theirs."""
        if self.logits is None or self.logits.numel() < logits.numel() or self.logits.dtype != logits.dtype:
            self.logits = logits.new_empty(logits.numel())
        return self.logits[: logits.numel()].view(logits.shape)

    def give_back(self, state: ref[ModelState]) -> None:
        """Leave the graphs to the next call."""
        left = state()
        if left is not None:
            left.graphs = self


class GraphRunner:
    """Scores trees in recorded fixed-shape passes; `GpuBackend` documents the options.

    Without a `scope` the model takes prepared masks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kept: KeptGraphs,
        device: torch.device,
        *,
        most_nodes: int,
        hidden_layers: tuple[int, ...],
        scope: AttentionScope | None,
        spans: Spans,
    ) -> None:
        self._model, self._kept, self._device, self._scope, self._spans = model, kept, device, scope, spans
        self.problem = ""  # why recording is off
        self._cache, self._most_nodes, self._hidden_layers = kept.cache, most_nodes, hidden_layers
        self.is_cold = False  # the newest pass was not a plain replay; its time does not count as a cost
        self._capture: CudaGraphs | None = CudaGraphs(device)
        finalize(self, kept.give_back, ref(state_of(model))).atexit = False

    def score(self, trees: Sequence[TokenTree], count: int, *, keeps_logits: bool) -> PassResult | None:
        """Score trees; None if passes failed.

        Args:
            trees: One per active row.
            count: Likeliest tokens per node that a replay finds, beside the argmax.
            keeps_logits: Whether the logits of a replay are copied, for they are overwritten by the next one.
        """
        self.is_cold = False
        if self._capture is None or not self._cache.layers:
            return None
        slots, nodes = self._cache.slots, max(map(len, trees))
        width = padded_nodes(nodes, self._most_nodes)
        rows = padded_rows(len(trees), len(slots.lengths))
        needed = int(slots.lengths[: len(trees)].max()) + width
        self._cache.reserve(needed)
        slots.reached = max(slots.reached, needed)
        # Not all slots: masks and splits of the keys follow the length of the text.
        reach = min(slots.capacity, max(_FEWEST_SLOTS, 1 << (needed - 1).bit_length()))
        runners = self._kept.runners
        if self._kept.made_at != slots.allocations:
            runners.clear()  # the KV moved, and recorded passes hold its old address
            self._kept.made_at = slots.allocations
        shape = rows, width, reach, count
        runner = runners.pop(shape, None) or _ShapeRunner(FixedShapePass(slots, rows, width, self._device))
        runners[shape] = runner
        if len(runners) > _MOST_SHAPES:
            del runners[next(iter(runners))]
        runner.static.fill(trees)
        runs = (
            nullcontext() if self._scope is None else self._scope.running(partial(attend, runner.static, self._spans))
        )
        with runner.static.running(reach), runs:
            result = self._run(runner, self._capture, count, keeps_logits)
        if result is None:
            return None
        state_of(self._model).unserved = frozenset(runner.static.unserved)
        logits, ranks, hidden = result
        active = slice(len(trees)), slice(nodes)
        return PassResult(
            logits[active], None if ranks is None else ranks[active], tuple(states[active] for states in hidden)
        )

    def _forward(self, static: FixedShapePass) -> tuple[Tensor, ...]:
        """Run the model on the static buffers of a pass, with new masks.

        Returns logits `[rows, width, vocab]` and the hidden states of `hidden_layers`.
        """
        options: dict[str, Any] = {CACHE: self._cache}
        if self._hidden_layers:
            options["output_hidden_states"] = True
        model: Any = self._model
        static.unserved.clear()
        try:
            if self._scope is None:
                options["attention_mask"] = static.mask(1, AttentionSpan(), model.dtype, static.tokens.device)
            output = model(input_ids=static.tokens, position_ids=static.positions, use_cache=True, **options)
        finally:
            static.forget()
        return (output.logits, *(output.hidden_states[layer] for layer in self._hidden_layers))

    def _run(self, runner: _ShapeRunner, capture: CudaGraphs, count: int, keeps_logits: bool) -> PassResult | None:
        """Run a pass with filled buffers. Returns None if it failed; then recording stops."""
        runner.uses += 1
        if runner.graph is not None and runner.logits is not None:
            return self._replay(runner, runner.graph, runner.logits, keeps_logits)
        try:
            logits, *hidden = self._forward(runner.static)
        except Exception as error:
            # The model itself runs next. If it is broken, it raises there.
            self._stop(_in_short(error))
            return None
        self.is_cold = runner.has_memory
        if runner.uses >= CAPTURE_AT and runner.has_memory:
            try:
                # The next pass of its shape is the first replay.
                runner.logits = self._kept.room(logits)
                runner.graph = capture(partial(self._forward_to, runner.logits, runner.static, count))
            except torch.OutOfMemoryError:
                runner.has_memory = False
                shape, name = tuple(runner.static.tokens.shape), type(self._model).__name__
                _log.warning("%s has no memory left to record passes of %d rows and %d nodes", name, *shape)
            except Exception as error:
                self._stop(_in_short(error))
        return PassResult(logits, None, tuple(hidden))

    def _forward_to(self, room: Tensor, static: FixedShapePass, count: int) -> tuple[Tensor, ...]:
        """The pass that is recorded: its own logits are freed, so that recordings share their memory."""
        logits, *hidden = self._forward(static)
        room.copy_(logits)
        return ranked(logits, count), *hidden

    def _replay(self, runner: _ShapeRunner, graph: Graph, logits: Tensor, keeps_logits: bool) -> PassResult:
        """Replay a graph. The first replay is compared with the pass itself, whose outputs are used if they differ.

        Its trees and lengths differ from the recorded ones, which reveals values that Python read while recording.
        """
        ranks, *hidden = graph.replay()
        # The next replay overwrites the outputs, and callers may keep them.
        kept = tuple(map(torch.clone, hidden))
        if not runner.is_checked:
            self.is_cold = runner.is_checked = True
            wanted, *wanted_hidden = self._forward(runner.static)
            if difference := _difference_of(self._model.dtype, (logits, *kept), (wanted, *wanted_hidden)):
                self._stop(f"a replay differs by {difference} from the pass that was recorded")
                return PassResult(wanted, None, tuple(wanted_hidden))
        return PassResult(logits.clone() if keeps_logits else logits[..., :0], ranks, kept)

    def _stop(self, reason: str) -> None:
        """Stop recording passes of this model, and log the reason once."""
        self._capture, self.problem = None, reason
        self._kept.runners.clear()
        state = state_of(self._model)
        if not state.has_failed_capture:
            _log.warning("%s is decoded without CUDA graphs: %s", type(self._model).__name__, reason)
        state.has_failed_capture = True


def _difference_of(dtype: torch.dtype, outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    """The largest error of a node, relative to the norm of `wanted`; an empty string if it is rounding.

    NaN if only one of the two is NaN.
    """
    errors = []
    for got, want in zip(outputs, wanted, strict=True):
        got, want = got.float(), want.float()
        is_same = (got == want) | (got.isnan() & want.isnan())
        lengths = want.nan_to_num().norm(dim=-1).clamp_min(1e-6)
        errors.append((torch.where(is_same, 0, got - want).norm(dim=-1) / lengths).max())
    error = float(torch.stack(errors).max())
    return "" if error <= _TOLERANCE.get(dtype, _TOLERANCE_FP32) else f"{error:.2g}"


def _in_short(error: Exception) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {first_line(error)}"
