"""Random settings, random prompts: never a difference, never a crash. `python -m bench.fuzz` runs thousands more."""

from __future__ import annotations

import pytest

from bench.fuzz import check_case


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "first", [0, 10, *(pytest.param(first, marks=pytest.mark.exhaustive) for first in range(20, 40, 10))]
)
def test_ten_random_calls_give_the_tokens_of_generate(first: int) -> None:
    # Numbers 17 and 24 are batches with criteria and no end of sequence: there rows that are stopped go on.
    for number in range(first, first + 10):
        assert check_case(number) == "", f"python -m bench.fuzz --first {number} --runs 1"
