"""Trained heads as a source of drafts: a folder in the configuration, a proposer in every call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lookahead.heads.medusa import MedusaHeads
from lookahead.heads.rates import HeadRates
from lookahead.proposers.base import Call, Proposer
from lookahead.proposers.parallel import ParallelProposer


class Heads:
    """Drafts from heads that were trained for the model, see `lookahead train`.

    They are read when a model is first decoded with them, and what is learned of them stays for later calls.

    Example:
        `LookaheadConfig(proposers=("prompt", "recycled", lookahead.Heads("heads/")))`

    Args:
        folder: What `lookahead train` wrote, or a published Medusa checkpoint in safetensors.
        name: What the source is called in the stats.

    Raises:
        HeadsError: When called: there are none in the folder, or they belong to another model.
    """

    def __init__(self, folder: str | os.PathLike[str], *, name: str = "medusa") -> None:
        self._folder = os.fspath(folder)
        self._name = name
        self._loaded: WeakKeyDictionary[Any, tuple[MedusaHeads, HeadRates]] = WeakKeyDictionary()

    def __call__(self, call: Call) -> Proposer:
        """The proposer of one call."""
        if call.model not in self._loaded:
            heads = MedusaHeads.load(self._folder, call.model)
            self._loaded[call.model] = (heads, HeadRates(len(heads)))
        heads, rates = self._loaded[call.model]
        return ParallelProposer(_Medusa(heads), rates, call, name=self._name, reads_all=False)


class _Medusa:
    """Medusa heads, which remember the newest hidden state of a row and nothing else."""

    def __init__(self, heads: MedusaHeads) -> None:
        self.heads = len(heads)
        self._network = heads
        self._newest: dict[int, Tensor] = {}

    def read(self, row: int, states: Tensor) -> None:
        """Keep the last of `[n, hidden]`."""
        self._newest[row] = states[-1]

    def guess(self, rows: Sequence[int]) -> Tensor:
        """Logits of every head, `[heads, rows, vocab]`."""
        logits: Tensor = self._network(torch.stack([self._newest[row] for row in rows]))
        return logits

    def forget(self, row: int) -> None:
        """Forget a row."""
        self._newest.pop(row, None)
