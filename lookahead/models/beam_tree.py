"""Beams as one token tree: what transformers' beam search takes for the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
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
CONTEXT = 16
"""Tokens up to a node that a draft is looked up by."""


class Known(NamedTuple):
    """What a pass tells about a node: logits `[vocab]` after it, and its 8 likeliest tokens, empty if not read."""

    logits: Tensor
    top: IntArray = np.zeros(0, np.int32)
    log_probs: NDArray[np.float32] = np.zeros(0, np.float32)


class BeamTree:
    """The beams of one prompt as a token tree, and what was drafted behind them.

    The very last of the tokens `before` is the root; `logits` are those after it, `[vocab]`.
    """

    def __init__(self, before: IntArray, logits: Tensor, beams: int) -> None:
        self._before = [int(token) for token in before[-CONTEXT:]]
        self._tokens, self._parents = [self._before[-1]], [0]
        self._children: dict[tuple[int, int], int] = {}
        self.known = {0: Known(logits)}  # of the tips and the nodes behind them
        self.scored = 1  # first nodes that passes have scored; later ones wait for the next pass
        self.tips = [0] * beams  # the newest node of each beam
        self.most = DEAD_NODES  # nodes beyond which dropping dead ones pays

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, token: int) -> int:
        """Add a node that continues another one; the node."""
        node = self._children[parent, token] = len(self)
        self._parents.append(parent)
        self._tokens.append(token)
        return node

    def child(self, node: int, token: int) -> int | None:
        """The newest node that continues another one by a token; None if there is none."""
        return self._children.get((node, token))

    def fill(self, nodes: int) -> None:
        """Add siblings of the last node that no beam takes, until so many nodes wait for the next pass."""
        parent, token = self._parents[-1], 0
        while len(self) - self.scored < nodes:
            if (parent, token) not in self._children:
                self.add(parent, token)
            token += 1

    def cut(self, nodes: int) -> None:
        """Remove all but the first nodes; those removed were not scored."""
        while len(self) > nodes:
            del self._children[self._parents.pop(), self._tokens.pop()]

    def advance(self, beams: Sequence[int], tokens: Sequence[int]) -> None:
        """Continue some of the beams by one token each; they are the new beams. A drafted node is taken by one beam.

        Beams with the same tokens stay apart: in half precision the bits of a pass depend on the number of its rows.
        """
        tips: list[int] = []
        for beam, token in zip(beams, tokens, strict=True):
            node = self.child(self.tips[beam], token)
            tips.append(self.add(self.tips[beam], token) if node is None or node in tips else node)
        self.tips = tips
        alive = set(tips)
        for node in sorted(self.known):
            if node and self._parents[node] in alive:
                alive.add(node)
        self.known = {node: each for node, each in self.known.items() if node in alive}

    def tree(self) -> TokenTree:
        """All nodes."""
        parents = np.array(self._parents, np.int32)
        return TokenTree(np.array(self._tokens, np.int32), parents, node_depths(parents), np.zeros_like(parents))

    def learn(self, logits: Tensor, top: IntArray | None = None, probs: NDArray[np.float32] | None = None) -> None:
        """Take logits `[n, vocab]` of the nodes not scored yet, and their likeliest tokens, `[n, 8]`, if read."""
        read = () if top is None or probs is None else (top, np.log(np.maximum(probs, np.float32(1e-12))))
        new = zip(range(self.scored, len(self)), logits, *read, strict=False)
        self.known.update({node: Known(*each) for node, *each in new})
        self.scored = len(self)

    def path_of(self, node: int) -> NDArray[np.int64]:
        """The nodes from the root to a node."""
        path = [node]
        while node:
            node = self._parents[node]
            path.append(node)
        return np.array(path[::-1])

    def context(self, node: int) -> IntArray:
        """The last 16 tokens up to a node, int32; fewer where the prompt is shorter."""
        tokens = self._before[:-1] + [self._tokens[each] for each in self.path_of(node)]
        return np.array(tokens[-CONTEXT:], np.int32)

    def drop_dead(self) -> tuple[IntArray, int]:
        """Forget the nodes that no beam comes from or may take; what all beams share is left to the cache.

        Returns the nodes to keep in the cache, and how many of them, the last ones, are still nodes.
        """
        paths = [set(self.path_of(tip).tolist()) for tip in self.tips]
        kept, shared = sorted(set(self.known).union(*paths)), len(set.intersection(*paths)) - 1
        places = {node: place for place, node in enumerate(kept[shared:])}
        self._before = (self._before + [self._tokens[node] for node in kept[1 : shared + 1]])[-CONTEXT:]
        self._tokens = [self._tokens[node] for node in places]
        self._parents = [places.get(self._parents[node], 0) for node in places]
        self._children = {(parent, self._tokens[i]): i for i, parent in enumerate(self._parents) if i}
        self.known = {places[node]: each for node, each in self.known.items() if node in places}
        self.tips = [places[tip] for tip in self.tips]
        self.scored = len(self)
        self.most = len(self) + DEAD_NODES
        return np.array(kept, np.int32), len(self)


class Drafts(Protocol):
    """Drafts for the beams of one prompt (`lookahead.proposers.beam_drafter`)."""

    def draft(self, tree: BeamTree, scores: Sequence[float], steps: int, left: int) -> bool:
        """Add drafted nodes to a tree; returns whether to read the likeliest tokens of the pass, for `learn`."""

    def learn(self, tree: BeamTree, logits: Tensor, seconds: float, *, is_cold: bool) -> None:
        """Learn from a pass over the last nodes of a tree, logits `[1, new, vocab]`, and let the tree learn too."""


class BeamModel:
    """What transformers' beam search takes for the model and for its cache.

    A pass scores the tips of all beams, and what was drafted behind them. Where the search then chooses nodes that were
    scored, its next step takes no pass. Every pass serves at least one step.

    Args:
        model: The model.
        target: The model behind its cache of trees, one row per prompt; in service while the search runs.
        prompts: int32 `[tokens]` each.
        beams: Beams of a prompt.
        read: Reads the prompts into the cache; the logits after each, `[prompts, vocab]`.
        drafts: Drafts for a single prompt; None to score tips alone.
        max_length: Tokens at which the search ends, the prompt and its padding included.
        fewest: Fewest rows of a pass with drafts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: Target,
        prompts: Sequence[IntArray],
        beams: int,
        read: Read,
        drafts: Drafts | None,
        max_length: int,
        fewest: int = 1,
    ) -> None:
        self._model, self._target, self._prompts, self._beams, self._read = model, target, prompts, beams, read
        self._drafts, self._max_length, self._fewest = drafts, max_length, fewest
        self._trees: list[BeamTree] = []
        self._chosen: list[int] = []
        self._scores = torch.zeros(1, beams)  # of the beams of each prompt
        self.served: list[int] = []  # by pass over tips, how many steps it has served
        self.drafted = 0  # nodes that passes scored beside tips

    def __getattr__(self, name: str) -> Any:
        if name == "_reorder_cache":  # a model's own way to rearrange a cache
            raise AttributeError(name)
        return getattr(self._model, name)

    def _prefill(self, input_ids: Tensor, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        logits = self._read(input_ids, generation_config)
        self._trees = [BeamTree(*each, self._beams) for each in zip(self._prompts, logits, strict=True)]
        return self._output()

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """The newest token of every beam, and how long the beams are."""
        return {"tokens": input_ids[:, -1].tolist(), "length": input_ids.shape[1]}

    def _get_running_beams_for_next_iteration(self, *args: Any, **kwargs: Any) -> Any:
        """The beams that the search goes on with, of which drafts read the scores."""
        model: Any = self._model
        running = model._get_running_beams_for_next_iteration(*args, **kwargs)
        self._scores = running[1]
        return running

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the beams, int64 `[batch * num_beams]`, that the next tokens continue."""
        self._chosen = (beam_idx % self._beams).tolist()

    def __call__(self, tokens: list[int], length: int, return_dict: bool = True) -> Any:
        """Logits after the tips of all beams, with a pass if some of them were not scored yet."""
        with torch.inference_mode():
            for row, tree in enumerate(self._trees):
                if len(tree) > tree.most:
                    self._target.cache.commit(row, *tree.drop_dead())
                own = slice(row * self._beams, (row + 1) * self._beams)
                tree.advance(self._chosen[own], tokens[own])
            if any(tree.scored < len(tree) for tree in self._trees):
                self._score(self._max_length - length - 1)
            self.served[-1] += 1
        return self._output()

    def _score(self, left: int) -> None:
        """Score new tips and a draft in one pass; the search may take `left` more steps behind the next one."""
        first, reads = self._trees[0], False
        tips = len(first)
        if self._drafts is not None:
            steps = self.served[-1] if self.served else 0
            reads = self._drafts.draft(first, self._scores[0].tolist(), steps, left)
            first.fill(self._fewest)
        self.drafted += len(first) - tips
        self.served.append(0)
        scored, cache = np.array([tree.scored for tree in self._trees]), self._target.cache
        needed = int(max(cache.slots.lengths + [len(tree) for tree in self._trees]))
        if needed > cache.slots.capacity:  # a cache that grows by itself gains half of its size
            cache.resize(rows=len(self._trees), capacity=needed + DEAD_NODES)
        begin, busy = time.perf_counter(), time.process_time()
        logits = self._target.score([tree.tree() for tree in self._trees], scored)
        if self._drafts is not None and reads:
            logits[0, 0, 0].item()  # the pass has run
            seconds = time.perf_counter() - begin
            if logits.device.type == "cpu":  # what waits for other processes is no cost of the pass
                seconds = max(1e-9, min(seconds, time.process_time() - busy))
            self._drafts.learn(first, logits, seconds, is_cold=self._target.is_cold)
            return
        for tree, each in zip(self._trees, logits, strict=True):
            tree.learn(each)

    def states(self) -> list[list[RowStates]]:
        """The keys and values of the chosen beams, but for their newest tokens."""
        taken, cache = [], self._target.cache
        for i, beam in enumerate(self._chosen):
            row, tree = i // self._beams, self._trees[i // self._beams]
            taken.append(cache.take(row, torch.from_numpy(tree.path_of(tree.tips[beam]))))
        return taken

    def _output(self) -> Any:
        """Logits after the tips, `[batch * num_beams, 1, vocab]`, as transformers' models return them."""
        logits: Any = torch.stack([tree.known[tip].logits for tree in self._trees for tip in tree.tips])
        return CausalLMOutputWithPast(logits=logits[:, None])

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """Leave the inputs as they are."""
        return model_kwargs
