"""Decoder layers that are compiled: one code for all layers of a kind, and for every number of rows and nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Lock, local
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as symbols
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lookahead.errors import first_line
from lookahead.models import attention
from lookahead.models.cache import TreeCache
from lookahead.models.model_state import replaced, state_of

_BACKEND = "inductor"
# Largest error of a compiled layer or a replayed pass, relative to the norm of a node's output. The same numbers give
# the same bits unless they are added in another order; a number frozen into it changes the output by many times that.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2}
_TOLERANCE_FP32 = 1e-4

_log = logging.getLogger(__name__)
_thread = local()


def _run_layer(layer: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """What is compiled. The weights of the layer are inputs of the code, so it serves all layers of a kind."""
    return type(layer).forward(layer, *args, **options)


class _CacheInCode:
    """Stands for the cache in compiled code. Operations of `attention` write and read the KV, wherever it is."""

    def __init__(self, mask: Tensor | None) -> None:
        self._mask = mask

    def update(self, key: Tensor, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values for tree attention, which writes them; all keys and values for a prepared mask."""
        return (key, value) if self._mask is None else attention.update_in_compiled_code(key, value, self._mask)

    def get_seq_length(self, *args: Any) -> int:
        """Always 1, as in a fixed-shape pass: models that verify trees take positions from elsewhere."""
        return 1


class LayerCode:
    """The compiled code of the layers of one model, for all calls."""

    def __init__(self) -> None:
        # Dynamo limits the compiled variants of one code object, so each model gets a copy.
        copy = FunctionType(_run_layer.__code__.replace(), _run_layer.__globals__)
        self._guarded: Any = torch.compile(copy, backend=self._compile, fullgraph=True, dynamic=True)
        self._lock = Lock()  # threads that share a model share its compiled code
        self._calls: list[tuple[Callable[..., Sequence[Tensor]], Sequence[Any], Sequence[Tensor]]] = []
        self._has_compiled = False

    def __call__(self, *arguments: Any) -> tuple[Any, Any, bool]:
        """Run a layer: its output; the compiled code that ran, its inputs and results; and whether the code is new."""
        from torch._dynamo import config

        # Sizes of 1 are like any other, and two sizes that are equal once may differ later.
        is_general = symbols.patch(backed_size_oblivious=True, use_duck_shape=False)  # type: ignore[attr-defined]
        with self._lock, is_general, config.patch(specialize_float=True):
            self._has_compiled = False
            try:
                output = self._guarded(*arguments)
                return output, self._calls[-1], self._has_compiled
            finally:
                self._calls.clear()  # they would keep tensors alive

    def _compile(self, graph: Any, examples: Sequence[Any]) -> Callable[..., Sequence[Tensor]]:
        """Compile with Inductor, which caches its code on disk, and remember the call."""
        from torch._dynamo import lookup_backend
        from torch._inductor import config

        self._has_compiled = True
        with config.patch(emulate_precision_casts=True):  # half precision rounds where the layer itself does
            compiled = lookup_backend(_BACKEND)(graph, list(examples))

        def call(*inputs: Any) -> Sequence[Tensor]:
            results = compiled(*inputs)
            self._calls.append((compiled, inputs, results))
            return results

        return call


class CompiledLayers:
    """Runs compiled decoder layers in the passes of one target, on its thread and on no other.

    With `is_masked` the model takes prepared masks.
    """

    def __init__(self, model: PreTrainedModel, *, is_masked: bool) -> None:
        state = state_of(model)
        self._model, self._is_masked = model, is_masked
        self._bound: dict[Any, Callable[[Sequence[Any]], Tensor] | None] = {}
        self.is_cold = False  # whether the newest pass compiled
        self.serves = "compile" not in state.failed
        self._forwards = [(layer, None, partial(_forward, layer, at)) for layer, at in _layers_of(model)]
        if not self._forwards:
            self._stop("its layers are not known as such")
        if state.compiled is None:
            state.compiled = LayerCode()
        self._code: LayerCode = state.compiled

    def serving(self) -> AbstractContextManager[None]:
        """Let the layers look for compiled code until the last open block of any thread ends."""
        return replaced("forward", self._forwards)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within `serving`, run compiled layers on this thread until the block ends."""
        outer, self.is_cold = getattr(_thread, "layers", None), False
        _thread.layers = self
        try:
            yield
        finally:
            _thread.layers = outer

    def run(self, layer: Any, at: int, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run a layer whose KV is the layer `at` of the cache. It runs as it is once one of them failed."""
        given = (*args, *options.values())
        values = [each for value in given for each in (value if isinstance(value, tuple) else (value,))]
        cache = next((each for each in values if isinstance(each, TreeCache)), None)
        if cache is None or not self.serves:
            return type(layer).forward(layer, *args, **options)
        key = layer, *(each.shape if isinstance(each, Tensor) else each for each in values if each is not cache)
        try:
            bound = self._bound.get(key)
        except TypeError:  # a dictionary of keys and values, in Gemma 3n and 4
            self._stop("its layers share keys and values")
            return type(layer).forward(layer, *args, **options)
        with attention.in_compiled_layer(cache, at):
            if bound is not None:
                return bound(values)
            mask = None
            if self._is_masked:
                mask = next(each for each in values if isinstance(each, Tensor) and each.dim() == 4)
                torch._dynamo.mark_static(mask, 1)  # which stands for all heads
            stand_in = _CacheInCode(mask)
            arguments = (stand_in if each is cache else each for each in args)
            named = {name: stand_in if each is cache else each for name, each in options.items()}
            try:
                output, call, is_new = self._code(layer, tuple(arguments), named)
            except Exception as error:
                self._stop(in_short(error))
                return type(layer).forward(layer, *args, **options)
        if key not in self._bound:
            self._bound[key] = _bind(layer, values, output, *call)
        if not is_new:
            return output
        self.is_cold, wanted = True, type(layer).forward(layer, *args, **options)
        pair = (output, wanted) if isinstance(wanted, tuple) else ((output,), (wanted,))
        if difference := difference_of(self._model, *pair):
            self._stop(f"a compiled layer differs by {difference} from the layer itself")
            return wanted
        return output

    def _stop(self, reason: str) -> None:
        self.serves = False
        self._bound.clear()
        give_up(self._model, "compile", reason)


