"""The target model: prefill prompts, score trees, commit accepted paths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.backend.cpu import fused_layers
from lookahead.backend.cpu.exact_attention import takes_rows
from lookahead.backend.cpu.linears import LinearScope
from lookahead.backend.cpu.product_bits import Bits
from lookahead.backend.gpu.cuda_graphs import GraphRunner, KeptGraphs
from lookahead.backend.gpu.kernel_trial import try_kernels
from lookahead.backend.tree_pass import AttentionSpan, TreePass
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.errors import UnsupportedModelError
from lookahead.hf.attention import AttentionScope
from lookahead.hf.cache import CACHE, TreeCache, windows_of
from lookahead.hf.model_code import version_of
from lookahead.hf.model_state import outside_passes
from lookahead.kernels import dispatch

Shape = Literal["trees", "chains"]
OnPrefill = Callable[[int, int], None]
"""Called with the tokens read of the longest prompt, and its length."""
PREFILL_CHUNK = 1024  # tokens of a pass over a part of a prompt
_MAX_WHOLE = 8192  # longest prompt, in tokens, that is read in one pass without fused attention


def input_device(model: PreTrainedModel) -> torch.device:
    """The device of a model's input tokens; `meta` for a model without weights."""
    embedding: Any = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type == "meta" and hasattr(embedding, "_hf_hook"):
        # Offloaded weights are on meta between passes. The hook of accelerate knows the device they run on.
        return torch.device(getattr(embedding._hf_hook, "execution_device", "cpu"))
    return device


def inputs_of(model: PreTrainedModel) -> frozenset[str]:
    """The names of the inputs of a model; of a subclass that hands all on by `**kwargs`, those of its base too."""
    names: set[str] = set()
    for kind in type(model).__mro__:
        if "forward" not in vars(kind):
            continue
        parameters = inspect.signature(vars(kind)["forward"]).parameters
        names |= parameters.keys()
        if "input_ids" in names or not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            break
    return frozenset(names)


def position_limit(model: PreTrainedModel) -> int | None:
    """Positions a model has a table for; None where positions are computed and unlimited."""
    config: Any = model.config.get_text_config()
    if getattr(config, "rope_parameters", None) or getattr(config, "alibi", False):
        return None
    # Recurrent models have no table, and sinusoidal ones of this kind lengthen it.
    if getattr(model, "_is_stateful", False) or any(hasattr(module, "make_weights") for module in model.modules()):
        return None
    limit: int | None = getattr(config, "max_position_embeddings", None)
    return limit if limit is not None else getattr(config, "max_seq_len", None)  # as MPT names its ALiBi table


def prefills_at_once(model: PreTrainedModel) -> bool:
    """Whether a prompt must be read in one pass, because position embeddings depend on the longest position in it."""
    return any(rope.get("rope_type") == "longrope" for rope in rope_parameters_of(model.config.get_text_config()))


