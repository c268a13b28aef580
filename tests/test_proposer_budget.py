"""A proposer is asked as long as its share of the tokens is its share of the time."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.drafting.budget import SOURCE_REFILL, START, Budget
from tests.support.default_run import examples


def live(budget: Budget, steps: int, *, spent_s: float, alone: float, others: float = 1.0) -> tuple[float, int]:
    """What was lost of steps of 10 ms that give `others` tokens without it, in such steps; how often it was asked."""
    took = tokens = 0.0
    asked = 0
    for _ in range(steps):
        asks = budget.affords
        asked += asks
        emitted = others + (alone if asks else 0.0)
        step_s = 0.01 + (spent_s if asks else 0.0)
        budget.charge(spent_s=spent_s if asks else None, alone=emitted - others, tokens=emitted, step_s=step_s)
        took, tokens = took + step_s, tokens + emitted
    return took / 0.01 - tokens / others, asked


@pytest.mark.parametrize("spent_s", [0.0001, 0.001, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("others", [1.0, 4.0])
def test_one_that_earns_nothing_loses_little_whatever_it_takes(spent_s: float, others: float) -> None:
    lost, _ = live(Budget(), 4000, spent_s=spent_s, alone=0.0, others=others)
    assert lost < 0.0075 * 4000 + 3 + spent_s / 0.01


@pytest.mark.parametrize("spent_s", [0.0001, 0.002, 0.005])
def test_one_that_earns_more_than_its_time_is_always_asked(spent_s: float) -> None:
    lost, asked = live(Budget(), 500, spent_s=spent_s, alone=0.6)
    assert asked == 500
    assert lost < 0


def test_one_that_earns_as_much_as_others_do_in_its_time_is_no_gain_and_no_loss() -> None:
    lost, asked = live(Budget(), 500, spent_s=0.005, alone=0.5)
    assert lost == pytest.approx(0.0, abs=1e-6)
    assert asked == 500


def test_one_that_begins_to_earn_is_found_out() -> None:
    budget = Budget()
    live(budget, 3000, spent_s=0.01, alone=0.0)
    _, asked = live(budget, 2000, spent_s=0.002, alone=1.0)
    assert asked > 1500


def test_a_disturbance_costs_no_more_than_twice_the_usual_price() -> None:
    budget = Budget()
    live(budget, 100, spent_s=0.001, alone=0.5)
    budget.charge(spent_s=60.0, alone=0.5, tokens=1.5, step_s=60.01)
    assert budget.affords


def test_the_first_question_of_a_row_costs_what_others_did_and_nothing_before_any() -> None:
    """A draft model reads the prompt then, which says nothing of its price."""
    new, known = Budget(), Budget()
    new.charge(spent_s=60.0, alone=0.0, tokens=1.0, step_s=60.01, is_first=True)
    assert new.affords and new.begins
    known.charge(spent_s=0.01, alone=0.0, tokens=1.0, step_s=0.02)
    live(known, 400, spent_s=0.01, alone=0.0)
    while not known.affords:
        known.charge(spent_s=None, alone=0.0, tokens=1.0, step_s=0.01)
    known.charge(spent_s=60.0, alone=0.0, tokens=1.0, step_s=60.01, is_first=True)
    assert not known.affords
    for _ in range(400):
        known.charge(spent_s=None, alone=0.0, tokens=1.0, step_s=0.01)
    assert known.affords  # what reading took is not on its account


def live_rows(budget: Budget, rows: int, *, reading_s: float, alone: float) -> tuple[float, int]:
    """What was lost of rows of 50 steps of 10 ms, in such steps, where a question takes 1 ms; how many it was shown."""
    lost, shown = 0.0, 0
    for _ in range(rows):
        is_shown = budget.begins
        shown += is_shown
        is_first = True
        for _ in range(50):
            asks = is_shown and budget.affords
            spent_s = 0.001 + (reading_s if is_first else 0.0) if asks else 0.0
            gained = alone if asks else 0.0
            told = spent_s if asks else None
            budget.charge(spent_s=told, alone=gained, tokens=1 + gained, step_s=0.01 + spent_s, is_first=is_first)
            is_first &= not asks
            lost += spent_s / 0.01 - gained
    return lost, shown


@pytest.mark.parametrize("reading_s", [0.05, 0.1, 0.2])
def test_one_that_does_not_earn_in_a_row_what_reading_it_takes_is_shown_few_rows(reading_s: float) -> None:
    lost, shown = live_rows(Budget(), 400, reading_s=reading_s, alone=0.11)
    assert shown < 40
    assert lost < 0.0075 * 400 * 50 + 2 * reading_s / 0.01


def test_one_that_earns_in_a_row_more_than_reading_it_takes_is_shown_every_row() -> None:
    lost, shown = live_rows(Budget(), 100, reading_s=0.2, alone=0.8)
    assert shown == 100
    assert lost < 0


def test_however_much_a_reading_took_another_row_is_tried_some_time() -> None:
    budget = Budget()
    live_rows(budget, 4, reading_s=1000.0, alone=0.0)
    assert not budget.begins
    live_rows(budget, 200, reading_s=0.01, alone=0.5)
    assert budget.begins


@pytest.mark.parametrize("at_first_s", [0.0, 1e-9])
def test_a_proposer_that_gets_too_dear_to_read_is_shown_few_more_rows(at_first_s: float) -> None:
    budget, shown = Budget(), 0
    for _ in range(5):
        budget.charge(spent_s=at_first_s, alone=0.0, tokens=1.0, step_s=0.01 + at_first_s, is_first=True)
    while budget.begins and shown < 100:
        budget.charge(spent_s=0.5, alone=0.0, tokens=1.0, step_s=0.51, is_first=True)
        shown += 1
    assert shown < 8


@pytest.mark.parametrize("at_first_s", [0.0, 1e-9, 1e-5])
@pytest.mark.parametrize("later_s", [0.005, 0.05])
def test_one_that_costs_nothing_at_first_and_then_too_much_is_found_out(at_first_s: float, later_s: float) -> None:
    budget = Budget()
    live(budget, 100, spent_s=at_first_s, alone=0.0)
    lost, _ = live(budget, 4000, spent_s=later_s, alone=0.0)
    assert lost < 0.0075 * 4000 + 3 + 12 * later_s / 0.01


@given(
    st.sampled_from([0.0001, 0.001, 0.003, 0.01, 0.1]),
    st.lists(st.sampled_from([0.0, 0.01, 0.1]), min_size=1, max_size=60),
    st.sampled_from([0, 100]),
    st.sampled_from([1.0, 3.0]),
)
@settings(max_examples=examples(30))
def test_whatever_it_costs_and_adds_the_tokens_lost_are_bounded(spent_s, pattern, lucky_steps, others) -> None:
    budget, lost, steps = Budget(), 0.0, 2000
    live(budget, lucky_steps, spent_s=spent_s, alone=9.0, others=others)
    saved = budget.balance - START
    for _, alone in zip(range(steps), cycle(pattern), strict=False):
        lost += others * live(budget, 1, spent_s=spent_s, alone=alone, others=others)[0]
    assert lost <= SOURCE_REFILL * steps * (others + max(pattern)) + START + saved + spent_s / 0.01 * others
