"""RACER: continuations of the text's n-grams and copied logits of tokens in one tree."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from bench.rules import DraftTree, IntArray, Recycled
from lookahead.drafting.proposal import Feedback, Proposal
from lookahead.ngram.successors import TOP


@dataclass(eq=False, slots=True)
class _State:
    """A state of the automaton: a prefix of n-grams."""

    token: int = -1
    parent: _State | None = None
    count: int = 0  # n-grams with this prefix
    children: dict[int, _State] = field(default_factory=dict)


class Ngrams:
    """The n-grams of texts in a trie of bounded size with LRU eviction of leaves.

    Args:
        capacity: Maximum number of states, larger than the length of an n-gram.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._root = _State()
        self._recent = OrderedDict[_State, None]()  # every state but the root, after its children

    def __len__(self) -> int:
        return len(self._recent)

    def insert(self, ngram: Sequence[int]) -> None:
        """Count an n-gram and its prefixes."""
        state, known = self._root, 0
        while known < len(ngram) and (child := state.children.get(ngram[known])):
            state, known = child, known + 1
            state.count += 1
        self.touch(state)
        for token in ngram[known:]:
            if len(self._recent) >= self._capacity:
                old, _ = self._recent.popitem(last=False)
                assert old.parent is not None
                del old.parent.children[old.token]
            state.children[token] = state = _State(token, state, 1)
            self._recent[state] = None
        self.touch(state)

    def touch(self, state: _State) -> None:
        """Mark a state and its ancestors as used."""
        while state.parent is not None:
            self._recent.move_to_end(state)
            state = state.parent

    def find(self, ngram: Sequence[int]) -> _State | None:
        """The state of an n-gram or prefix; None if there is none."""
        state: _State | None = self._root
        for token in ngram:
            state = state and state.children.get(token)
        return state


class Racer(Recycled):
    """RACER: a tree of continuations of the newest tokens in the text, filled up with copied logits of tokens.

    As in the paper and its code: 10-grams of the text are kept in an automaton of 10,000 states with eviction. Every
    suffix of at least 2 tokens that is a state offers its continuations. The most frequent of all continuations are
    drafted, up to the nodes of the tree. The remaining nodes go to the logits tree: its root has 8 children, and so has
    the first of these; any other first child has half as many as its parent, and every further child half as many as
    the previous one, but at least 1. The successors after the prompt's tokens are kept too. Scaled: both trees together
    have `nodes` nodes (64 in the paper, with the root). Unlike the paper, suffixes are searched in the trie: the
    paper's failure links are made for the prompt only, and lead to the root once used, so that they miss some suffixes.

    Source: Zhang et al. 2026, "RACER: Retrieval-Augmented Contextual Rapid Speculative Decoding", §3.1 (the logits
        tree), §3.2 (the automaton), §3.3 (the union of both).
    """

    LENGTH, SHORTEST = 10, 2  # tokens of an n-gram, and minimum tokens of a suffix to continue

    def __init__(
        self, vocab_size: int, model: PreTrainedModel | None = None, breadth: int = TOP, capacity: int = 10_000
    ) -> None:
        super().__init__(vocab_size, model)
        self._ngrams, self._breadth = Ngrams(capacity), breadth
        self._known: dict[int, int] = {}  # tokens of a row whose n-grams are inserted

    def start(self, row: int, prompt: IntArray) -> None:
        super().start(row, prompt)
        self._known[row] = 0

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        text = self.texts[row]
        tree = DraftTree(int(text[-1]), max_nodes)
        for path in self._continuations(text[-self.LENGTH :].tolist(), max_nodes + 1):
            tree.add(path)
        self._add_logits(tree)
        return tree.proposal()

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        super().observe(row, feedback, placed)
        text = self.texts[row][:-1].tolist()
        for end in range(max(self._known[row] + 1, self.LENGTH), len(text) + 1):
            self._ngrams.insert(text[end - self.LENGTH : end])
        self._known[row] = len(text)

    def finish(self, row: int) -> None:
        super().finish(row)
        del self._known[row]

    def _continuations(self, text: Sequence[int], most: int) -> list[tuple[int, ...]]:
        """The most frequent continuations of all suffixes, prefixes first, including the empty one."""
        tips: list[tuple[int, int, int, tuple[int, ...], _State]] = []
        for begin in range(len(text) - self.SHORTEST + 1):
            if state := self._ngrams.find(text[begin:]):
                self._ngrams.touch(state)
                tips.append((-state.count, 0, begin, (), state))
        heapq.heapify(tips)
        found: list[tuple[int, ...]] = []
        while tips and len(found) < most:
            _, depth, begin, path, state = heapq.heappop(tips)
            found.append(path)
            for token, child in state.children.items():
                heapq.heappush(tips, (-child.count, depth + 1, begin, (*path, token), child))
        return found

    def _add_logits(self, tree: DraftTree) -> None:
        """Fill a tree with the likeliest successors of its tokens, breadth first from the root."""
        queue = deque([(0, self._breadth, self._breadth)])  # nodes, their and their first child's breadth
        while queue and not tree.is_full:
            node, breadth, next_breadth = queue.popleft()
            for token in self.successors[tree.tokens[node], :breadth].tolist():
                place = tree.child(node, token) if token >= 0 else None
                if place is not None:
                    queue.append((place, max(1, next_breadth), next_breadth // 2))
                next_breadth //= 2
