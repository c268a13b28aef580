"""Passes over token trees by a model's own code, on any device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.backend.pass_attention import Spans, attend, attend_alone
from lookahead.backend.prompt_groups import PromptGroup, copy_beginning, groups_of
from lookahead.backend.protocol import BackendReport, BitPolicy, OnPrefill, PathReport, Shape
from lookahead.backend.tree_pass import AttentionSpan, PackedPrompts, TreePass
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.errors import UnsupportedModelError
from lookahead.kernels import dispatch
from lookahead.kernels.prompt_attention import tokens_alike
from lookahead.model.attention import AttentionScope
from lookahead.model.cache import TreeCache
from lookahead.model.calls import MakeInputs, ModelInputs
from lookahead.model.level_calls import MixTrees
from lookahead.model.model_state import CHECKPOINTING, checkpointed, outside_passes, patched_attribute, plan_of
from lookahead.model.stamp import stamp_of
from lookahead.model.state_layers import cache_layers
from lookahead.model.state_scope import StateScope, mixers_of

PREFILL_CHUNK = 1024  # tokens per pass of a prompt that is read in parts
_MAX_WHOLE = 8192  # longest prompt, in tokens, that is read in one pass without fused attention


class TorchBackend:
    """A `Backend` for every model that transformers runs.

    Models that call registered attention functions get tree attention; older architectures get prepared masks. For
    chains of a single row the model makes its own masks. `serving` changes the model's attention implementation.

    Args:
        model: The model.
        rows: Rows of the batch; 1 for chains.
        capacity: Initial slots per row.
        shape: Whether `score` takes trees, or only chains.
        hidden_layers: Indices in `output_hidden_states` of the hidden states to keep.
        make_inputs: Makes the `ModelInputs` of the model and its cache.
        continues: Tells whether recurrent layers can continue a text by a pass over several tokens.
    """

    warm_ups = 0  # passes of a shape before its later ones are as fast as they will be
    packs_prompts = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int,
        capacity: int,
        shape: Shape = "trees",
        hidden_layers: Sequence[int] = (),
        make_inputs: MakeInputs = ModelInputs,
        continues: Callable[[], bool] = bool,
    ) -> None:
        plan = plan_of(model)
        self._model, self._rows, self._device, self._make_inputs = model, rows, plan.device, make_inputs
        self._takes_masks, self._continues = shape == "trees", continues
        self._scope: AttentionScope | None = None
        if self._takes_masks and plan.registers_attention:
            self._scope = plan.part("attention", plan.form, partial(AttentionScope, model))
        self._spans: Spans = {}
        self._reads_at_once, self._windows = plan.reads_at_once, plan.windows
        has_mixers = plan.may_keep_states and bool(mixers_of(model))
        self._like = cache_layers(model.config.get_text_config()) if has_mixers else []
        self.begin(capacity)
        self._hidden_layers = tuple(hidden_layers)
        self.keeps_hidden = self.keeps_logits = True
        self.reads_top = 0
        self.ranks: Tensor | None = None
        self.hidden: dict[int, Tensor] = {}
        self.prompt_hidden: list[dict[int, Tensor]] = []
        self.reused_tokens: list[int] = []
        self._mixers: Mapping[Any, MixTrees] = {}  # recurrent layers that kernels compute
        self._has_copies = False  # half-precision prompts that are being read begin with copies of others
        self._known: dict[Hashable, Any] | None = None  # what was checked of the model, while nothing can change it
        self._is_served, self._checkpointed = False, checkpointed(model) if plan.trains else []
        self._first_stamp: int | None = None  # of `has_changed`
        self._runs_own_code, self._has_sdpa = False, plan.attention == "sdpa"
        # In float32 the last bits do not change tokens.
        self._is_half = model.dtype in (torch.bfloat16, torch.float16)
        self.is_read_whole = self.is_cold = self.is_ragged = False
        self.ragged_nodes = 0

    def begin(self, capacity: int, cache: TreeCache | None = None) -> None:
        """Start with an empty cache of `capacity` slots per row, outside `serving`. Users keep the previous cache."""
        if cache is None:
            cache = TreeCache(rows=self._rows, capacity=capacity, windows=self._windows, like=self._like)
        self._inputs = inputs = self._make_inputs(self._model, cache)  # which may have a cache of their own
        self.cache, self.positions, self.counts_nodes = inputs.cache, inputs.positions, inputs.counts_nodes
        self._states = StateScope(self._model, cache) if self._like else None

    @contextmanager
    def serving(self, *, is_alone: bool = False) -> Iterator[None]:
        """See `Backend.serving`."""
        with torch.inference_mode():
            if self._is_served:
                yield
                return
            self._is_served, self._known = True, {} if is_alone else None
            self._spans.clear()
            try:
                by_depth = nullcontext() if self._states is None else self._states.serving()
                cached = patched_attribute(CHECKPOINTING, self._checkpointed)
                attends = nullcontext() if self._scope is None else patched_attribute("config", self._scope.views)
                with outside_passes(), by_depth, cached, self._patched(), attends:
                    yield
            finally:
                self._is_served, self._known = False, None

    def _patched(self) -> AbstractContextManager[None]:
        """A block in which kernels replace modules of the model."""
        return nullcontext()

    def has_changed(self) -> bool:
        """See `Backend.has_changed`."""
        number = stamp_of(self._model).number
        self._first_stamp = number if self._first_stamp is None else self._first_stamp
        self._runs_own_code = self._runs_own_code or number != self._first_stamp
        return self._runs_own_code

    def reads_alone(self, policy: BitPolicy) -> bool:
        """See `Backend.reads_alone`."""
        return self._inputs.joins_alone or (self._keeps(policy) and not self.packs_prompts)

    def _keeps(self, policy: BitPolicy) -> bool:
        """Whether passes can have the bits of a policy."""
        return False

    def read(
        self,
        prompts: Sequence[IntArray],
        first: int = 0,
        *,
        encoded: Any = None,
        texts: Sequence[IntArray] | None = None,
        as_whole: bool = False,
        on_prefill: OnPrefill | None = None,
    ) -> Tensor:
        """See `Backend.read`.

        Args:
            prompts: int32 `[tokens]` for each row from `first` on.
            first: The first row.
            encoded: Encoder outputs of the rows.
            texts: Tokens in the cache for each row before `first`.
            as_whole: Whether prompts have the bits of a pass over the whole behind their cached prefixes.
            on_prefill: Called before the first pass and after every pass.
        """
        self.reused_tokens, self._has_copies = [0] * len(prompts), self._is_half and as_whole
        with self._inputs.reading(encoded) as logits:
            if logits is not None:
                return self._read_by_model(prompts, logits, on_prefill)
            if self.packs_prompts or (self.cache.states and len(prompts) > 1):
                return self._read_in_groups(prompts, first, self._groups_of(prompts, first, texts), on_prefill)
            with self.cache.slots.rows_from(first, len(prompts)):
                return self._read(prompts, on_prefill or (lambda *_: None))

    def _read_by_model(self, prompts: Sequence[IntArray], logits: Tensor, report: OnPrefill | None) -> Tensor:
        """`read` for prompts that the model itself has read into the cache."""
        self.is_read_whole, self.hidden, self.prompt_hidden = len(prompts) == 1, {}, []
        for row in range(len(prompts)):
            self.cache.hold_root(row)
        if report is not None:
            longest = max(map(len, prompts))
            report(longest, longest)
        return logits

    def _groups_of(
        self, prompts: Sequence[IntArray], first: int, texts: Sequence[IntArray] | None
    ) -> list[PromptGroup]:
        """The prompts that are read in one pass each.

        Recurrent layers read prompts alone: padding after a shorter one would change its states. So do half-precision
        layers a prompt of one token, whose products have other bits. There beginnings are copied as far as their bits
        do not depend on the rest of the text.
        """
        cached = self.cache.slots.lengths[first : first + len(prompts)].tolist()
        most, fewest = 0 if self.cache.states else PREFILL_CHUNK, 2 if self._is_half else 1
        texts = texts if self.packs_prompts else None
        groups = groups_of(prompts, cached, texts, most, fewest, tokens_alike if self._is_half else min)
        if self._is_half and any(source >= 0 for group in groups for source, _ in group.copies):
            groups = groups if self._shares_beginnings() else groups_of(prompts, cached, None, most, fewest)
        return groups

    def _shares_beginnings(self) -> bool:
        """Whether half-precision prompts may copy beginnings of other prompts."""
        return False

    def _read_in_groups(
        self, prompts: Sequence[IntArray], first: int, groups: Sequence[PromptGroup], report: OnPrefill | None
    ) -> Tensor:
        """`read` the prompts of one group after the other."""
        longest = max(range(len(prompts)), key=lambda row: len(prompts[row]))
        logits, hidden, whole = list[Tensor](), list[dict[int, Tensor]](), list[dict[int, Tensor]]()
        is_whole, has_copies = True, self._has_copies
        for group in groups:
            for row, (source, tokens) in enumerate(group.copies, first + group.first):
                if source >= 0:
                    copy_beginning(self.cache, source, row, tokens)
            some, told = [prompts[at] for at in group.prompts], report if longest in group.prompts else None
            self._has_copies = has_copies or (self._is_half and any(source >= 0 for source, _ in group.copies))
            with self.cache.slots.rows_from(first + group.first, len(some)):
                read = self._read if len(some) == 1 else self._read_packed
                logits.append(read(some, told or (lambda *_: None)))
            hidden.append(self.hidden)
            whole += self.prompt_hidden
            is_whole &= self.is_read_whole
        self.hidden = {layer: torch.cat([states[layer] for states in hidden]) for layer in self.hidden}
        self.prompt_hidden, self.is_read_whole = whole, is_whole
        self.reused_tokens = [tokens if source >= 0 else 0 for group in groups for source, tokens in group.copies]
        return torch.cat(logits)

    def _read_packed(self, prompts: Sequence[IntArray], report: OnPrefill) -> Tensor:
        """`read` for all rows in the passes, in one pass without padding."""
        longest, slots = max(map(len, prompts)), self.cache.slots
        report(0, longest)
        committed, lengths = slots.lengths[: len(prompts)], np.array(list(map(len, prompts)))
        new = [prompt[start:] for prompt, start in zip(prompts, committed, strict=True)]
        slots.begin(longest - int(committed.max()))  # the slots that are read end with the longest prompt
        packed = PackedPrompts(slots, self._device, new, has_copies=self._has_copies)
        logits = self._forward(packed, BitPolicy.BATCH)[0]
        committed[:] = lengths - 1
        texts = {layer: states[0].split(packed.sizes) for layer, states in self.hidden.items()}
        self.prompt_hidden = [{layer: some[row] for layer, some in texts.items()} for row in range(len(prompts))]
        self.hidden = {layer: torch.stack([text[-1:] for text in some]) for layer, some in texts.items()}
        self.is_read_whole = True
        report(longest, longest)
        return logits[:, None]

    def _read(self, prompts: Sequence[IntArray], report: OnPrefill) -> Tensor:
        """`read` for all rows in the passes."""
        slots = self.cache.slots
        committed = slots.lengths[: slots.active]
        cached = committed.copy()
        lengths = np.array([len(prompt) for prompt in prompts])
        new = lengths - cached
        width = int(new.max())
        padded = np.zeros((len(prompts), width), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : new[row]] = prompt[cached[row] :]
        last: dict[int, Tensor] = {}
        hidden: list[dict[int, Tensor]] = []
        size = self._tokens_of_a_pass(new, cached)
        self.is_read_whole = size >= width and len(prompts) == 1
        report(0, width)
        for start in range(0, width, size):
            chunk = np.ascontiguousarray(padded[:, start : start + size])
            # A row whose prompt has ended writes padding after it, into the slots of its later trees.
            committed[:] = cached + start
            ends = new - 1 - start
            ending = np.flatnonzero((ends >= 0) & (ends < chunk.shape[1]))
            keep, place = np.unique(ends[ending], return_inverse=True)
            keep = keep if len(keep) else np.zeros(1, np.int64)
            # The model's own attention has the bits of `generate`, and is as fast as ours from an empty cache.
            may_be_plain = self._is_half or (self._has_sdpa and not (committed.any() or any(self._windows)))
            is_plain = may_be_plain and not np.ptp(committed) and keep.tolist() == [chunk.shape[1] - 1]
            slots.begin(chunk.shape[1], is_plain=is_plain)
            if self.cache.states:
                self.cache.begin_prompt(slots.first)
            logits = self._forward(TreePass(slots, self._device, prompt=(chunk, keep)), BitPolicy.BATCH)
            last.update({int(row): logits[row, column] for row, column in zip(ending, place, strict=True)})
            hidden.append(self.hidden)
            if self.cache.states:
                self.cache.end_prompt(slots.first)
            report(min(start + size, width), width)
        committed[:] = lengths - 1
        whole = {layer: torch.cat([chunk[layer] for chunk in hidden], 1) for layer in self.hidden}
        self.prompt_hidden = [{layer: states[row, :n] for layer, states in whole.items()} for row, n in enumerate(new)]
        self.hidden = {layer: states[range(len(new)), new - 1][:, None] for layer, states in whole.items()}
        return torch.stack([last[row] for row in range(len(prompts))])[:, None]

    def _tokens_of_a_pass(self, new: NDArray[np.int64], cached: NDArray[np.int64]) -> int:
        """Tokens per row that one pass reads, of `new` ones after `cached` ones, int64 `[rows]` each."""
        width = int(new.max())
        # In half precision prompts of one length are read in one pass, with the bits of `model.generate`. Without fused
        # causal attention the memory of a pass grows quadratically with its tokens.
        is_fused = self._has_sdpa and (self._has_copies or not cached.any()) and not any(self._windows)
        is_whole = self._is_half and not (np.ptp(new) or np.ptp(cached)) and (is_fused or width <= _MAX_WHOLE)
        if self.cache.states and width > PREFILL_CHUNK:  # their bits depend on the tokens of a pass
            is_whole = self._is_half or not self._continues()
        return width if is_whole or self._reads_at_once else PREFILL_CHUNK

    def score(
        self,
        trees: Sequence[TokenTree],
        policy: BitPolicy = BitPolicy.ROUNDED,
        scored: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """See `Backend.score`."""
        slots, sizes = self.cache.slots, [len(tree.tokens) for tree in trees]
        width = max(sizes) if scored is None else int((np.array(sizes) - scored).max())
        windows, may_be_plain = self._attention_of(trees, policy)
        # `model.generate` would run the same pass: one token per row, and rows of one length.
        is_plain = may_be_plain and self._is_half and width == 1 and scored is None
        is_plain = is_plain and not np.ptp(slots.lengths[: len(trees)])
        slots.begin(width, scored, is_plain=is_plain)
        tree_pass = TreePass(slots, self._device, trees, scored, windows=windows)
        if self._inputs.shifts is not None:
            tree_pass.positions = tree_pass.positions + self._inputs.shifts[: len(trees)]
        if self._states is None:
            return self._forward(tree_pass, policy)
        if scored is not None:
            raise UnsupportedModelError("the states of nodes that an earlier pass scored are not kept")
        self.cache.begin_trees(trees, self._device)
        with self._states.running(self._nodes_of_call(policy), self._mixers):
            return self._forward(tree_pass, policy)

    def _nodes_of_call(self, policy: BitPolicy) -> int | None:
        """The most nodes that a recurrent layer takes in one call; None for all nodes of one depth."""
        return None

    def _attention_of(self, trees: Sequence[TokenTree], policy: BitPolicy) -> tuple[Sequence[int | None] | None, bool]:
        """The attention windows by layer if nodes attend one by one, or None if they attend under a mask.

        Second, whether the pass may be the model's own.
        """
        return None, True

    def retire(self, row: int) -> int:
        """See `Backend.retire`."""
        last = self.cache.retire(row)
        self._inputs.retire(row, last)
        return last

    def report(self, policy: BitPolicy = BitPolicy.ROUNDED) -> BackendReport:
        """See `Backend.report`."""
        is_registered = self._scope is not None
        own = plan_of(self._model).attention
        attention = "" if own in (None, "sdpa", "eager") else f"in place of {own}"
        attention = attention if is_registered else "the model takes prepared masks"
        paths = [PathReport("tree attention", is_registered, attention)]
        if not self._takes_masks:
            paths = [PathReport("trees of drafts", False, "the model verifies chains")]
        elif self.cache.states:
            paths.append(PathReport("states by depth", True, "recurrent layers run once for every depth of a tree"))
        if self._takes_masks and self._device.type not in ("cpu", "cuda"):
            paths.append(PathReport("kernels for trees", False, dispatch.unserved_device(self._device)))
        names, dtype = (type(self).__name__, type(self._model).__name__), str(self._model.dtype).removeprefix("torch.")
        return BackendReport(*names, tuple(paths), policy.value, dtype)

    def _forward(self, tree_pass: TreePass, policy: BitPolicy) -> Tensor:
        """One pass of the model; returns the logits of all columns, or only of `tree_pass.keep`."""
        inputs, is_plain, keeps = self._inputs, self.cache.slots.is_plain, len(tree_pass.keep) > 0
        options: dict[str, Any] = {"use_cache": True}
        if inputs.keeps_logits and keeps:
            # Hooks of accelerate move tensors to the first layer's device, and the last layer may be on another one.
            keep = tree_pass.keep if self._device.type == "cpu" else tree_pass.keep.tolist()
            options["logits_to_keep"] = 1 if is_plain else keep
        scope: AbstractContextManager[None] = nullcontext()
        by_kernel = self._has_copies or tree_pass.reads_by_kernel
        if is_plain and tree_pass.is_prefill and self._scope is not None and by_kernel:
            scope = self._scope.running(partial(attend_alone, as_whole=self._has_copies))
        elif self._takes_masks and not is_plain:
            if self._scope is not None:
                if tree_pass.trees:
                    tree_pass.tensors(self._device)  # now, since a mask may be compiled
                scope = self._scope.running(partial(attend, tree_pass, self._spans))
            else:
                mask = tree_pass.mask(1, AttentionSpan(), self._model.dtype, self._device)
                options[f"{inputs.prefix}attention_mask"] = mask
        keeps_hidden = self.keeps_hidden and bool(self._hidden_layers)
        if keeps_hidden:
            options["output_hidden_states"] = True
        with inputs.of_pass(tree_pass.tokens, tree_pass.positions) as arguments, scope:
            tree_pass.cross = inputs.cross
            output = self._model(**arguments, **options)
        states: Sequence[Tensor] = getattr(output, "hidden_states", None) or ()
        self.hidden = {}
        for layer in self._hidden_layers if keeps_hidden else ():
            if not -len(states) <= layer < len(states):
                raise UnsupportedModelError(
                    f"a proposer asks for hidden states {layer}, and the model has {len(states)}"
                )
            self.hidden[layer] = states[layer]
        logits: Tensor = output.logits
        return logits[:, tree_pass.keep] if keeps and not inputs.keeps_logits else logits
