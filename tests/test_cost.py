"""The measured cost of a step, and drafts that are as large as it pays for."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

import lookahead
from lookahead.decoding.assembly import node_cost
from lookahead.drafting.budget import DraftingBudget
from lookahead.drafting.controller import Controller, StepRecord
from lookahead.drafting.cost_model import NODE_COST, StepCost, padded_nodes
from lookahead.drafting.proposal import Proposal
from lookahead.drafting.select import merge
from lookahead.drafting.tree import TokenTree
from lookahead.model.model_state import state_of
from lookahead.ngram.prune import Limits


def test_before_any_measurement_a_node_costs_a_share_of_a_step() -> None:
    curve = StepCost().curve(rows=1, nodes=64)
    assert curve[1] == 1.0
    assert 1.0 < curve[2] < 1.1
    assert len(curve) == 65


def test_another_first_guess_changes_what_was_not_measured_and_nothing_else() -> None:
    cost = StepCost()
    cost.calibrate([1, 8], [0.010, 0.030], rows=1, context=0)
    far = cost.curve(1, 256)[256]
    cost.node_cost = 0.003
    np.testing.assert_allclose(cost.curve(1, 8)[[1, 8]], [0.010, 0.030])
    assert cost.curve(1, 256)[256] < far / 4
    again = StepCost()  # of a process that has not asked for a guess yet
    again.update(cost.to_dict())
    np.testing.assert_allclose(again.curve(1, 8)[[1, 8]], [0.010, 0.030])


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models believe to be on a GPU."""
    monkeypatch.setattr("lookahead.decoding.assembly.input_device", lambda _: torch.device("cuda"))


def test_on_a_gpu_the_first_call_believes_in_what_a_node_costs_there(on_a_gpu, tiny_llama: LlamaForCausalLM) -> None:
    model = copy.deepcopy(tiny_llama).to(torch.bfloat16)
    ids = torch.tensor([[5, 9, 31, 5]])
    model.generate(ids, max_new_tokens=2, do_sample=False, custom_generate=lookahead.decode)
    curve = StepCost()
    curve.node_cost = node_cost(model)
    assert 1.2 < curve.curve(1, 64)[64] < 1.6, "what the data sheets of an H100 and of an RTX 5090 say"
    learned = state_of(model).learned.cost.curve(1, 65)
    assert (learned[64] - learned[1]) / learned[1] < 0.5, "3.5 times a plain step by the guess of a CPU"


@pytest.mark.parametrize("what", ["float32", "packed", "experts", "no GPU"])
def test_where_memory_and_products_say_too_little_the_guess_is_that_of_a_cpu(
    what: str, on_a_gpu, tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny_llama).to(torch.float32 if what == "float32" else torch.bfloat16)
    assert what == "float32" or node_cost(model) < 0.01
    if what == "packed":
        model.is_quantized = True
    elif what == "experts":
        model.model.layers[0].mlp.experts = torch.nn.Identity()
    elif what == "no GPU":
        monkeypatch.setattr("lookahead.decoding.assembly.input_device", lambda _: torch.device("cpu"))
    assert node_cost(model) == NODE_COST


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(1e-4, 10.0)), max_size=60), st.integers(1, 8))
def test_the_curve_is_positive_and_finite_whatever_was_measured(steps: list[tuple[int, float]], rows: int) -> None:
    cost = StepCost()
    for tokens, seconds in steps:
        cost.observe(tokens, seconds)
    curve = cost.curve(rows, 100)
    assert np.isfinite(curve).all()
    assert (curve > 0).all()


def test_what_is_measured_is_what_the_curve_says() -> None:
    cost = StepCost()
    for _ in range(200):
        for tokens in (1, 8, 64):
            cost.observe(tokens, 0.003 * tokens**0.5)
    np.testing.assert_allclose(cost.curve(1, 64)[[1, 8, 64]], 0.003 * np.array([1, 8, 64]) ** 0.5, rtol=0.2)
    np.testing.assert_allclose(cost.curve(8, 8)[[1, 8]], 0.003 * np.array([8, 64]) ** 0.5, rtol=0.2)