def _forward(layer: Any, at: int, *args: Any, **options: Any) -> Any:
    """The layer's `forward`; compiled on a thread that runs a pass."""
    layers: CompiledLayers | None = getattr(_thread, "layers", None)
    if layers is None:
        return type(layer).forward(layer, *args, **options)
    return layers.run(layer, at, args, options)


def _layers_of(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The decoder layers whose KV is one layer of the cache, and its number."""
    found: list[tuple[nn.Module, int]] = []
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and "forward" not in layer.__dict__:
            inside = [vars(each) for each in layer.modules()]
            places = {each[name] for each in inside for name in ("layer_idx", "layer_id") if name in each}
            found += [(layer, at) for at in places if len(places) == 1]
    return found


def _bind(
    layer: nn.Module, values: Sequence[Any], output: Any, compiled: Any, inputs: Sequence[Any], results: Sequence[Any]
) -> Callable[[Sequence[Any]], Tensor] | None:
    """Compiled code for other values of the same shapes, without Dynamo's guards; None where they are needed.

    Guards take a tenth of a small model's pass, and nothing they check changes while one call decodes.
    """
    places = {id(value): place for place, value in enumerate(values) if isinstance(value, Tensor)}
    own = {id(each) for each in (*layer.parameters(), *layer.buffers())}
    sources = [(at, places[id(each)]) for at, each in enumerate(inputs) if id(each) in places]
    others = [each for each in inputs if isinstance(each, Tensor) and id(each) not in places]
    which = next((at for at, each in enumerate(results) if each is output), None)
    if which is None or any(id(each) not in own for each in others):
        return None
    fixed = [None if id(each) in places else each for each in inputs]

    def run(values: Sequence[Any]) -> Tensor:
        given = fixed.copy()
        for at, place in sources:
            given[at] = values[place]
        made: Tensor = compiled(*given)[which]
        return made

    return run


def give_up(model: PreTrainedModel, what: str, reason: str) -> None:
    """Note that a way to run a model, "compile" or "capture", failed, and log once why."""
    failed = state_of(model).failed
    if what not in failed:
        way = {"compile": "torch.compile", "capture": "CUDA graphs"}[what]
        _log.warning("%s is decoded without %s: %s", type(model).__name__, way, reason)
    failed.add(what)


def difference_of(model: PreTrainedModel, outputs: Sequence[Any], wanted: Sequence[Any]) -> str:
    """The largest error of a node, relative to the norm of what is wanted; an empty string if that is rounding.

    NaN where only one of both is a number.
    """
    errors = []
    for got, want in zip(outputs, wanted, strict=True):
        if isinstance(want, Tensor):
            got, want = got.float(), want.float()
            is_same = (got == want) | (got.isnan() & want.isnan())
            lengths = want.nan_to_num().norm(dim=-1).clamp_min(1e-6)
            errors.append((torch.where(is_same, 0, got - want).norm(dim=-1) / lengths).max())
    error = float(torch.stack(errors).max())
    return "" if error <= _TOLERANCE.get(model.dtype, _TOLERANCE_FP32) else f"{error:.2g}"


def in_short(error: Exception) -> str:
    """The first line of an error; for a missing compiler what to install."""
    if type(error).__name__ == "InvalidCxxCompiler" or "InvalidCxxCompiler" in str(error):
        return "there is no C++ compiler; install g++ or clang++, or name one in the environment variable CXX"
    return f"{type(error).__name__}: {first_line(error)}"
