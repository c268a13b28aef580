"""The GPU backend: tested kernels for trees, and passes recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.backend.gpu import cuda_graphs
from lookahead.backend.gpu.cuda_graphs import CAPTURE_AT, GraphRunner, KeptGraphs
from lookahead.backend.gpu.kernel_trial import try_kernels
from lookahead.backend.protocol import BackendReport, BitPolicy, PathReport
from lookahead.backend.torch_backend import TorchBackend
from lookahead.backend.tree_pass import TreePass
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import dispatch
from lookahead.kernels.dispatch import COMPACTION, KernelVariant
from lookahead.model.calls import ModelInputs
from lookahead.model.model_state import state_of


class GpuBackend(TorchBackend):
    """A `TorchBackend` that tests kernels for trees before it uses them, and can record passes.

    Args:
        model: The model.
        captures: Whether `score` records CUDA graphs, with trees padded to few sizes.
        most_nodes: Nodes of the largest expected tree, its root included.
        **options: Options of `TorchBackend`.
    """

    warm_ups = CAPTURE_AT + 1  # the last one compares a replay with its pass

    def __init__(self, model: PreTrainedModel, *, captures: bool = False, most_nodes: int = 64, **options: Any) -> None:
        super().__init__(model, **options)
        self._graphs: GraphRunner | None = None
        inputs, is_plain = self._inputs, type(self._inputs) is ModelInputs and not self.cache.states
        captures = captures and not cuda_graphs.graphs_unsupported_reason(model, self._device)
        if captures and self._takes_masks and inputs.takes_positions and is_plain:
            kind, slots = (self._hidden_layers, most_nodes, str(self._device)), self.cache.slots
            kept = KeptGraphs.take(model, kind, slots.rows, slots.capacity, self._windows)
            self.begin(slots.capacity, kept.cache)
            self._graphs = GraphRunner(
                model, kept, self._device, most_nodes=most_nodes, hidden_layers=self._hidden_layers,
                scope=self._scope, spans=self._spans,
            )  # fmt: skip

    def score(
        self,
        trees: Sequence[TokenTree],
        policy: BitPolicy = BitPolicy.ROUNDED,
        scored: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """See `Backend.score`; replays a recording if there is one."""
        count, result = len(dispatch.verdicts) + len(dispatch.served), None
        if self._graphs is not None and scored is None and not self._runs_own_code:
            result = self._graphs.score(trees, self.reads_top, keeps_logits=self.keeps_logits)
        if result is None:
            logits, self.ranks = super().score(trees, policy, scored), None
        else:
            logits, self.ranks, hidden = result
            self.hidden = dict(zip(self._hidden_layers, hidden, strict=True)) if self.keeps_hidden else {}
        if dispatch.wanted:
            try_kernels(dispatch.wanted)
        is_new = len(dispatch.verdicts) + len(dispatch.served) > count
        self.is_cold = is_new or (self._graphs is not None and self._graphs.is_cold)
        return logits

    def _forward(self, tree_pass: TreePass, policy: BitPolicy) -> Tensor:
        logits = super()._forward(tree_pass, policy)
        if tree_pass.unserved:
            state_of(self._model).unserved = frozenset(tree_pass.unserved)
        return logits

    def _kernels(self) -> PathReport:
        """Whether kernels served the newest pass over drafts of the model."""
        reasons = state_of(self._model).unserved
        if reasons is None:
            prepared = "" if self._scope is not None else "the model takes prepared masks"
            reason = dispatch.unserved_device(self._device) or prepared or "no pass over drafts has asked for one yet"
            reasons = frozenset((reason,))
        compaction = dispatch.verdicts.get(KernelVariant(self._device, kernel=COMPACTION))
        problems = [f"{COMPACTION}: {compaction.problem}"] if compaction is not None and compaction.problem else []
        return PathReport("kernels for trees", "" in reasons, "; ".join([*sorted(filter(None, reasons)), *problems]))

    def report(self, policy: BitPolicy = BitPolicy.ROUNDED) -> BackendReport:
        """See `Backend.report`."""
        unsupported = cuda_graphs.graphs_unsupported_reason(self._model, self._device)
        graphs = self._graphs.problem if self._graphs is not None else unsupported or "its passes read more than tokens"
        report = super().report(policy)
        return replace(report, paths=(*report.paths, self._kernels(), PathReport("CUDA graphs", not graphs, graphs)))
