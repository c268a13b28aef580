"""When to draft, under simulated costs: plain decoding is never lost to, and what can be copied is found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lookahead.drafting.budget import CAP, OVERDRAFT, REFILL, START, DraftingBudget
from lookahead.drafting.controller import Controller, StepRecord
from lookahead.drafting.cost_model import StepCost
from lookahead.drafting.proposal import Proposal
from lookahead.drafting.select import BatchValue, Draft, fit, merge
from lookahead.ngram.prune import Limits
from tests.support.default_run import examples

BUDGET = 32


def alike(rows: int) -> BatchValue:
    """Rows whose steps are as dear as there are rows, so that a token of any row is worth the same."""
    return BatchValue(np.full(rows, 10_000.0), np.arange(rows + 1.0))


def controller_of(cost: StepCost | None = None, budget: DraftingBudget | None = None, **options: Any) -> Controller:
    return Controller(cost or StepCost(), budget or DraftingBudget(), node_budget=BUDGET, **options)


def chain(chances: list[float]) -> Proposal:
    n = len(chances) + 1
    return Proposal(
        np.arange(n, dtype=np.int32),
        np.maximum(np.arange(n) - 1, 0).astype(np.int32),
        np.array([1.0, *chances], np.float32),
    )


@dataclass
class Machine:
    """A simulated engine: what steps cost, what looking for drafts costs, and what it did with its time."""

    node_cost: float
    look: float = 0.01
    rows: int = 1
    controller: Controller = field(default_factory=controller_of)
    plain_s: float = 1.0  # of its clock
    seconds: float = 0.0
    tokens: float = 0.0  # a row
    drafted: int = 0
    steps: int = 0
    longest: float = 0.0

    def step_cost(self, nodes: int) -> float:
        return 1.0 + self.node_cost * (nodes - 1)

    def step(self, claimed: list[float], accepted: int) -> None:
        """One step: every row's proposer claims these chances for a chain, and so many of its nodes are right."""
        plan = self.controller.plan([10_000] * self.rows, 100)
        drafts = [Draft(merge(0, [], Limits(0, 0)).tree, ())] * self.rows
        host = 0.0
        if plan.drafts:
            host = self.look
            offers = [merge(0, [chain(claimed)], Limits(BUDGET, 99)) for _ in range(self.rows)]
            drafts = fit(offers, plan.costs, plan.value or alike(1))
            if not self.controller.accepts(plan, drafts):
                drafts = [draft.root_only() for draft in drafts]
        nodes = len(drafts[0].tree)
        tokens = 1 + min(accepted, nodes - 1)
        took = self.step_cost(nodes)
        path = np.arange(tokens, dtype=np.int32)
        times = host * self.plain_s, (host + took) * self.plain_s
        verified = [(draft.tree, path) for draft in drafts]
        self.controller.record(plan, StepRecord(verified, [tokens] * self.rows, nodes, *times))
        self.seconds += took + host
        self.tokens += tokens
        self.drafted += nodes > 1
        self.steps += 1
        self.longest = max(self.longest, took + host)

    @property
    def lost(self) -> float:
        """Seconds beyond those of plain decoding."""
        return self.seconds - self.tokens


@given(
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.sampled_from([1, 4, 16]),
    st.lists(st.tuples(st.lists(st.sampled_from([0.1, 0.6, 0.99]), max_size=20), st.integers(0, 20)), min_size=1),
)
@example(1.0, 0.5, 1, [([0.6], 0), ([0.6, *[0.99] * 5], 6)])
@settings(max_examples=examples(50))
def test_whatever_steps_cost_and_drafts_claim_the_time_lost_is_the_share_for_probing(node_cost, look, rows, pattern):
    machine = Machine(node_cost, look, rows)
    for i in range(400):
        machine.step(*pattern[i % len(pattern)])
    assert machine.lost <= REFILL * machine.seconds + CAP + OVERDRAFT + 3 * machine.longest


def test_drafts_that_are_never_right_cost_no_more_than_the_share_for_probing() -> None:
    machine = Machine(node_cost=0.3)
    for _ in range(4000):
        machine.step([0.99] * 10, 0)
    assert machine.lost < 0.015 * machine.seconds
    assert machine.drafted < 0.05 * machine.steps


def test_looking_for_drafts_in_vain_costs_no_more_however_slow_it_is() -> None:
    machine = Machine(node_cost=0.1, look=0.5)
    for _ in range(4000):
        machine.step([], 0)
    assert machine.lost < REFILL * machine.seconds + START + 2 * machine.longest


def test_text_that_can_be_copied_is_copied_from_the_first_steps_on() -> None:
    machine = Machine(node_cost=0.1)
    for _ in range(50):
        machine.step([0.9] * 16, 16)
    assert machine.tokens > 3 * machine.seconds
    assert machine.drafted >= 45


