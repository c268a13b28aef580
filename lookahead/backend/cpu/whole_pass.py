"""Passes over token trees as one kernel call: all layers, the last norm and the head."""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import is_
from time import perf_counter
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lookahead.backend.cpu import exact_attention
from lookahead.backend.cpu.cpu_pass import CpuPass, thread
from lookahead.backend.cpu.exact_attention import has_bits
from lookahead.backend.cpu.fused_layers import FAMILIES, FusedLayers, is_bare, name_of
from lookahead.backend.cpu.linears import LinearScope, packed_weights
from lookahead.backend.cpu.pass_table import MAX_BATCH_NODES, MAX_TABLE_NODES, PassParts, PassTable
from lookahead.backend.pass_attention import span_of
from lookahead.backend.tree_pass import TreePass
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import row_attention
from lookahead.kernels.jobs import torch_on_one_thread
from lookahead.model.attention import real_config
from lookahead.model.cache import TreeCache
from lookahead.model.facts import own_attention
from lookahead.model.known_code import code_of, global_hooks, is_ours, is_set_by_user, working_hooks_of

_TRIALS = 3  # per number of threads
_FEWER, _HOPELESS = 0.9, 1.3  # time relative to the least: below, fewer threads are used; above, the search stops
_FEWEST_SLOTS = 16  # of a cache, to see how numbers change with the slot


def fastest_number(run: Callable[[int], object], most: int, clock: Callable[[], float] = perf_counter) -> int:
    """The number of threads with which a call is fastest: `most`, a half of it, a quarter, and so on.

    Fewer threads must save a tenth of the time: load that is there now may go, and waiting threads cost little. Threads
    may share a core or a container's CPU quota, and a small model has too little work for many.
    """
    best, least, number = most, math.inf, most
    while number:
        taken = min(timeit.repeat(partial(run, number), timer=clock, number=1, repeat=_TRIALS)) if most > 1 else 0.0
        if taken < _FEWER * least:
            best, least = number, taken
        elif taken > _HOPELESS * least:
            break
        number //= 2
    return best


def _is_called_alone(head: Any) -> bool:
    """Whether calling the output layer runs no user code around it."""
    return not (is_set_by_user(head) or working_hooks_of(head))


