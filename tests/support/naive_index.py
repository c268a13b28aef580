"""What the index and the tree must find, by brute force: slow, obvious, and used by tests only."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.ngram.chains import LEVELS


def find_by_scan(
    stream: Sequence[int], context: Sequence[int], *, min_ngram: int = 1, max_ngram: int = 64
) -> list[tuple[int, int]]:
    """Compare every position of a stream with the end of a context.

    Args:
        stream: Documents, a negative number between them.
        context: Tokens whose end is looked up; a negative number cuts it short.
        min_ngram: Shortest match that counts, in tokens.
        max_ngram: Longest context compared, in tokens.

    Returns:
        Position and length of every match, in the order of `find_matches` without limits.
    """
    matches = []
    for position in range(len(stream)):
        if stream[position] < 0:
            continue
        length = 0
        while length < min(max_ngram, position, len(context)):
            left, right = stream[position - 1 - length], context[len(context) - 1 - length]
            if left != right or left < 0:
                break
            length += 1
        if length >= max(1, min_ngram):
            matches.append((position, length))
    return sorted(matches, key=lambda match: (-_chain_of(match[1]), -match[0]))


def _chain_of(length: int) -> int:
    """The longest chain context, in tokens, that a match of `length` tokens shows up under."""
    return max(1 << level for level in range(LEVELS) if 1 << level <= length)


def continuation(stream: Sequence[int], position: int, depth: int, *, is_open: bool) -> list[int]:
    """What followed an occurrence, `depth` tokens at most.

    Args:
        stream: Documents, a negative number between them.
        position: Where the occurrence's next token stands.
        depth: How many tokens to read.
        is_open: Whether the stream's end is the context itself: what follows is then taken to repeat from
            `position`, so that a loop goes on as a loop.
    """
    tokens: list[int] = []
    at = position
    while len(tokens) < depth:
        if at == len(stream):
            if not is_open:
                break
            at = position
        if stream[at] < 0:
            break
        tokens.append(stream[at])
        at += 1
    return tokens


class RecycledByDict:
    """What `SuccessorTable` remembers where it forgets nothing: successors by context, the newest."""

    def __init__(self) -> None:
        self.successors: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def store(
        self,
        before: Sequence[int],
        parents: Sequence[int],
        tokens: Sequence[int],
        top: Sequence[list[int]],
        chances: Sequence[list[float]],
    ) -> None:
        """As `SuccessorTable.store`."""
        for node in range(len(tokens)):
            path: list[int] = []
            up = node
            while up != 0:
                path.insert(0, tokens[up])
                up = parents[up]
            for order in range(1, 5):
                context = (*before, *path)[-order:]
                if len(context) == order and min(context) >= 0:
                    self.successors[context] = (top[node], chances[node])

    def find(self, context: Sequence[int]) -> tuple[int, list[int], list[float]]:
        """As `tests.support.index_queries.find_recycled`."""
        for order in range(min(4, len(context)), 0, -1):
            known = self.successors.get(tuple(context[len(context) - order :]))
            if known is not None:
                return order, *known
        return 0, [], []