def test_a_step_of_several_rows_takes_no_longer_than_four_plain_ones() -> None:
    cost, root = StepCost(), merge(0, [], Limits(0, 0)).tree
    cost.calibrate([1, 4, 16, 33], [1.0, 4.0, 16.0, 33.0], rows=16, context=100)
    controller = controller_of(cost)
    plain = StepRecord([(root, np.zeros(1, np.int32))] * 16, [1] * 16, 1, 0.0, 1.0)
    controller.record(controller.plan([100] * 16, 100, ragged_nodes=256), plain)
    plan = controller.plan([100] * 16, 100, is_refilled=True, ragged_nodes=256)
    drafts = [merge(0, [chain([0.99] * 20)], Limits(plan.max_nodes, 99)) for _ in range(16)]
    assert plan.value is not None and sum(len(draft.tree) for draft in drafts) > 200
    for most in (plan.ragged_nodes, 32):
        assert 16 < sum(len(d.tree) for d in fit(drafts, plan.costs, plan.value, ragged_nodes=most)) <= min(most, 64)


@pytest.mark.parametrize("rows", [1, 16])
def test_text_that_becomes_copyable_is_noticed_after_long_pauses(rows: int) -> None:
    machine = Machine(node_cost=0.2 / rows**0.5, look=0.03, rows=rows)
    for _ in range(2000):
        machine.step([0.7] * 4, 0)
    # The last draft in vain may have overdrawn the account: what it lost is earned again within so many steps.
    drafted, seconds, tokens = machine.drafted, machine.seconds, machine.tokens
    for _ in range(300):
        machine.step([0.95] * 20, 20)
    assert machine.drafted > drafted + 150
    assert machine.tokens - tokens > 2 * (machine.seconds - seconds)


def test_a_modest_gain_is_kept() -> None:
    machine = Machine(node_cost=0.1)
    for i in range(2000):
        machine.step([0.5], i % 2)
    assert machine.drafted > 0.9 * machine.steps
    assert machine.lost < -0.2 * machine.seconds


def test_while_every_step_drafts_some_are_plain_so_that_the_plain_speed_stays_known() -> None:
    machine = Machine(node_cost=0.01)
    for _ in range(1000):
        machine.step([0.99] * 20, 20)
    assert 1000 / 128 / 2 < machine.steps - machine.drafted < 2 * 1000 / 128


def test_a_number_of_rows_where_drafting_loses_does_not_stop_one_where_it_pays() -> None:
    controller = controller_of()
    many, single = Machine(2.0, rows=16, controller=controller), Machine(0.05, controller=controller)
    for _ in range(300):
        many.step([0.9] * 4, 1)
        single.step([0.9] * 4, 3)
    assert single.drafted > 250
    assert many.lost < 0.05 * many.seconds


def outputs(budget: DraftingBudget, count: int, chances: list[float], accepted: int) -> list[Machine]:
    cost, machines = StepCost(), []
    for _ in range(count):
        machines.append(Machine(node_cost=0.1, look=0.2, controller=controller_of(cost, budget)))
        for _ in range(50):
            machines[-1].step(chances, accepted)
    return machines


def test_what_earlier_outputs_saved_is_not_lost_again_once_they_save_nothing() -> None:
    budget = DraftingBudget()
    outputs(budget, 3, [0.9] * 16, 16)
    lost = [machine.lost for machine in outputs(budget, 40, [], 0)]
    assert max(lost[20:]) < START + REFILL * 50


def test_of_what_a_lucky_output_saved_the_next_may_lose_half() -> None:
    budget = DraftingBudget()
    outputs(budget, 20, [], 0)
    outputs(budget, 1, [0.9] * 16, 16)
    (following,) = outputs(budget, 1, [], 0)
    assert following.lost < 0.6 * CAP


def test_one_output_that_lost_its_savings_does_not_keep_the_next_from_drafting() -> None:
    budget = DraftingBudget()
    outputs(budget, 3, [0.9] * 16, 16)
    outputs(budget, 1, [0.9] * 16, 0)
    (following,) = outputs(budget, 1, [0.9] * 16, 16)
    assert following.drafted > 40


def test_the_budget_must_cover_what_a_draft_may_lose_unless_it_is_a_long_match() -> None:
    budget = DraftingBudget()
    assert budget.verifies(1, 1.1, at_risk=0.2)
    budget.record(1, drafted=True, tokens=1.0, forward=1.0 + START, usual=1.0 + START, proposing=0.0)
    assert not budget.verifies(1, 1.1, at_risk=0.2)
    assert budget.verifies(1, 2.0, at_risk=0.2)


