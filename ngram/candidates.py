"""What may follow one node of a growing tree: matches that agree so far and the target's memory, joined by token."""

from __future__ import annotations

from numba import njit

from lookahead.ngram.hits import (
    CEILING,
    FREQUENT,
    RANKS,
    feature_of_both,
    feature_of_frequent,
    feature_of_match,
    feature_of_memory,
    standing_of,
    support_of,
)
from lookahead.ngram.recycled import TOP, chance_of, find_context

MOST_OPTIONS = RANKS + max(TOP, FREQUENT)
_FOLLOWED = 6  # occurrences that agree on a token and are followed on
_LONG = 2  # tokens; a match as long knows more of the context than the memory does
_SHORT = 5  # tokens; where a match is as long, a token that is merely frequent stands no chance

# Columns of an option: the occurrences behind it, where it would stand, its token, its feature (until it is scored,
# the length of its match and the agreement on it), and a bit for each source.
FIRST, STOP, PARENT, DEPTH, TOKEN, FEATURE, SOURCES, _SUPPORT = range(8)
COLUMNS = 8


@njit(cache=True)
def part(which, first, stop, depth, lengths, texts, ahead, options, weights):
    """Part the occurrences `which[first:stop]` by the token `depth` places ahead, each part an option.

    Returns the options and the longest match. An option's weight is what it is ranked by among them.
    """
    end, of_first_text = first, 0
    for at in range(first, stop):
        if ahead[which[at], depth] >= 0:
            which[end] = which[at]
            of_first_text += texts[which[at]] == 0
            end += 1
    count, begin, longest = 0, first, 0
    while begin < end and count < RANKS:
        token = ahead[which[begin], depth]
        after, matched, sources, agreeing = begin, 0, 0, 0
        for at in range(begin, end):
            each = which[at]
            if ahead[each, depth] == token:
                for back in range(at, after, -1):
                    which[back] = which[back - 1]
                which[after] = each
                after += 1
                matched = max(matched, lengths[each])
                sources |= 1 << texts[each]
                agreeing += texts[each] == 0
        options[count, FIRST], options[count, STOP] = begin, min(after, begin + _FOLLOWED)
        options[count, TOKEN], options[count, SOURCES] = token, sources
        options[count, FEATURE] = matched + depth
        if agreeing > 0:
            options[count, _SUPPORT] = support_of(0, agreeing, of_first_text)
            weights[count] = matched + depth + 0.5 * agreeing + 1.0
        else:
            kind = 2 if of_first_text > 0 else 1
            options[count, _SUPPORT] = support_of(kind, after - begin, end - first - of_first_text)
            weights[count] = matched + depth + 0.5 * (after - begin)
        longest = max(longest, matched + depth)
        count += 1
        begin = after
    return count, longest


@njit(cache=True)
def score(options, chances, matches, longest, memory, hashes, orders, source, table, frequent, factor):
    """Rank the options of matches, add those of the memory, or of what is frequent where it knows nothing.

    Fills `chances` with the chance of each once the node was chosen; returns how many options there are.
    """
    keys, top, stored = memory
    order, group, way = find_context(keys, hashes, orders)
    _rank(options, chances, matches)
    for at in range(matches):
        standing = 0
        for rank in range(TOP if order > 0 else 0):
            if top[group, way, rank] == options[at, TOKEN]:
                standing = standing_of(rank, chance_of(stored[group, way, rank]))
                options[at, SOURCES] |= 1 << source
        if order == 0 or options[at, FEATURE] >= _LONG:
            feature = feature_of_match(options[at, FEATURE], at, options[at, _SUPPORT])
        else:
            feature = feature_of_both(options[at, FEATURE], at, options[at, _SUPPORT], order, standing)
        options[at, FEATURE] = feature
        chances[at] = table[feature, 0]
    is_long = longest >= _LONG
    left = _scale(chances, 0, matches, factor, CEILING) if is_long else CEILING
    count = matches
    if order > 0:
        for rank in range(TOP):
            feature = feature_of_memory(order, standing_of(rank, chance_of(stored[group, way, rank])), longest)
            count = _add(options, chances, matches, count, top[group, way, rank], 1 << source, feature, table)
    if not is_long:
        left = _scale(chances, 0, count, factor, CEILING)
    begin = matches if is_long else count
    if order == 0 and longest < _SHORT:
        for rank in range(FREQUENT):
            feature = feature_of_frequent(rank, longest)
            count = _add(options, chances, matches, count, frequent[rank, 0], 1, feature, table)
    _scale(chances, begin, count, factor, left)
    return count


@njit(cache=True)
def _rank(options, weights, count):
    """Put the options with the greatest weight first."""
    for at in range(count):
        best = at
        for other in range(at + 1, count):
            if weights[other] > weights[best]:
                best = other
        if best != at:
            for column in range(COLUMNS):
                options[at, column], options[best, column] = options[best, column], options[at, column]
            weights[at], weights[best] = weights[best], weights[at]


@njit(cache=True)
def _add(options, chances, matches, count, token, sources, feature, table):
    """Add an option that no match stands behind, unless a match offers its token; returns how many there are now."""
    if token < 0:
        return count
    for option in range(matches):
        if options[option, TOKEN] == token:
            return count
    options[count, FIRST] = options[count, STOP] = 0
    options[count, TOKEN], options[count, SOURCES], options[count, FEATURE] = token, sources, feature
    chances[count] = table[feature, 0]
    return count + 1


@njit(cache=True)
def _scale(chances, begin, end, factor, most):
    """Multiply chances by a factor, a smaller one where they would sum up to more than `most`; returns the rest."""
    mass = 0.0
    for option in range(begin, end):
        mass += chances[option]
    if mass == 0.0:
        return most
    scale = min(factor, most / mass)
    for option in range(begin, end):
        chances[option] *= scale
    return most - mass * scale
