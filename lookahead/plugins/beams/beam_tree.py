"""Beams as one token tree, and a stand-in for the model in transformers' beam search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lookahead.drafting.tree import IntArray, TokenTree, node_depths
from lookahead.model.cache import TreeCache
from lookahead.model.slots import RowCopy

Read = Callable[[Tensor, Any], Tensor]
Score = Callable[[Sequence[TokenTree], NDArray[np.int64]], Tensor]
DEAD_NODES = 64
"""Nodes that a tree gains before dead ones, which no beam descends from, are dropped."""


class BeamTree:
    """The beams of one prompt as a token tree behind its last token, the root, with the logits after it, `[vocab]`."""

    def __init__(self, root: int, logits: Tensor, beams: int) -> None:
        self._tokens, self._parents = [root], [0]
        self.logits = logits.expand(beams, -1)  # after the newest node of each beam, `[beams, vocab]`
        self.scored = 1  # number of scored nodes; later ones wait for the next pass
        self.tips = [0] * beams  # the newest node of each beam
        self.most = DEAD_NODES  # nodes beyond which dropping dead ones pays

    def __len__(self) -> int:
        return len(self._tokens)

    def advance(self, beams: Sequence[int], tokens: Sequence[int]) -> None:
        """Continue beams by one token each; the results are the new beams.

        Beams with equal tokens are not merged: in half precision the bits of a pass depend on the number of its rows.
        """
        parents = [self.tips[beam] for beam in beams]
        self.tips = list(range(len(self), len(self) + len(parents)))
        self._parents += parents
        self._tokens += tokens

    def tree(self) -> TokenTree:
        """All nodes."""
        parents = np.array(self._parents, np.int32)
        return TokenTree(np.array(self._tokens, np.int32), parents, node_depths(parents), np.zeros_like(parents))

    def learn(self, logits: Tensor) -> None:
        """Set the logits after the newest node of each beam, `[beams, vocab]`."""
        self.logits, self.scored = logits, len(self)

    def path_of(self, node: int) -> NDArray[np.int64]:
        """The nodes from the root to a node."""
        path = [node]
        while node:
            node = self._parents[node]
            path.append(node)
        return np.array(path[::-1])

    def drop_dead(self) -> tuple[IntArray, int]:
        """Drop the nodes that no beam descends from, and leave nodes shared by all beams to the cache.

        Returns the nodes to keep in the cache, and how many of the last ones stay tree nodes.
        """
        paths = [set(self.path_of(tip).tolist()) for tip in self.tips]
        kept, shared = sorted(set.union(*paths)), len(set.intersection(*paths)) - 1
        places = {node: place for place, node in enumerate(kept[shared:])}
        self._tokens = [self._tokens[node] for node in places]
        self._parents = [places.get(self._parents[node], 0) for node in places]
        self.tips = [places[tip] for tip in self.tips]
        self.scored = len(self)
        self.most = len(self) + DEAD_NODES
        return np.array(kept, np.int32), len(self)


class BeamModel:
    """Stands in for the model and its cache in transformers' beam search. A pass scores the tips of all beams.

    `cache` has one row per prompt. `read` reads the prompts into it and returns the logits after each,
    `[prompts, vocab]`. `score` scores the nodes of all trees after the first `scored` ones, whose KV is cached; it runs
    within `serving`. `roots` are the last tokens of the prompts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        score: Score,
        roots: Sequence[int],
        beams: int,
        read: Read,
    ) -> None:
        self._model, self._cache, self._score_trees = model, cache, score
        self._roots, self._beams, self._read = roots, beams, read
        self._trees: list[BeamTree] = []
        self._chosen: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name == "_reorder_cache":  # a model's own method to reorder a cache
            raise AttributeError(name)
        return getattr(self._model, name)

    def _prefill(self, input_ids: Tensor, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        logits = self._read(input_ids, generation_config)
        self._trees = [BeamTree(*root, self._beams) for root in zip(self._roots, logits, strict=True)]
        return self._output()

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """The newest token of every beam."""
        return {"tokens": input_ids[:, -1].tolist()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Set the beams, int64 `[batch * num_beams]`, that the next tokens continue."""
        self._chosen = (beam_idx % self._beams).tolist()

    def __call__(self, tokens: list[int], return_dict: bool = True) -> Any:
        """Logits after the tips of all beams."""
        with torch.inference_mode():
            for row, tree in enumerate(self._trees):
                if len(tree) > tree.most:
                    self._cache.commit(row, *tree.drop_dead())
                own = slice(row * self._beams, (row + 1) * self._beams)
                tree.advance(self._chosen[own], tokens[own])
            self._score()
        return self._output()

    def _score(self) -> None:
        """Score the tips of all trees."""
        scored, cache = np.array([tree.scored for tree in self._trees]), self._cache
        needed = int(max(cache.slots.lengths + [len(tree) for tree in self._trees]))
        if needed > cache.slots.capacity:  # growing on demand would add half of its size
            cache.resize(rows=len(self._trees), capacity=needed + DEAD_NODES)
        logits = self._score_trees([tree.tree() for tree in self._trees], scored)
        for tree, scores in zip(self._trees, logits, strict=True):
            tree.learn(scores)

    def states(self) -> list[RowCopy]:
        """The keys and values of the chosen beams, without their newest tokens."""
        taken, cache = [], self._cache
        for i, beam in enumerate(self._chosen):
            row, tree = i // self._beams, self._trees[i // self._beams]
            taken.append(cache.extract_row(row, torch.from_numpy(tree.path_of(tree.tips[beam]))))
        return taken

    def _output(self) -> Any:
        """Logits after the tips, `[batch * num_beams, 1, vocab]`, as a transformers model output."""
        logits: Any = torch.cat([tree.logits for tree in self._trees])
        return CausalLMOutputWithPast(logits=logits[:, None])

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """Return the inputs unchanged."""
        return model_kwargs