class WholePass:
    """The passes of a model whose decoder layers are alike and run by code that transformers ships.

    The embedding and the rotary positions are called as modules, as is a head with hooks.
    """

    def __init__(self, model: Any, parts: PassParts, threads: dict[int, int]) -> None:
        # The model's plan holds this, and must not keep the model alive.
        self._model, self._decoder, self._parts = ref(model), model.model, parts
        self._linears = [each for of_layer in parts.layers for each in of_layer.linears]
        self._threads = threads  # of a pass, by torch's number of threads; kept with the model
        self._known: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}  # of `packed_weights`, for layers and the head
        layers = [layer.attention for layer in parts.layers]
        window = span_of(layers[0], {}).window  # for layers that pass no window
        self._windows = {layer.options.get("sliding_window", window) for layer in parts.layers}
        heads, kv_heads = (parts.layers[0].linears[at].out_features // layers[0].head_dim for at in (0, 1))
        is_half = parts.norm.weight.dtype == torch.bfloat16  # float32 has no bit guarantee
        own = {own_attention(layer, real_config(layer.config)) for layer in layers if is_half}
        self._has_bits = is_half and all(has_bits(each, heads, kv_heads, layers[0].head_dim) for each in own)
        # A streamer or a stopping criterion may change these between two passes of a call.
        self._layers = [each.layer for each in parts.layers]
        self._inner = [self._decoder, parts.norm, *([parts.head] if parts.head else []), *self._layers]
        self._forwards: list[Any] = []  # their `forward`s as of the newest pass
        self._newest_hook = RemovableHandle.next_id

    def __call__(
        self, tree_pass: TreePass, cache: TreeCache, mode: CpuPass, layers: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """The logits of all nodes, `[rows, width, vocab]`, and hidden states; None for an unsupported pass.

        Must run within `cpu_pass.running`. The hidden states `[rows, width, size]` are keyed by `layers`, numbered as
        in `output_hidden_states`. Padding is left unwritten.
        """
        model: Any = self._model()
        if not self._takes(model, tree_pass, cache):
            return None
        last = len(self._parts.layers)
        places = tuple(layer if layer >= 0 else layer + last + 1 for layer in layers)
        if places and not (min(places) >= 0 and max(places) <= last):
            return None
        # Weights are looked up before calling the embedding: a hook on it must run once per pass.
        trees, scored, (rows, width) = tree_pass.trees, tree_pass.firsts, tree_pass.tokens.shape
        counts = [len(tree.tokens) - done for tree, done in zip(trees, scored, strict=True)]
        like = self._parts.norm.weight.expand(1, sum(counts), -1)
        weights = packed_weights(self._linears, like, self._known[0])
        if not weights or like.numel() > mode.most_in_call:
            return None
        of_head = packed_weights([self._parts.head], like, self._known[1]) if self._parts.head else ()
        parts = self._parts if of_head else self._parts._replace(head=None)
        kind = len(of_head), places, rows, torch.get_num_threads()
        table = cache.tables.get(kind)
        if table is None or not table.serves(parts, weights, of_head):
            held, dim = cache.layers[0], parts.layers[0].attention.head_dim
            if held.keys.dtype != like.dtype or not row_attention.is_supported(held.keys, held.keys, held.values):
                return None
            table = cache.tables[kind] = PassTable(parts, weights, of_head, cache, like, dim, rows, places)
        starts = cache.slots.lengths[:rows].tolist()
        if not (table.is_right and self._attends(trees, starts, table, is_exact=tree_pass.attends_per_node)):
            return None
        # The flat indices of nodes that are not padding.
        kept = None
        tokens, at = tree_pass.tokens, tree_pass.positions
        if rows > 1:
            kept = torch.from_numpy(np.concatenate([row * width + np.arange(n) for row, n in enumerate(counts)]))
            tokens, at = (each.flatten()[kept][None] for each in (tokens, at))
        most = torch.get_num_threads()
        with torch_on_one_thread() if most > 1 else nullcontext():
            hidden = self._decoder.embed_tokens(tokens)
            if hidden.dtype != like.dtype:
                return None
            positions = self._decoder.rotary_emb(hidden, position_ids=at)
        run = partial(table.run, hidden, positions, trees, starts, scored)
        if most not in self._threads:
            self._threads[most] = fastest_number(run, most)
            thread.is_cold = most > 1
        written: Tensor = run(self._threads[most])
        states = {}
        if places:
            by_place = table.kept(hidden) if of_head else table.kept(hidden) | {last: written}
            states = {layer: by_place[place] for layer, place in zip(layers, places, strict=True)}
        logits = written if of_head else model.lm_head(written)
        if kept is None:
            return logits, states
        return _padded(logits, kept, rows, width), {at: _padded(each, kept, rows, width) for at, each in states.items()}

    @property
    def thread_count(self) -> int:
        """Threads that share a pass; torch's number before the first pass."""
        most = torch.get_num_threads()
        return self._threads.get(most, most)

    def _takes(self, model: Any, tree_pass: TreePass, cache: TreeCache) -> bool:
        """Whether this is a small pass over trees, and the modules that are not called are unchanged."""
        parts, slots, decoder, trees = self._parts, cache.slots, self._decoder, tree_pass.trees
        sizes = [len(tree.tokens) for tree in trees]
        if not trees or max(sizes) > MAX_TABLE_NODES or sum(sizes) > MAX_BATCH_NODES:
            return False
        # In half precision the nodes of several rows have the bits of each row alone, or of one batch.
        if len(trees) > 1 and parts.norm.weight.dtype != torch.float32 and not tree_pass.attends_per_node:
            return False
        forwards = [vars(module).get("forward") for module in (model, *self._inner)]
        return (
            slots.capacity >= _FEWEST_SLOTS
            and decoder.config.num_hidden_layers == len(cache.layers) == len(decoder.layers) == len(parts.layers)
            and cache.is_ready(0)
            and all(map(is_, decoder.layers._modules.values(), self._layers))
            and decoder.norm is parts.norm
            and (parts.head is None or model.lm_head is parts.head)
            and (forwards == self._forwards or self._are_ours(forwards))
            and (self._newest_hook == RemovableHandle.next_id or self._is_unhooked(model))
        )

    def _are_ours(self, forwards: list[Any]) -> bool:
        """Whether no module has a user's `forward`; ours are others where a thread serves the model beside this one."""
        if not all(forward is None or is_ours(forward) for forward in forwards):
            return False
        self._forwards = forwards
        return True

    def _is_unhooked(self, model: Any) -> bool:
        """Whether no module that is not called has a hook; checked again after any hook was set anywhere."""
        called = self._decoder.embed_tokens, self._decoder.rotary_emb, None if self._parts.head else model.lm_head
        if global_hooks() or any(working_hooks_of(module) for module in model.modules() if module not in called):
            return False
        self._newest_hook = RemovableHandle.next_id
        return True

    def _attends(self, trees: Sequence[TokenTree], starts: Sequence[int], table: PassTable, *, is_exact: bool) -> bool:
        """Whether the kernel attends in all layers: within all windows, with the bits of SDPA or faster than a mask."""
        ends = [start + int(tree.depths.max()) + 1 for tree, start in zip(trees, starts, strict=True)]
        end, nodes = max(ends), sum(len(tree.tokens) for tree in trees)
        if any(window is not None and end >= window for window in self._windows):
            return False
        if is_exact:
            return self._has_bits
        return table.query_size * (nodes - len(trees)) * end <= exact_attention.MAX_KERNEL_PRODUCTS


def _padded(flat: Tensor, places: Tensor, rows: int, width: int) -> Tensor:
    """Scatter concatenated rows, `[1, tokens, size]`, to their places in `[rows, width, size]`."""
    padded = flat.new_empty(rows, width, flat.shape[2])
    padded.flatten(0, 1).index_copy_(0, places, flat[0])
    return padded


def whole_pass(model: Any, fused: FusedLayers, linears: LinearScope, threads: dict[int, int]) -> WholePass | str:
    """The `WholePass` of a model with these fused layers and packed weights, or why it cannot be one call."""
    layers = fused.layers
    if not layers:
        return "no layer is fused"
    dtypes = {parts.norms[0].weight.dtype for parts in layers}
    sizes = [[(linear.out_features, linear.in_features) for linear in parts.linears] for parts in layers]
    kinds = {(type(parts.layer), *of_layer) for parts, of_layer in zip(layers, sizes, strict=True)}
    if len(kinds) + len(dtypes) > 2 or [parts.attention.layer_idx for parts in layers] != list(range(len(layers))):
        return "its layers are not alike"
    file, family = type(layers[0].layer).__module__, FAMILIES[name_of(layers[0].layer)]
    decoder, names = getattr(model, "model", None), (f"{family}ForCausalLM", f"{family}Model")
    if decoder is None or [name_of(model), name_of(decoder)] != [(file, name) for name in names]:
        return f"it is no {names[0]} of transformers"
    held, norm, head = decoder._modules.get("layers"), decoder._modules.get("norm"), model._modules.get("lm_head")
    if type(held) is not nn.ModuleList or [*held] != [parts.layer for parts in layers]:
        return "some of its layers are not fused, or have another order"
    owners = (model, decoder, held)
    if code_of(frozenset(map(type, owners))).foreign or not (is_bare(model) and is_bare(decoder)):
        return "a user's hooks or code surround its layers"
    if norm is None or norm not in fused.norms or norm.weight.dtype not in dtypes:
        return "its last norm is not fused, or of another type than its layers"
    if not all(linears.may_pack(each) for parts in layers for each in parts.linears):
        return "some of its weights are not packed"
    is_plain = head is not None and "weight" in head._parameters and linears.may_pack(head)
    parts = PassParts(layers, norm, head if is_plain and _is_called_alone(head) else None)
    return WholePass(model, parts, threads)
