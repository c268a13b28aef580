"""Passes over token trees as one kernel call: all layers, the last norm and the head."""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from lookahead.backend.cpu.attention_limits import limits_of
from lookahead.backend.cpu.cpu_pass import CpuPass, thread
from lookahead.backend.cpu.exact_attention import has_bits, has_bits_behind_windows
from lookahead.backend.cpu.fused_layers import FusedLayers, is_bare
from lookahead.backend.cpu.linears import LinearScope, packed_weights
from lookahead.backend.cpu.pass_parts import PassContext, PassParts, latent_linears, owners_of, padded, placeholders_of
from lookahead.backend.cpu.pass_table import MAX_BATCH_NODES, MAX_TABLE_NODES, PassTable
from lookahead.backend.cpu.routing import serves
from lookahead.backend.cpu.tree_mixers import TreeMixer
from lookahead.backend.tree_pass import TreePass
from lookahead.kernels import eager_attention, row_attention
from lookahead.kernels.jobs import torch_on_one_thread
from lookahead.kernels.row_attention import AttentionLimits
from lookahead.model.attention import real_config
from lookahead.model.cache import TreeCache
from lookahead.model.facts import own_attention
from lookahead.model.families.operations import SelfAttention
from lookahead.model.known_code import (
    arithmetic_flags,
    code_of,
    global_hooks,
    is_ours,
    is_set_by_user,
    working_hooks_of,
)
from lookahead.model.state_layers import States

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

    Attributes:
        detail: Why layers attend by the model's own function; empty if the kernel attends.
        most_nodes: Nodes that a pass like the newest may have, all its trees together.
    """

    def __init__(
        self, model: Any, owners: Sequence[Any], parts: PassParts, threads: dict[int, int], detail: str = ""
    ) -> None:
        # The model's plan holds this, and must not keep the model alive.
        self._model, self._decoder, self._parts = ref(model), owners[-1], parts
        self._placeholders = placeholders_of(model.config)
        self._linears, self._family = parts.linears, parts.layers[0].family
        self.most_nodes = MAX_BATCH_NODES
        self._threads = threads  # of a pass, by torch's number of threads; kept with the model
        self._slopes = dict[Hashable, Any]()  # of tables, by their kind
        self._known: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}  # of `packed_weights`, for layers and the head
        self._with_experts, self._reach = next((layer for layer in parts.layers if layer.experts), None), parts.reach
        self._windows = {limits.window for limits in parts.limits if limits.window}
        self._ropes = list(dict.fromkeys(rope.kind for layer in parts.layers if (rope := layer.rope)))
        attentions = [layer.attention for layer in parts.layers if layer.attention]
        fewest = (eager_attention.fewest_keys(part.heads[0], part.dim) for part in attentions if parts.is_eager)
        self._fewest_keys = max(fewest, default=0)
        self._query_size, self.detail = max((part.width for part in attentions), default=0), detail
        self._runs_mixers, self._slots_at = any(layer.called for layer in parts.layers), parts.slotted
        self._stateful = 1 + max(
            at for at, layer in enumerate(parts.layers) if at in parts.slotted or layer.recurrence or layer.called
        )
        is_half, is_eager = parts.norm.weight.dtype == torch.bfloat16, parts.is_eager
        self._has_bits = is_half and (is_eager or all(map(_has_bits, attentions)))
        self._has_bits_behind_windows = self._has_bits and (is_eager or all(map(_has_bits_behind_windows, attentions)))
        # A streamer or a stopping criterion may change these between two passes of a call.
        self._layers = [layer.module for layer in parts.layers]
        inner = [*self._layers, *(layer.called.module for layer in parts.layers if layer.called)]
        self._inner = [*owners[1:], parts.norm.module, *([parts.head] if parts.head else []), *inner]
        self._forwards: list[Any] = []  # their `forward`s as of the newest pass
        self._newest_hook = RemovableHandle.next_id

    def __call__(
        self,
        tree_pass: TreePass,
        cache: TreeCache,
        mode: CpuPass,
        layers: Sequence[int] = (),
        attending: Callable[[], AbstractContextManager[None]] = nullcontext,
        tables: dict[Hashable, PassTable] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """The logits of all nodes, `[rows, width, vocab]`, and hidden states; None for an unsupported pass.

        Must run within `cpu_pass.running`. Padding is left unwritten.

        Args:
            tree_pass: The pass.
            cache: Its cache.
            mode: How its layers compute.
            layers: The hidden states to return by layer, `[rows, width, size]`; numbered as in `output_hidden_states`.
            attending: Makes the block in which the model's own layers attend as nodes.
            tables: Tables of earlier passes, since when nothing can have changed the model; None if something can.
        """
        if not self._is_small(tree_pass, cache):
            return None
        trees, scored, (rows, width) = tree_pass.trees, tree_pass.firsts, tree_pass.tokens.shape
        counts = [len(tree.tokens) - done for tree, done in zip(trees, scored, strict=True)]
        most, starts = torch.get_num_threads(), cache.slots.lengths[: len(trees)].tolist()
        is_called, mixture = not self._attends(tree_pass, starts), self._with_experts
        packs_experts = mixture is not None and mixture.packs_experts(mode)
        kind = mode, tuple(layers), rows, most, packs_experts, is_called, tree_pass.attends_per_node
        table = tables.get(kind) if tables else None
        is_checked = table is not None and table.is_for(sum(counts))
        if not is_checked:
            table = self._checked(tree_pass, cache, kind, sum(counts))
        if table is None:
            return None
        self.most_nodes = min(MAX_BATCH_NODES, table.tokens.stop - 1) if len(table.tokens) > 1 else MAX_BATCH_NODES
        # The flat indices of nodes that are not padding.
        kept = None
        tokens, at = tree_pass.tokens, tree_pass.positions
        if rows > 1:
            kept = torch.from_numpy(np.concatenate([row * width + np.arange(n) for row, n in enumerate(counts)]))
            tokens, at = (numbers.flatten()[kept][None] for numbers in (tokens, at))
        with torch_on_one_thread() if most > 1 else nullcontext():
            hidden = getattr(self._decoder, self._family.embedding)(tokens)
            if self._family.embedding_factor:
                hidden = hidden * getattr(self._decoder, self._family.embedding_factor)
            if self._family.placed:
                hidden = self._family.placed(self._decoder, hidden, at)
            rotary: Any = getattr(self._decoder, self._family.rotary, None)  # absent if no layer rotates
            positions = {
                kind: rotary(hidden, at, kind) if kind else rotary(hidden, position_ids=at) for kind in self._ropes
            }
            beside = None
            if table.reads_beside:
                beside = self._decoder.get_per_layer_inputs(tokens, hidden)
                beside = self._decoder.project_per_layer_inputs(hidden, beside)
            if not (is_checked or table.takes(hidden, positions, beside)):
                return None
        before = self._states(cache, counts) if self._parts.mixers else {}
        if before is None:
            return None
        if tables is not None:
            tables[kind] = table
        own = rotary(hidden, position_ids=at) if self._runs_mixers else None
        per_node = tree_pass.per_node if self._runs_mixers and tree_pass.attends_per_node else None
        context = PassContext(cache, [sum(counts[:row]) for row in range(rows)], before, own, per_node)
        run = partial(table.run, hidden, positions, trees, starts, scored, context, beside)
        with attending() if is_called else nullcontext():
            if most not in self._threads:
                self._threads[most] = fastest_number(run, most)
                thread.is_cold = most > 1
            written: Tensor = run(self._threads[most])
        model: Any = self._model()
        has_head, states = table.parts.head is not None, {}
        if layers:
            last = len(self._parts.layers)
            by_place = table.kept(hidden) if has_head else table.kept(hidden) | {last: written}
            states = {layer: by_place[layer % (last + 1)] for layer in layers}
        logits: Tensor = written if has_head else model.lm_head(written)
        if self._family.logits_divisor or self._family.logits_cap:
            is_gemma3 = type(model).__name__ == "Gemma3ForConditionalGeneration"  # which bounds no logits
            logits = logits if is_gemma3 else self._finished(logits, model.config.get_text_config())
        if kept is None:
            return logits, states
        return padded(logits, kept, rows, width), {
            at: padded(of_layer, kept, rows, width) for at, of_layer in states.items()
        }

    def _checked(self, tree_pass: TreePass, cache: TreeCache, kind: tuple[Any, ...], tokens: int) -> PassTable | None:
        """The table of a kind of passes, for the model as it is now; None if it must run its own code."""
        model, last = self._model(), len(self._parts.layers)
        mode, layers, rows, _, packs_experts, is_called, _ = kind
        if not self._is_unchanged(model, cache) or not all(-last - 1 <= layer <= last for layer in layers):
            return None
        may_mask = self._parts.norm.weight.dtype == torch.float32 and not self._runs_mixers
        if is_called and (rows > 1 or may_mask):
            return None
        # Weights are looked up before calling the embedding: a hook on it must run once per pass.
        like = self._parts.norm.weight.expand(1, tokens, -1)
        weights = packed_weights(self._linears, like, self._known[0])
        has_experts = self._with_experts is not None
        if not weights or like.numel() > mode.most_in_call or (has_experts and not serves(like.dtype, mode)):
            return None
        of_head = packed_weights([self._parts.head], like, self._known[1]) if self._parts.head else ()
        parts = self._parts if of_head else self._parts._replace(head=None)
        key = self, len(of_head), *kind[1:6]  # a draft may share the cache
        table: PassTable | None = cache.tables.get(key)
        if table is None or not table.serves(parts, weights, of_head):
            slots = [cache.layers[at] for at in self._slots_at]
            kernel = eager_attention if parts.is_eager else row_attention
            is_kernel = all(kernel.is_supported(one.keys, one.keys, one.values) for one in slots)
            if any(one.keys.dtype != like.dtype for one in slots) or not (is_called or is_kernel):
                return None
            places = tuple(layer % (last + 1) for layer in layers)
            slopes, options = self._slopes.get(key[1:]), {"packs_experts": packs_experts, "is_called": is_called}
            table = cache.tables[key] = PassTable(parts, weights, of_head, cache, like, rows, places, slopes, **options)
            self._slopes[key[1:]] = table.slopes
        fitting = [modes[mode].rows for modes in self._known if mode in modes]
        most = min(mode.most_in_call // like.shape[2] + 1, *(some.stop for some in fitting))
        # Another number of tokens may need the head as a module, or no more.
        table.tokens = range(tokens, tokens + 1)
        if of_head or not self._parts.head:
            table.tokens = range(max(some.start for some in fitting), most)
        return table if table.is_right else None

    def _finished(self, logits: Tensor, config: Any) -> Tensor:
        """What the model does with the results of its output layer."""
        divisor, cap = self._family.logits_divisor, getattr(config, self._family.logits_cap or " ", None)
        if divisor:
            logits = logits / getattr(config, divisor)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _states(self, cache: TreeCache, counts: Sequence[int]) -> dict[Any, list[States]] | None:
        """The states before a pass, by recurrent module; None if one of them must run its own code."""
        before = dict[Any, list[States]]()
        for module, mixer in self._parts.mixers.items():
            states = mixer.begun(self._parts.norm.weight.dtype, len(counts), max(counts), cache)
            if states is None:
                return None
            before[module] = states
        return before

    def _is_small(self, tree_pass: TreePass, cache: TreeCache) -> bool:
        """Whether this is a small pass over trees whose slots and states the table can use."""
        parts, slots, trees = self._parts, cache.slots, tree_pass.trees
        sizes = [len(tree.tokens) for tree in trees]
        if not trees or max(sizes) > MAX_TABLE_NODES or sum(sizes) > MAX_BATCH_NODES:
            return False
        if self._reach is not None and int(tree_pass.positions.max()) >= self._reach:
            return False
        if self._placeholders and not self._placeholders.isdisjoint(tree_pass.tokens.flatten().tolist()):
            return False
        # In half precision the nodes of several rows have the bits of each row alone, or of one batch.
        if len(trees) > 1 and not tree_pass.attends_per_node and parts.norm.weight.dtype != torch.float32:
            return False
        has_states = not parts.mixers or not (any(tree_pass.firsts) or cache.levels is None)
        return slots.capacity >= _FEWEST_SLOTS and not (slots.first or slots.is_plain) and has_states

    def _is_unchanged(self, model: Any, cache: TreeCache) -> bool:
        """Whether the modules that are not called are unchanged, and the cache is that of a pass of theirs."""
        parts, decoder = self._parts, self._decoder
        forwards = [vars(module).get("forward") for module in (model, *self._inner)]
        layers = getattr(decoder, self._family.layers)
        is_whole: bool = decoder.config.num_hidden_layers == len(layers) == len(parts.layers)
        return bool(
            is_whole
            and self._stateful <= len(cache.layers) <= len(parts.layers)
            and all(map(cache.is_ready, self._slots_at))
            and all(map(is_, layers._modules.values(), self._layers))
            and getattr(decoder, self._family.last_norm) is parts.norm.module
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
        called = [getattr(self._decoder, name, None) for name in (self._family.embedding, self._family.rotary)]
        called.append(None if self._parts.head else model.lm_head)
        if global_hooks() or any(working_hooks_of(module) for module in model.modules() if module not in called):
            return False
        self._newest_hook = RemovableHandle.next_id
        return True

    def _attends(self, tree_pass: TreePass, starts: Sequence[int]) -> bool:
        """Whether the kernel attends in all layers: with the bits of SDPA, or faster than a mask."""
        if not self._parts.limits:
            return False
        trees = tree_pass.trees
        if tree_pass.attends_per_node and min(starts) + 1 < self._fewest_keys:
            return False
        if tree_pass.attends_per_node and not self._windows:
            return self._has_bits
        ends = [start + max(tree.depths.tolist()) + 1 for tree, start in zip(trees, starts, strict=True)]
        end, nodes = max(ends), sum(len(tree.tokens) for tree in trees)
        if tree_pass.attends_per_node:
            # Behind a window the model's own cache must begin with the window, as the sums of the kernel do.
            reached = [window for window in self._windows if end >= window]
            crops = all(window in (tree_pass.windows or ()) for window in reached)
            return self._has_bits and (not reached or (crops and self._has_bits_behind_windows))
        return bool(self._query_size * (nodes - len(trees)) * end <= exact_attention.MAX_KERNEL_PRODUCTS)


def _has_bits(part: SelfAttention) -> bool:
    """Whether the kernel has the bits of a layer's own attention."""
    module = part.module
    return has_bits(own_attention(module, real_config(module.config)), *part.heads, part.dim)


