"""The part of full parameter products in the default run. An exhaustive run (`make test-all`) has all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import settings

settings.register_profile("brief", deadline=None, max_examples=20)  # no deadline: the first example compiles
settings.register_profile("exhaustive", deadline=None, max_examples=100)


def examples(count: int) -> int:
    """The number of Hypothesis examples of a test: `count` in an exhaustive run, a quarter by default."""
    return count if settings().max_examples == settings.get_profile("exhaustive").max_examples else count // 4


def mark_exhaustive(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of tests marked `covering` that are not in a covering selection."""
    groups: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            groups[item.nodeid.partition("[")[0]].append(item)
    for group in groups.values():
        strength = group[0].get_closest_marker("covering").args[0]  # type: ignore[union-attr]
        chosen = covering([_values_of(item) for item in group], strength)
        for number, item in enumerate(group):
            if number not in chosen:
                item.add_marker(pytest.mark.exhaustive)


def _values_of(item: pytest.Function) -> tuple[tuple[str, int], ...]:
    """The parameters of a case with the identities of their values, since some cannot be hashed. Cases share values."""
    return tuple((name, id(value)) for name, value in sorted(item.callspec.params.items()))


def covering(cases: Sequence[tuple[tuple[str, int], ...]], strength: int) -> set[int]:
    """Greedily choose cases so that every value (strength 1) or every pair of values (strength 2) is in one of them.

    Args:
        cases: The parameters of every case, each with a number for its value.
        strength: The number of parameters covered together.

    Returns:
        The indices of the chosen cases.
    """
    parts = [set(combinations(case, strength)) for case in cases]
    missing = set().union(*parts)
    uses: Counter[tuple[str, int]] = Counter()
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(parts[i] & missing), -sum(uses[value] for value in cases[i])))
        chosen.add(best)
        missing -= parts[best]
        uses.update(cases[best])
    return chosen
