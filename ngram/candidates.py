"""What may follow one node of a growing tree: matches that agree so far and the target's memory, joined by token."""

from __future__ import annotations

from lookahead.ngram.acceptance import hit_rate, risk_of
from lookahead.ngram.features import (
    CEILING,
    COPY,
    FREQUENT,
    PLACE_WEIGHT,
    RANKS,
    RESUMED,
    feature_of_both,
    feature_of_frequent,
    feature_of_match,
    feature_of_memory,
    is_own,
    standing_of,
    support_of,
)
from lookahead.ngram.raw_arrays import jit_inline
from lookahead.ngram.recycled import TOP, chance_of, find_context

MOST_OPTIONS = RANKS + max(TOP, FREQUENT)
_MOST_FOREIGN = RANKS // 2  # options found in other texts first, so that they do not crowd out the row's own
_FOLLOWED = 6  # occurrences that agree on a token and are followed on
_LONG = 2  # tokens; a match as long knows more of the context than the memory does
_SHORT = 5  # tokens; where a match is as long, a token that is merely frequent stands no chance

# Columns of an occurrence: where its next token stands, its match, its text, how much was read of what followed, and
# its place (`lookahead.ngram.features.place_of`, or RESUMED where nothing matches).
POSITION, LENGTH, TEXT, READ, PLACE = range(5)
_CHUNK = 8  # tokens read at a time
# Columns of an option: the occurrences behind it, where it would stand, its token, its feature (until it is scored,
# the length of its match, the agreement on it, and its place), and a bit for each source.
FIRST, STOP, PARENT, DEPTH, TOKEN, FEATURE, SOURCES, _SUPPORT, _PLACE = range(9)
COLUMNS = 9
_MEMBERS, _AGREEING = PARENT, DEPTH  # while occurrences are counted: all of an option's, and those of the first text


@jit_inline
def read_ahead(arena, length, is_open, occurrences, ahead, each):
    """Copy some more of what followed an occurrence, -1 where its document has ended.

    The open document, the first text where it is the row's own, has not ended: what will follow it repeats what
    followed the occurrence, so that a loop is continued as a loop.
    """
    begin, depth = occurrences[each, POSITION], occurrences[each, READ]
    stop = min(depth + _CHUNK, ahead.shape[1])
    while depth < stop:
        place = begin + depth
        if place >= length:
            place = begin + depth % (length - begin) if is_open else 0  # a separator stands at 0
        token = arena[place]
        ahead[each, depth] = token
        depth += 1
        if token < 0:
            depth = stop = ahead.shape[1]  # nothing is read behind it
    occurrences[each, READ] = stop


@jit_inline
def _read_on(texts, own, occurrences, ahead, each):
    """`read_ahead` in the text of an occurrence."""
    text = occurrences[each, TEXT]
    if text == 0:
        read_ahead(texts[0][0], texts[0][3], own, occurrences, ahead, each)
    elif text == 1:
        read_ahead(texts[1][0], texts[1][3], False, occurrences, ahead, each)
    else:
        read_ahead(texts[2][0], texts[2][3], False, occurrences, ahead, each)


@jit_inline
def part(texts, own, places, first, stop, depth, options, weights):
    """Part the occurrences from `first` to `stop` by the token `depth` places ahead, each part an option.

    Returns the options and the longest match. An option's weight is what it is ranked by among them.
    """
    occurrences, ahead, orders = places
    count, foreign, end, of_first_text, own_length = 0, 0, 0, 0, 0
    for at in range(first, stop):
        each = orders[0, at]
        text = occurrences[each, TEXT]
        if occurrences[each, READ] <= depth:
            _read_on(texts, own, occurrences, ahead, each)
        token = ahead[each, depth]
        if token < 0:
            continue
        is_resumed = occurrences[each, PLACE] == RESUMED
        if text == 0 and not is_resumed:
            of_first_text += 1
            own_length = max(own_length, occurrences[each, LENGTH] + depth)
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
        options[option, _AGREEING] += text == 0 and not is_resumed
        options[option, FEATURE] = max(options[option, FEATURE], occurrences[each, LENGTH] + depth)
        if text == 0:
            options[option, FIRST] = max(options[option, FIRST], occurrences[each, LENGTH] + depth)
        options[option, SOURCES] |= 1 << text
        if not is_resumed or options[option, _MEMBERS] == 1:
            options[option, _PLACE] = max(options[option, _PLACE], occurrences[each, PLACE])
        orders[1, end], orders[2, end] = each, option
        end += 1
    longest, place = 0, first
    for option in range(count):
        matched, agreeing, total = options[option, FEATURE], options[option, _AGREEING], options[option, _MEMBERS]
        longest = max(longest, matched)
        if agreeing > 0:
            options[option, _SUPPORT] = support_of(0, agreeing, of_first_text)
            options[option, FEATURE] = options[option, FIRST]
            weights[option] = matched + 0.5 * agreeing + 1.0 + PLACE_WEIGHT[options[option, _PLACE]]
        elif options[option, _PLACE] == RESUMED:
            options[option, _SUPPORT] = 0
            weights[option] = matched
        else:
            kind = 1 if of_first_text == 0 else (3 if own_length >= matched else 2)
            options[option, _SUPPORT] = support_of(kind, total, end - of_first_text)
            weights[option] = matched + 0.5 * total
        options[option, FIRST] = options[option, STOP] = place
        place += min(total, _FOLLOWED)
    for at in range(end):
        option = orders[2, at]
        if options[option, STOP] < options[option, FIRST] + _FOLLOWED:
            orders[0, options[option, STOP]] = orders[1, at]
            options[option, STOP] += 1
    return count, longest


