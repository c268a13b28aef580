"""Brute-force references of the index and the tree: slow, obvious, and only for tests."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.ngram.chains import LEVELS


def find_by_scan(
    stream: Sequence[int], context: Sequence[int], *, min_ngram: int = 1, max_ngram: int = 64
) -> list[tuple[int, int]]:
    """Compare every position of a stream with the end of a context.

    Args:
        stream: Documents, separated by a negative number.
        context: Tokens whose end is looked up; a negative number limits a match.
        min_ngram: Minimum length of a match, in tokens.
        max_ngram: Maximum length of a compared context, in tokens.

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
    """The longest chain context, in tokens, under which a match of `length` tokens is found."""
    return max(1 << level for level in range(LEVELS) if 1 << level <= length)


def continuation(stream: Sequence[int], position: int, depth: int, *, is_open: bool) -> list[int]:
    """The tokens after an occurrence, at most `depth`.

    Args:
        stream: Documents, separated by a negative number.
        position: The position of the next token after the occurrence.
        depth: Maximum number of tokens to read.
        is_open: Whether the end of the stream is the context itself. The text then continues from `position`, so that
            a loop continues as a loop.
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
    """A `SuccessorTable` without eviction: the newest successors by context."""

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
        """Like `SuccessorTable.store`."""
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
        """Like `tests.support.index_queries.find_recycled`."""
        for order in range(min(4, len(context)), 0, -1):
            known = self.successors.get(tuple(context[len(context) - order :]))
            if known is not None:
                return order, *known
        return 0, [], []
