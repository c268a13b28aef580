"""The selection of a product that the default run tries."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.default_run import covering

SIZES = [(5,), (4, 2), (3, 3, 4), (2, 6, 1, 3)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_value_and_every_pair_of_values_is_tried_and_no_more_than_needed(sizes):
    cases = [tuple(enumerate(values)) for values in product(*map(range, sizes))]
    cases = [tuple((str(name), value) for name, value in case) for case in cases]
    for strength in range(1, min(2, len(sizes)) + 1):
        chosen = covering(cases, strength)
        tried = {part for number in chosen for part in combinations(cases[number], strength)}
        assert tried == {part for case in cases for part in combinations(case, strength)}
        largest = sorted(sizes)[-strength:]
        assert len(chosen) <= 2 * largest[0] * (largest[-1] if strength == 2 else 1)


def test_values_are_told_apart_and_not_counted():
    """Two processes collect the same tests though their values have other addresses."""
    cases = [tuple(zip("abc", values, strict=True)) for values in product(range(3), range(4), range(2))]
    moved = [tuple((name, 1000 - 7 * value) for name, value in case) for case in cases]
    assert covering(cases, 2) == covering(moved, 2)
    assert len(covering(cases, 1)) == 4