@jit_inline
def score(after, options, chances, matches, longest, memory, hashes, orders, source, table, frequent):
    """Rank the options of matches, add those of the memory, or where it knows nothing what is frequent.

    Fills `chances` with the chance of each once the node was chosen; returns how many options there are. `after` is
    the token of the node, and the chance below which an option that no match stands behind is left out.
    """
    token, least = after
    order, group, way = find_context(memory[0], hashes, orders) if orders > 0 else (0, 0, 0)
    _rank(options, chances, matches)
    risk = risk_of(table, token) if matches > 0 else 0
    own, foreign = 0, 0
    for at in range(matches):
        # What the first text offers is ranked among its own: other texts come and go, and say little of it.
        if is_own(options[at, _SUPPORT]):
            rank, own = own, own + 1
        else:
            rank, foreign = foreign, foreign + 1
        standing = 0
        if order > 0:
            standing = _standing_in(memory, group, way, options[at, TOKEN])
            if standing > 0:
                options[at, SOURCES] |= 1 << source
        is_resumed = options[at, _PLACE] == RESUMED
        if order == 0 or options[at, FEATURE] >= _LONG or (is_resumed and standing == 0):
            feature = feature_of_match(options[at, FEATURE], rank, options[at, _SUPPORT], risk, options[at, _PLACE])
        elif is_resumed:
            feature = feature_of_memory(order, standing, 0)
        else:
            feature = feature_of_both(rank, options[at, _SUPPORT], options[at, _PLACE], order, standing)
        options[at, FEATURE] = feature
        chances[at] = hit_rate(table, feature)
    is_long = longest >= _LONG
    left = CEILING
    if longest >= COPY:
        # A copy is as likely as it was found to be, whatever short matches say beside it.
        chances[0] = min(chances[0], CEILING)
        left = _shrink(chances, 1, matches, CEILING - chances[0])
    elif is_long:
        left = _shrink(chances, 0, matches, CEILING)
    count = matches
    if order > 0:
        count = _add_memory(options, chances, matches, longest, memory, order, group, way, 1 << source, table, least)
    elif longest < _SHORT:
        for rank in range(FREQUENT):
            feature = feature_of_frequent(rank, longest)
            chance = hit_rate(table, feature)
            if chance >= least:
                count = _add(options, chances, matches, count, frequent[rank, 0], 1, feature, chance)
    _shrink(chances, matches if is_long else 0, count, left)
    return count


@jit_inline
def _add_memory(options, chances, matches, longest, memory, order, group, way, source, table, least):
    """Add what the memory thought likely in a place of it; returns how many options there are then."""
    _, top, stored = memory
    count = matches
    for rank in range(TOP):
        feature = feature_of_memory(order, standing_of(rank, chance_of(stored[group, way, rank])), longest)
        chance = hit_rate(table, feature)
        if chance >= least:
            count = _add(options, chances, matches, count, top[group, way, rank], source, feature, chance)
    return count


@jit_inline
def _standing_in(memory, group, way, token):
    """The standing of a token in a place of the memory, 0 where it is not among the likeliest."""
    _, top, stored = memory
    for rank in range(TOP):
        if top[group, way, rank] == token:
            return standing_of(rank, chance_of(stored[group, way, rank]))
    return 0


@jit_inline
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


@jit_inline
def _add(options, chances, matches, count, token, sources, feature, chance):
    """Add an option that no match stands behind, unless a match offers its token; returns how many there are now."""
    if token < 0:
        return count
    for option in range(matches):
        if options[option, TOKEN] == token:
            return count
    options[count, FIRST] = options[count, STOP] = 0
    options[count, TOKEN], options[count, SOURCES], options[count, FEATURE] = token, sources, feature
    chances[count] = chance
    return count + 1


@jit_inline
def _shrink(chances, begin, end, most):
    """Make chances smaller where they sum up to more than `most`; returns the rest."""
    mass = 0.0
    for option in range(begin, end):
        mass += chances[option]
    if mass <= most:
        return most - mass
    for option in range(begin, end):
        chances[option] *= most / mass
    return 0.0
