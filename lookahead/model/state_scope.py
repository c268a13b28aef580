"""Recurrent layers in passes over token trees: finding the modules with states, and calling them by depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel

from lookahead.drafting.tree import IntArray
from lookahead.errors import is_out_of_memory
from lookahead.model.cache import KINDS, TreeCache
from lookahead.model.facts import cache_input, decoder_of, decoder_vocabulary, input_device
from lookahead.model.level_calls import LevelCalls, MixTrees, SharedLinear, thread
from lookahead.model.model_state import patched_attribute, plan_of, state_of
from lookahead.model.state_layers import cache_layers, has_states, states_in

_TEXT = 8  # tokens of a probe's text
_MOST_BYTES, _SHARE_OF_WEIGHTS = 64 << 20, 4  # limit of the states of a pass: the bytes, or the share of the weights


class Mixers(NamedTuple):
    """The modules of a model that read and write states; false if there are none."""

    layers: dict[str, list[int]]  # cache layers with states, by module name
    node_bytes: int  # size of the states of one node

    def __bool__(self) -> bool:
        return bool(self.layers)

    @classmethod
    def of(cls, value: Any) -> Mixers:
        """Parse a stored value; TypeError or ValueError for anything else."""
        layers, node_bytes = value
        numbers = [node_bytes, *(at for some in dict(layers).values() for at in some)]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError(f"it must have whole numbers, got {value!r}")
        return cls(layers, node_bytes)


_NONE = Mixers({}, 0)


class StateScope:
    """Calls the recurrent layers of a model once for every depth of the trees, or kernels, on threads that run a pass.

    Args:
        model: The model.
        cache: Its cache, with layers for states.
    """

    def __init__(self, model: PreTrainedModel, cache: TreeCache) -> None:
        self._cache, self._patches = cache, defaultdict[str, list[tuple[nn.Module, Any, Any]]](list)
        for name, layers in mixers_of(model).layers.items():
            module = model.get_submodule(name)
            own = module.__dict__.get("forward")
            if isinstance(own, partial) and own.func is _forward:  # another thread runs a pass
                own = own.keywords["own"]
            forward = partial(_forward, own=own, module=module, layers=layers, cached={})
            self._patches["forward"].append((module, own, forward))
            for child, linear in module.named_children():
                if isinstance(linear, nn.Linear):
                    self._patches[child].append((module, None, SharedLinear(linear)))

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A block in which the modules can be called by depth."""
        with ExitStack() as stack:
            for name, values in self._patches.items():
                stack.enter_context(patched_attribute(name, values))
            yield

    @contextmanager
    def running(self, most: int | None, kernels: Mapping[nn.Module, MixTrees]) -> Iterator[None]:
        """Within `serving`, run a pass on this thread over the trees set by `cache.begin_trees`.

        A module is computed by its kernels, if there are any. Otherwise a call of it gets `most` nodes, or all nodes of
        one depth.
        """
        outer = [getattr(thread, name, None) for name in ("cache", "most", "kernels")]
        thread.cache, thread.most, thread.kernels = self._cache, most, kernels
        try:
            yield
        finally:
            thread.cache, thread.most, thread.kernels = outer


def _forward(
    hidden_states: Tensor, *args: Any, own: Any, module: Any, layers: list[int], cached: dict[str, Any], **kwargs: Any
) -> Any:
    """Call a module that mixes tokens by its states: in passes over trees, once for the nodes of every depth.

    The linear layer that makes its output is kept in `cached`.
    """
    forward = own if own is not None else partial(type(module).forward, module)
    cache: TreeCache | None = getattr(thread, "cache", None)
    levels = None if cache is None else cache.levels
    if cache is None or levels is None:
        return forward(hidden_states, *args, **kwargs)
    kernels: MixTrees | None = thread.kernels.get(module)
    # The modules take padding into account, which trees do not have.
    if kernels is not None and not args and kwargs.get("attention_mask") is None:
        made = kernels(hidden_states, cache)
        if made is not None:
            return made
    if len(levels.all) == 1 and len(hidden_states) <= (thread.most or len(hidden_states)):  # only roots
        for at in layers:
            cache.layers[at].begin(0, levels.all[0].parents)
        made = forward(hidden_states, *args, **kwargs)
        for at in layers:
            cache.layers[at].end(0)
        return made
    calls = LevelCalls(hidden_states, levels, cached.get("last"))
    made = calls.run(cache, layers, thread.most, lambda states: forward(states, *args, **kwargs))
    cached["last"] = calls.last
    return made