def test_the_curve_falls_where_a_larger_step_was_measured_to_take_less() -> None:
    cost = StepCost()
    for _ in range(20):
        for nodes, seconds in ((1, 0.05), (12, 0.13), (16, 0.10)):
            cost.observe(nodes, seconds)
    curve = cost.curve(1, 16)
    assert curve[12] == pytest.approx(0.13, rel=0.02)
    assert curve[16] == pytest.approx(0.10, rel=0.02)
    chain = Proposal(np.arange(17, dtype=np.int32), np.arange(-1, 16).clip(0).astype(np.int32), np.full(17, 0.9, "f4"))
    assert len(merge(0, [chain], Limits(15, 99), costs=curve).tree) == 16


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_costs_of_another_process_keep_their_shape_at_the_scale_of_the_first_step(factor: float) -> None:
    kept, cost = StepCost(), StepCost()
    kept.calibrate([1, 8, 16], [0.05, 0.08, 0.10], rows=1, context=0)
    cost.update(kept.to_dict())
    cost.observe(1, 0.05 * factor)
    np.testing.assert_allclose(cost.curve(1, 16)[[1, 8, 16]], factor * kept.curve(1, 16)[[1, 8, 16]], rtol=0.01)


def test_a_shape_measured_on_a_busy_machine_is_tried_again_and_put_right() -> None:
    kept, cost = StepCost(), StepCost()
    kept.calibrate([1, 8, 16], [0.05, 0.50, 0.60], rows=1, context=0)
    cost.update(kept.to_dict())
    for _ in range(600):
        cost.observe(1, 0.05)
    assert cost.curve(1, 8)[8] < 0.2, "cheap enough for a long match"
    for _ in range(30):
        cost.observe(8, 0.06)
    assert cost.curve(1, 8)[8] == pytest.approx(0.06, rel=0.1)


def test_what_was_measured_in_this_process_is_not_replaced_by_a_file() -> None:
    kept, cost = StepCost(), StepCost()
    kept.calibrate([1, 8, 16], [0.5, 0.8, 1.0], rows=1, context=0)
    for _ in range(3):
        cost.observe(1, 0.05)
        cost.observe(8, 0.06)
    cost.update(kept.to_dict())
    np.testing.assert_allclose(cost.curve(1, 16)[[1, 8, 16]], [0.05, 0.06, 0.10], rtol=0.02)


def test_a_first_step_that_was_held_up_is_put_right_by_the_next() -> None:
    cost = StepCost()
    cost.observe(1, 0.15)
    cost.observe(1, 0.05)
    assert cost.curve(1, 1)[1] == pytest.approx(0.05)


def test_a_machine_that_becomes_slower_changes_no_ratio_of_costs() -> None:
    cost = StepCost()
    for _ in range(30):
        cost.observe(1, 0.05)
        cost.observe(8, 0.07)
    for _ in range(30):
        cost.observe(1, 0.10)
    assert cost.curve(1, 8)[8] == pytest.approx(0.14, rel=0.03)


def test_a_step_that_was_held_up_counts_little() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(1, 0.003)
    cost.observe(1, 3.0)
    assert cost.curve(1, 1)[1] < 0.004


def test_a_cost_measured_too_high_is_tried_again() -> None:
    cost = StepCost()
    for _ in range(30):
        cost.observe(1, 0.003)
        cost.observe(16, 0.300)
    before = cost.curve(1, 16)[16]
    for _ in range(2000):
        cost.observe(1, 0.003)
    assert cost.curve(1, 16)[16] < before / 5


@given(
    st.lists(st.sampled_from([0.05, 0.3, 0.6, 0.9, 0.99]), min_size=1, max_size=12),
    st.lists(st.floats(0.001, 1.0), min_size=14, max_size=14),
)
def test_a_draft_ends_where_expected_tokens_over_cost_are_highest(chances: list[float], steps: list[float]) -> None:
    n = len(chances) + 1
    chain = Proposal(
        np.arange(n, dtype=np.int32),
        np.maximum(np.arange(n) - 1, 0).astype(np.int32),
        np.array([1.0, *chances], np.float32),
    )
    costs = np.cumsum(steps)
    tree = merge(0, [chain], Limits(12, 100), costs=costs).tree
    expected = np.cumsum(np.cumprod(chain.probabilities.astype(np.float64)))
    rates = expected / costs[1 : n + 1]
    assert rates[len(tree) - 1] == pytest.approx(rates.max())


