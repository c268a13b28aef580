"""What a draft model may cost: it is asked as long as it saves more time than it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from bench.near_models import like, small
from lookahead import DraftModel, LookaheadConfig
from lookahead.generation import prepare
from lookahead.proposers.base import IntArray, Outcome, Proposal, Proposer


class Clock:
    """Time that passes only where a model runs: so many seconds a pass, by the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[PreTrainedModel, float]) -> None:
        self.now = 0.0
        self.passes = dict.fromkeys(seconds, 0)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        for model, duration in seconds.items():
            model.register_forward_hook(self._hook(model, duration))

    def _hook(self, model: PreTrainedModel, seconds: float) -> Callable[..., None]:
        def passed(*_: Any) -> None:
            self.now += seconds
            self.passes[model] += 1

        return passed


def lost(target: PreTrainedModel, config: LookaheadConfig, tokens: int) -> float:
    """Steps of 10 ms that a call took beyond those of plain decoding; below 0 what it saved."""
    ids = torch.tensor([[5, 9, 31, 77]])
    options = {"do_sample": False, "max_new_tokens": tokens, "custom_generate": prepare, "lookahead_config": config}
    engine = target.generate(ids, **options)
    for _ in engine.run():
        pass
    return engine.stats[0].decode_s / 0.01 - engine.stats[0].decoded_tokens


@pytest.mark.parametrize("draft_s", [0.0001, 0.001, 0.004, 0.02, 0.1])
def test_a_draft_model_that_foretells_nothing_loses_a_few_steps_whatever_it_takes(
    looping_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, draft_s: float
) -> None:
    target, draft = like(looping_llama, 0.0), small()
    Clock(monkeypatch, {target: 0.01, draft: draft_s})
    config = LookaheadConfig(proposers=(DraftModel(draft),))
    assert lost(target, config, 200) < 5 + 2 * draft_s / 0.01  # it reads the prompt, and is asked once
    assert lost(target, config, 200) < 3 + 2 * draft_s / 0.01


def test_a_good_draft_model_is_asked_as_long_as_it_is_fast(
    looping_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for draft_s, least in ((0.0001, 120), (0.002, 80)):
        target, draft = like(looping_llama, 0.0), like(looping_llama, 0.02)
        with monkeypatch.context() as patch:
            Clock(patch, {target: 0.01, draft: draft_s})
            assert lost(target, LookaheadConfig(proposers=(DraftModel(draft),)), 200) < -least


@pytest.mark.parametrize("draft_s", [0.004, 0.1])
def test_a_costly_draft_model_does_not_eat_up_what_the_names_beside_it_save(
    looping_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, draft_s: float
) -> None:
    target, twin, draft = (like(looping_llama, noise) for noise in (0.0, 0.0, 0.02))
    Clock(monkeypatch, {target: 0.01, twin: 0.01, draft: draft_s})
    names = ("prompt", "recycled")
    alone = [lost(twin, LookaheadConfig(proposers=names, memory="request"), 200) for _ in range(2)][1]
    config = LookaheadConfig(proposers=(*names, DraftModel(draft)), memory="request")
    lost(target, config, 200)
    assert lost(target, config, 200) < 0.8 * alone < -50


def test_drafting_stops_where_a_further_pass_takes_longer_than_it_gains(
    looping_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: dict[float, float] = {}
    for draft_s in (0.0001, 0.009):
        target, draft = like(looping_llama, 0.0), like(looping_llama, 0.02)
        with monkeypatch.context() as patch:
            clock = Clock(patch, {target: 0.01, draft: draft_s})
            config = LookaheadConfig(proposers=(DraftModel(draft, children=1, depth=16),))
            options = {
                "do_sample": False,
                "max_new_tokens": 300,
                "custom_generate": prepare,
                "lookahead_config": config,
            }
            for _ in target.generate(torch.tensor([[5, 9, 31, 77]]), **options).run():
                pass
        depths[draft_s] = clock.passes[draft] / clock.passes[target]
    assert depths[0.0001] > 3 * depths[0.009]


@pytest.mark.parametrize("draft_s", [0.004, 0.1])
def test_beside_a_draft_model_that_is_too_dear_the_names_draft_as_if_it_were_not_there(
    looping_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, draft_s: float
) -> None:
    target, twin, draft = like(looping_llama, 0.0), like(looping_llama, 0.0), small()
    Clock(monkeypatch, {target: 0.01, twin: 0.01, draft: draft_s})
    names = ("prompt", "recycled")
    config = LookaheadConfig(proposers=(*names, DraftModel(draft)), memory="request")
    alone = [lost(twin, LookaheadConfig(proposers=names, memory="request"), 200) for _ in range(3)]
    beside = [lost(target, config, 200) for _ in range(3)]
    for before, after in zip(alone, beside, strict=True):
        assert after < before + 6 + 2 * draft_s / 0.01  # it reads the prompt, and is tried once


class Misleading(Proposer):
    """Offers what is never right; it costs nothing."""

    sources = ("misleading",)

    def __init__(self, *_: Any, **options: Any) -> None:
        self.newest: dict[int, int] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        self.newest[row] = int(prompt[-1])

    def propose(self, row: int, room: int) -> Proposal | None:
        tokens = np.array([self.newest[row], 100, 100], np.int32)[: room + 1]
        return Proposal(tokens, np.arange(-1, 2, dtype=np.int32).clip(0)[: room + 1], _CHANCES[: room + 1])

    def observe(self, row: int, outcome: Outcome, placed: IntArray) -> None:
        self.newest[row] = int(outcome.tokens[-1])

    def finish(self, row: int) -> None:
        del self.newest[row]


_CHANCES = np.array([1.0, 0.3, 0.3], np.float32)


@pytest.mark.parametrize("beside", ["names", "a proposer that has to earn its time"])
def test_sources_that_are_useless_do_not_switch_off_a_draft_model_that_is_good(
    looping_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    target, twin, draft, other = (like(looping_llama, noise) for noise in (0.0, 0.0, 0.3, 0.3))
    clock = Clock(monkeypatch, {target: 0.01, twin: 0.01, draft: 0.0005, other: 0.0005})
    shape = {"depth": 1, "children": 1}  # it promises too little to be verified whatever the others lost
    alone = LookaheadConfig(proposers=(DraftModel(other, **shape),), memory="request")
    useless: Any = Misleading
    if beside == "names":  # which have no account of their own
        for method in ("start", "propose", "observe", "finish"):
            monkeypatch.setattr(f"lookahead.proposers.mixture.MixtureProposer.{method}", getattr(Misleading, method))
        monkeypatch.setattr("lookahead.proposers.mixture.MixtureProposer.newest", {}, raising=False)
        useless = "prompt"
    together = LookaheadConfig(proposers=(useless, DraftModel(draft, **shape)), memory="request")
    saved = [-lost(twin, alone, 200) for _ in range(3)]
    kept = [-lost(target, together, 200) for _ in range(3)]
    assert min(saved) > 60 and min(kept) > 0.9 * min(saved)
    assert clock.passes[draft] > 0.9 * clock.passes[other]
