"""Draft heads as a proposer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.drafting.proposal import BatchProposer, Call, Feedback, IntArray, Proposal, Proposer
from lookahead.heads.guess_tree import GuessTree, HeadDrafter
from lookahead.heads.head_files import Network, fresh_rates, make_drafter, open_heads
from lookahead.heads.layers import lm_head
from lookahead.models.model_state import state_of
from lookahead.ngram.acceptance import AcceptanceTable


class Heads:
    """Drafts from heads that were trained for the model, see `lookahead train`.

    They are read when a model is first decoded with them, and their hit rates stay for later calls.

    Example:
        `LookaheadConfig(proposers=("prompt", "recycled", lookahead.Heads("heads/")))`

    Args:
        folder: What `lookahead train` wrote, a published checkpoint of Medusa or EAGLE in safetensors, or `"native"`
            for the MTP layer of the model's own checkpoint.
        name: What the source is called in the stats; their kind when None.

    Raises:
        HeadsError: When called: there are none in the folder, or they belong to another model.
    """

    def __init__(self, folder: str | os.PathLike[str], *, name: str | None = None) -> None:
        self._folder = os.fspath(folder)
        self._name = name

    def __call__(self, call: Call) -> Proposer:
        """The proposer of one call."""
        kind, network, rates = state_of(call.model).learned.of(self, partial(self._open, call.model))
        drafter = make_drafter(network, call.model, rates, call.warp, call.rows)
        return HeadsProposer(drafter, rates, self._name or kind, lm_head(call.model).weight.device)

    def _open(self, model: PreTrainedModel) -> tuple[str, Network, AcceptanceTable]:
        kind, network = open_heads(self._folder, model)
        return kind, network, fresh_rates(network)


@dataclass(slots=True)
class _HeadsRow:
    """One row: its last token, what its heads have not read yet, and its last draft."""

    root: int
    prompt: IntArray | None
    tokens: list[IntArray] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)  # of every step, by layer
    tree: GuessTree | None = None


class HeadsProposer(BatchProposer):
    """Lets heads read what was decoded, offers what they guess, and counts what was right."""

    def __init__(self, drafter: HeadDrafter, rates: AcceptanceTable, name: str, device: torch.device) -> None:
        self.sources = (name,)
        self.hidden_layers = drafter.hidden_layers
        self._drafter = drafter
        self._rates = rates
        self._device = device
        self._rows: dict[int, _HeadsRow] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        """Add a row."""
        self._rows[row] = _HeadsRow(int(prompt[-1]), prompt)

    def propose_batch(self, rows: Sequence[int], max_nodes: int) -> Sequence[Proposal | None]:
        """Let the heads read and guess for all rows at once."""
        with torch.inference_mode():
            self._read([row for row in rows if self._rows[row].states])
            trees = self._drafter.draft(rows, max_nodes)
        offers = []
        for state, tree in zip((self._rows[row] for row in rows), trees, strict=True):
            state.tree = tree
            offers.append(Proposal(*tree.best(state.root, self._rates, max_nodes)))
        return [offer if len(offer.tokens) > 1 else None for offer in offers]

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Count which guesses were right, and keep for later what the heads are to read."""
        state = self._rows[row]
        if state.tree is not None:
            tree = state.tree
            self._rates.learn(tree.parents, tree.tokens, tree.kinds, tree.draft_probs, feedback.tokens)
            state.tree = None
        tokens = feedback.tokens
        path = torch.from_numpy(feedback.path)
        states = [feedback.hidden[layer][path.to(feedback.hidden[layer].device)] for layer in self.hidden_layers]
        if state.prompt is not None:
            # Behind every token of the prompt stands the next one, and behind its last the first that was emitted.
            states = [feedback.prompt_hidden[layer] for layer in self.hidden_layers]
            tokens = np.concatenate((state.prompt[len(state.prompt) + 1 - len(states[0]) :], tokens))
        state.tokens.append(tokens)
        state.states.append(states)
        state.prompt, state.root = None, int(tokens[-1])

    def finish(self, row: int) -> None:
        """Forget the row; what was learned stays."""
        del self._rows[row]
        self._drafter.forget(row)

    def _read(self, rows: Sequence[int]) -> None:
        """Let the heads read what is new in some rows."""
        if not rows:
            return
        states = []
        for row in rows:  # the steps behind one another, all layers side by side: [tokens, layers * size]
            layers = [torch.cat(layer).to(self._device) for layer in zip(*self._rows[row].states, strict=True)]
            states.append(torch.cat(layers, -1))
        tokens = [torch.from_numpy(np.concatenate(self._rows[row].tokens)).long().to(self._device) for row in rows]
        self._drafter.read(rows, tokens, states)
        for row in rows:
            self._rows[row].tokens.clear()
            self._rows[row].states.clear()
