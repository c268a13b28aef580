"""The lookahead branch left to costs: on where it pays, off where it does not, and free while it is off."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.drafting.branch import LookaheadBranch
from lookahead.drafting.budget import CAP, REFILL, DraftingBudget
from lookahead.drafting.controller import Controller, StepRecord
from lookahead.drafting.cost_model import StepCost
from lookahead.drafting.proposal import Feedback
from lookahead.drafting.sizes import BranchSize
from lookahead.drafting.tree import TokenTree, without_sources
from lookahead.errors import ConfigError
from lookahead.model.model_state import LearnedState, use_learned
from lookahead.proposers.jacobi import JacobiProposer
from tests.support.default_run import examples
from tests.support.simulated_devices import decode, on_device

AUTO = LookaheadConfig(window="auto")
SIZE = BranchSize(7, 5, 7)
BUDGET = 32
NOTHING = np.zeros(0, np.int32)
Cost = Callable[[int], float]


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def flat_to(width: int, node_cost: float = 0.04) -> Cost:
    """A device on which nodes are free up to a width, and then take some share of a plain step each."""
    return lambda nodes: 1.0 + node_cost * max(0, nodes - width)


def rising(node_cost: float) -> Cost:
    return flat_to(1, node_cost)


class Others:
    """Stands for the proposers beside the branch, where only the names of sources count."""

    sources = ("others",)


OTHERS, BRANCH = 1, 2  # the bits of their nodes


def controller_of(node_budget: int = BUDGET, *, has_branch: bool = True) -> tuple[Controller, LookaheadBranch]:
    branch = LookaheadBranch(SIZE)
    proposers: Any = [Others(), JacobiProposer(SIZE, branch)]
    decided = branch if has_branch else None
    return Controller(StepCost(), DraftingBudget(), decided, proposers, node_budget=node_budget), branch


def record_of(own_nodes: int, nodes: int, own: float, tokens: float, host_s: float, step_s: float) -> StepRecord:
    """A step whose tree has `own_nodes` without the branch; it gave `own` of its tokens without it."""
    sources = np.full(nodes, OTHERS, np.int32)
    sources[own_nodes:], sources[0] = BRANCH, 0
    tree = TokenTree(ids(*range(nodes)), ids(*range(-1, nodes - 1)).clip(0), np.zeros(nodes, np.int32), sources)
    added = round(tokens - own)  # nodes of the branch that were accepted
    return StepRecord([(tree, ids(0, *range(own_nodes, own_nodes + added)))], [tokens], nodes, host_s, step_s)  # type: ignore


@dataclass
class Machine:
    """A simulated engine of one row: what steps cost, what other sources give, and what the branch adds to them."""

    step_cost: Cost
    own_nodes: int = 1
    own_tokens: float = 1.0
    host: float = 0.01
    has_branch: bool = True
    seconds: float = 0.0
    without_branch: float = 0.0  # what the same tokens would have taken
    on: list[bool] = field(default_factory=list)
    longest: float = 0.0

    def __post_init__(self) -> None:
        self.controller, self.branch = controller_of(has_branch=self.has_branch)

    def step(self, added: float) -> None:
        """One step; a branch that is on adds so many tokens to it."""
        plan = self.controller.plan([900], 100)
        nodes, tokens, host = (self.own_nodes, self.own_tokens, self.host) if plan.drafts else (1, 1.0, 0.0)
        own_nodes, own_tokens = nodes, tokens
        if plan.has_branch:
            nodes += SIZE.window_nodes + SIZE.guesses
            assert nodes < len(plan.costs)
            tokens, host = tokens + added, 2 * self.host
            self.branch.host_s = self.host
        took = self.step_cost(nodes)
        self.controller.record(plan, record_of(own_nodes, nodes, own_tokens, tokens, host, took + host))
        self.seconds += took + host
        own = self.step_cost(self.own_nodes) + self.host
        self.without_branch += tokens * own / self.own_tokens if self.own_tokens > 1 else tokens
        self.on.append(plan.has_branch)
        self.longest = max(self.longest, took + host)

    @property
    def lost(self) -> float:
        """Plain steps beyond those that the same tokens would have taken without the branch."""
        return self.seconds - self.without_branch

    def share_on(self, last: int) -> float:
        """Of the last steps, those with the branch."""
        return sum(self.on[-last:]) / last


# Whether it runs


@pytest.mark.parametrize("own", [(1, 1.0), (32, 3.0)], ids=["alone", "beside others"])
def test_where_nodes_are_free_it_is_soon_on_and_stays(own: tuple[int, float]) -> None:
    machine = Machine(flat_to(256), *own)
    for i in range(600):
        machine.step(float(i % 2))
    assert machine.share_on(500) > 0.9
    assert machine.lost < -0.1 * machine.seconds


def test_where_nodes_are_dear_it_is_hardly_ever_tried() -> None:
    machine = Machine(rising(0.05), own_nodes=8, own_tokens=3.0)
    for i in range(4000):
        machine.step(float(i % 3 == 0))
    assert machine.share_on(4000) < 0.01
    assert machine.lost < 0.01 * machine.seconds


@pytest.mark.parametrize("node_cost", [0.001, 0.02, 0.1])
def test_where_it_never_adds_anything_it_costs_no_more_than_its_share(node_cost: float) -> None:
    machine = Machine(rising(node_cost), own_nodes=8, own_tokens=2.0)
    for _ in range(4000):
        machine.step(0.0)
    assert machine.lost < REFILL * machine.seconds


@given(
    st.floats(0.0, 1.0),
    st.sampled_from([1, 32, 64]),
    st.floats(0.0, 0.3),
    st.sampled_from([(1, 1.0), (16, 2.0)]),
    st.lists(st.integers(0, 3), min_size=1, max_size=200),
)
@settings(max_examples=examples(30))
def test_whatever_steps_cost_and_the_branch_adds_the_time_lost_is_bounded(node_cost, width, host, own, pattern) -> None:
    machine = Machine(flat_to(width, node_cost), *own, host=host)
    without = Machine(flat_to(width, node_cost), *own, host=host, has_branch=False)
    for _, added in zip(range(800), cycle(pattern), strict=False):
        machine.step(added)
        without.step(0.0)
    # Other sources lose what they lose; the branch's own account comes on top.
    allowed = max(0.0, without.lost) * machine.seconds / without.seconds
    assert machine.lost <= allowed + 2 * REFILL * machine.seconds + CAP + 6 * machine.longest


def test_what_begins_to_pay_is_found_and_what_ceases_to_is_left() -> None:
    machine = Machine(rising(0.01), host=0.005)
    for _ in range(2000):
        machine.step(0.0)
    assert machine.share_on(1000) < 0.1
    for _ in range(2000):
        machine.step(2.0)
    assert machine.share_on(500) > 0.9
    for _ in range(1000):
        machine.step(0.0)
    assert machine.share_on(500) < 0.1


def test_while_it_runs_some_steps_are_plain_so_that_their_cost_stays_known() -> None:
    machine = Machine(flat_to(256), host=0.005)
    for _ in range(2000):
        machine.step(1.0)
    assert 2000 / 64 / 4 < machine.on[100:].count(False) < 2 * 2000 / 64


def test_numbers_of_rows_are_judged_for_themselves() -> None:
    machine = Machine(flat_to(256))
    for _ in range(300):
        machine.step(1.0)
    assert machine.controller.plan([900], 100).has_branch
    assert not machine.controller.plan([900] * 4, 100).has_branch


def test_a_branch_on_trial_takes_nothing_from_other_sources() -> None:
    (controller, branch), dear = controller_of(), rising(0.2)
    for _ in range(50):
        plan = controller.plan([900], 100)
        controller.record(plan, record_of(2, 2, 2, 2, 0.01, dear(2) + 0.01))
    proposed = 0
    for _ in range(300):
        plan = controller.plan([900], 100)
        proposed += plan.drafts
        branch.is_on = True  # as if it had been chosen
        controller.record(plan._replace(has_branch=True), record_of(2, 40, 2, 2, 0.01, dear(40) + 0.01))
    assert proposed > 280, "each of its steps costs as much as eight without it"


def test_a_hang_of_the_machine_does_not_turn_it_off() -> None:
    machine = Machine(flat_to(256))
    for _ in range(200):
        machine.step(1.0)
    machine.step_cost = rising(10.0)
    machine.step(1.0)
    machine.step_cost = flat_to(256)
    for _ in range(200):
        machine.step(1.0)
    assert machine.share_on(200) > 0.9


# What a step would have been without it


def test_a_step_without_it_lacks_the_tokens_and_nodes_that_it_alone_offered() -> None:
    #        root, 1 of both, 2 of the others, 3 of the branch alone, 4 below it, and a sibling of the branch
    tree = TokenTree.from_parents(ids(9, 1, 2, 3, 4, 5), ids(0, 0, 1, 2, 3, 0), ids(0, 3, 1, 2, 2, 2))
    assert without_sources([(tree, ids(0))], [1], bits=2) == (3, [1])
    assert without_sources([(tree, ids(0, 1, 2))], [3], bits=2) == (3, [3])
    assert without_sources([(tree, ids(0, 1, 2, 3, 4)), (TokenTree.root(9), ids(0))], [5, 1], bits=2) == (3, [3, 1])


# What it costs while it is off


def test_while_it_is_off_nothing_is_made_or_drafted() -> None:
    proposer = JacobiProposer(SIZE, LookaheadBranch(SIZE))
    proposer.start(0, ids(1, 2, 1))
    assert proposer.propose(0, 100) is None
    proposer.observe(0, Feedback(ids(2), ids(0), NOTHING), NOTHING)
    assert not proposer._rows[0].has_window
    proposer.finish(0)


def test_where_it_is_the_only_source_a_step_without_it_is_plain() -> None:
    config = LookaheadConfig(proposers=("jacobi",))
    assert config.node_budget == 0
    controller, _ = controller_of(node_budget=config.node_budget)
    controller.record(controller.plan([900], 100), record_of(1, 1, 1, 1, 0.0, 1.0))
    assert not controller.plan([900], 100).drafts


@pytest.mark.parametrize("steps_off", [1, 3])
def test_a_row_goes_on_as_if_it_had_been_told_all_the_while(steps_off: int) -> None:
    branch = LookaheadBranch(SIZE)
    auto, fixed = JacobiProposer(SIZE, branch), JacobiProposer(SIZE)

    def step(emitted: np.ndarray) -> None:
        proposals = [each.propose(0, SIZE.nodes) for each in (auto, fixed)]
        for ours, theirs in zip(*([p.tokens, p.parents, p.probabilities] for p in proposals), strict=True):
            assert np.array_equal(ours, theirs)
        argmax = np.arange(len(proposals[0].tokens), dtype=np.int32)
        for each in (auto, fixed):
            each.observe(0, Feedback(emitted, ids(0), argmax), np.arange(len(argmax), dtype=np.int32))

    for each in (auto, fixed):
        each.start(0, ids(1, 2, 3, 1, 2))
    for i in range(12):
        turn = i % (3 + steps_off)
        branch.is_on = turn < 3
        if branch.is_on:
            step(ids(i, i + 1))
        else:
            assert auto.propose(0, 90) is None
            auto.observe(0, Feedback(ids(7, i), ids(0), NOTHING), NOTHING)
            if turn == 2 + steps_off:  # told all at once, as rows are told that were not asked
                missed = [token for k in range(i - steps_off + 1, i + 1) for token in (7, k)]
                fixed.observe(0, Feedback(ids(*missed), ids(0), NOTHING), NOTHING)


# The option


@pytest.mark.parametrize("draft", ["auto", "fixed"])
@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"window": "auto"}, (7, 5, 7)),
        ({"window": (7, 4, 0)}, (7, 4, 0)),
        ({"proposers": ("jacobi",)}, (7, 5, 7)),
        ({"proposers": ("prompt", "jacobi"), "window": (9, 3)}, (9, 3, 7)),
        ({"window": 15}, (15, 5, 7)),
        ({"window": (20, 7, 20)}, (20, 7, 20)),
        ({}, None),
    ],
    ids=str,
)
def test_the_size_is_what_is_given_and_elsewhere_7_5_and_7(given, size, draft) -> None:
    assert LookaheadConfig(**given, draft=draft).branch_size == size


def test_a_window_adds_the_branch_and_the_branch_alone_is_left_to_costs() -> None:
    assert AUTO.proposers == (*LookaheadConfig().proposers, "jacobi")
    alone = LookaheadConfig(proposers=("jacobi",))
    assert AUTO.decides_branch and alone.decides_branch
    assert AUTO.node_budget == LookaheadConfig().node_budget == 64
    assert not LookaheadConfig(window=3).decides_branch
    assert not replace(alone, draft="fixed").decides_branch and not LookaheadConfig(window=(7, 5)).decides_branch


@pytest.mark.parametrize("window", ["wide", "7,5", "", 0, 65, True, 2.0, [7, 5]])
def test_a_window_that_is_neither_auto_nor_a_number_in_range_is_refused(window) -> None:
    message = f"window must be auto, a tuple (W, N) or (W, N, G), or a whole number from 1 to 64, got {window!r}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        LookaheadConfig(window=window)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ((7,), "window must be auto, W, (W, N) or (W, N, G), got (7,)"),
        ((7, 5, 7, 1), "window must be auto, W, (W, N) or (W, N, G), got (7, 5, 7, 1)"),
        ((65, 5), "W of window must be a whole number from 1 to 64, got 65"),
        ((7, 1), "N of window must be a whole number from 2 to 16, got 1"),
        ((7, 5, -1), "G of window must be a whole number from 0 to 64, got -1"),
        ((7, 5, 2.5), "G of window must be a whole number from 0 to 64, got 2.5"),
        (("auto", 5), "W of window must be a whole number from 1 to 64, got 'auto'"),
    ],
    ids=str,
)
def test_a_tuple_with_a_size_out_of_range_is_refused_by_the_name_of_the_size(window, message) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LookaheadConfig(window=window)


def test_a_window_that_does_not_fit_is_refused() -> None:
    for window in ("auto", 7):
        with pytest.raises(ConfigError, match=r"at least W \* \(N - 1\) - 1 = 27, got 26"):
            replace(AUTO, window=window, max_nodes=26)
        assert replace(AUTO, window=window, max_nodes=27).branch_size == SIZE
    with pytest.raises(ConfigError, match="= 9, got 8"):
        replace(AUTO, window=(5, 3), max_nodes=8)


# The engine


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Turns the branch of every engine on and off, a few steps each; lists what it was."""
    chosen: list[bool] = []

    def choose(self: LookaheadBranch, curve: object, measured: object) -> None:
        self.is_on = len(chosen) // 3 % 2 == 1
        chosen.append(self.is_on)

    monkeypatch.setattr(LookaheadBranch, "choose", choose)
    monkeypatch.setattr(DraftingBudget, "prices", lambda self, rows: (0.05, 4.0))
    return chosen


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 1.3}], ids=str)
@pytest.mark.parametrize("proposers", [("jacobi",), AUTO.proposers], ids="+".join)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_branch_that_comes_and_goes_changes_no_token(
    looping_llama: PreTrainedModel, restless, options, proposers, batch_size
) -> None:
    rows = torch.randint(3, 100, (batch_size, 12), generator=torch.Generator().manual_seed(5))
    options = {**options, "max_new_tokens": 60, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(1)
    expected = looping_llama.generate(rows, **options)
    torch.manual_seed(1)
    config = LookaheadConfig(proposers=proposers, memory="request")
    got = looping_llama.generate(rows, **options, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(got, expected)
    assert set(restless) == {True, False}


def test_on_a_device_of_free_nodes_the_engine_runs_it_and_on_a_dear_one_it_does_not(
    looping_llama: PreTrainedModel,
) -> None:
    drafted = {}
    for name, cost in (("free", flat_to(512)), ("dear", rising(0.5))):
        with on_device(cost), use_learned(looping_llama, LearnedState()):
            config = LookaheadConfig(proposers=("jacobi",))
            _, drafted[name] = decode(looping_llama, torch.tensor([[5, 9, 31]]), 400, config)
    assert drafted["free"].mean_acceptance_length > 1.5
    assert drafted["free"].drafted_by_source["jacobi"] > 2000
    assert drafted["dear"].drafted_by_source["jacobi"] < 100
    assert drafted["dear"].decode_s < 1.05 * 399
