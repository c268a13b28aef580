"""Texts that an output will largely be, and where in them the output has arrived.

Source: the diagonals of an alignment, Myers 1986, "An O(ND) Difference Algorithm and Its Variations", §2. One is
    followed token by token; where it is lost, the longest agreement near that place tells the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.ngram.chains import MAX_CONTEXT, ChainIndex, IntArray, chains_at, find_matches, match_length
from lookahead.ngram.features import START, shift_of
from lookahead.ngram.inlining import jit_inline
from lookahead.utils.addresses import KeepsAddresses, addresses_of, array_at
from lookahead.utils.jit import njit

_BEHIND, _AHEAD = 128, 1024  # entries around a cursor in which its place is looked for when it is lost
_SURE = 8  # tokens of agreement from which on no other place is looked for
_FOUND = 4  # least tokens of agreement that move a cursor
_MOST_PLACES = 24  # of one text, besides those that its chains name
_MAX_LINKS = 16
MAX_ALIGNED = 64  # occurrences of all texts
# A cursor: the first entry of its text and the one behind its last, the entry expected next, and the tokens before it
# that agree with the output.
CURSOR = np.dtype([(name, np.int64) for name in ("begin", "end", "at", "run")])
# The record, int64: where the record of the texts and the cursors lie, and how many cursors there are.
_TEXTS, _CURSORS, _COUNT = range(3)


class Predictions(KeepsAddresses):
    """Texts that the output of a row will largely be, each with a cursor.

    Args:
        texts: int32 `[n]` each; at most `MAX_TEXTS` of them are followed, and empty ones are left out.
    """

    MAX_TEXTS = 8

    __slots__ = ("_cursors", "record", "texts")

    def __init__(self, texts: Sequence[IntArray]) -> None:
        self.texts, begins, ends = ChainIndex(), [], []
        for text in [each for each in texts if len(each)][: self.MAX_TEXTS]:
            self.texts.end_document()
            begins.append(len(self.texts))
            self.texts.append(text)
            ends.append(len(self.texts))
        self._cursors = np.zeros(len(begins), CURSOR)
        self._cursors["begin"], self._cursors["end"], self._cursors["at"] = begins, ends, begins
        self.record = np.array([0, 0, len(begins)], np.int64)
        self._readdress()

    def __len__(self) -> int:
        return len(self._cursors)

    def _readdress(self) -> None:
        self.record[:_COUNT] = addresses_of([self.texts.record, self._cursors])

    def advance(self, text: ChainIndex, emitted: int) -> None:
        """Move the cursors along the last `emitted` tokens of the text of the row."""
        if len(self):
            advance(self.record, text.record, emitted)


@jit_inline
def texts_of(address):
    """The chains of the texts, by where the record of predictions lies."""
    return chains_at(array_at(array_at(address, (3,), np.int64)[_TEXTS], (6,), np.int64))


@jit_inline
def _cursors_of(record):
    return array_at(record[_CURSORS], (record[_COUNT],), CURSOR)


@njit(error_model="numpy")
def advance(record, text, emitted):
    """The core of `Predictions.advance`; `text` is the record of the row's text."""
    arena, heads, links, size = chains_at(array_at(record[_TEXTS], (6,), np.int64))
    own, _, _, length = chains_at(text)
    cursors = _cursors_of(record)
    positions, lengths = np.empty(_MAX_LINKS, np.int64), np.empty(_MAX_LINKS, np.int64)
    for i in range(cursors.size):
        cursor = cursors[i]
        begin, end = cursor["begin"], cursor["end"]
        for at in range(length - emitted, length):
            goes_on = cursor["at"] < end and arena[cursor["at"]] == own[at]
            cursor["at"] += goes_on
            cursor["run"] = cursor["run"] + 1 if goes_on else 0
        if cursor["run"] >= _SURE:
            continue
        # The longest agreement near it, and the nearest of those; or one elsewhere that is longer by two tokens.
        lost_at, place, agreed = cursor["at"], -1, max(cursor["run"], _FOUND - 1)
        for at in range(max(begin + 1, lost_at - _BEHIND), min(end, lost_at + _AHEAD) + 1):
            if arena[at - 1] == own[length - 1]:
                found = match_length(arena, at, own, length, MAX_CONTEXT)
                is_nearer = found == agreed and place >= 0 and abs(at - lost_at) < abs(place - lost_at)
                if found > agreed or is_nearer:
                    agreed, place = found, at
        count = find_matches(arena, heads, links, size, own, length, agreed + 2, MAX_CONTEXT, positions, lengths)
        for each in range(count):
            if begin < positions[each] <= end and lengths[each] > agreed + 1:
                agreed, place = lengths[each], positions[each]
        if place >= 0:
            cursor["at"], cursor["run"] = place, agreed


@jit_inline
def find_aligned(address, text, tail, matches):
    """Find the places at which the texts may go on, those of a sure cursor alone; returns how many there are.

    They are the first occurrences of `matches`, as `_find` of a search lists them.
    """
    record = array_at(address, (3,), np.int64)
    arena, heads, links, length = texts_of(address)
    occurrences, orders = matches
    cursors, size, count = _cursors_of(record), tail.size, 0
    for i in range(cursors.size):
        cursor = cursors[i]
        expected, begin, end = cursor["at"], cursor["begin"], cursor["end"]
        most = min(MAX_ALIGNED, count + _MOST_PLACES)
        if expected < end and count < most:
            agreed = cursor["run"] if cursor["run"] > 0 else match_length(arena, expected, tail, size, MAX_CONTEXT)
            shift = START if expected == begin else 0
            count = _place(occurrences, orders, count, text, expected, agreed, shift_of(shift))
        if cursor["run"] >= _SURE:
            continue
        if cursor["run"] == 0 and expected + 1 < end and count < most:
            agreed = match_length(arena, expected + 1, tail, size, MAX_CONTEXT)
            count = _place(occurrences, orders, count, text, expected + 1, agreed, shift_of(1))
        # The nearest places first.
        for step in range(1, _AHEAD + 1):
            for at in (expected + step, expected - step):
                if not begin < at < end or expected - at > _BEHIND or arena[at - 1] != tail[size - 1]:
                    continue
                if count < most and not (at == expected + 1 and cursor["run"] == 0):
                    agreed = match_length(arena, at, tail, size, MAX_CONTEXT)
                    count = _place(occurrences, orders, count, text, at, agreed, shift_of(at - expected))
        positions, lengths = orders[1, :_MAX_LINKS], orders[2, :_MAX_LINKS]
        found = find_matches(arena, heads, links, length, tail, size, 2, MAX_CONTEXT, positions, lengths)
        for each in range(found):
            at = positions[each]
            is_near = expected - _BEHIND <= at <= expected + _AHEAD
            if begin < at < end and not is_near and count < MAX_ALIGNED:
                count = _place(occurrences, orders, count, text, at, lengths[each], shift_of(at - expected))
    return count


@jit_inline
def _place(occurrences, orders, count, text, position, length, shift):
    """Add one occurrence; returns how many there are then."""
    new = occurrences[count]
    new["text"], new["position"], new["length"], new["shift"] = text, position, length, shift
    orders[0, count] = count
    return count + 1
