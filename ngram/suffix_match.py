"""Occurrences of the end of a context in hash chains: from the longest context down, confirmed token by token."""

from __future__ import annotations

from numba import njit

from lookahead.ngram.raw_arrays import jit_inline

LEVELS = 4  # level k has the chains of contexts of 2**k tokens
_COPY_AGE, _COPY_LINKS = 12, 2  # tokens, and links from each of them, where the last copy is searched


@jit_inline
def mix(code, token):
    """Fold one more token into a hash; every product stays below 2**63."""
    product = (code ^ token) * 0x5BD1E995 + 0x2545F491
    return (product ^ (product >> 29)) & 0x7FFFFFFF


@jit_inline
def _match_length(arena, position, context, end, cap):
    """Tokens that agree reading backwards from `position` and from `end` (both exclusive), separators aside."""
    length = 0
    while length < cap and length < end:
        token = context[end - 1 - length]
        if token < 0 or arena[position - 1 - length] != token:
            break
        length += 1
    return length


@jit_inline
def hash_levels(context, end, mask):
    """How many levels the context fills, and the hash of its last 1, 2, 4 and 8 tokens."""
    code, levels = 0, 0
    first, second, third, fourth = 0, 0, 0, 0
    for back in range(1, min(end, 1 << (LEVELS - 1)) + 1):
        token = context[end - back]
        if token < 0:
            break
        code = mix(code, int(token))
        if back == 1:
            levels, first = 1, code & mask
        elif back == 2:
            levels, second = 2, code & mask
        elif back == 4:
            levels, third = 3, code & mask
        elif back == 8:
            levels, fourth = 4, code & mask
    return levels, first, second, third, fourth


@jit_inline
def _is_new(arena, positions, count):
    """Whether the last of `count` positions holds a token that none before it holds."""
    token = arena[positions[count - 1]]
    for other in range(count - 1):
        if arena[positions[other]] == token:
            return False
    return True


@njit(cache=True, error_model="numpy")
def find_matches(arena, heads, links, length, context, end, shortest, longest, variety, positions, lengths):
    """Walk the chains from the longest context down; `Chains.find` is the public function and checks its arguments.

    Fills `positions` and `lengths`, whose size bounds the links walked, and returns how many were found.
    """
    levels, first, second, third, fourth = hash_levels(context, end, heads.shape[1] - 1)
    budget = positions.size
    count = 0
    distinct = 0
    for level in range(levels - 1, -1, -1):
        width = 1 << level
        above = 2 * width if level < levels - 1 and 2 * width <= longest else longest + 1
        if width > longest:
            continue
        if above <= shortest:
            break
        # No tuple is indexed: the compiler assumes that this can fail, and code that can fail counts references.
        slot = fourth if level == 3 else (third if level == 2 else (second if level == 1 else first))
        position = heads[level, slot]
        while position > 0 and budget > 0:
            budget -= 1
            agreed = _match_length(arena, position, context, end, longest)
            if max(width, shortest) <= agreed < above:
                positions[count] = position
                lengths[count] = agreed
                count += 1
                if _is_new(arena, positions, count):
                    distinct += 1
                    if distinct == variety:
                        return count
            position = links[position, level]
    return count


@jit_inline
def last_copy(arena, links, length):
    """The last copy in the open document: the position behind its source (0: none), and its distance to the end.

    A copy is at least three tokens among the last dozen that occurred in a row before; links already lead there.
    """
    for end in range(length - 1, max(3, length - _COPY_AGE), -1):
        if arena[end] < 0:
            break
        place = links[end, 1]
        for _ in range(_COPY_LINKS):
            if place <= 2:
                break
            if arena[place] == arena[end] and arena[place - 1] == arena[end - 1] and arena[place - 2] == arena[end - 2]:
                return place + 1, length - 1 - end
            place = links[place, 1]
    return 0, 0
