"""Alignment of an output with a text that it largely repeats, to predict how it continues after an edit.

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

# The record of a cursor, int64: the position after the last token that agreed, 0 without a prediction; the number of
# output tokens since then, none of which agrees; the number of tokens that agree before it; and the numbers of output
# tokens that the text predicted, and of all output tokens.
_AT, _GAP, _RUN, _HITS, _SEEN, CURSOR_SIZE = range(6)
MOST_ALIGNED = 12  # followed places of one text
_LINKS = 32  # links walked in the whole text, where blocks may have moved
_BEHIND, _AHEAD = 64, 1024  # tokens before and after the cursor that are compared first
_NEAR, _NEAR_RUN, _FAR_RUN = 128, 5, 12  # the cursor moves after a run of agreeing tokens, longer beyond `_NEAR` tokens
_BRIEF = 2  # tokens of a change after which the text is likely to continue
_SURE_RUN = 8  # agreeing tokens after which no other place is searched
_JUDGED = 8  # output tokens after which the text is judged
_CONVINCING = 4  # minimum of agreeing tokens if a text fared badly
_COUNTED = 512  # tokens at which counts are halved, to forget old text


@jit_inline
def find_aligned(chains, number, cursor, output, end, occurrences, scratch):
    """Find continuations of an output in a text: at the cursor, after an edit, or where a block moved.

    Args:
        chains: The chains of the text.
        number: The number of the text.
        cursor: int64 `[CURSOR_SIZE]`.
        output: int32 `[end or more]`.
        end: Length of the output, or of its last part, whose last tokens are compared.
        occurrences: `OCCURRENCE` `[MOST_ALIGNED]`, filled, best first.
        scratch: int64 `[2, 32 or more]`, scratch memory.

    Returns:
        The number of places found.

    Example:
        >>> from lookahead.ngram.chains import ChainIndex
        >>> text, output = ChainIndex(), np.array([5, 6, 9], np.int32)
        >>> text.append([5, 6, 7, 8, 9, 4])
        >>> occurrences, scratch = np.zeros(MOST_ALIGNED, OCCURRENCE), np.zeros((2, _LINKS), np.int64)
        >>> cursor = np.array([3, 1, 0, 2, 3])  # 5 and 6 agree, 9 does not
        >>> count = find_aligned(text.state, 0, cursor, output, 3, occurrences, scratch)
        >>> text.tokens[occurrences["position"][:count]].tolist()  # 9 was inserted, replaced 7, or 7 and 8 left out
        [7, 8, 4]
    """
    arena, _, _, length = chains
    at, gap, run = cursor[_AT], cursor[_GAP], cursor[_RUN]
    hits, seen, fared = cursor[_HITS], cursor[_SEEN], UNKNOWN
    if seen >= _JUDGED:
        fared = BADLY + (5 * hits >= seen) + (5 * hits >= 4 * seen)
    count = 0
    if gap == 0:
        if at < length:
            count = _insert(occurrences, count, number, at, run, place_of(0, fared), 1 << 20)
        if run >= _SURE_RUN:
            return count
        if seen == 0:  # the output may start with any of several texts
            for start in range(1, length):
                if arena[start - 1] < 0 and start != at and count < MOST_ALIGNED:
                    count = _insert(occurrences, count, number, start, 0, place_of(1, fared), -start)
            return count
    elif fared != BADLY:  # the insertion ends here, or it replaced as many tokens
        long = 7 if gap > _BRIEF else 0  # places after long edits have their own numbers
        count = _insert(occurrences, count, number, at, 0, place_of(1 + long, fared), 1)
        if at + gap < length:
            count = _insert(occurrences, count, number, at + gap, 0, place_of(2 + long, fared), 0)
    last = output[end - 1]
    first, stop = max(2, at + 1 - _BEHIND), min(length, at + 1 + _AHEAD)
    for start in range(first, stop):
        if arena[start - 1] == last and not (gap == 0 and start == at):
            agreed = match_length(arena, start, output, end, MAX_CONTEXT)
            count = _offer(occurrences, count, number, start, agreed, at, gap, fared)
    positions, lengths = scratch[0, :_LINKS], scratch[1, :_LINKS]
    walked = find_matches(chains, output, end, 1, MAX_CONTEXT, positions, lengths)
    for start in range(walked):
        position = positions[start]
        if not first <= position < stop:
            count = _offer(occurrences, count, number, position, lengths[start], at, gap, fared)
    return count


@jit_inline
def _offer(occurrences, count, number, position, agreed, at, gap, fared):
    """Add a place where tokens agree. Longer agreements and fewer skipped tokens rank higher.

    In a text that fared badly, agreements of few tokens are chance and are ignored.
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
    return _insert(
        occurrences, count, number, position, agreed, place_of(place, fared), 16 * min(agreed, 24) - 10 * far
    )


@jit_inline
def _insert(occurrences, count, number, position, agreed, place, worth):
    """Insert a place into `occurrences`, sorted by descending worth; returns the number of places."""
    if count == MOST_ALIGNED:
        if occurrences[count - 1]["worth"] >= worth:
            return count
        count -= 1
    at = count
    while at > 0 and occurrences[at - 1]["worth"] < worth:
        occurrences[at] = occurrences[at - 1]
        at -= 1
    new = occurrences[at]
    new["text"], new["position"], new["length"], new["place"], new["worth"] = number, position, agreed, place, worth
    return count + 1


@njit(error_model="numpy")
def follow(cursor, text, output, new):
    """Move a cursor over new tokens of an output.

    Args:
        cursor: int64 `[CURSOR_SIZE]`, changed.
        text: The record of the text's `Chains`.
        output: The record of the output's `Chains`, which ends with the new tokens.
        new: Number of new tokens.

    Example:
        >>> from lookahead.ngram.chains import ChainIndex
        >>> text, output, cursor = ChainIndex(), ChainIndex(), np.array([1, 0, 0, 0, 0])
        >>> text.append([5, 6, 7, 8])
        >>> output.append([5, 6])
        >>> follow(cursor, text.record, output.record, 2)
        >>> cursor.tolist()
        [3, 0, 2, 2, 2]
    """
    chains, (written, _, _, end) = chains_at(text), chains_at(output)
    arena, length = chains[0], chains[3]
    occurrences, scratch = np.empty(MOST_ALIGNED, OCCURRENCE), np.empty((2, _LINKS), np.int64)
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
        count = find_aligned(chains, 0, cursor, written, at + 1, occurrences, scratch)
        for number in range(count):
            agreed, position = occurrences[number]["length"], occurrences[number]["position"]
            skipped = position - min(agreed, cursor[_GAP]) - cursor[_AT]
            if agreed >= (_NEAR_RUN if 0 <= skipped < _NEAR else _FAR_RUN):
                cursor[_AT], cursor[_GAP], cursor[_RUN] = position, 0, agreed
                cursor[_HITS] = min(cursor[_SEEN], cursor[_HITS] + agreed)
                break


@jit_inline
def _begin(arena, length, token, cursor):
    """Move the cursor after the first output token, in the first of several texts that begins with it."""
    for at in range(1, length):
        if arena[at - 1] < 0 and arena[at] == token:
            cursor[_AT], cursor[_RUN], cursor[_HITS] = at + 1, 1, 1
            return
    cursor[_GAP] = 1
