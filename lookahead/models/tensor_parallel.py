"""Tensor parallelism: several processes hold one model. The first one drafts, and all verify the same trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lookahead.drafting.select import Draft
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.errors import UnsupportedModelError


class TensorParallelGroup:
    """The processes of a model under tensor parallelism, which run every pass together.

    A draft depends on measured seconds, which differ between processes, and passes over different trees would wait for
    each other forever. So the first process sends its drafts. All else follows from the logits, which are the same.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._leader = torch.distributed.get_global_rank(group, 0)
        self.leads = torch.distributed.get_rank(group) == 0  # whether this process drafts

    def agree(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts of the leader, one per row; those of other processes are ignored."""
        sizes = self._send(np.array([len(draft.tree) for draft in drafts], np.int32))
        nodes: IntArray = np.zeros((5, int(sizes.sum())), np.int32)
        if self.leads:  # tokens, parents, depths, and the two halves of every float64 path probability
            trees = [(draft.tree.tokens, draft.tree.parents, draft.tree.depths) for draft in drafts]
            halves = [draft.path_probs.astype(np.float64).view(np.int32).reshape(-1, 2).T for draft in drafts]
            np.concatenate([np.concatenate(pair) for pair in zip(trees, halves, strict=True)], 1, out=nodes)
        nodes = self._send(nodes)
        if self.leads:
            return list(drafts)
        return [
            # Without the sources of the nodes.
            Draft(TokenTree(tokens, parents, depths, np.zeros_like(tokens)), (), np.stack(halves, 1).view(float)[:, 0])
            for tokens, parents, depths, *halves in np.split(nodes, np.cumsum(sizes)[:-1], 1)
        ]

    def _send(self, numbers: IntArray) -> IntArray:
        """Broadcast the leader's numbers; the others pass an array of the same shape."""
        sent = torch.from_numpy(numbers).to(self._device)
        torch.distributed.broadcast(sent, src=self._leader, group=self._group)
        received: IntArray = sent.cpu().numpy()
        return received


def tensor_parallel_group(model: nn.Module) -> TensorParallelGroup | None:
    """The processes that hold a model together; None if this one holds all of it."""
    if (getattr(model, "_tp_size", None) or 1) == 1 or not torch.distributed.is_initialized():
        return None
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    mesh: Any = next((mesh for mesh in meshes if mesh is not None), None)
    device = next(model.parameters()).device
    if mesh is None:
        return TensorParallelGroup(torch.distributed.group.WORLD, device)
    return TensorParallelGroup((mesh["tp"] if mesh.ndim > 1 else mesh).get_group(), device)


def validate_tensor_parallel(model: nn.Module, *, reads_hidden: bool, by_rejection: bool) -> None:
    """Refuse what tensor parallelism does not support: heads that read hidden states, and rejection sampling."""
    what = "heads that read its hidden states" if reads_hidden else "acceptance='rejection'" if by_rejection else ""
    if what:
        raise UnsupportedModelError(f"{type(model).__name__} is spread over several processes, and cannot use {what}")
