"""Candidates after one node of a growing tree, by token: from matches that agree so far, and from recycled tokens."""

from __future__ import annotations

from lookahead.ngram.acceptance import hit_rate
from lookahead.ngram.features import (
    CEILING,
    COPY,
    FREQUENT,
    RANKS,
    bucket_of,
    feature_of_both,
    feature_of_frequent,
    feature_of_match,
    feature_of_memory,
    is_own,
    support_of,
)
from lookahead.ngram.inlining import jit_inline
from lookahead.ngram.recycled import TOP, find_context, prob_of

MOST_OPTIONS = RANKS + max(TOP, FREQUENT)
_MOST_FOREIGN = RANKS // 2  # options found first in other texts; the rest is for the row's own text
_FOLLOWED = 6  # occurrences followed further of those that agree on a token
_LONG = 2  # tokens; a match of this length replaces the recycled context
_SHORT = 5  # tokens; no frequent tokens are offered beside a match of this length

# Columns of an occurrence: the position of its next token, the length of its match, and its text.
POSITION, LENGTH, TEXT = range(3)
# Columns of an option: the range of its occurrences, its parent and depth, its token, its feature (until it is scored,
# the length of its match), a bit for each source, and the agreement on it.
FIRST, STOP, PARENT, DEPTH, TOKEN, FEATURE, SOURCES, _SUPPORT = range(8)
COLUMNS = 8
_MEMBERS, _AGREEING = PARENT, DEPTH  # while occurrences are counted: all of an option's, and those of the first text


@jit_inline
def _token_after(chains, is_open, position, depth):
    """The token at a depth after an occurrence, negative at the end of its document.

    The open document, the first text if it is the row's own, has no end: it is continued by what followed the
    occurrence, so that a loop is continued as a loop.
    """
    arena, _, _, length = chains
    at = position + depth
    if at >= length:
        at = position + depth % (length - position) if is_open else 0  # entry 0 is a separator
    return arena[at]


@jit_inline
def split(texts, own, found, first, stop, depth, options, weights):
    """Split the occurrences from `first` to `stop` by their token at `depth`; each token is an option.

    Fills `weights`, by which options are ranked. Returns the number of options, and the longest match.
    """
    occurrences, orders = found
    count, foreign, end, of_first_text, own_length = 0, 0, 0, 0, 0
    for at in range(first, stop):
        each = orders[0, at]
        text, position = occurrences[each, TEXT], occurrences[each, POSITION]
        if text == 0:
            token = _token_after(texts[0], own, position, depth)
        elif text == 1:
            token = _token_after(texts[1], False, position, depth)
        else:
            token = _token_after(texts[2], False, position, depth)
        if token < 0:
            continue
        matched = occurrences[each, LENGTH] + depth
        if text == 0:
            of_first_text += 1
            own_length = max(own_length, matched)
        option = 0
        while option < count and options[option, TOKEN] != token:
            option += 1
        if option == count:
            if count == RANKS or (text > 0 and foreign == _MOST_FOREIGN):
                continue
            foreign += text > 0
            for column in range(COLUMNS):
                options[option, column] = 0
            options[option, TOKEN] = token
            count += 1
        options[option, _MEMBERS] += 1
        options[option, FEATURE] = max(options[option, FEATURE], matched)
        if text == 0:
            options[option, _AGREEING] += 1
            options[option, FIRST] = max(options[option, FIRST], matched)
        options[option, SOURCES] |= 1 << text
        orders[1, end], orders[2, end] = each, option
        end += 1
    longest, begin = 0, first
    for option in range(count):
        matched, agreeing, total = options[option, FEATURE], options[option, _AGREEING], options[option, _MEMBERS]
        longest = max(longest, matched)
        if agreeing > 0:
            options[option, _SUPPORT] = support_of(0, agreeing, of_first_text)
            options[option, FEATURE] = options[option, FIRST]
            weights[option] = matched + 0.5 * agreeing + 1.0
        else:
            kind = 1 if of_first_text == 0 else (3 if own_length >= matched else 2)
            options[option, _SUPPORT] = support_of(kind, total, end - of_first_text)
            weights[option] = matched + 0.5 * total
        options[option, FIRST] = options[option, STOP] = begin
        begin += min(total, _FOLLOWED)
    for at in range(end):
        option = orders[2, at]
        if options[option, STOP] < options[option, FIRST] + _FOLLOWED:
            orders[0, options[option, STOP]] = orders[1, at]
            options[option, STOP] += 1
    return count, longest


