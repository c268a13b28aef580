"""What a draft model may cost: it is asked as long as it saves more time than it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from lookahead import DraftModel, LookaheadConfig
from lookahead.backend.cpu.cpu_backend import CpuBackend
from lookahead.cli.app import app
from lookahead.drafting.budget import Budget, PassTimes
from lookahead.drafting.proposal import Call, Feedback, IntArray, Proposal, Proposer
from lookahead.proposers.validated import ValidatedProposer
from tests.support.engines import engine_of
from tests.support.near_models import like, small


class Clock:
    """Time that passes only where a model runs: so many seconds a pass, by the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[PreTrainedModel, float]) -> None:
        self.now = 0.0
        self.passes = dict.fromkeys(seconds, 0)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        own: Any = CpuBackend._forward

        def forward(backend: Any, *args: Any) -> Any:
            self.now += seconds[backend._model]
            self.passes[backend._model] += 1
            return own(backend, *args)

        monkeypatch.setattr(CpuBackend, "_forward", forward)


def lost(target: PreTrainedModel, config: LookaheadConfig, tokens: int) -> float:
    """Steps of 10 ms that a call took beyond those of plain decoding; below 0 what it saved."""
    ids = torch.tensor([[5, 9, 31, 77]])
    options = {"do_sample": False, "max_new_tokens": tokens, "lookahead_config": config}
    engine = engine_of(target, ids, **options)
    for _ in engine.run():
        pass
    return engine.stats[0].decode_s / 0.01 - engine.stats[0].decoded_tokens


@pytest.mark.parametrize("draft_s", [0.0001, pytest.param(0.004, marks=pytest.mark.exhaustive), 0.1])
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
                "lookahead_config": config,
            }
            for _ in engine_of(target, torch.tensor([[5, 9, 31, 77]]), **options).run():
                pass
        depths[draft_s] = clock.passes[draft] / clock.passes[target]
    assert depths[0.0001] > 3 * depths[0.009]


@pytest.mark.parametrize("draft_s", [0.004, 0.1])
def test_beside_a_draft_model_that_is_too_dear_the_other_sources_draft_as_alone(
    looping_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, draft_s: float
) -> None:
    target, twin, draft = like(looping_llama, 0.0), like(looping_llama, 0.0), small()
    Clock(monkeypatch, {target: 0.01, twin: 0.01, draft: draft_s})
    names = ("prompt", "recycled")
    config = LookaheadConfig(proposers=(*names, DraftModel(draft)), memory="request")
    alone = [lost(twin, LookaheadConfig(proposers=names, memory="request"), 200) for _ in range(2)]
    beside = [lost(target, config, 200) for _ in range(2)]
    for before, after in zip(alone, beside, strict=True):
        assert after < before + 6 + 2 * draft_s / 0.01  # it reads the prompt, and is tried once


class Misleading(Proposer):
    """Offers what is never right; it costs nothing."""

    sources = ("misleading",)

    def __init__(self, *_: Any, **options: Any) -> None:
        self.newest: dict[int, int] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        self.newest[row] = int(prompt[-1])

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        tokens = np.array([self.newest[row], 100, 100], np.int32)[: max_nodes + 1]
        return Proposal(tokens, np.arange(-1, 2, dtype=np.int32).clip(0)[: max_nodes + 1], _CHANCES[: max_nodes + 1])

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        self.newest[row] = int(feedback.tokens[-1])

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
            monkeypatch.setattr(f"lookahead.proposers.ngram.NgramProposer.{method}", getattr(Misleading, method))
        monkeypatch.setattr("lookahead.proposers.ngram.NgramProposer.newest", {}, raising=False)
        useless = "prompt"
    together = LookaheadConfig(proposers=(useless, DraftModel(draft, **shape)), memory="request")
    saved = [-lost(twin, alone, 100) for _ in range(2)]
    kept = [-lost(target, together, 100) for _ in range(2)]
    assert min(saved) > 30 and min(kept) > 0.9 * min(saved)
    assert clock.passes[draft] > 0.9 * clock.passes[other]


class Reader(Misleading):
    """Reads hidden states besides, and takes time."""

    sources = ("reader",)
    hidden_layers = (1,)

    def __init__(self, clock: Clock | None = None, takes_s: float = 0.0) -> None:
        super().__init__()
        self.clock = clock
        self.takes_s = takes_s
        self.told = 0

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        if self.clock is not None:
            self.clock.now += self.takes_s
        return super().propose(row, max_nodes)

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        assert feedback.hidden[1].shape[0] >= len(feedback.path)
        self.told += 1
        super().observe(row, feedback, placed)


@pytest.mark.parametrize("takes_s", [pytest.param(0.004, marks=pytest.mark.exhaustive), 0.02])
def test_no_hidden_states_are_kept_for_what_is_not_worth_asking(
    looping_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, takes_s: float
) -> None:
    target = like(looping_llama, 0.0)
    clock = Clock(monkeypatch, {target: 0.01})
    kept: list[bool] = []
    target.register_forward_pre_hook(
        lambda _, __, kwargs: kept.append(bool(kwargs.get("output_hidden_states"))), with_kwargs=True
    )
    config = LookaheadConfig(proposers=(lambda call: Reader(clock, takes_s),), trust_user_code=True)
    lost(target, config, 200)
    assert 0 < sum(kept) < 40
    kept.clear()
    lost(target, config, 200)
    assert sum(kept) < 20 < len(kept)


