"""Where an output stands in a text that it will largely repeat, and how it may go on there after an edit.

Source: Heckel 1978, "A Technique for Isolating Differences Between Files" (after a difference, the longest agreement
    near it aligns both texts again).
"""

from __future__ import annotations

import numpy as np

from lookahead.ngram.candidates import OCCURRENCE
from lookahead.ngram.chains import MAX_CONTEXT, chains_at, find_matches, match_length
from lookahead.ngram.features import BADLY, UNKNOWN, place_of
from lookahead.ngram.inlining import jit_inline
from lookahead.utils.jit import njit

# The record of a cursor, int64: the position behind the last token that agreed, 0 without a prediction; how many tokens
# of the output came since, none of which agrees; how many agree before it; and of all tokens of the output those at
# which the text foretold them, and how many there are.
_AT, _GAP, _RUN, _HITS, _SEEN, CURSOR_SIZE = range(6)
MOST_ALIGNED = 12  # places of one text that are followed
_LINKS = 32  # walked in the whole text, where blocks may have moved
_BEHIND, _AHEAD = 64, 1024  # tokens of the cursor that are compared first
_NEAR, _NEAR_RUN, _FAR_RUN = 128, 5, 12  # tokens that agree before the cursor moves, so many or more tokens away
_BRIEF = 2  # tokens of a change behind which the text may well go on
_SURE_RUN = 8  # tokens that agree; then no other place is looked for
_JUDGED = 8  # tokens of the output from which on it is known how the text fared
_CONVINCING = 4  # tokens that agree at least where a text fared badly
_COUNTED = 512  # tokens; at so many their counts are halved, so that old text counts less


@jit_inline
def find_aligned(chains, number, cursor, output, end, found, scratch):
    """Find how a text goes on after an output: at the cursor, behind an edit, or where a block moved.

    Args:
        chains: The chains of the text.
        number: The number of the text.
        cursor: int64 `[CURSOR_SIZE]`.
        output: int32 `[end or more]`.
        end: Tokens of the output, or of its end, the last ones of which are compared.
        found: `OCCURRENCE` `[MOST_ALIGNED]`, filled, the best first.
        scratch: int64 `[2, 32 or more]`.

    Returns:
        How many were found.
    """
    arena, heads, links, length = chains
    at, gap, run = cursor[_AT], cursor[_GAP], cursor[_RUN]
    hits, seen, fared = cursor[_HITS], cursor[_SEEN], UNKNOWN
    if seen >= _JUDGED:
        fared = BADLY + (5 * hits >= seen) + (5 * hits >= 4 * seen)
    count = 0
    if gap == 0:
        if at < length:
            count = _insert(found, count, number, at, run, place_of(0, fared), 1 << 20)
        if run >= _SURE_RUN:
            return count
        if seen == 0:  # any of several texts may begin
            for each in range(1, length):
                if arena[each - 1] < 0 and each != at and count < MOST_ALIGNED:
                    count = _insert(found, count, number, each, 0, place_of(1, fared), -each)
            return count
    elif fared != BADLY:  # what was inserted ends, or as much was replaced
        long = 7 if gap > _BRIEF else 0  # such places have numbers of their own
        count = _insert(found, count, number, at, 0, place_of(1 + long, fared), 1)
        if at + gap < length:
            count = _insert(found, count, number, at + gap, 0, place_of(2 + long, fared), 0)
    last = output[end - 1]
    first, stop = max(2, at + 1 - _BEHIND), min(length, at + 1 + _AHEAD)
    for each in range(first, stop):
        if arena[each - 1] == last and not (gap == 0 and each == at):
            agreed = match_length(arena, each, output, end, MAX_CONTEXT)
            count = _offer(found, count, number, each, agreed, at, gap, fared)
    positions, lengths = scratch[0, :_LINKS], scratch[1, :_LINKS]
    walked = find_matches(arena, heads, links, length, output, end, 1, MAX_CONTEXT, positions, lengths)
    for each in range(walked):
        position = positions[each]
        if not first <= position < stop:
            count = _offer(found, count, number, position, lengths[each], at, gap, fared)
    return count


@jit_inline
def _offer(found, count, number, position, agreed, at, gap, fared):
    """Add a place where some tokens agree, the better the longer they are and the fewer of the text are left out.

    In a text that fared badly few tokens agree by chance.
    """
    if fared == BADLY and agreed < _CONVINCING:
        return count
    skipped = position - min(agreed, gap) - at
    distance, place = skipped, 3
    if skipped < 0:
        distance, place = -2 * skipped, 6 if skipped >= -16 else 7
    elif skipped >= 16:
        place = 4 if skipped < _NEAR else 5
    far = 0
    while distance > 0:
        far, distance = far + 1, distance >> 1
    return _insert(found, count, number, position, agreed, place_of(place, fared), 16 * min(agreed, 24) - 10 * far)


@jit_inline
def _insert(found, count, number, position, agreed, place, worth):
    """Add a place to those found, which fall by worth; returns how many there are."""
    if count == MOST_ALIGNED:
        if found[count - 1]["worth"] >= worth:
            return count
        count -= 1
    at = count
    while at > 0 and found[at - 1]["worth"] < worth:
        found[at] = found[at - 1]
        at -= 1
    new = found[at]
    new["text"], new["position"], new["length"], new["place"], new["worth"] = number, position, agreed, place, worth
    return count + 1


@njit(error_model="numpy")
def follow(cursor, text, output, new):
    """Move a cursor along with new tokens of an output.

    Args:
        cursor: int64 `[CURSOR_SIZE]`, changed.
        text: The record of the text's `Chains`.
        output: The record of the output's; it ends with the new tokens.
        new: How many there are.
    """
    chains, (written, _, _, end) = chains_at(text), chains_at(output)
    arena, length = chains[0], chains[3]
    found, scratch = np.empty(MOST_ALIGNED, OCCURRENCE), np.empty((2, _LINKS), np.int64)
    for at in range(end - new, end):
        token = written[at]
        cursor[_SEEN] += 1
        if cursor[_SEEN] == _COUNTED:
            cursor[_SEEN], cursor[_HITS] = cursor[_SEEN] // 2, cursor[_HITS] // 2
        if cursor[_GAP] == 0 and cursor[_AT] < length and arena[cursor[_AT]] == token:
            cursor[_AT], cursor[_RUN], cursor[_HITS] = cursor[_AT] + 1, cursor[_RUN] + 1, cursor[_HITS] + 1
            continue
        if cursor[_SEEN] == 1:
            _begin(arena, length, token, cursor)
            continue
        cursor[_GAP], cursor[_RUN] = cursor[_GAP] + 1, 0
        count = find_aligned(chains, 0, cursor, written, at + 1, found, scratch)
        for each in range(count):
            agreed, position = found[each]["length"], found[each]["position"]
            skipped = position - min(agreed, cursor[_GAP]) - cursor[_AT]
            if agreed >= (_NEAR_RUN if 0 <= skipped < _NEAR else _FAR_RUN):
                cursor[_AT], cursor[_GAP], cursor[_RUN] = position, 0, agreed
                cursor[_HITS] = min(cursor[_SEEN], cursor[_HITS] + agreed)
                break


@jit_inline
def _begin(arena, length, token, cursor):
    """Put the cursor behind the first token of an output, in the first of several texts that begins with it."""
    for at in range(1, length):
        if arena[at - 1] < 0 and arena[at] == token:
            cursor[_AT], cursor[_RUN], cursor[_HITS] = at + 1, 1, 1
            return
    cursor[_GAP] = 1
