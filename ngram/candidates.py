"""Candidates for the token after one node of a growing tree, from matches that agree so far and recycled tokens."""

from __future__ import annotations

import numpy as np

from lookahead.ngram.features import (
    CEILING,
    COPY,
    FARES,
    FREQUENT,
    RANKS,
    UNKNOWN,
    bucket_of,
    feature_of_both,
    feature_of_frequent,
    feature_of_guess,
    feature_of_match,
    feature_of_memory,
    feature_of_opposed,
    feature_of_standing,
    standing_of,
    support_of,
)
from lookahead.ngram.hit_rates import hit_rate
from lookahead.ngram.inlining import jit_inline
from lookahead.ngram.successors import TOP, UNIT, find_context

MAX_OPTIONS = RANKS + max(TOP, FREQUENT)
_MAX_FOREIGN_OPTIONS = RANKS // 2  # options found first in other texts; the others are reserved for the own text
_FOLLOWED = 6  # occurrences per token that are followed further
_LONG = 2  # tokens; a match of this length replaces the recycled context
_UNTRIED = 16  # tokens; draft limit of a prediction without a record, which would risk too much at once
_SHORT = 5  # tokens; with a match of this length no frequent tokens are offered

# An occurrence of the end of the context: the position of the next token, and the length of the match. An occurrence in
# a prediction has a place relative to the cursor, from `place_of`, and is ranked by worth.
OCCURRENCE = np.dtype([(name, np.int64) for name in ("text", "position", "length", "place", "worth")])
PREDICTED = 4  # the number of the text of predictions
# An option after a node, and later a node itself. Its occurrences are `first` to `stop`. `members` occurrences agree on
# it, `agreeing` of them in the first text; `length` and `own_length` are the longest matches of each. Occurrences in a
# prediction are counted separately as `guesses`; the best has a place, a number of agreeing tokens, and a rank.
NODE = np.dtype(
    [(name, np.int64) for name in ("token", "parent", "depth", "feature", "sources", "first", "stop")]
    + [(name, np.int64) for name in ("members", "agreeing", "length", "own_length", "support")]
    + [(name, np.int64) for name in ("guesses", "place", "agreed", "guess_rank")]
    + [(name, np.float64) for name in ("weight", "prob", "path_prob")]
)