def step_of(seconds: float) -> Machine:
    """A machine whose plain step takes so long; looking for drafts takes 0.1 ms, a node 10% of a plain step."""
    return Machine(node_cost=0.1, look=0.0001 / seconds, plain_s=seconds)


@pytest.mark.parametrize("seconds", [0.005, 0.05, 0.5])
def test_a_copy_is_noticed_at_once_though_drafts_were_wrong_before(seconds: float) -> None:
    machine = step_of(seconds)
    for _ in range(3):
        machine.step([0.6] * 4, 0)
    for _ in range(30):
        machine.step([], 0)
    before = machine.drafted
    for _ in range(10):
        machine.step([0.7, 0.7, 0.7, 0.8], 4)
    assert machine.drafted >= before + 8


@pytest.mark.parametrize("look", [0.002, 0.015, 0.03])
def test_a_loop_is_noticed_within_a_few_steps_after_drafts_that_lost_the_budget(look: float) -> None:
    machine = Machine(node_cost=0.1, look=look)
    for _ in range(4):
        machine.step([], 0)
    budget = machine.controller.budget
    budget.record(1, drafted=True, tokens=1.0, forward=2.0 + START, usual=2.0 + START, proposing=look)
    assert not budget.verifies(1, 1.1)
    for _ in range(20):
        machine.step([0.95] * 16, 16)
    assert machine.drafted >= 15


@pytest.mark.parametrize("seconds", [0.005, 0.05, 0.5])
def test_long_matches_that_are_always_wrong_lose_a_few_plain_steps_and_the_share(seconds: float) -> None:
    machine = step_of(seconds)
    for _ in range(1000):
        machine.step([0.95] * 8, 0)
    assert START < machine.lost < START + OVERDRAFT + 2 * machine.longest + REFILL * machine.seconds


def test_no_draft_is_larger_than_what_the_budget_pays_for_if_none_of_it_is_right() -> None:
    machine = Machine(node_cost=0.5)
    machine.controller.cost.node_cost = machine.node_cost
    machine.step([], 0)
    plan = machine.controller.plan([10_000], 100)
    assert plan.drafts and plan.max_nodes * machine.node_cost == START + OVERDRAFT
    for _ in range(10):
        machine.step([0.99] * 10, 10)
    risk = machine.controller.plan([10_000], 100).max_nodes * machine.node_cost
    assert START + OVERDRAFT < risk <= CAP + OVERDRAFT


def test_a_step_that_was_held_up_is_not_paid_in_full() -> None:
    budget = DraftingBudget()
    budget.record(1, drafted=True, tokens=1.0, forward=50.0, usual=1.2, proposing=0.0)
    assert budget.verifies(1, 1.1, at_risk=0.5)


def test_a_bad_beginning_does_not_stop_drafting_where_outputs_save_a_lot() -> None:
    budget = DraftingBudget()
    outputs(budget, 3, [0.9] * 16, 16)
    machine = Machine(node_cost=0.1, look=0.2, controller=controller_of(budget=budget))
    for accepted in 3 * [0] + 47 * [16]:
        machine.step([0.9] * 16, accepted)
    assert machine.drafted > 40


@pytest.mark.parametrize("teaches", [False, True])
def test_a_node_is_worth_more_than_its_tokens_where_a_source_learns_from_it(teaches) -> None:
    cost, budget = StepCost(), DraftingBudget()
    budget.record_plain(1)  # the first step is plain
    cost.calibrate([1, 33], [1.0, 1.1], rows=1, context=0)
    plan = controller_of(cost, budget, teaches=teaches).plan([100], 100)
    assert (plan.node_bonus_tokens > 0.0) == teaches


def test_the_trees_of_rows_that_step_together_are_sized_together() -> None:
    likely, unlikely = [0.9] * 8, [0.1]
    costs = 1.0 + 0.5 * np.arange(34.0)
    alone = fit([merge(0, [chain(likely)], Limits(32, 99))], costs, alike(1))
    assert len(alone[0].tree) > 4
    together = [merge(0, [chain(chances)], Limits(32, 99)) for chances in [likely] + 15 * [unlikely]]
    assert all(len(draft.tree) == 1 for draft in fit(together, costs, alike(16))), (
        "one row does not make fifteen others wait"
    )
    everyone = [merge(0, [chain(likely)], Limits(32, 99)) for _ in range(16)]
    assert {len(draft.tree) for draft in fit(everyone, costs, alike(16))} == {len(alone[0].tree)}


