"""Drafts for beam search: the nodes that all beams of a prompt are likely to choose in their next steps."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.config import LookaheadConfig
from lookahead.drafting.budget import REFILL, Budget, Ema
from lookahead.drafting.cost_model import StepCost
from lookahead.drafting.tree import IntArray
from lookahead.models.beam_tree import CONTEXT, BeamTree
from lookahead.models.calibration import node_cost
from lookahead.models.model_state import state_of
from lookahead.ngram.acceptance import HitRates
from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.recycled import RecycledTable
from lookahead.ngram.search import Search, Trie
from lookahead.verification.exact import read_scores

SOURCES = ("prompt", "recycled")
_MOST_LEVELS = 4  # steps drafted ahead
_MOST_IN_LEVEL = 16  # nodes of one of them
_MOST_NODES = 48
_LEAST_REACHED = 0.1  # probability of a level below which nothing is drafted behind it
_PARTIAL = 0.25  # of a step, what a level with one of the beams outside is worth: the others need not be scored again
_GROWN = 32  # nodes of a search, for the successors of one node
_LEAST_SUCCESSOR = 1e-4
_LINKS = 32  # walked in the prompt
_CONTEXTS = 1 << 14  # of recycled tokens
_PLAIN_PASSES = 3  # of a search, before its first draft: they are measured
_RATE = 0.03  # step size of the logistic regression
# Of a level: a constant; how far the score of the first candidate left out is below that of the last beam; how far that
# of a token not found may be above it; the share of guessed nodes; whether it is a later level.
_FEATURES = 5
_FIRST_WEIGHTS = 0.0, 1.0, -2.0, -1.8, 0.0  # fitted to SmolLM2-135M-Instruct with 4 beams
_ROOT = np.zeros(1, np.int32)


@dataclass(slots=True)
class BeamState:
    """What drafting for beams learns of a model, for later searches.

    The `weights`, float64 `[5]`, are of the logistic regression that tells whether all beams stay among drafted nodes.
    The `budget` holds plain passes that drafting may lose; `host` is in seconds, to make a draft and to learn from it.
    """

    rates: HitRates = field(default_factory=HitRates)
    weights: NDArray[np.float64] = field(default_factory=lambda: np.array(_FIRST_WEIGHTS))
    costs: StepCost = field(default_factory=StepCost)
    budget: Budget = field(default_factory=lambda: Budget(2.0, 4.0, REFILL))
    host: Ema = field(default_factory=lambda: Ema(0.1, clip=2.0, value=1e-3, count=3))


class BeamDrafter:
    """Drafts for the beams of one prompt.

    A pass serves one step of the search, and a further one for every level of its draft that holds the nodes of all
    beams. A level has the candidates with the highest scores: the score of the beam and the log probabilities of the
    tokens behind it. They are known behind nodes that were scored, and are estimated behind the others from earlier
    occurrences of their last tokens in the prompt, and from the model's likeliest tokens after the same last tokens.

    Source: Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
        Recycling", §3 (drafts from the logits of earlier passes); Bottou 1998, "Online Learning and Stochastic
        Approximations", §3 (the logistic regression).
    """

    def __init__(
        self,
        prompt: IntArray,
        beams: int,
        ends: Collection[int],  # tokens behind which no beam goes on
        config: LookaheadConfig,
        state: BeamState,
        lock: RLock,  # held while the state is read or changed
        most: int = _MOST_NODES,
    ) -> None:
        self._beams, self._ends, self._state, self._lock = beams, set(ends), state, lock
        self._is_fixed = config.draft == "fixed"
        self._most = min(_MOST_NODES, most, config.max_nodes or _MOST_NODES)
        self._tokens = len(prompt)
        texts = []
        if "prompt" in config.proposers and config.min_ngram <= CONTEXT:
            texts.append(ChainIndex())
            texts[0].append(prompt)
        self._recycled = RecycledTable(_CONTEXTS) if "recycled" in config.proposers else None
        bounds = (min(config.min_ngram, CONTEXT), min(config.max_ngram, CONTEXT), _LINKS)
        self._search = Search(texts, state.rates, self._recycled, bounds)
        self._passes = 0
        self._drafted: list[NDArray[np.float64]] = []  # the features of every level of the newest draft
        self._searched: dict[int, Trie] = {}
        self._spent: float | None = None  # seconds of the newest pass, drafting included
        self._host_s = 0.0  # of the newest draft

    def draft(self, tree: BeamTree, scores: Sequence[float], steps: int, left: int) -> bool:
        """Add drafted nodes to a tree with tips that are not scored; whether the pass is to be read for `learn`.

        The pass before has served `steps` steps, and the search may take `left` behind the next one.
        """
        with self._lock:
            begin = time.perf_counter()
            self._settle(steps)
            self._passes += 1
            self._drafted, self._searched, self._host_s = [], {}, 0.0
            if not (self._is_fixed or self._state.budget.balance > 0.0):
                return False
            is_measured = self._is_fixed or self._passes > _PLAIN_PASSES
            if is_measured and np.isfinite(scores).all():  # a processor may forbid all tokens
                self._add_levels(tree, scores, left)
                self._host_s = time.perf_counter() - begin
        return True

    def learn(self, tree: BeamTree, logits: Tensor, seconds: float, *, is_cold: bool) -> None:
        """Learn from a pass, of logits `[1, new, vocab]` after the last nodes of a tree, and let the tree learn too."""
        begin, first, new = time.perf_counter(), tree.scored, logits.shape[1]
        scores = read_scores(logits, with_top=True)
        assert scores.top is not None and scores.probabilities is not None
        top, probs = scores.top[0], scores.probabilities[0]
        tree.learn(logits[0], top, probs)
        with self._lock:
            state = self._state
            for node, trie in self._searched.items():
                state.rates.learn(trie.parents, trie.tokens, trie.features, top[node - first, :1])
            if self._recycled is not None:
                for node in range(first, len(tree)):
                    each, before = slice(node - first, node - first + 1), tree.context(node)
                    self._recycled.store(before, _ROOT, before[-1:], top[each], probs[each])
            if not is_cold:
                state.costs.observe(new, seconds, context=self._tokens + self._passes)
            state.host.add(self._host_s + time.perf_counter() - begin)
            # What the pass took, not what was expected of it: costs that are learned late would hide losses.
            expected = float(state.costs.curve(1, new, self._tokens + self._passes)[new])
            self._spent = (expected if is_cold else seconds) + state.host.value

    def _settle(self, steps: int) -> None:
        """Learn which levels of the newest draft held all beams, and what it has gained."""
        state = self._state
        for level, features in enumerate(self._drafted[:steps], 1):
            error = (level < steps) - _chances(state.weights, features)
            state.weights += _RATE * error * features
        plain = float(state.costs.curve(1, self._beams, self._tokens + self._passes)[-1])
        gain = 0.0 if self._spent is None else steps - self._spent / plain
        state.budget.settle(gain, steps)
        self._spent = None

    def _add_levels(self, tree: BeamTree, scores: Sequence[float], left: int) -> None:
        """Add the levels that promise the most steps per second."""
        waiting, first = len(tree) - tree.scored, len(tree)
        costs = self._state.costs.curve(1, waiting + self._most, self._tokens + self._passes)[waiting:]
        if self._is_fixed:
            costs = np.ones_like(costs)
        best, nodes, levels = 1.0 / costs[0], first, 0
        level = list(zip(scores, tree.tips, strict=True))
        steps = reached = 1.0
        while len(self._drafted) < min(_MOST_LEVELS, left) and reached > _LEAST_REACHED:
            candidates, features = self._candidates(tree, level)
            used = len(tree) - first
            is_new = np.array([tree.child(node, token) is None for _, node, token in candidates], np.int64)
            added = (used + np.cumsum(is_new))[self._beams - 1 :]
            added = added[added <= self._most]
            if not added.size:
                break
            chances = _chances(self._state.weights, features[: len(added)])
            rates = (steps + reached * (_PARTIAL + (1.0 - _PARTIAL) * chances)) / costs[added]
            size = int(rates.argmax())
            level = [
                (score, tree.add(node, token) if new else cast(int, tree.child(node, token)))
                for (score, node, token), new in zip(candidates[: self._beams + size], is_new, strict=False)
            ]
            self._drafted.append(features[size])
            reached *= float(chances[size])
            steps += reached
            if rates[size] > best:
                best, nodes, levels = float(rates[size]), len(tree), len(self._drafted)
        tree.cut(nodes)
        del self._drafted[levels:]
        self._searched = {node: trie for node, trie in self._searched.items() if tree.scored <= node < nodes}

    def _candidates(
        self, tree: BeamTree, level: Sequence[tuple[float, int]]
    ) -> tuple[list[tuple[float, int, int]], NDArray[np.float64]]:
        """The likeliest continuations of the nodes of a level: score, node and token, those of high scores first.

        With them float64 `[n, 5]`, the features of a level of the first `beams`, `beams` + 1, … of them; n is 0 if
        there are too few.
        """
        found, missed = [], -math.inf
        for score, node in level:
            successors, rest = self._successors(tree, node)
            found += [(score + each, node, token) for token, each in successors if token not in self._ends]
            missed = max(missed, score + math.log(rest)) if rest else missed
        found.sort(reverse=True)
        count = min(len(found), _MOST_IN_LEVEL) + 1 - self._beams
        if count < 1:
            return [], np.zeros((0, _FEATURES))
        values = np.array([score for score, *_ in found[: _MOST_IN_LEVEL + 1]] + [-math.inf])
        least = values[self._beams - 1]
        features = np.ones((count, _FEATURES))
        features[:, 1] = np.minimum(least - values[self._beams : self._beams + count], 6.0) / 3.0
        features[:, 2] = min(max(missed - least, -3.0), 4.0) / 3.0
        features[:, 3] = np.mean([self._is_guessed(tree, node) for _, node in level[: self._beams]])
        features[:, 4] = len(self._drafted) > 0
        return found[:_MOST_IN_LEVEL], features

    def _is_guessed(self, tree: BeamTree, node: int) -> bool:
        """Whether the likeliest tokens after a node are not known."""
        return node not in tree.known or not len(tree.known[node].top)

    def _successors(self, tree: BeamTree, node: int) -> tuple[list[tuple[int, float]], float]:
        """Likely tokens after a node, their log probabilities, and the probability that a guess leaves to others."""
        if not self._is_guessed(tree, node):
            top, log_probs = tree.known[node].top, tree.known[node].log_probs
            return [pair for pair in zip(top.tolist(), log_probs.tolist(), strict=True) if pair[0] >= 0], 0.0
        trie = self._search.grow(_GROWN, _LEAST_SUCCESSOR, tree.context(node))
        self._searched[node] = trie
        is_next = trie.parents == 0
        is_next[0] = False
        probs = trie.probabilities[is_next]
        pairs = zip(trie.tokens[is_next].tolist(), np.log(probs).tolist(), strict=True)
        return list(pairs), max(1e-3, 1.0 - float(probs.sum()))


def drafter_for(
    model: PreTrainedModel, prompt: IntArray, beams: int, ends: Collection[int], config: LookaheadConfig, most: int
) -> BeamDrafter | None:
    """The drafter of a search, of at most so many nodes, with what was learned of the model; None without sources."""
    if beams > _MOST_IN_LEVEL or not set(SOURCES) & set(config.proposers):
        return None
    learned = state_of(model).learned
    with learned.lock:
        states: dict[int, BeamState] = learned.of(BeamState, dict)
        state = states.setdefault(beams, BeamState())
        state.costs.assume(node_cost(model))
    return BeamDrafter(prompt, beams, ends, config, state, learned.lock, most)


def _chances(weights: NDArray[np.float64], features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability that all beams stay in levels with these features, `[..., 5]`."""
    return np.asarray(1.0 / (1.0 + np.exp(-(features @ weights))))
