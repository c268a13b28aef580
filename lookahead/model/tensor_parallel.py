"""Tensor parallelism: several processes share a model. The first one drafts, and all verify the same trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lookahead.drafting.select import Draft
from lookahead.drafting.tree import TokenTree
from lookahead.errors import UnsupportedModelError
from lookahead.model.facts import processes_of


class TensorParallelGroup:
    """The processes of a model under tensor parallelism, which run every pass together.

    Drafts depend on measured times, which differ between processes, and passes over different trees would deadlock. So
    the first process sends its drafts. Everything else follows from the logits, which are equal.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._leader = torch.distributed.get_global_rank(group, 0)
        self.leads = torch.distributed.get_rank(group) == 0  # whether this process drafts

    def agree(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts of the leader, one per row; drafts of other processes are ignored."""
        sizes = self._send(np.array([len(draft.tree) for draft in drafts])).astype(int)
        nodes = np.zeros((4, sizes.sum()))
        if self.leads:
            trees = [(draft.tree.tokens, draft.tree.parents, draft.tree.depths, draft.path_probs) for draft in drafts]
            np.concatenate(trees, 1, out=nodes)
        nodes = self._send(nodes)
        if self.leads:
            return list(drafts)
        agreed = []
        for *tree, path_probs in np.split(nodes, np.cumsum(sizes)[:-1], 1):
            tokens, parents, depths = (array.astype(np.int32) for array in tree)
            sources = np.zeros_like(tokens)  # not sent
            agreed.append(Draft(TokenTree(tokens, parents, depths, sources), (), path_probs))
        return agreed

    def _send(self, numbers: NDArray[Any]) -> NDArray[np.float64]:
        """Broadcast the leader's numbers, as float64; the others pass an array of the same shape."""
        sent = torch.from_numpy(numbers.astype(np.float64)).to(self._device)
        torch.distributed.broadcast(sent, src=self._leader, group=self._group)
        received: NDArray[np.float64] = sent.cpu().numpy()
        return received


def tensor_parallel_group(model: nn.Module) -> TensorParallelGroup | None:
    """The processes that share a model; None if this one holds all of it."""
    if processes_of(model) == 1 or not torch.distributed.is_initialized():
        return None
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    mesh: Any = next((mesh for mesh in meshes if mesh is not None), None)
    device = next(model.parameters()).device
    if mesh is None:
        return TensorParallelGroup(torch.distributed.group.WORLD, device)
    return TensorParallelGroup((mesh["tp"] if mesh.ndim > 1 else mesh).get_group(), device)


def validate_tensor_parallel(model: nn.Module, *, reads_hidden: bool, by_rejection: bool) -> None:
    """Refuse features that tensor parallelism does not support: heads that read hidden states, rejection sampling."""
    what = "heads that read its hidden states" if reads_hidden else "acceptance='rejection'" if by_rejection else ""
    if what:
        raise UnsupportedModelError(f"{type(model).__name__} is spread over several processes, and cannot use {what}")