@given(
    st.lists(st.lists(st.sampled_from([0.2, 0.6, 0.95]), max_size=8), min_size=1, max_size=4),
    st.integers(0, 4),
    st.lists(st.floats(0.01, 1.0), min_size=12, max_size=12),
)
def test_a_common_size_gives_the_most_expected_tokens_per_cost(rows, required, steps) -> None:
    offers = [chain(chances) for chances in rows]
    offers = [Proposal(o.tokens, o.parents, o.probabilities, required=min(required, len(o.tokens))) for o in offers]
    drafts = [merge(0, [offer], Limits(10, 99)) for offer in offers]
    costs = np.cumsum(steps)
    fitted = fit(drafts, costs, alike(len(drafts)))
    least = max(max(1, int(d.required.sum()) + 1) for d in drafts)

    def rate(size: int) -> float:
        tokens = sum(float(np.sort(d.path_probs)[::-1][:size].sum()) for d in drafts)
        return tokens / costs[size]

    size = max(range(least, len(costs)), key=rate)
    for draft, cut in zip(drafts, fitted, strict=True):
        assert len(cut.tree) == min(size, len(draft.tree))
        assert cut.placed[0][: len(cut.tree)].tolist() == list(range(len(cut.tree)))
        assert cut.tree.parents.tolist() == [max(0, i - 1) for i in range(len(cut.tree))]


def simulate(left: list[int], plain: list[float]) -> float:
    """Seconds of plain decoding until all rows have ended."""
    seconds, left = 0.0, list(left)
    while any(left):
        seconds += plain[sum(1 for each in left if each)]
        left = [max(0, each - 1) for each in left]
    return seconds


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=2, max_size=6),
    st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6),
)
def test_tokens_are_worth_the_time_by_which_the_batch_then_ends_sooner(rows, steps) -> None:
    left, tokens = [each for each, _ in rows], [each for _, each in rows]
    plain = [0.0, *np.cumsum([1.0, *steps])][: len(rows) + 1]
    sooner = simulate(left, plain) - simulate([max(0, a - b) for a, b in rows], plain)
    batch = BatchValue(np.array(left, np.float64), np.array(plain))
    assert batch.steps_saved(tokens) == pytest.approx(sooner / plain[-1])


@pytest.mark.parametrize("p_runs_to_limit", [0.0, 0.5, 1.0])
def test_the_less_it_is_known_when_rows_end_the_more_their_tokens_count_alike(p_runs_to_limit: float) -> None:
    batch = BatchValue.of([50, 90], np.array([0.0, 3.0, 3.0]), p_runs_to_limit)
    ahead, behind = batch.steps_saved([4, 0]), batch.steps_saved([0, 4])
    assert ahead == pytest.approx((1 - p_runs_to_limit) * 2)
    assert behind == pytest.approx((1 - p_runs_to_limit) * 2 + p_runs_to_limit * 4)


def test_a_row_ahead_is_not_drafted_for_if_the_others_take_as_long_without_it() -> None:
    drafts = [merge(0, [chain([0.9] * 8)], Limits(32, 99)), merge(0, [], Limits(32, 99))]
    costs = np.array([0.0, *np.linspace(1.0, 2.0, 32)])
    same_price = np.array([0.0, 1.0, 1.0])
    ahead, behind = (
        fit(drafts, costs, BatchValue(np.array(left), same_price)) for left in ([50.0, 90.0], [90.0, 50.0])
    )
    assert [len(draft.tree) for draft in ahead] == [1, 1]
    assert len(behind[0].tree) > 4


@pytest.mark.parametrize("is_refilled", [True, False])
def test_a_token_is_worth_the_same_in_every_row_while_rows_are_refilled(is_refilled):
    cost, budget = StepCost(), DraftingBudget()
    for _ in range(20):
        cost.observe(1, 0.010, rows=2)
    controller = controller_of(cost, budget, runs_to_limit=True)
    budget.record_plain(2)
    plan = controller.plan([5, 100], 50, is_refilled=is_refilled)
    assert plan.drafts
    saved = [plan.value.steps_saved(tokens) for tokens in ([3.0, 1.0], [1.0, 3.0])]
    assert (saved[0] == pytest.approx(saved[1]) == pytest.approx(2.0)) == is_refilled
    assert is_refilled or saved[0] < saved[1]  # else the one that has more to go ends the batch


def test_slow_first_proposals_and_failed_first_drafts_do_not_blind_a_large_model() -> None:
    budget = DraftingBudget()
    budget.begin_output()
    for drafted, proposing in ((False, 0.1), (True, 0.06), (True, 0.005), (False, 0.005)):
        took = 1.7 if drafted else 1.0
        budget.record(1, drafted=drafted, tokens=1.0, forward=took, usual=took, proposing=proposing)
    for _ in range(32):
        assert budget.prices(1)
        budget.record(1, drafted=False, tokens=1.0, forward=1.0, usual=1.0, proposing=0.005)
