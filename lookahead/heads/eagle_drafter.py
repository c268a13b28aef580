"""An EAGLE head at work: a tree grown level by level from its likeliest nodes, and the best of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from lookahead.heads.draft_cache import DraftCache, take
from lookahead.heads.eagle import EagleHead
from lookahead.heads.guess_tree import FloatArray, GuessTree, HeadDrafter, IntArray, Warp
from lookahead.heads.hit_rates import HeadRates
from lookahead.heads.layers import attend

DEPTH = 6
"""Levels of a tree: tokens guessed at most."""

WIDTH = 8
"""Nodes of a level that the head goes on from, and guesses after each."""

ROOT_WIDTH = 32
"""Guesses after the root, where a draft is begun: where the head is unsure, these are what is likely at all."""

LEAST = 0.03
"""Chance that a node is reached, below which a further pass over what may follow it is not worth its time."""


class EagleDrafter(HeadDrafter):
    """Lets a head read what the model said, then guess on, each level's likeliest nodes at once.

    Args:
        head: The head.
        model: The model, for its embedding and its LM head.
        rates: How far guesses can be trusted, by depth.
        rows: How many rows there may be.
        warp: What sampling does to logits; None where the likeliest token is taken.

    Source: Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", §4.1 (expansion)
        and §4.2 (reranking), here by chances that are calibrated as decoding goes on.
    """

    reads_all = True

    def __init__(self, head: EagleHead, model: PreTrainedModel, rates: HeadRates, rows: int, warp: Warp | None) -> None:
        self.hidden_layers = head.hidden_layers
        self._head = head
        self._model = model
        self._rates = rates
        self._warp = warp
        self._cache = DraftCache(rows)
        self._newest: dict[int, Tensor] = {}

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Put the pairs of new tokens and the hidden states they were chosen from behind those that are there."""
        features = self._head.enter(pad_sequence(list(states), batch_first=True))
        read, add = self._head.pair(features, self._embed(pad_sequence(list(tokens), batch_first=True)))
        new = [len(each) for each in tokens]
        out = self._cache.extend(self._head.layer, self._head.rotation, rows, new, read, add)
        self._newest.update(zip(rows, out[:, None], strict=True))

    def draft(self, rows: Sequence[int], roots: Sequence[int], room: int) -> list[GuessTree]:
        """What may follow the newest token of each of some rows."""
        levels = self._expand(rows)
        # One copy from the device: [rows, nodes], each a token, a parent and the bits of a probability.
        packed = torch.cat([torch.stack(level, -1).flatten(1, 2) for level in levels], 1).cpu().numpy()
        ranks = [np.arange(level[0][0].numel(), dtype=np.int32) % level[0].shape[-1] for level in levels]
        depths = np.repeat(np.arange(len(levels), dtype=np.int32), [len(each) for each in ranks])
        kinds = np.stack((depths, np.concatenate(ranks)), -1)
        trees = []
        for row, root in zip(packed, roots, strict=True):
            tokens, parents, bits = (np.ascontiguousarray(row[:, i]) for i in range(3))
            promised = bits.view(np.float32)
            chances = self._rates.calibrate(kinds, promised)
            trees.append(rerank(root, tokens, parents, chances, kinds, promised, room))
        return trees

    def forget(self, row: int) -> None:
        """Forget a row."""
        self._cache.forget(row)
        self._newest.pop(row, None)

    def _expand(self, rows: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Guesses of every level: tokens, parents and the bits of probabilities, int32 `[rows, nodes, guesses]`.

        Node 0 is the root, and the guesses of a level are numbered on in the order of its nodes.
        """
        out = torch.stack([self._newest[row] for row in rows])
        reach = out.new_ones(len(rows), 1, 1, dtype=torch.float32)
        nodes = tokens = torch.zeros(len(rows), 1, dtype=torch.int32, device=out.device)
        parents = nodes.long()
        seen = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=out.device)
        levels, count = [], 1
        for level in range(DEPTH):
            if level > 0:
                out, seen = self._step(rows, level, tokens, out, seen, parents)
            promised, guesses = self._guess(out, WIDTH if level else ROOT_WIDTH)
            width = promised.shape[-1]
            levels.append((guesses, nodes[..., None].expand(guesses.shape), promised.view(torch.int32)))
            best = (reach * promised).flatten(1).topk(min(WIDTH, promised[0].numel()))
            if float(best.values.max()) < LEAST:
                break
            reach, parents = best.values[..., None], best.indices // width
            tokens = guesses.flatten(1).gather(1, best.indices)
            nodes = best.indices.int() + count
            count += promised[0].numel()
        return levels

    def _guess(self, features: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Probabilities and tokens of the likeliest guesses, `[rows, nodes, guesses]`, of `[rows, nodes, hidden]`."""
        logits = self._head.logits(self._model, features)
        if self._warp is not None:
            logits = self._warp(logits.flatten(0, 1).float()).view(logits.shape)
        promised, places = logits.softmax(-1, dtype=torch.float32).topk(min(most, logits.shape[-1]))
        return promised, self._head.token_ids(places).int()

    def _step(
        self, rows: Sequence[int], level: int, tokens: Tensor, out: Tensor, seen: Tensor, parents: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Go on from the chosen guesses of the level before.

        Args:
            rows: The rows.
            level: At least 1.
            tokens: int32 `[rows, n]`, the guesses.
            out: `[rows, nodes, hidden]`, what the head said at the nodes they follow.
            seen: bool `[rows, nodes, slots]`, what these nodes see of the tree.
            parents: int64 `[rows, n]`, which of these nodes each guess follows.

        Returns:
            What the head says at each guess, `[rows, n, hidden]`, and what it sees, bool `[rows, n, slots + n]`.
        """
        head, n = self._head, tokens.shape[1]
        lengths = [self._cache.lengths[row] for row in rows]
        own = torch.eye(n, dtype=torch.bool, device=out.device).expand(len(rows), -1, -1)
        seen = torch.cat((seen.gather(1, parents[..., None].expand(-1, -1, seen.shape[-1])), own), -1)
        features = take(out, parents)
        positions = torch.tensor(lengths, device=out.device)[:, None] + (level - 1)
        rotation = head.rotation(features, positions.expand(-1, n))
        read, residual = head.pair(features, self._embed(tokens))
        before = seen.shape[-1] - n
        self._cache.write(rows, [length + before for length in lengths], *head.layer.keys_values(read, rotation))
        mask = torch.zeros(len(rows), n, max(lengths) + seen.shape[-1], dtype=torch.bool, device=out.device)
        for i, length in enumerate(lengths):
            mask[i, :, :length] = True
            mask[i, :, length : length + seen.shape[-1]] = seen[i]
        keys, values = self._cache.read(rows, mask.shape[-1])
        return head.layer.finish(residual, attend(head.layer.query(read, rotation), keys, values, mask)), seen

    def _embed(self, tokens: Tensor) -> Tensor:
        """The model's embeddings, `[..., hidden]`."""
        table: Any = self._model.get_input_embeddings()
        embedded: Tensor = table(tokens.to(table.weight.device)).to(tokens.device)
        return embedded


def rerank(
    root: int,
    tokens: IntArray,
    parents: IntArray,
    chances: FloatArray,
    kinds: IntArray,
    promised: FloatArray,
    room: int,
) -> GuessTree:
    """Of all guesses the tree of those that are likeliest to be reached.

    Args:
        root: The token they follow.
        tokens: int32 `[n]`; guess i is node i + 1.
        parents: int32 `[n]`, the node each follows, an earlier one; 0 is the root.
        chances: float32 `[n]`, of each where its parent is right.
        kinds: int32 `[n, 2]`, as of a `GuessTree`.
        promised: float32 `[n]`, likewise.
        room: Most nodes besides the root.
    """
    return GuessTree(*_rerank(root, tokens, parents, chances, kinds, promised, room))


@njit(cache=True)
def _rerank(root, tokens, parents, chances, kinds, promised, room):
    """A parent is never less likely than its child, and stands before it."""
    reach = np.ones(len(tokens) + 1)
    for i in range(len(tokens)):
        reach[i + 1] = reach[parents[i]] * chances[i]
    order = np.argsort(-reach, kind="mergesort")[: room + 1]
    kept = np.sort(order[reach[order] > 0.0])
    places = np.zeros(len(reach), np.int32)
    size = len(kept)
    out_tokens, out_parents = np.empty(size, np.int32), np.zeros(size, np.int32)
    out_chances, out_promised = np.ones(size, np.float32), np.ones(size, np.float32)
    out_kinds = np.zeros((size, 2), np.int32)
    out_tokens[0] = root
    for place in range(1, size):
        i = kept[place] - 1
        places[kept[place]] = place
        out_tokens[place], out_parents[place] = tokens[i], places[parents[i]]
        out_chances[place], out_promised[place], out_kinds[place] = chances[i], promised[i], kinds[i]
    return out_tokens, out_parents, out_chances, out_kinds, out_promised