@jit_inline
def split(texts, own, matches, node, options):
    """Split the occurrences of a node by their next token; each token is an option.

    The open document, which is the first text if it is the row's own, has no end: it continues with the tokens after
    the occurrence, so that a loop is continued as a loop.

    Args:
        texts: The chains of five texts, each as from `lookahead.ngram.chains.chains_at`.
        own: Whether the first text is the row's own.
        matches: Occurrences, `OCCURRENCE` `[n]`, and int64 `[3, n]`, whose first row lists those of the node, longest
            match first, and is sorted by option. The other rows are scratch memory.
        node: The node, a `NODE`.
        options: `NODE` `[MAX_OPTIONS]`, filled, including weights, which rank options.

    Returns:
        The number of options, the tokens of the longest match, and the number of options in predictions.

    Example:
        >>> from lookahead.ngram.search import ChainIndex, HitRates, Search
        >>> text = ChainIndex()
        >>> text.append([1, 5, 1, 6, 1])
        >>> trie = Search([text], HitRates(), None, (1, 16, 32)).grow(2)  # two occurrences of 1
        >>> trie.tokens.tolist(), trie.parents.tolist()
        ([1, 6, 5], [0, 0, 0])
    """
    occurrences, orders = matches
    count, foreign, end, of_first_text, own_length, predicted, guessed = 0, 0, 0, 0, 0, 0, 0
    first, stop, depth = node["first"], node["stop"], node["depth"]
    for at in range(first, stop):
        occurrence = orders[0, at]
        text, position = occurrences[occurrence]["text"], occurrences[occurrence]["position"]
        arena, _, _, length = texts[text]
        token_at = position + depth
        if token_at >= length:  # entry 0 is a separator
            token_at = position + depth % (length - position) if own and text == 0 else 0
        token = arena[token_at]
        if token < 0 or (
            text == PREDICTED and depth >= _UNTRIED and occurrences[occurrence]["place"] % FARES == UNKNOWN
        ):
            continue
        matched = occurrences[occurrence]["length"] + depth
        if text == 0:
            of_first_text += 1
            own_length = max(own_length, matched)
        at_option = 0
        while at_option < count and options[at_option]["token"] != token:
            at_option += 1
        option = options[at_option]
        if at_option == count:
            if count == RANKS or (text > 0 and text != PREDICTED and foreign == _MAX_FOREIGN_OPTIONS):
                continue
            foreign += text > 0 and text != PREDICTED
            option["token"], option["sources"], option["members"], option["length"] = token, 0, 0, 0
            option["agreeing"], option["own_length"], option["guesses"], option["agreed"] = 0, 0, 0, 0
            count += 1
        option["sources"] |= 1 << text
        orders[1, end], orders[2, end] = occurrence, at_option
        end += 1
        if text == PREDICTED:
            predicted += 1
            if option["guesses"] == 0:
                guessed += 1
                option["place"], option["guess_rank"] = occurrences[occurrence]["place"], guessed
            option["guesses"] += 1
            option["agreed"] = max(option["agreed"], matched)
            continue
        option["members"] += 1
        option["length"] = max(option["length"], matched)
        if text == 0:
            option["agreeing"] += 1
            option["own_length"] = max(option["own_length"], matched)
    longest, begin = 0, first
    for at in range(count):
        option = options[at]
        longest = max(longest, option["length"])
        if option["agreeing"] > 0:
            option["support"] = support_of(0, option["agreeing"], of_first_text)
            option["weight"] = option["length"] + 0.5 * option["agreeing"] + 1.0
            option["length"] = option["own_length"]
        else:
            kind = 1 if of_first_text == 0 else (3 if own_length >= option["length"] else 2)
            option["support"] = support_of(kind, option["members"], end - of_first_text - predicted)
            option["weight"] = option["length"] + 0.5 * option["members"]
        option["first"] = option["stop"] = begin
        begin += min(option["members"] + option["guesses"], _FOLLOWED)
    for at in range(end):
        option = options[orders[2, at]]
        if option["stop"] < option["first"] + _FOLLOWED:
            orders[0, option["stop"]] = orders[1, at]
            option["stop"] += 1
    return count, longest, guessed


