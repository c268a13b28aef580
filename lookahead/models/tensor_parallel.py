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
    each other forever. So the first process sends its drafts. Everything after the draft follows from the logits, which
    are the same in all processes.

    Args:
        group: The process group of the model.
        device: The device of the model, from which the group sends tensors.

    Attributes:
        leads: Whether this process drafts.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._leader = torch.distributed.get_global_rank(group, 0)
        self.leads = torch.distributed.get_rank(group) == 0

    def agree(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts of the leader: the sizes of all trees are broadcast, then the trees.

        Args:
            drafts: One per row; ignored in all processes but the leader.
        """
        sizes = self._send(np.array([len(draft.tree) for draft in drafts], np.int32))
        nodes = np.zeros((5, int(sizes.sum())), np.int32)
        if self.leads:
            np.concatenate([_pack(draft) for draft in drafts], 1, out=nodes)
        nodes = self._send(nodes)
        if self.leads:
            return list(drafts)
        return [_unpack(*part) for part in np.split(nodes, np.cumsum(sizes)[:-1], 1)]

    def _send(self, numbers: IntArray) -> IntArray:
        """Broadcast the leader's numbers; the others pass an array of the same shape."""
        sent = torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device)
        torch.distributed.broadcast(sent, src=self._leader, group=self._group)
        received: IntArray = sent.cpu().numpy()
        return received


def _pack(draft: Draft) -> IntArray:
    """A draft as int32 `[5, nodes]`: tokens, parents, depths, and the two halves of every float64 path probability."""
    halves = np.ascontiguousarray(draft.path_probs, np.float64).view(np.int32).reshape(-1, 2)
    return np.concatenate(([draft.tree.tokens, draft.tree.parents, draft.tree.depths], halves.T))


def _unpack(tokens: IntArray, parents: IntArray, depths: IntArray, *halves: IntArray) -> Draft:
    """The draft of the leader, without the sources of its nodes."""
    path_probs = np.stack(halves, 1).view(np.float64)[:, 0]
    return Draft(TokenTree(tokens, parents, depths, np.zeros(len(tokens), np.int32)), (), path_probs)


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
    """Refuse options that tensor parallelism does not support.

    Args:
        model: The model.
        reads_hidden: Whether a source of drafts reads hidden states, as trained heads do.
        by_rejection: Whether drafts are accepted by rejection sampling.

    Raises:
        UnsupportedModelError: One of the options is used; the message names it.
    """
    what = "heads that read its hidden states" if reads_hidden else "acceptance='rejection'" if by_rejection else ""
    if what:
        raise UnsupportedModelError(f"{type(model).__name__} is spread over several processes, and cannot use {what}")