def rope_parameters_of(config: Any) -> list[dict[str, Any]]:
    """The rotary embeddings of a model: one for all layers, or one per type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [each for each in rope.values() if isinstance(each, dict)] or [rope]


class Target:
    """A HuggingFace causal LM that scores one token tree per row in one forward pass.

    Models that call registered attention functions get tree attention, older architectures get prepared masks. For
    chains of a single row the model makes its own masks. Within `serving`, its attention implementation changes.

    Args:
        model: The model.
        rows: Rows of the batch; 1 for chains.
        capacity: Slots per row to begin with.
        shape: What `score` takes: trees, or chains only.
        hidden_layers: Indices in `output_hidden_states` of the hidden states to keep.
        captures: Whether `score` records CUDA graphs, with trees padded to few sizes.
        most_nodes: Nodes of the largest expected tree, its root included.
        is_bitwise: Whether every node attends alone, so that in half precision on a CPU the logits have the bits of
            decoding each row alone, token by token (`lookahead.backend.cpu.exact_attention`). The prompts of several rows
            must be read one at a time.
        packs: Whether linear layers may keep packed copies of their weights (`lookahead.backend.cpu.linears`).
        has_kernels: Whether kernels may stand for linear layers and whole layers of the model.
        is_together: Whether `is_bitwise` means the bits of decoding all nodes of a pass as the rows of a batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int,
        capacity: int,
        shape: Shape = "trees",
        hidden_layers: Sequence[int] = (),
        captures: bool = False,
        most_nodes: int = 64,
        is_bitwise: bool = False,
        packs: bool = True,
        has_kernels: bool = True,
        is_together: bool = False,
    ) -> None:
        self._model = model
        self._prefix, self._encoded = "", dict[str, Any]()  # of the names of inputs, and further ones
        self._device = input_device(model)
        takes = inputs_of(model)
        self._keeps_logits = "logits_to_keep" in takes
        self._takes_positions = "position_ids" in takes
        self._takes_masks = shape == "trees"
        self._scope = None
        if self._takes_masks and model._can_set_attn_implementation():
            self._scope = AttentionScope(model)
        self._reads_at_once = prefills_at_once(model)
        is_fixed = captures and self._takes_masks and self._takes_positions
        self._windows = windows_of(model)
        kind = tuple(hidden_layers), most_nodes, str(self._device)
        kept = KeptGraphs.take(model, kind, rows, capacity, self._windows) if is_fixed else None
        self.cache = kept.cache if kept else TreeCache(rows=rows, capacity=capacity, windows=self._windows)
        self.positions = position_limit(model)
        self.is_aligned = False  # whether rows must accept equally many tokens, so that they keep one length
        self.counts_nodes = False  # whether a tree needs a position for every node, not only for every depth
        self._hidden_layers = tuple(hidden_layers)
        self.on_prefill: OnPrefill | None = None
        self.keeps_hidden = True  # whether later passes keep hidden states
        # By layer `[active, nodes of the largest tree, size]`, or `[prompts, 1, size]` of the last tokens of prompts.
        self.hidden: dict[int, Tensor] = {}
        self.prompt_hidden: list[dict[int, Tensor]] = []  # of the newest prefill, by prompt, `[tokens read, size]`
        self._is_served = False
        # In float32 the last bits do not change tokens, and packed heads are faster.
        self._is_half = model.dtype in (torch.bfloat16, torch.float16)
        self.is_exact = is_bitwise and self._is_half and self._scope is not None and not is_fixed
        self.is_bitwise = self.is_exact  # whether the newest prefill, and passes after it, have the bits of `generate`
        self.reads_alone = self.is_exact  # whether prompts must be read one at a time: so they keep their bits
        is_alone = self.is_exact and not is_together
        self._bits: Bits = "alone" if is_alone else "any" if rows == 1 and not is_together else "together"
        # A single node need not attend by torch either.
        is_bf16 = self._scope is not None and not is_fixed and model.dtype == torch.bfloat16
        self._takes_rows = is_bf16 and not any(self._windows) and takes_rows(model.config.get_text_config())
        # Each process measures whether packing pays, and tensor-parallel processes must compute the same bits.
        is_apart = not has_kernels or (getattr(model, "_tp_size", None) or 1) > 1
        self._served = nn.Identity() if is_apart else model
        self._linears = LinearScope(self._served, packs=packs)
        self.is_cold = False  # whether the newest pass did work, such as packing, that later ones do not repeat
        self._graphs = None
        if kept is not None:
            self._graphs = GraphRunner(
                model, kept, self._device, most_nodes=most_nodes, hidden_layers=self._hidden_layers,
                scope=self._scope,
            )  # fmt: skip

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Switch the model to tree attention in this target's passes, which all must run inside; blocks may be nested.

        Other calls of the model, on this thread or another, are not affected.
        """
        with torch.inference_mode():
            if self._is_served:
                yield
                return
            self._is_served = True
            try:
                scope = nullcontext() if self._scope is None else self._scope.serving()
                with outside_passes(), fused_layers.serving(self._served), self._linears.serving(), scope:
                    yield
            finally:
                self._is_served = False

    def join(self, encoded: Any) -> None:
        """Say what an encoder has read for the rows of the next prompts; without one there is nothing to say."""

    def prefill(self, prompts: Sequence[IntArray], first: int = 0) -> Tensor:
        """Read prompts into the cache. The last token of each is the first root, and is not committed yet.

        The prompts, int32 `[tokens]`, are those of the active rows from `first` on, each longer than the cache of its
        row. Returns the logits after their last tokens, `[prompts, 1, vocab]`.
        """
        with self.cache.slots.rows_from(first):
            return self._read_prompts(prompts)

    def _read_prompts(self, prompts: Sequence[IntArray]) -> Tensor:
        """`prefill` of all rows that are in the passes."""
        slots, report = self.cache.slots, self.on_prefill or (lambda *_: None)
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
        # In half precision prompts of one length are read in one pass, with the bits of `model.generate`. Without fused
        # causal attention the memory of a pass grows quadratically with its tokens.
        is_sdpa = self._model.config.get_text_config()._attn_implementation == "sdpa"
        is_fused = is_sdpa and not cached.any() and not any(self._windows)
        is_whole = self._is_half and not (np.ptp(new) or np.ptp(cached)) and (is_fused or width <= _MAX_WHOLE)
        is_whole = is_whole or self._reads_at_once
        # A hook may edit the end of a prompt, and would meet the end of every part.
        is_whole = is_whole or (width > PREFILL_CHUNK and bool(version_of(self._model).users))
        size = width if is_whole else PREFILL_CHUNK
        self.is_bitwise = self.is_exact and size >= width and len(prompts) == 1
        report(0, width)
        for start in range(0, width, size):
            chunk = np.ascontiguousarray(padded[:, start : start + size])
            # A row whose prompt has ended writes padding after it, into the slots of its later trees.
            committed[:] = cached + start
            ends = new - 1 - start
            ending = np.flatnonzero((ends >= 0) & (ends < chunk.shape[1]))
            keep, place = np.unique(ends[ending], return_inverse=True)
            keep = keep if len(keep) else np.zeros(1, np.int64)
            is_plain = self._is_half and not np.ptp(committed) and keep.tolist() == [chunk.shape[1] - 1]
            slots.begin(chunk.shape[1], is_plain=is_plain)
            tree_pass = TreePass(slots, self._device, prompt=(chunk, keep))
            logits = self._forward(tree_pass, "torch")
            last.update({int(row): logits[row, column] for row, column in zip(ending, place, strict=True)})
            hidden.append(self.hidden)
            report(min(start + size, width), width)
        committed[:] = lengths - 1
        whole = {layer: torch.cat([chunk[layer] for chunk in hidden], 1) for layer in self.hidden}
        self.prompt_hidden = [{layer: each[row, :n] for layer, each in whole.items()} for row, n in enumerate(new)]
        self.hidden = {layer: each[range(len(new)), new - 1][:, None] for layer, each in whole.items()}
        return torch.stack([last[row] for row in range(len(prompts))])[:, None]

    def score(self, trees: Sequence[TokenTree], scored: NDArray[np.int64] | None = None) -> Tensor:
        """Logits after every node, `[active, nodes of the largest tree, vocab]`, in one forward pass.

        Of each tree the first `scored` nodes, int64 `[active]` and at least 1, have their KV in their slots since an
        earlier pass, and no logits are returned of them. A prefill scores the root.
        """
        known, outputs = len(dispatch.verdicts) + len(dispatch.served), None
        self._linears.has_packed = False
        if self._graphs is not None and scored is None:
            outputs = self._graphs.score(trees)
        if outputs is not None:
            logits = outputs[0]
            self.hidden = dict(zip(self._hidden_layers, outputs[1:], strict=True)) if self.keeps_hidden else {}
        else:
            slots, sizes = self.cache.slots, np.array([len(tree.tokens) for tree in trees])
            width = int((sizes if scored is None else sizes - scored).max())
            # `model.generate` would run the same pass: one token a row, and rows of one length.
            is_plain = self._is_half and width == 1 and scored is None
            is_plain = is_plain and not np.ptp(slots.lengths[: len(trees)])
            # One prompt's nodes attend alone where a kernel does that, which is faster than one mask. Transformers'
            # own attention for several rows has other bits than for each alone.
            takes_rows = self._takes_rows and len(trees) == 1
            is_plain = is_plain and not takes_rows and (len(trees) == 1 or not self.is_exact)
            slots.begin(width, scored, is_plain=is_plain)
            windows = self._windows if self.is_exact or takes_rows else None
            tree_pass = TreePass(slots, self._device, trees, scored, windows=windows)
            logits = self._forward(tree_pass, self._bits)
        if dispatch.wanted:
            try_kernels(dispatch.wanted)
        is_new = len(dispatch.verdicts) + len(dispatch.served) > known
        is_recording = self._graphs is not None and self._graphs.is_cold
        self.is_cold = is_new or self._linears.has_packed or is_recording
        return logits

    def commit(self, row: int, path: IntArray) -> None:
        """Keep the KV of an accepted path (int32 `[a]`, from node 0) of a row's tree."""
        self.cache.commit(row, path)

    def retire(self, row: int) -> int:
        """Remove a finished row from the passes; returns the row that took its place."""
        return self.cache.retire(row)

    def _forward(self, tree_pass: TreePass, bits: Bits) -> Tensor:
        """One pass of the model; returns the logits of all columns, or of those to keep."""
        options = {CACHE: self.cache, f"{self._prefix}input_ids": tree_pass.tokens, **self._encoded}
        is_plain, keeps = self.cache.slots.is_plain, len(tree_pass.keep) > 0
        if self._keeps_logits and keeps:
            options["logits_to_keep"] = 1 if is_plain else tree_pass.keep
        if self._takes_positions:
            options[f"{self._prefix}position_ids"] = tree_pass.positions
        scope: AbstractContextManager[None] = nullcontext()
        if self._takes_masks and not is_plain:
            if self._scope is not None:
                scope = self._scope.running(tree_pass)
            else:
                mask = tree_pass.mask(1, AttentionSpan(), self._model.dtype, self._device)
                options[f"{self._prefix}attention_mask"] = mask
        keeps_hidden = self.keeps_hidden and bool(self._hidden_layers)
        if keeps_hidden:
            options["output_hidden_states"] = True
        as_one = tree_pass.has_trees and not keeps_hidden
        with self._linears.running(bits), fused_layers.running(as_one=as_one), scope:
            output = self._model(use_cache=True, **options)
        states: Sequence[Tensor] = getattr(output, "hidden_states", None) or ()
        self.hidden = {}
        for layer in self._hidden_layers if keeps_hidden else ():
            if not -len(states) <= layer < len(states):
                raise UnsupportedModelError(
                    f"a proposer asks for hidden states {layer}, and the model has {len(states)}"
                )
            self.hidden[layer] = states[layer]
        logits: Tensor = output.logits
        return logits[:, tree_pass.keep] if keeps and not self._keeps_logits else logits
