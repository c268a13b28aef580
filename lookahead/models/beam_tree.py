"""Beams as one token tree: what transformers' beam search takes for the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lookahead.drafting.tree import IntArray, TokenTree, node_depths
from lookahead.models.cache import RowStates
from lookahead.models.target import Target

Read = Callable[[Tensor, Any], Tensor]
DEAD_NODES = 64
"""Nodes that a tree gains before those that no beam comes from are dropped."""


class BeamTree:
    """The beams of one prompt as a token tree.

    Args:
        root: The last token of the prompt.
        logits: `[vocab]`, after the prompt.
        beams: Number of beams.

    Attributes:
        scored: First nodes that passes have scored.
        tips: The newest node of each beam.
    """

    def __init__(self, root: int, logits: Tensor, beams: int) -> None:
        self._tokens, self._parents = [root], [0]
        self._logits = {0: logits}
        self.scored = 1
        self.tips = [0] * beams
        self._most = DEAD_NODES

    def __len__(self) -> int:
        return len(self._tokens)

    def advance(self, beams: Sequence[int], tokens: Sequence[int]) -> None:
        """Continue some of the beams by one token each; they are the new beams.

        Beams with the same tokens stay apart: in half precision the bits of a pass depend on the number of its rows.
        """
        self._parents += [self.tips[beam] for beam in beams]
        self._tokens += tokens
        self.tips = list(range(len(self) - len(tokens), len(self)))

    @property
    def is_overgrown(self) -> bool:
        """Whether so many nodes were added that dropping dead ones pays."""
        return len(self) > self._most

    def tree(self) -> TokenTree:
        """All nodes."""
        parents = np.array(self._parents, np.int32)
        return TokenTree(np.array(self._tokens, np.int32), parents, node_depths(parents), np.zeros_like(parents))

    def learn(self, logits: Tensor) -> None:
        """Take the logits `[n, vocab]` after the nodes that were not scored yet."""
        self._logits = {tip: self._logits[tip] for tip in self.tips if tip in self._logits}
        self._logits.update(zip(range(self.scored, len(self)), logits, strict=False))
        self.scored = len(self)

    def after_tips(self) -> list[Tensor]:
        """Logits `[vocab]` after the newest token of each beam."""
        return [self._logits[tip] for tip in self.tips]

    def path_of(self, beam: int) -> NDArray[np.int64]:
        """The nodes from the root to the tip of a beam."""
        path, node = [0], self.tips[beam]
        while node:
            path.append(node)
            node = self._parents[node]
        return np.sort(path)

    def drop_dead(self) -> tuple[IntArray, int]:
        """Forget the nodes that no beam comes from; what all beams share is left to the cache.

        Returns:
            int32, the nodes to keep in the cache, and how many of them, the last ones, are still nodes.
        """
        kept, shared = _survivors(np.array(self._parents), np.array(self.tips))
        places = {node: place for place, node in enumerate(kept[shared:].tolist())}
        self._tokens = [self._tokens[node] for node in places]
        self._parents = [places.get(self._parents[node], 0) for node in places]
        self._logits = {places[node]: logits for node, logits in self._logits.items() if node in places}
        self.tips = [places[tip] for tip in self.tips]
        self.scored = len(self)
        self._most = len(self) + DEAD_NODES
        return kept, len(self)


@njit(cache=True)
def _survivors(parents, tips):
    """The nodes that tips come from, ascending, and how many of the first ones are shared by all and not the last."""
    below = np.zeros(len(parents), np.int64)
    for tip in tips:
        below[tip] += 1
    for node in range(len(parents) - 1, 0, -1):
        below[parents[node]] += below[node]
    return np.flatnonzero(below).astype(np.int32), np.sum(below == len(tips)) - 1


class BeamModel:
    """What transformers' beam search takes for the model and for its cache.

    Args:
        model: The model.
        target: The model behind its cache of trees, one row per prompt; in service while the search runs.
        roots: The last token of each prompt.
        beams: Beams of a prompt.
        read: Reads the prompts into the cache; the logits after each, `[prompts, vocab]`.

    Attributes:
        passes: Passes over tips so far.
    """

    def __init__(self, model: PreTrainedModel, target: Target, roots: Sequence[int], beams: int, read: Read) -> None:
        self._model, self._target, self._roots, self._beams, self._read = model, target, roots, beams, read
        self._trees: list[BeamTree] = []
        self._chosen: list[int] = []
        self.passes = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_reorder_cache":  # a model's own way to rearrange a cache
            raise AttributeError(name)
        return getattr(self._model, name)

    def _prefill(self, input_ids: Tensor, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the prompts."""
        logits = self._read(input_ids, generation_config)
        self._trees = [BeamTree(*each, self._beams) for each in zip(self._roots, logits, strict=True)]
        return self._output()

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """The newest token of every beam."""
        return {"tokens": input_ids[:, -1].tolist()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the beams, int64 `[batch * num_beams]`, that the next tokens continue."""
        self._chosen = (beam_idx % self._beams).tolist()

    def __call__(self, tokens: list[int], return_dict: bool = True) -> Any:
        """Score the tips of all beams in one pass."""
        cache = self._target.cache
        with torch.inference_mode():
            for row, tree in enumerate(self._trees):
                if tree.is_overgrown:
                    cache.commit(row, *tree.drop_dead())
                own = slice(row * self._beams, (row + 1) * self._beams)
                tree.advance(self._chosen[own], tokens[own])
            scored = np.array([tree.scored for tree in self._trees])
            logits = self._target.extend([tree.tree() for tree in self._trees], scored)
        self.passes += 1
        for tree, each in zip(self._trees, logits, strict=True):
            tree.learn(each)
        return self._output()

    def states(self) -> list[list[RowStates]]:
        """The keys and values of the chosen beams, but for their newest tokens."""
        taken, cache = [], self._target.cache
        for i, beam in enumerate(self._chosen):
            row = i // self._beams
            taken.append(cache.take(row, torch.from_numpy(self._trees[row].path_of(beam))))
        return taken

    def _output(self) -> Any:
        """Logits after the tips, `[batch * num_beams, 1, vocab]`, as transformers' models return them."""
        return CausalLMOutputWithPast(
            logits=cast(
                torch.FloatTensor, torch.stack([each for tree in self._trees for each in tree.after_tips()])[:, None]
            )
        )

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """Leave the inputs as they are."""
        return model_kwargs
