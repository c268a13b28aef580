"""An index of unfinished outputs, which the other rows of a batch can search."""

from __future__ import annotations

import numpy as np

from lookahead.ngram.chains import SEPARATOR, ChainIndex, IntArray, put

_FIRST_ROOM = 64  # tokens of a document
_MAX_ENTRIES = 4  # arena entries per token, beyond which all documents are packed


class LiveOutputs:
    """Growing documents, one per row, in one index.

    A document without room moves to the end of the arena and gets twice the room, so that a token costs amortised O(1).
    The entries it leaves become separators; if most entries are empty, all documents are packed.

    Attributes:
        chains: The index.

    Example:
        >>> live = LiveOutputs()
        >>> for row, tokens in ((0, [5, 6]), (1, [8]), (0, [7])):
        ...     live.extend(row, np.array(tokens, np.int32))
        >>> live.end(1)
        >>> [live.chains.tokens[slice(*live.span_of(row))].tolist() for row in (0, 1)]
        [[5, 6, 7], []]
    """

    def __init__(self) -> None:
        self.chains = ChainIndex()
        self._spans: dict[int, tuple[int, int, int]] = {}  # by row: begin, end, and the end of its room
        self._used = 0  # tokens of all documents

    def span_of(self, row: int) -> tuple[int, int]:
        """The begin and end (exclusive) of the document of a row; an empty span if it has none."""
        return self._spans.get(row, (0, 0, 0))[:2]

    def extend(self, row: int, tokens: IntArray) -> None:
        """Add tokens, int32 `[n]`, to the document of a row, which is created if necessary."""
        begin, end, limit = self._spans.get(row, (0, 0, 0))
        if end + tokens.size > limit:
            tokens = np.concatenate((self.chains.tokens[begin:end], tokens))
            self.end(row)
            self.chains.end_document()
            begin = end = len(self.chains)
            limit = begin + max(_FIRST_ROOM, 2 * tokens.size)
            self.chains.append_documents(np.full(limit + 1 - begin, SEPARATOR, np.int32))
        put(self.chains.record, end, tokens)
        self._spans[row] = begin, end + tokens.size, limit
        self._used += tokens.size

    def end(self, row: int) -> None:
        """Drop the document of a row, if it has one."""
        begin, end, _ = self._spans.pop(row, (0, 0, 0))
        self.chains.state[0][begin:end] = SEPARATOR
        self._used -= end - begin
        if len(self.chains) > _MAX_ENTRIES * (self._used + _FIRST_ROOM * (1 + len(self._spans))):
            texts = {other: self.chains.tokens[slice(*self.span_of(other))].copy() for other in self._spans}
            self._spans, self._used, self.chains.state = {}, 0, ChainIndex().state
            for other, text in texts.items():
                self.extend(other, text)