@jit_inline
def score(least, options, probs, matches, longest, memory, hashes, orders, rates):
    """Rank the options of matches, and add recycled tokens, or frequent ones if no recycled context is known.

    Fills `probs` with the probability of each option once the node was chosen; returns the number of options. `least`
    is the least probability of options without a match.
    """
    keys, successors, stored, times, source, since = memory
    table, frequent = rates
    order, group, way, is_foreign = 0, 0, 0, 0
    if orders > 0:
        order, group, way, is_foreign = find_context(keys, times, since, hashes, orders)
    _rank(options, probs, matches)

    own, foreign = 0, 0
    for at in range(matches):
        # Options of the first text are ranked separately: other texts are weak evidence for them.
        if is_own(options[at, _SUPPORT]):
            rank, own = own, own + 1
        else:
            rank, foreign = foreign, foreign + 1
        bucket = 0
        if order > 0:
            bucket = _bucket_in(successors[group, way], stored[group, way], options[at, TOKEN])
            if bucket > 0:
                options[at, SOURCES] |= 1 << source
        if order == 0 or options[at, FEATURE] >= _LONG:
            feature = feature_of_match(options[at, FEATURE], rank, options[at, _SUPPORT])
        else:
            feature = feature_of_both(rank, options[at, _SUPPORT], order, is_foreign, bucket)
        options[at, FEATURE] = feature
        probs[at] = hit_rate(table, feature)
    is_long = longest >= _LONG
    left = CEILING
    if longest >= COPY:
        # Short matches for other tokens do not reduce the probability of a copy.
        probs[0] = min(probs[0], CEILING)
        left = _shrink(probs, 1, matches, CEILING - probs[0])
    elif is_long:
        left = _shrink(probs, 0, matches, CEILING)
    count = matches
    if order > 0:
        for rank in range(TOP):
            bucket = bucket_of(rank, prob_of(stored[group, way, rank]))
            feature = feature_of_memory(order, is_foreign, bucket, longest)
            prob = hit_rate(table, feature)
            if prob >= least:
                token = successors[group, way, rank]
                count = _add(options, probs, matches, count, token, 1 << source, feature, prob)
    elif longest < _SHORT:
        for rank in range(FREQUENT):
            feature = feature_of_frequent(rank, longest)
            prob = hit_rate(table, feature)
            if prob >= least:
                count = _add(options, probs, matches, count, frequent[rank, 0], 1, feature, prob)
    _shrink(probs, matches if is_long else 0, count, left)
    return count


@jit_inline
def _bucket_in(successors, stored, token):
    """The bucket of a token among the successors of a recycled context, 0 if it is not one of them."""
    for rank in range(TOP):
        if successors[rank] == token:
            return bucket_of(rank, prob_of(stored[rank]))
    return 0


@jit_inline
def _rank(options, weights, count):
    for at in range(count):
        best = at
        for other in range(at + 1, count):
            if weights[other] > weights[best]:
                best = other
        if best != at:
            for column in range(COLUMNS):
                options[at, column], options[best, column] = options[best, column], options[at, column]
            weights[at], weights[best] = weights[best], weights[at]


@jit_inline
def _add(options, probs, matches, count, token, sources, feature, prob):
    """Add an option without a match, unless a match offers its token; returns the new number of options."""
    if token < 0:
        return count
    for option in range(matches):
        if options[option, TOKEN] == token:
            return count
    options[count, FIRST] = options[count, STOP] = 0
    options[count, TOKEN], options[count, SOURCES], options[count, FEATURE] = token, sources, feature
    probs[count] = prob
    return count + 1


@jit_inline
def _shrink(probs, begin, end, most):
    """Scale probs down where they sum up to more than `most`; returns the rest."""
    mass = 0.0
    for option in range(begin, end):
        mass += probs[option]
    if mass <= most:
        return most - mass
    for option in range(begin, end):
        probs[option] *= most / mass
    return 0.0