def mixers_of(model: PreTrainedModel) -> Mixers:
    """The modules of a model that read and write cache states; none if a `TreeCache` cannot hold the states.

    The first call for a model finds them by a pass over a few tokens, and a file keeps them for later processes.
    """
    layers = cache_layers(model.config.get_text_config(decoder=True))
    if not layers or decoder_of(model) is not model or not {type(layer).__name__ for layer in layers} <= KINDS.keys():
        return _NONE
    return state_of(model).probed("mixers", model, partial(_find_mixers, model, layers), Mixers.of)


def probe_text(model: PreTrainedModel, step: int = 7) -> IntArray:
    """The text that probes of passes behind a prompt read: tokens that are `step` apart."""
    return (np.arange(_TEXT, dtype=np.int32) * step + 1) % decoder_vocabulary(model)


def _find_mixers(model: PreTrainedModel, layers: list[Any]) -> Mixers:
    """Run the model over a text; returns no modules if the states of some layer were not read.

    A comparison of bits continues behind the same text, so the plan keeps what this pass has read until then.
    """
    running, layers_of = list[str](), defaultdict[str, set[int]](set)
    handles: list[RemovableHandle] = []

    def enter(name: str, *_: Any) -> None:
        running.append(name)

    def leave(*_: Any) -> None:
        running.pop()

    def note(layer: int) -> None:
        if running:  # a later probe continues from the cache
            layers_of[running[-1]].add(layer)

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, name)))
        handles.append(module.register_forward_hook(leave))
    config, causal_lm = model.config.get_text_config(decoder=True), model
    cache = _RecordingCache(config, note)
    ids = torch.from_numpy(probe_text(model).astype(np.int64))[None].to(input_device(model))
    arguments: dict[str, Any] = {"input_ids": ids, cache_input(model): cache}
    try:
        with torch.inference_mode():
            causal_lm(**arguments, use_cache=True)
    except Exception as error:  # a model with its own cache type may raise anything
        if is_out_of_memory(error):
            raise
        return _NONE
    finally:
        for handle in handles:
            handle.remove()
    expected = {at for at, layer in enumerate(layers) if has_states(layer)}
    if set().union(*layers_of.values()) != expected:
        return _NONE
    all_states = (states_in(layer) for layer in cache.layers if has_states(layer))
    size = sum(state.nbytes for states in all_states for state in states.values())
    if model.dtype in (torch.bfloat16, torch.float16):
        plan_of(model).own_read = cache
    return Mixers({name: sorted(at) for name, at in layers_of.items()}, size)


def most_nodes(model: PreTrainedModel, rows: int) -> int:
    """Nodes per row whose states a pass may hold: a quarter of the weights' bytes, or 64 MiB if that is more."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return max(1, max(_MOST_BYTES, weights // _SHARE_OF_WEIGHTS) // (mixers_of(model).node_bytes * rows))


class _RecordingCache(DynamicCache):
    """A cache that reports which layer's states are read or written."""

    def __init__(self, config: Any, note: Callable[[int], None]) -> None:
        super().__init__(config=config)
        self._note = note

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Report the layer, and call the base class."""
        self._note(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Report the layer, and call the base class."""
        self._note(layer_idx)
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Report the layer, and call the base class."""
        self._note(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Report the layer, and call the base class."""
        self._note(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