def test_hidden_states_are_kept_for_every_step_where_time_does_not_count(looping_llama: PreTrainedModel) -> None:
    made: list[Reader] = []

    def make(call: Any) -> Reader:
        made.append(Reader())
        return made[0]

    ids = torch.tensor([[5, 9, 31, 77]])
    options = {"do_sample": False, "max_new_tokens": 50}
    engine = engine_of(
        looping_llama, ids, **options, lookahead_config=LookaheadConfig(proposers=(make,), draft="fixed")
    )
    for _ in engine.run():
        pass
    assert made[0].told == engine.stats[0].target_forwards + 1


def call_of(is_timed: bool) -> Call:
    """A call of two rows."""
    return Call(
        model=None, tokenizer=None, rows=2, vocab_size=101, max_length=99, max_nodes=8,
        is_chain=False, is_timed=is_timed, by_rejection=False, warp=None,
    )  # fmt: skip


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_row_is_not_shown_to_what_did_not_earn_what_reading_the_rows_before_took(is_timed: bool) -> None:
    budget = Budget()
    for _ in range(2):
        budget.charge(spent_s=0.1, alone=0.0, tokens=1.0, step_s=0.11, is_first=True)
    assert budget.affords and not budget.begins
    proposer = ValidatedProposer(Misleading, call_of(is_timed), budget)
    proposer.start(0, np.array([5, 9], np.int32))
    assert (proposer.propose(0, 2) is None) == is_timed
    for _ in range(4000):
        budget.charge(spent_s=None, alone=0.0, tokens=1.0, step_s=0.01)
    proposer.start(1, np.array([5, 9], np.int32))
    assert proposer.propose(1, 2) is not None


@pytest.mark.parametrize("is_timed", [True, False])
def test_hidden_states_are_kept_no_longer_once_drafting_rests(is_timed: bool) -> None:
    call = call_of(is_timed)
    reader = ValidatedProposer(lambda _: Reader(), call, Budget())
    root, states = np.zeros(1, np.int32), {1: torch.zeros(1, 4)}
    feedback = Feedback(np.array([7], np.int32), root, root, hidden=states)
    for row in range(2):
        reader.start(row, np.array([5, 9], np.int32))
    for step in range(40):
        assert reader.reads_hidden or (is_timed and step > 20)
        if step < 20:
            assert all(offer is not None for offer in reader.propose_batch([0, 1], 2))
        for row in range(2):
            reader.observe(row, feedback, root)
        reader.settle(alone=0.0, tokens=1.0, step_s=0.01)
    assert reader.reads_hidden != is_timed
    assert reader.propose(0, 2) is None or not is_timed
    for row in range(2):
        reader.finish(row)
    reader.start(0, np.array([5, 9], np.int32))
    assert reader.reads_hidden and reader.propose(0, 2) is not None


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, looping_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> dict[str, Path]:
    """A target, a draft model, and one of another vocabulary."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = looping_llama.config
    models = {
        "target": looping_llama,
        "draft": LlamaForCausalLM(type(config)(**{**config.to_dict(), "num_hidden_layers": 1})),
        "stranger": LlamaForCausalLM(type(config)(**{**config.to_dict(), "vocab_size": 300, "num_hidden_layers": 1})),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    other = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer, unk_token="<unk>")
    other.add_tokens(["<new>"])
    other.save_pretrained(root / "stranger")
    return {name: root / name for name in models}


def test_generate_drafts_with_the_model_that_is_named(folders: dict[str, Path]) -> None:
    options = ["generate", "abcab", "--model", str(folders["target"]), "--max-new-tokens", "20", "--threads", "1"]
    draft = ["--draft-model", str(folders["draft"]), "--stats"]
    plain, drafted, alone = (
        CliRunner().invoke(app, [*options, *more]) for more in ([], draft, [*draft, "--proposers", "none"])
    )
    assert plain.exit_code == drafted.exit_code == alone.exit_code == 0, drafted.output
    assert plain.stdout == drafted.stdout == alone.stdout
    refused = CliRunner().invoke(app, [*options, "--draft-model", str(folders["stranger"])])
    assert refused.exit_code == 2 and "gives other ids than the target's" in " ".join(refused.stderr.split())


@pytest.mark.filterwarnings("default")
def test_a_draft_model_larger_than_its_target_is_told_of_in_one_line(folders: dict[str, Path]) -> None:
    options = ["generate", "abcab", "--model", str(folders["draft"]), "--max-new-tokens", "4", "--threads", "1"]
    run = CliRunner().invoke(app, [*options, "--draft-model", str(folders["target"])])
    assert run.exit_code == 0, run.output
    told = [line for line in run.stderr.splitlines() if "hardly pay" in line]
    assert len(told) == 1 and told[0].startswith("warning: the draft model has ")
    assert ".py:" not in told[0]


def test_a_draft_model_is_asked_only_where_it_beats_what_others_keep_of_their_promise() -> None:
    times = PassTimes()
    assert times.beats(9.0, depth=4), "nothing is measured yet"
    times.target.add(0.010)
    times.draft.add(0.005)
    times.agreement.value = 0.9  # 4.10 tokens in 30 ms at depth 4, as many as 1.37 in 10 ms; best at depth 3: 1.38
    assert times.beats(1.36, depth=4) and not times.beats(1.40, depth=4)
    times.others.value = 0.5  # the other sources give half of what they promise
    assert times.beats(2.7, depth=4) and not times.beats(2.8, depth=4)