@jit_inline
def score(least, depth, options, matches, longest, guessed, memory, hashes, orders, rates):
    """Rank the options of matches, and add recycled tokens, or frequent tokens if no recycled context is known.

    Sets the probability of each option given its parent.

    Args:
        least: Minimum probability of an option without a match.
        depth: Depth of the options, 1 for the root's children.
        options: `NODE` `[MAX_OPTIONS]`, as filled by `split`; changed.
        matches: Number of options from `split`.
        longest: Tokens of the longest match, 0 if there is none.
        guessed: Number of options in predictions.
        memory: Entries of a `SuccessorTable`, the bit of its source, and the time until which entries are foreign.
        hashes: uint64 `[ORDERS]`, the keys of the contexts that end at the node.
        orders: Number of keys; 0 without a recycled table.
        rates: Hit rates and frequent tokens, as from `lookahead.ngram.hit_rates.rates_at`.

    Returns:
        The number of options.

    Example:
        >>> from lookahead.ngram.search import ChainIndex, HitRates, Search
        >>> text = ChainIndex()
        >>> text.append([1, 5, 1, 6, 1])
        >>> trie = Search([text], HitRates(), None, (1, 16, 32)).grow(2)
        >>> trie.tokens.tolist(), (100 * trie.probabilities).round().tolist()
        ([1, 6, 5], [100.0, 18.0, 9.0])
    """
    entries, source, since = memory
    table, frequent = rates
    order, group, way, is_foreign = find_context(entries, since, hashes, orders)
    entry = entries[group, way]
    _rank(options, matches)

    own, foreign, agreed = 0, 0, 0
    if guessed > 0:
        for at in range(matches):
            if options[at]["agreed"] > agreed:
                agreed = options[at]["agreed"]
    matched = longest
    if agreed >= COPY:
        longest = max(longest, agreed)
    for at in range(matches):
        option = options[at]
        # Options of the first text are ranked separately: other texts are weak evidence for them.
        rank = 0
        if option["agreeing"] > 0:
            rank, own = own, own + 1
        elif option["members"] > 0:
            rank, foreign = foreign, foreign + 1
        # Its bucket and standing among the successors of the recycled context.
        bucket, standing, known_place = 0, standing_of(-1, 0.0), -1
        for place in range(TOP if order > 0 else 0):
            if entry["tokens"][place] == option["token"]:
                bucket = bucket_of(place, entry["probs"][place] / UNIT)
                standing = standing_of(place, entry["probs"][place] / UNIT)
                option["sources"] |= 1 << source
                known_place = place
                break
        if option["guesses"] > 0 and option["agreed"] >= option["length"]:
            verdict = 0 if matched == 0 else 3
            if option["members"] > 0:
                verdict = 1 if option["length"] >= matched else 2
            guess_rank = 0 if guessed == 1 else min(option["guess_rank"], 2)
            has = 0 if order == 0 else 1 if known_place == 0 else 2
            option["feature"] = feature_of_guess(option["agreed"], option["place"], guess_rank, verdict, has)
        elif option["guesses"] == 0 and agreed >= COPY and agreed >= option["length"]:
            option["feature"] = feature_of_opposed(option["length"], agreed)
        elif order == 0:
            option["feature"] = feature_of_match(option["length"], rank, option["support"])
        elif option["length"] >= _LONG:
            option["feature"] = feature_of_standing(option["length"], rank, option["support"], is_foreign, standing)
        else:
            option["feature"] = feature_of_both(rank, option["support"], order, is_foreign, bucket)
        option["prob"] = hit_rate(table, option["feature"], depth)
    is_long = longest >= _LONG
    if guessed > 0:
        _put_likeliest_first(options, matches)
    left = CEILING
    if longest >= COPY:
        # Short matches for other tokens do not reduce the probability of a copy.
        options[0]["prob"] = min(options[0]["prob"], CEILING)
        left = _shrink(options, 1, matches, CEILING - options[0]["prob"])
    elif is_long:
        left = _shrink(options, 0, matches, CEILING)
    count = matches
    if order > 0:
        for rank in range(TOP):
            bucket = bucket_of(rank, entry["probs"][rank] / UNIT)
            feature = feature_of_memory(order, is_foreign, bucket, longest)
            token = entry["tokens"][rank]
            count = _add(options, matches, count, token, 1 << source, feature, hit_rate(table, feature, depth), least)
    elif longest < _SHORT:
        for rank in range(FREQUENT):
            feature = feature_of_frequent(rank, longest)
            count = _add(options, matches, count, frequent[rank, 0], 1, feature, hit_rate(table, feature, depth), least)
    _shrink(options, matches if is_long else 0, count, left)
    return count


@jit_inline
def _rank(options, count):
    """Sort options by descending weight; the entry after them is scratch memory."""
    for at in range(count):
        best = at
        for other in range(at + 1, count):
            if options[other]["weight"] > options[best]["weight"]:
                best = other
        if best != at:
            options[count] = options[at]
            options[at] = options[best]
            options[best] = options[count]


@jit_inline
def _put_likeliest_first(options, count):
    """Swap the first option with the likeliest; the entry after them is scratch memory."""
    best = 0
    for at in range(1, count):
        if options[at]["prob"] > options[best]["prob"]:
            best = at
    options[count] = options[0]
    options[0] = options[best]
    options[best] = options[count]


@jit_inline
def _add(options, matches, count, token, sources, feature, prob, least):
    """Add an option without a match, unless it is unlikely or a match has its token; returns the number of options."""
    if token < 0 or prob < least:
        return count
    for at in range(matches):
        if options[at]["token"] == token:
            return count
    option = options[count]
    option["token"], option["sources"], option["feature"], option["prob"] = token, sources, feature, prob
    option["first"] = option["stop"] = 0
    return count + 1


@jit_inline
def _shrink(options, begin, end, most):
    """Scale probabilities down if their sum exceeds `most`; returns the remaining probability mass."""
    mass = 0.0
    for at in range(begin, end):
        mass += options[at]["prob"]
    if mass <= most:
        return most - mass
    for at in range(begin, end):
        options[at]["prob"] *= most / mass
    return 0.0