def test_a_node_that_teaches_a_source_is_drafted_where_its_chance_alone_does_not_pay() -> None:
    chain = Proposal(np.array([0, 1], np.int32), np.zeros(2, np.int32), np.array([1.0, 0.05], np.float32))
    costs = np.array([0.0, 1.0, 1.06])
    assert len(merge(0, [chain], Limits(1, 9), costs=costs).tree) == 1
    assert len(merge(0, [chain], Limits(1, 9, node_bonus_tokens=0.02), costs=costs).tree) == 2
    assert len(merge(0, [chain], Limits(1, 9, min_probability=0.1, node_bonus_tokens=0.02), costs=costs).tree) == 1


def test_nodes_that_cost_too_much_are_not_drafted_at_all() -> None:
    chain = Proposal(np.array([0, 1], np.int32), np.zeros(2, np.int32), np.array([1.0, 0.5], np.float32))
    assert len(merge(0, [chain], Limits(4, 9), costs=np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])).tree) == 1
    assert len(merge(0, [chain], Limits(4, 9), costs=np.array([0.0, 1.0, 1.1, 1.2, 1.3, 1.4])).tree) == 2


def test_the_curve_follows_what_steps_cost() -> None:
    cost = StepCost()
    for seconds in (1.0, 3.0):
        for _ in range(60):
            cost.observe(1, seconds)
            cost.observe(8, 2 * seconds)
            cost.curve(1, 8)
        assert cost.curve(1, 8)[[1, 8]].tolist() == pytest.approx([seconds, 2 * seconds], rel=0.1)
        assert cost.plain(1)[1] == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    ("nodes", "most", "padded"), [(1, 64, 1), (3, 64, 4), (33, 64, 64), (64, 64, 64), (17, 21, 21), (30, 21, 30)]
)
def test_nodes_are_padded_to_a_power_of_two_or_the_most_there_are(nodes: int, most: int, padded: int) -> None:
    assert padded_nodes(nodes, most) == padded


def test_the_cost_of_padded_steps_is_a_staircase_and_recording_is_no_part_of_it() -> None:
    cost = StepCost()
    controller = Controller(cost, DraftingBudget(), node_budget=63, is_padded=True)

    def step(nodes: int, tokens: int, seconds: float, *, is_cold: bool = False) -> None:
        root = TokenTree.root(5), np.zeros(1, np.int32)
        plan = controller.plan([50], 100)
        controller.record(plan, StepRecord([root], [tokens], float(nodes), 0.0, seconds, is_cold))

    for nodes, seconds in [(1, 0.001), (4, 0.002), (16, 0.004), (1, 0.001), (1, 0.001)] * 8:
        step(nodes, nodes, seconds)
    step(8, 1, 30.0, is_cold=True)
    plan = controller.plan([50], 100)
    assert plan.drafts
    stairs = plan.costs.tolist()
    assert stairs[3] == stairs[4] < stairs[5] == stairs[8] < stairs[9] == stairs[16] < stairs[17] == stairs[32]
    assert stairs[8] < 0.004
    for _ in range(50):
        step(13, 1, 0.006)  # was padded to 16, and counts as such
    assert cost.curve(1, 16, 100)[16] == pytest.approx(0.006, rel=0.1)


@pytest.mark.parametrize("node_cost", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("nodes", [2, 5, 7, 9, 10, 14, 19, 20, 27, 28, 39, 40, 55, 79])
def test_a_size_between_two_points_gets_the_cost_that_it_has(nodes: int, node_cost: float) -> None:
    cost = StepCost()
    for _ in range(60):
        cost.observe(1, 1.0)
        cost.observe(nodes, 1.0 + node_cost * (nodes - 1))
    assert cost.curve(rows=1, nodes=nodes)[nodes] == pytest.approx(1.0 + node_cost * (nodes - 1), rel=0.03)