def _has_bits_behind_windows(part: SelfAttention) -> bool:
    heads, kv_heads = part.heads
    return has_bits_behind_windows(part.dim, heads // kv_heads, arithmetic_flags())


def whole_pass(
    model: Any,
    fused: FusedLayers,
    linears: LinearScope,
    threads: dict[int, int],
    mixers: Mapping[nn.Module, TreeMixer],
) -> WholePass | str:
    """The `WholePass` of a model, or why its passes cannot be one call.

    Args:
        model: The model.
        fused: Its fused layers.
        linears: Its linear layers, which say what is packed.
        threads: Threads of a pass, by torch's number of threads.
        mixers: Its recurrent modules that kernels compute.
    """
    layers = fused.layers
    if not layers:
        return "no layer is fused"
    dtypes = {layer.norms[0].weight.dtype for layer in layers}
    kinds, indices = {type(layer.module) for layer in layers}, [layer.index for layer in layers]
    if len(kinds) + len(dtypes) != 2 or indices != list(range(len(layers))):
        return "its layers are not alike"
    recurrent = {layer.recurrence.module for layer in layers if layer.recurrence}
    if recurrent != mixers.keys():
        return "its recurrent layers are not by kernels"
    family = layers[0].family
    owners = owners_of(model, family)
    if isinstance(owners, str):
        return owners
    decoder = owners[-1]
    modules, norm = (decoder._modules.get(name) for name in (family.layers, family.last_norm))
    head: Any = model._modules.get("lm_head")
    if type(modules) is not nn.ModuleList or [*modules] != [layer.module for layer in layers]:
        return "some of its layers are not fused, or have another order"
    kinds = {type(owner) for owner in (*owners, modules)}
    if code_of(frozenset(kinds)).foreign or not all(map(is_bare, owners)):
        return "a user's hooks or code surround its layers"
    last = next((one for one in fused.norms if one.module is norm), None)
    if last is None or last.weight.dtype not in dtypes:
        return "its last norm is not fused, or of another type than its layers"
    if not all(linears.may_pack(linear) for layer in layers for linear in layer.linears):
        return "some of its weights are not packed"
    bounds = [limits_of(layer) for layer in layers]
    detail = next((bound for bound in bounds if isinstance(bound, str)), "")
    if detail and torch.float32 in dtypes and not any(layer.called for layer in layers):
        return detail
    limits = [] if detail else [bound for bound in bounds if isinstance(bound, AttentionLimits)]
    is_plain = head is not None and "weight" in head._parameters and linears.may_pack(head)
    head = head if is_plain and _is_called_alone(head) else None
    parts = PassParts(layers, last, head, limits, mixers, latent_linears(layers, linears.may_pack))
    return WholePass(model, owners, parts, threads, detail)
