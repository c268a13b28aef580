"""Trees of guesses, and proposers that grow them with heads."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.drafting.budget import PassTimes
from lookahead.drafting.proposal import BatchProposer, Feedback, Proposal
from lookahead.ngram.chains import IntArray
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.ngram.prune import best_nodes
from lookahead.plugins.heads.target import gather_positions, lm_head

FloatArray = NDArray[np.float32]
Warp = Callable[[Tensor], Tensor]
Run = Callable[[int, Tensor, Tensor, Tensor], Tensor]
WIDTH = 8  # guesses after a node
MIN_PATH_PROB = 0.03  # minimum probability of the most likely parent of a further level


class GuessTree(NamedTuple):
    """Guesses as a tree of nodes. Node 0 is the root, the last token of the row; its values are ignored."""

    tokens: IntArray
    parents: IntArray  # parents come before their children; 0 for the root
    kinds: IntArray  # [nodes, 2]: the head or the depth, from 0, and the rank among the guesses after the parent
    draft_probs: FloatArray  # the head's probability given the parent

    @classmethod
    def of(cls, tokens: IntArray, parents: IntArray, kinds: IntArray, draft_probs: FloatArray) -> GuessTree:
        """Build a tree from guesses; guess i is node i + 1."""
        kinds = np.concatenate((np.zeros((1, 2), np.int32), kinds))
        draft_probs = np.append(np.float32(1), np.nan_to_num(draft_probs))  # heads that overflow give NaN
        return cls(np.append(np.int32(0), tokens), np.append(np.int32(0), parents), kinds, draft_probs)

    def best(self, root: int, rates: AcceptanceTable, max_nodes: int) -> tuple[IntArray, IntArray, FloatArray]:
        """Tokens, parents and probabilities of `root` and the most likely guesses, at most `max_nodes`."""
        probabilities = rates.calibrate(self.kinds, self.draft_probs)
        probabilities[0] = 1.0
        nodes, parents = best_nodes(self.parents, probabilities, max_nodes)
        tokens = self.tokens[nodes]
        tokens[0] = root
        return tokens, parents, probabilities[nodes]


@dataclass(slots=True)
class _HeadsRow:
    """One row: its last token, the input its heads have not read yet, and its last draft."""

    root: int
    prompt: IntArray | None
    tokens: list[IntArray] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)  # of every step, by layer
    tree: GuessTree | None = None


class HeadDrafter(BatchProposer):
    """Feeds decoded tokens to heads, proposes their guesses, and counts the hits.

    `rates` are the acceptance rates of guesses, updated while decoding. `warp` is that of `Call`, on scores
    `[n, vocab]`. The measured `times` decide the number of passes; None for the maximum.
    """

    def __init__(
        self,
        heads: Any,
        model: PreTrainedModel,
        rates: AcceptanceTable,
        warp: Warp | None = None,
        name: str = "heads",
        times: PassTimes | None = None,
    ) -> None:
        self.sources = (name,)
        self._heads, self._model, self._rates = heads, model, rates
        # Layers of the model that the heads read, numbered as in `output_hidden_states`.
        self.hidden_layers: tuple[int, ...] = getattr(heads, "hidden_layers", (-1,))
        self._warp = warp
        self._device = lm_head(model).weight.device
        self._rows: dict[int, _HeadsRow] = {}
        self._last: dict[int, Tensor] = {}  # by row, the state for its next guesses
        self._times = times
        self._done: float | None = None  # end time of the drafts of this step
        self._past: dict[int, Any] = {}  # by row, what the heads attend to

    @abstractmethod
    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Read the new tokens `[n]` of each row, and the states `[n, size]` that they were chosen from."""

    @abstractmethod
    def draft(self, rows: Sequence[int], max_nodes: int) -> list[GuessTree]:
        """Guess after the last token of each row; at most `max_nodes` nodes of a tree are drafted."""

    def start(self, row: int, prompt: IntArray) -> None:
        self._rows[row] = _HeadsRow(int(prompt[-1]), prompt)

    def propose_batch(self, rows: Sequence[int], max_nodes: int) -> Sequence[Proposal | None]:
        offers: list[Proposal | None] = []
        unread = [row for row in rows if self._rows[row].states]
        tokens, states = [], []
        with torch.inference_mode():
            for state in (self._rows[row] for row in unread):
                # All steps, with layers concatenated: [tokens, layers * size].
                layers = [torch.cat(layer).to(self._device) for layer in zip(*state.states, strict=True)]
                states.append(torch.cat(layers, -1))
                tokens.append(torch.from_numpy(np.concatenate(state.tokens)).long().to(self._device))
                state.tokens, state.states = [], []
            if unread:
                self.read(unread, tokens, states)
            trees = self.draft(rows, max_nodes)
        self._done = time.perf_counter()
        for row, tree in zip(rows, trees, strict=True):
            self._rows[row].tree = tree
            offer = Proposal(*tree.best(self._rows[row].root, self._rates, max_nodes))
            offers.append(offer if len(offer.tokens) > 1 else None)
        return offers

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        if self._times is not None and self._done is not None:
            self._times.target.add(time.perf_counter() - self._done)
        self._done = None
        state, tokens = self._rows[row], feedback.tokens
        if (tree := state.tree) is not None:
            self._rates.learn(tree.parents, tree.tokens, tree.kinds, tree.draft_probs, tokens)
        if state.prompt is None:
            path = torch.from_numpy(feedback.path)
            states = [feedback.hidden[layer][path.to(feedback.hidden[layer].device)] for layer in self.hidden_layers]
        else:
            # Every prompt token is paired with the next one, the last with the first emitted token.
            states = [feedback.prompt_hidden[layer] for layer in self.hidden_layers]
            tokens = np.concatenate((state.prompt[len(state.prompt) + 1 - len(states[0]) :], tokens))
        state.tokens.append(tokens)
        state.states.append(states)
        state.prompt, state.tree, state.root = None, None, int(tokens[-1])

    def finish(self, row: int) -> None:
        self._rows.pop(row, None)
        self._last.pop(row, None)
        self._past.pop(row, None)

    def _guess(self, logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Probabilities and indices of the most likely guesses, `[..., most]` each, of logits `[..., vocab]`."""
        if self._warp is not None:
            logits = self._warp(logits.flatten(0, -2).float()).view(logits.shape)
        best = logits.softmax(-1, dtype=torch.float32).topk(min(most, logits.shape[-1]))
        return best.values, best.indices


class GrowingDrafter(HeadDrafter):
    """Grows a tree level by level: the heads run again at the most likely guesses of a level.

    Source: Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", §4.1.
    """

    @abstractmethod
    def _guesses(self, out: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Probabilities and tokens of the most likely guesses, `[..., most]` each, of the heads' output."""

    def _grow(self, out: Tensor, run: Run, *, depth: int, width: int, root_width: int = WIDTH) -> list[GuessTree]:
        """The guesses after each row, from its output `[rows, 1, size]`.

        There are `root_width` guesses after the root, and further ones after `width` guesses of each level up to
        `depth`. If passes are timed, growth stops before a level that costs more time than its tokens save. The time of
        a level includes its pass and the choice of its guesses with the projection to the vocabulary.

        `run` takes a level, its tokens `[rows, n]`, and the outputs `[rows, n, size]` and indices `[rows, n]` of their
        parents; it returns the outputs at the tokens.
        """
        path_probs = out.new_ones(len(out), 1, 1, dtype=torch.float32)
        nodes = torch.zeros(len(out), 1, dtype=torch.int32, device=out.device)  # 0 is the root
        levels, count, expected = [], 1, 1.0  # expected tokens per row
        begin = now = time.perf_counter()
        for level in range(depth):
            probs, tokens = self._guesses(out, WIDTH if level else root_width)
            ranks = torch.arange(tokens.shape[-1], device=out.device).expand_as(tokens)
            columns = tokens, nodes[..., None].expand_as(tokens), torch.full_like(tokens, level), ranks
            packed = torch.stack([*(column.int() for column in columns), probs.view(torch.int32)], -1)
            levels.append(packed.flatten(1, 2))
            best = (path_probs * probs).flatten(1).topk(min(width, probs[0].numel()))
            likeliest, before, now = float(best.values.max()), now, time.perf_counter()  # after synchronizing the GPU
            if level and self._times is not None:
                self._times.draft.add(now - before)
            if level + 1 == depth or likeliest < MIN_PATH_PROB:
                break
            if self._times is not None:
                reached, found_here, chosen = torch.stack(
                    (path_probs.sum(), (path_probs * probs).sum(), best.values.sum())
                ).tolist()
                expected += found_here / len(out)
                gain = chosen / len(out) * found_here / max(reached, 1e-9)
                if not self._times.pays(expected, gain, now - begin):
                    break
            path_probs, parents = best.values[..., None], best.indices // tokens.shape[-1]
            nodes, count = best.indices.int() + count, count + probs[0].numel()
            out = run(level, tokens.flatten(1).gather(1, best.indices), gather_positions(out, parents), parents)
        rows = torch.cat(levels, 1).cpu().numpy()  # one copy from the device
        guesses = (np.ascontiguousarray(row.T) for row in rows)
        return [GuessTree.of(guess[0], guess[1], guess[2:4].T, guess[4].view(np.float32)) for guess in guesses]
