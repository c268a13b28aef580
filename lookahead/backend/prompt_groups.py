"""Which prompts are read in one pass, and what they copy of rows that begin alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import Tensor

from lookahead.drafting.tree import IntArray
from lookahead.model.cache import TreeCache, TreeLayer

_FEWEST_SHARED = 16  # tokens that are worth copying
Alike = Callable[[int, int, int], int]


@dataclass(slots=True)
class PromptGroup:
    """Prompts that are read in one pass.

    Attributes:
        first: The first of the prompts.
        copies: For each prompt the row whose beginning it copies, or -1, and the tokens of the prompt that are cached
            then.
        tokens: Tokens that are read.
    """

    first: int
    copies: list[tuple[int, int]] = field(default_factory=list)
    tokens: int = 0

    @property
    def prompts(self) -> range:
        """The prompts."""
        return range(self.first, self.first + len(self.copies))


def groups_of(
    prompts: Sequence[IntArray],
    cached: Sequence[int],
    texts: Sequence[IntArray] | None,
    most: int,
    fewest: int,
    alike: Alike = min,
) -> list[PromptGroup]:
    """Group prompts in order.

    Args:
        prompts: int32 `[tokens]` for each row after those of `texts`.
        cached: Tokens of each prompt that are in the cache.
        texts: The tokens in the cache for each row before the prompts; None if nothing may be copied.
        most: Maximum tokens of a pass over several prompts. A prompt with more is read alone.
        fewest: Minimum tokens of a prompt that is read with others, and that are left of one that copies a beginning.
        alike: How many of the first tokens that two texts share may be copied, by that number and their lengths.
    """
    groups, open_group = list[PromptGroup](), PromptGroup(0)
    for at, (prompt, tokens) in enumerate(zip(prompts, cached, strict=True)):
        source = -1
        if texts is not None:
            longer = partial(_longer, prompt, fewest=fewest, alike=alike)
            source, tokens = longer([*texts, *prompts[: open_group.first]], 0, tokens)
            if open_group.copies:  # its beginnings are copied only once that group is read
                inner = longer(prompts[open_group.first : at], len(texts) + open_group.first, tokens)
                if inner[0] >= 0:
                    groups.append(open_group)
                    open_group, (source, tokens) = PromptGroup(at), inner
        new = len(prompt) - tokens
        is_alone = not fewest <= new <= most
        if open_group.copies and (is_alone or open_group.tokens + new > most):
            groups.append(open_group)
            open_group = PromptGroup(at)
        open_group.copies.append((source, tokens))
        open_group.tokens += most if is_alone else new
    return [*groups, open_group]


def _longer(
    prompt: IntArray, others: Sequence[IntArray], first: int, tokens: int, *, fewest: int, alike: Alike
) -> tuple[int, int]:
    """The text, numbered from `first`, that shares the longest beginning with a prompt, and its tokens.

    -1 and `tokens` if no text shares enough more than these.
    """
    shared = [
        min(alike(shared_tokens(prompt, other), len(other), len(prompt)), len(prompt) - fewest) for other in others
    ]
    best = max(range(len(shared)), key=shared.__getitem__, default=-1)
    return (first + best, shared[best]) if shared and shared[best] >= tokens + _FEWEST_SHARED else (-1, tokens)


def shared_tokens(some: IntArray, others: IntArray) -> int:
    """Length of the common beginning of two texts in tokens."""
    size = min(len(some), len(others))
    differs = np.flatnonzero(some[:size] != others[:size])
    return int(differs[0]) if len(differs) else size


def copy_beginning(cache: TreeCache, source: int, row: int, tokens: int) -> None:
    """Copy the keys and values of the first tokens of a row into another one, which has none or fewer."""

    def states() -> Iterator[tuple[Tensor, Tensor] | None]:
        for layer in cache.layers:
            if isinstance(layer, TreeLayer) and layer.is_initialized:
                yield layer.keys[source, :tokens].transpose(0, 1), layer.values[source, :tokens].transpose(0, 1)
            else:
                yield None

    cache.copy_prefix_from(row, states(), tokens, cache.slots.origins[source])
