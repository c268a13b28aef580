"""Processes that hold a share each of one model: the first one drafts, and the others verify the same trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lookahead.drafting import Draft, FloatArray
from lookahead.errors import UnsupportedModelError
from lookahead.tree import IntArray, TokenTree


class Ensemble:
    """The processes of a model under tensor parallelism, each of which takes every pass with the others.

    What a draft holds depends on measured seconds too, which no two processes agree on; passes over different trees
    would wait for each other forever. Everything behind the draft follows from the logits, which are the same.

    Args:
        group: The process group of the model's shares.

    Attributes:
        leads: Whether this process drafts.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._leader = torch.distributed.get_global_rank(group, 0)
        self.leads = torch.distributed.get_rank(group) == 0

    def agree(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts of the leader, which are its own there.

        Args:
            drafts: One per row; those of the others do not count.
        """
        mine = [(draft.tree.tokens, draft.tree.parents, draft.tree.depths, draft.reach) for draft in drafts]
        shared = [mine if self.leads else None]
        torch.distributed.broadcast_object_list(shared, src=self._leader, group=self._group)
        return list(drafts) if self.leads else [_followed(*arrays) for arrays in shared[0] or ()]


def _followed(tokens: IntArray, parents: IntArray, depths: IntArray, reach: FloatArray) -> Draft:
    """The draft of another process; where its nodes come from is known there."""
    return Draft(TokenTree(tokens, parents, depths, np.zeros(len(tokens), np.int32)), (), reach)


def ensemble_of(model: nn.Module) -> Ensemble | None:
    """The processes that a model is spread over; None where this one holds all of it."""
    if (getattr(model, "_tp_size", None) or 1) == 1 or not torch.distributed.is_initialized():
        return None
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    mesh: Any = next((mesh for mesh in meshes if mesh is not None), None)
    if mesh is None:
        return Ensemble(torch.distributed.group.WORLD)
    return Ensemble((mesh["tp"] if mesh.ndim > 1 else mesh).get_group())


def refuse_in_ensemble(model: nn.Module, *, reads_hidden: bool, by_rejection: bool) -> None:
    """Refuse what one process of several cannot draft or verify by itself.

    Args:
        model: The model.
        reads_hidden: Whether a source of drafts reads hidden states, as trained heads do, which then run layers of it.
        by_rejection: Whether drafts are drawn, and accepted by rejection sampling.

    Raises:
        UnsupportedModelError: With what it is.
    """
    what = "heads that read its hidden states" if reads_hidden else "acceptance='rejection'" if by_rejection else ""
    if what:
        raise UnsupportedModelError(f"{type(model).__name__} is spread over several processes, and cannot use {what}")
