"""The CPU backend: packed weights, fused layers, whole passes as one call, attention per node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.backend.cpu.cpu_pass import CpuPass, running, thread
from lookahead.backend.cpu.exact_attention import takes_rows
from lookahead.backend.cpu.fused_layers import FusedLayers, find_fused
from lookahead.backend.cpu.linears import LinearScope
from lookahead.backend.cpu.state_bits import Mixing, mixing_of
from lookahead.backend.cpu.tree_mixers import TreeMixer, find_mixers
from lookahead.backend.cpu.whole_pass import WholePass, whole_pass
from lookahead.backend.pass_attention import attend
from lookahead.backend.protocol import BackendReport, BitPolicy, PathReport
from lookahead.backend.torch_backend import TorchBackend
from lookahead.backend.tree_pass import PackedPrompts, TreePass
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import prompt_attention
from lookahead.loading.quantized import kinds_in_words
from lookahead.model.facts import decoder_vocabulary
from lookahead.model.level_calls import MixTrees
from lookahead.model.model_state import patched_attribute, plan_of, state_of
from lookahead.model.stamp import form_of


class CpuParts(NamedTuple):
    """The modules of a model that kernels compute, found once for its plan and form."""

    fused: FusedLayers
    linears: LinearScope
    whole: WholePass | str  # or why passes are not one call
    forwards: list[tuple[nn.Module, None, Callable[..., Any]]]  # for `patched_attribute`
    mixers: dict[nn.Module, TreeMixer]  # recurrent modules

    @classmethod
    def of(cls, model: Any, served: Any, *, packs: bool, has_trees: bool) -> CpuParts:
        """Find the parts of a model.

        Args:
            model: The model.
            served: The model, or a module of nothing if kernels must compute nothing of it.
            packs: Whether linear layers may keep packed copies of their weights.
            has_trees: Whether its attention takes trees.
        """
        linears, fused = LinearScope(served, packs=packs), find_fused(served)
        mixers = find_mixers(model) if served is model else {}
        # Chains are verified under the model's own masks, which a user may have changed.
        whole: WholePass | str = "it verifies chains, by its own masks"
        if has_trees:
            whole = whole_pass(served, fused, linears, state_of(model).threads, mixers)
        return cls(fused, linears, whole, [*fused.forwards, *linears.forwards()], mixers)


class CpuBackend(TorchBackend):
    """A `TorchBackend` that runs products and layers by kernels, with the bits of token-by-token decoding on request.

    The model's own code runs whatever the kernels do not support. In half precision every node may attend alone, so
    that the logits have the bits of each row alone (`lookahead.backend.cpu.exact_attention`).

    Args:
        model: The model.
        packs: Whether linear layers may keep packed copies of their weights.
        has_kernels: Whether kernels may replace linear layers and whole layers of the model.
        mixing: How recurrent layers run; compared and measured if None.
        is_draft: Whether the model only drafts. What kernels compute of it is then found once, not at every service.
        packs_prompts: Whether `read` takes several prompts without padding, as `self_check.packs_prompts` allows.
        shares_beginnings: Tells whether half-precision prompts may copy beginnings of others.
        **options: Options of `TorchBackend`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        packs: bool = True,
        has_kernels: bool = True,
        mixing: Mixing | None = None,
        is_draft: bool = False,
        packs_prompts: bool = False,
        shares_beginnings: Callable[[], bool] = bool,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self._is_draft, self._has_parts, self.packs_prompts = is_draft, False, packs_prompts
        self._is_sharing = shares_beginnings
        self._packs, self._has_bits = packs, self._is_half and self._scope is not None
        # Tensor-parallel processes must compute the same bits, but each would measure on its own whether packing pays.
        self._why_apart = "" if has_kernels else "its kernels compute differently from the model's own code"
        plan = plan_of(model)
        if plan.processes > 1:
            self._why_apart = "it is spread over several processes"
        self._served: nn.Module = nn.Identity() if self._why_apart else model
        self._mixing = mixing or (self._measured_mixing(model) if self.cache.states else Mixing())
        self._parts: CpuParts  # found when the model is in service
        # A single node need not attend by torch.
        self._takes_rows = self._scope is not None and model.dtype == torch.bfloat16
        if self._takes_rows:
            config = model.config.get_text_config()
            self._takes_rows = plan.part("attention of rows", plan.form, partial(takes_rows, config))

    def _measured_mixing(self, model: PreTrainedModel) -> Mixing:
        """How the recurrent layers of a model run, compared once for its weights."""
        plan, is_half = plan_of(model), self._keeps(BitPolicy.SOLO)
        mixers = {} if self._why_apart else plan.part("mixers", plan.form, partial(find_mixers, model))
        if not (mixers or is_half):
            return Mixing()
        name = f"mixers, {torch.get_num_threads()} threads{', passes' if mixers else ''}"
        make = partial(type(self), model, rows=1, capacity=64)
        find = partial(
            mixing_of,
            lambda mixing: make(packs=mixing.by_kernels, mixing=mixing),
            mixers.values(), decoder_vocabulary(model), is_half=self._is_half,
        )  # fmt: skip
        return state_of(model).probed(name, model, find, Mixing.of)

    def mix(self, mixer: TreeMixer, hidden: Tensor, *, by_kernels: bool) -> Tensor:
        """The output of a recurrent module alone, within `serving`: by its kernels, or by its own code node by node.

        Args:
            mixer: The module.
            hidden: Its input for the nodes of the tree that the cache has begun, `[1, nodes, size]`, or for a text.
            by_kernels: Whether kernels run; not for a text.
        """
        linears, kernels = self._parts.linears, {mixer.module: mixer} if by_kernels else {}
        mode = CpuPass(BitPolicy.SOLO, packs=linears.packs, fewest=linears.fewest)
        assert self._states is not None
        with running(mode), self._states.running(1, kernels):
            out: Tensor = mixer.module(hidden, **{mixer.cache: self.cache})
        return out

    def _nodes_of_call(self, policy: BitPolicy) -> int | None:
        return self._mixing.most if policy is BitPolicy.SOLO and self._keeps(policy) else None

    @contextmanager
    def _patched(self) -> Iterator[None]:
        if not (self._is_draft and self._has_parts):
            model, served, packs, has_trees = self._model, self._served, self._packs, self._scope is not None
            name = "parts for a CPU", packs, has_trees, served is model, torch.get_num_threads()
            make = partial(CpuParts.of, model, served, packs=packs, has_trees=has_trees)
            self._parts, self._has_parts = plan_of(model).part(name, form_of(model).number, make), True
        mixers: Mapping[Any, MixTrees] = self._parts.mixers
        self._mixers = mixers if self._mixing.by_kernels else {}
        with patched_attribute("forward", self._parts.forwards):
            yield

    def _keeps(self, policy: BitPolicy) -> bool:
        return policy is not BitPolicy.ROUNDED and self._has_bits

    def _attention_of(self, trees: Sequence[TokenTree], policy: BitPolicy) -> tuple[Sequence[int | None] | None, bool]:
        is_exact, is_one = policy is not BitPolicy.ROUNDED and self._has_bits, len(trees) == 1
        # The nodes of a single row attend per node if a kernel supports it, which is faster than a mask. An encoder's
        # output is the exception: all nodes attend to it in one call. Transformers' own attention over several rows has
        # other bits than over each row alone.
        takes_rows = self._takes_rows and is_one and (is_exact or not self._inputs.has_cross)
        windows = self._windows if is_exact or takes_rows else None
        is_whole = is_one and is_exact and isinstance(self._parts.whole, WholePass)  # which the model's own is not
        return windows, not (takes_rows or is_whole) and (is_one or not is_exact)

    def _shares_beginnings(self) -> bool:
        is_usual = self._takes_rows and not (self._why_apart or self._runs_own_code or any(self._windows))
        return is_usual and self._is_sharing()

    def _forward(self, tree_pass: TreePass, policy: BitPolicy) -> Tensor:
        if self._rows > 1 and policy is BitPolicy.ROUNDED:
            policy = BitPolicy.BATCH  # passes that `model.generate` would also run have its bits
        linears, whole = self._parts.linears, self._parts.whole
        is_prompt = not tree_pass.trees
        by_kernels = not self._runs_own_code
        packs, packs_experts = (allowed and by_kernels for allowed in (linears.packs, linears.packs_experts))
        last_rows = len(tree_pass.keep) if isinstance(tree_pass, PackedPrompts) else 0
        mode = CpuPass(policy, is_prompt, packs, packs_experts, linears.fewest, last_rows)
        layers = self._hidden_layers if self.keeps_hidden else ()
        with running(mode, fuses=by_kernels) as seen:
            result = None
            mixes = not self.cache.states or bool(self._mixers)
            if isinstance(whole, WholePass) and seen is not None and not is_prompt and by_kernels and mixes:
                assert self._scope is not None
                attending = partial(self._scope.running, partial(attend, tree_pass, self._spans))
                result = whole(tree_pass, self.cache, seen, layers, attending, self._known)
            if not is_prompt:
                self.is_ragged = result is not None
                self.ragged_nodes = whole.most_nodes if isinstance(whole, WholePass) else 0
            if result is None:
                is_usual = by_kernels and self._takes_rows and not (self._why_apart or any(self._windows))
                is_long = self.cache.slots.width >= prompt_attention.FEWEST
                is_served = seen is not None and not self._inputs.has_cross
                tree_pass.reads_by_kernel = is_usual and is_long and is_served
                logits = super()._forward(tree_pass, policy)
            else:
                logits, self.hidden = result
            self.is_cold = thread.is_cold
        return logits

    def report(self, policy: BitPolicy = BitPolicy.ROUNDED) -> BackendReport:
        """See `Backend.report`."""
        fused, linears, whole, apart = *self._parts[:3], self._why_apart
        plain, layers = linears.counts
        packed = linears.reason or f"{plain} of {layers} linear layers"
        one_call = "" if isinstance(whole, WholePass) else whole
        if self._rows > 1 and self._is_half:
            one_call = one_call or "passes over several rows are where each keeps the bits it has alone"
        quantized = kinds_in_words(self._model) if getattr(self._model, "is_quantized", False) else ""
        most = torch.get_num_threads()
        threads = state_of(self._model).threads.get(most, most) if isinstance(whole, WholePass) else 1
        shared = "; ".join(filter(None, (getattr(whole, "detail", ""), f"on {threads} threads" if threads > 1 else "")))
        mixers, states = len(self._mixers), len(self.cache.states)
        mixed = f"{mixers} of {states} layers" if mixers else "they are for gated delta nets and short convolutions"
        share = f"{len(fused.layers)} of {fused.total} layers"
        report = super().report(policy)
        paths = (
            *report.paths,
            PathReport(
                "nodes that attend by a kernel of their own", self._takes_rows,
                "" if self._takes_rows else "it is for bfloat16, SDPA and CPUs with its order of sums",
            ),
            *([PathReport("quantized layers", True, quantized)] if quantized else []),
            *([PathReport("states by kernels", mixers > 0, apart or mixed)] if states else []),
            PathReport("packed weights", linears.packs and linears.copies, apart or packed),
            PathReport("fused layers", bool(fused.layers), apart or "; ".join(filter(None, (share, fused.reason)))),
            PathReport("passes as one call", not one_call, apart or one_call or shared),
        )  # fmt: skip
        return replace(report, paths=paths)


@contextmanager
def packed_products(model: PreTrainedModel) -> Iterator[None]:
    """Let a model's linear layers use packed weights on this thread, with the bits of torch's products."""
    linears = LinearScope(model)
    mode = CpuPass(BitPolicy.BATCH, packs=linears.packs, fewest=linears.fewest)
    with patched_attribute("forward", linears.forwards()), running(mode, fuses=False):
        yield
