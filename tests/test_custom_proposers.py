"""Proposers of a user's own: any of them may stand beside the names, none can change a token."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import lookahead
from lookahead import ConfigError, LookaheadConfig, ProposerError, UnsupportedModelError
from lookahead.drafting import select
from lookahead.drafting.proposal import Call, Draws, Feedback, IntArray, Proposal, Proposer

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "proposers.md"
FIXED: dict[str, Any] = {"draft": "fixed", "min_probability": 0.0, "trust_user_code": True}


class Recorder(Proposer):
    """Drafts what a function tells it, and keeps what it is shown."""

    sources = ("recorder",)

    def __init__(self, call: Call, offer: Callable[[int, list[int], int], Proposal | None] | None = None) -> None:
        self.call = call
        self.offer = offer
        self.texts: dict[int, list[int]] = {}
        self.feedbacks: dict[int, list[Feedback]] = {}
        self.finished: list[int] = []

    def start(self, row: int, prompt: IntArray) -> None:
        self.texts[row], self.feedbacks[row] = prompt.tolist(), []

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        return None if self.offer is None else self.offer(row, self.texts[row], max_nodes)

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        self.texts[row] += feedback.tokens.tolist()
        self.feedbacks[row].append(feedback)

    def finish(self, row: int) -> None:
        self.finished.append(row)


class Maker:
    """A factory that keeps what it made."""

    def __init__(self, make: Callable[[Call], Any]) -> None:
        self.make = make
        self.made: list[Any] = []

    def __call__(self, call: Call) -> Any:
        self.made.append(self.make(call))
        return self.made[-1]


def tree(tokens: list[int], parents: list[int], chance: float = 0.5) -> Proposal:
    chances = np.array([1.0] + [chance] * (len(tokens) - 1), np.float32)
    return Proposal(np.array(tokens, np.int32), np.array(parents, np.int32), chances)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])


@pytest.fixture
def ragged() -> dict[str, torch.Tensor]:
    rows = [[0, 0, 0, 7, 8], [3, 4, 5, 3, 4], [0, 9, 9, 9, 9]]
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
    }


def decode(model: PreTrainedModel, config: LookaheadConfig, **kwargs: Any) -> torch.Tensor:
    kwargs = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **kwargs}
    return model.generate(**kwargs, custom_generate=lookahead.decode, lookahead_config=config)


def plain(model: PreTrainedModel, **kwargs: Any) -> torch.Tensor:
    return model.generate(**{"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **kwargs})


def the_example() -> Any:
    code = next(block for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if "class " in block)
    names: dict[str, Any] = {}
    exec(compile(code, str(GUIDE), "exec"), names)
    return names["Bigrams"]


def test_arrays_of_any_layout_are_merged_without_another_compilation(
    looping_llama: PreTrainedModel, ids: torch.Tensor
) -> None:
    def strided(row: int, text: list[int], most: int) -> Proposal:
        arrays = [np.repeat(each, 2)[::2] for each in tree([text[-1], 1, 2], [0, 0, 1])[:3]]
        for each in arrays:
            each.flags.writeable = False
        return Proposal(*arrays)

    compiled = []
    for offer in (lambda row, text, most: tree([text[-1], 1, 2], [0, 0, 1]), strided):
        config = LookaheadConfig(proposers=(Maker(partial(Recorder, offer=offer)),), **FIXED)
        assert torch.equal(decode(looping_llama, config, input_ids=ids), plain(looping_llama, input_ids=ids))
        compiled.append(len(select._merge.signatures))
    assert compiled[0] == compiled[1]


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
def test_the_example_of_the_guide_drafts_and_changes_no_token(
    looping_llama: PreTrainedModel, ragged: dict[str, torch.Tensor], accepted: list[int], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    expected = plain(looping_llama, **ragged, **options)
    torch.manual_seed(0)
    config = LookaheadConfig(proposers=(the_example(),), **FIXED)
    assert torch.equal(decode(looping_llama, config, **ragged, **options), expected)
    assert accepted[0] > 0


def test_the_example_of_the_guide_works_in_every_way_of_calling(
    looping_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = LookaheadConfig(proposers=("prompt", the_example()), **FIXED)
    expected = lookahead.generate(looping_llama, tiny_tokenizer, "abcab", max_new_tokens=30)
    got = lookahead.generate(looping_llama, tiny_tokenizer, "abcab", config=config, max_new_tokens=30)
    assert got.token_ids == expected.token_ids
    assert {"bigrams", "prompt"} == set(got.stats.accepted_by_source)
    assert (
        "".join(lookahead.stream(looping_llama, tiny_tokenizer, "abcab", config=config, max_new_tokens=30))
        == (expected.texts[0])
    )
    prompt = torch.tensor([tiny_tokenizer("abcab")["input_ids"]])
    with lookahead.enable(looping_llama, config):
        answer = looping_llama.generate(prompt, max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert answer[0, prompt.shape[1] :].tolist() == expected.token_ids[0]


def test_a_proposer_is_told_what_it_is_made_for_once_a_call(
    tiny_llama: PreTrainedModel, ragged: dict[str, torch.Tensor]
) -> None:
    maker = Maker(Recorder)
    config = LookaheadConfig(proposers=(maker,), max_nodes=9, draft="fixed")
    decode(tiny_llama, config, **ragged)
    decode(tiny_llama, replace(config, draft="auto"), **ragged, do_sample=True, temperature=0.5)
    first, second = (recorder.call for recorder in maker.made)
    assert first.model is tiny_llama and first.tokenizer is None
    assert (first.rows, first.vocab_size, first.max_length, first.max_nodes) == (3, 101, 45, 9)
    assert (first.is_chain, first.is_timed, second.is_timed) == (False, False, True)
    assert not first.by_rejection and not second.by_rejection
    assert first.warp is None and second.warp is not None
    assert second.warp(torch.ones(2, 101)).tolist() == [[2.0] * 101] * 2


def test_a_proposer_sees_every_row_from_its_prompt_to_its_end(
    tiny_llama: PreTrainedModel, ragged: dict[str, torch.Tensor]
) -> None:
    maker = Maker(Recorder)
    expected = plain(tiny_llama, **ragged, eos_token_id=[7, 8, 9])
    for row, ids in enumerate(
        decode(tiny_llama, LookaheadConfig(proposers=(maker,)), **ragged, eos_token_id=[7, 8, 9])
    ):
        assert ids.tolist() == expected[row].tolist()
        text = [token for token in ids.tolist() if token != 0]
        assert maker.made[0].texts[row] == text
    assert sorted(maker.made[0].finished) == [0, 1, 2]


def test_a_proposer_that_drafts_for_all_rows_at_once_is_asked_once_a_step(
    tiny_llama: PreTrainedModel, ragged: dict[str, torch.Tensor]
) -> None:
    class Batched(Recorder):
        asked: list[list[int]]

        def propose_batch(self, rows: list[int], max_nodes: int) -> list[Proposal | None]:
            self.__dict__.setdefault("asked", []).append(list(rows))
            return [tree([self.texts[row][-1], row + 3], [0, 0]) for row in rows]

    maker = Maker(Batched)
    config = LookaheadConfig(proposers=(maker,), **FIXED)
    got = decode(tiny_llama, config, **ragged, max_new_tokens=6)
    assert torch.equal(got, plain(tiny_llama, **ragged, max_new_tokens=6))
    assert all(rows == [0, 1, 2] for rows in maker.made[0].asked[:2])


@pytest.mark.parametrize("layers", [(-1,), (0, 1, 2), (-1, -2)])
@pytest.mark.parametrize("draft", ["fixed", "auto"])
def test_hidden_states_are_those_of_the_model_at_every_node(
    tiny_llama: PreTrainedModel, ragged: dict[str, torch.Tensor], layers: tuple[int, ...], draft: Any
) -> None:
    answers = [[t for t in ids if t] for ids in plain(tiny_llama, **ragged, max_new_tokens=30).tolist()]

    def offer(row: int, text: list[int], max_nodes: int) -> Proposal:
        right = answers[row][len(text) : len(text) + 3]
        wrong = [(token + 1) % 101 for token in right]
        parents = [0, *range(len(right))], [0, *range(len(right) + 1, 2 * len(right))]
        return tree([text[-1], *wrong, *right], [*parents[0], *parents[1][: len(right)]])

    def make(call: Call) -> Recorder:
        recorder = Recorder(call, offer)
        recorder.hidden_layers = layers
        return recorder

    maker = Maker(make)
    config = LookaheadConfig(proposers=(maker,), draft=draft, min_probability=0.0)
    decode(tiny_llama, config, **ragged, max_new_tokens=12)
    for row, answer in enumerate(answers):
        ids = torch.tensor([answer])
        with torch.inference_mode():
            states = tiny_llama(ids, output_hidden_states=True).hidden_states
        feedbacks = maker.made[0].feedbacks[row]
        prompt = int(ragged["attention_mask"][row].sum())
        at = prompt - 1
        for i, feedback in enumerate(feedbacks):
            for layer in layers:
                got = feedback.hidden[layer][feedback.path]
                torch.testing.assert_close(got, states[layer][0, at : at + len(feedback.path)], atol=2e-4, rtol=2e-4)
                assert (layer in feedback.prompt_hidden) == (i == 0)
            at += len(feedback.path)
        for layer in layers:
            read = feedbacks[0].prompt_hidden[layer]
            torch.testing.assert_close(read, states[layer][0, :prompt], atol=2e-4, rtol=2e-4)
        assert at == prompt - 1 + sum(len(feedback.tokens) for feedback in feedbacks)


def test_hidden_states_of_a_prompt_read_in_chunks_are_whole(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lookahead.backend.choice import backend_for

    monkeypatch.setattr("lookahead.backend.torch_backend.PREFILL_CHUNK", 3)
    target = backend_for(tiny_llama, rows=2, capacity=8, hidden_layers=(1, -1))
    prompts = [np.arange(3, 14, dtype=np.int32), np.arange(40, 45, dtype=np.int32)]
    with target.serving():
        target.read(prompts)
    for row, prompt in enumerate(prompts):
        with torch.inference_mode():
            states = tiny_llama(
                torch.from_numpy(prompt.astype(np.int64))[None], output_hidden_states=True
            ).hidden_states
        for layer in (1, -1):
            torch.testing.assert_close(target.prompt_hidden[row][layer], states[layer][0], atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(target.hidden[layer][row], states[layer][0, -1:], atol=2e-4, rtol=2e-4)


def test_hidden_states_are_collected_only_when_asked_for(
    tiny_llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    forward = type(tiny_llama).forward

    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("output_hidden_states"))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(tiny_llama), "forward", watching)
    maker = Maker(Recorder)
    decode(tiny_llama, LookaheadConfig(proposers=("prompt", maker), **FIXED), input_ids=ids)
    assert not any(asked)
    assert all(not feedback.hidden for feedback in maker.made[0].feedbacks[0])


def test_a_layer_the_model_does_not_have_is_refused(tiny_llama: PreTrainedModel, ids: torch.Tensor) -> None:
    class Deep(Recorder):
        hidden_layers = (7,)

    with pytest.raises(UnsupportedModelError, match="hidden states 7, and the model has 3"):
        decode(tiny_llama, LookaheadConfig(proposers=(Deep,)), input_ids=ids)


FAULTS: dict[str, tuple[Proposal, str]] = {
    "root": (tree([4, 5], [0, 0]), "root is 4, the row's last token is"),
    "vocabulary": (tree([-2, 101], [0, 0]), "outside of 0 to 100"),
    "negative": (tree([-2, -1], [0, 0]), "outside of 0 to 100"),
    "parents": (tree([-2, 5, 6], [0, 2, 0]), "parents"),
    "probability": (tree([-2, 5], [0, 0], 1.5), "probability outside"),
    "nan": (tree([-2, 5], [0, 0], float("nan")), "probability outside"),
    "room": (tree([-2] + [5] * 9, [0] * 10), "of 10 nodes, allowed are 1 to 9"),
    "empty": (Proposal(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)), "of 0 nodes"),
    "dtype": (tree([-2, 5], [0, 0])._replace(tokens=np.array([-2, 5])), "tokens must be int32"),
    "list": (tree([-2, 5], [0, 0])._replace(parents=[0, 0]), "parents must be int32 .2,., got list"),
    "shape": (tree([-2, 5], [0, 0])._replace(parents=np.zeros(1, np.int32)), "parents must be int32 .2,."),
    "sources": (tree([-2, 5], [0, 0])._replace(sources=np.array([0, 2], np.int32)), "first 1"),
    "required": (tree([-2, 5], [0, 0])._replace(required=3), "requires 3 of its 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_proposal_that_is_no_tree_of_known_tokens_is_named_and_not_decoded(
    tiny_llama: PreTrainedModel, ids: torch.Tensor, fault: str
) -> None:
    proposal, message = FAULTS[fault]

    def offer(row: int, text: list[int], max_nodes: int) -> Proposal:
        tokens = proposal.tokens.copy()
        tokens[tokens == -2] = text[-1]
        return proposal._replace(tokens=tokens)

    config = LookaheadConfig(proposers=(lambda call: Recorder(call, offer),), max_nodes=8, **FIXED)
    with pytest.raises(ProposerError, match=message):
        decode(tiny_llama, config, input_ids=ids)


@pytest.mark.parametrize("factory", [3, None, object()])
def test_what_makes_no_proposer_is_refused_when_it_is_named(factory: Any) -> None:
    with pytest.raises(ConfigError, match="must be names or callables that return a Proposer"):
        LookaheadConfig(proposers=("prompt", factory))


def test_one_proposer_may_not_stand_twice() -> None:
    with pytest.raises(ConfigError, match="must not repeat"):
        LookaheadConfig(proposers=(Recorder, "prompt", Recorder))


def test_what_a_factory_makes_must_be_a_proposer(tiny_llama: PreTrainedModel, ids: torch.Tensor) -> None:
    with pytest.raises(ProposerError, match="a dict, which is not a proposer: it has no start, propose"):
        decode(tiny_llama, LookaheadConfig(proposers=(lambda call: {},)), input_ids=ids)


def test_two_sources_of_one_name_are_refused(tiny_llama: PreTrainedModel, ids: torch.Tensor) -> None:
    config = LookaheadConfig(proposers=(Recorder, lambda call: Recorder(call)))
    with pytest.raises(ProposerError, match="'recorder': rename one of them"):
        decode(tiny_llama, config, input_ids=ids)


def test_more_sources_than_a_node_can_tell_are_refused(tiny_llama: PreTrainedModel, ids: torch.Tensor) -> None:
    class Many(Recorder):
        sources = tuple(f"source {i}" for i in range(31))

    decode(tiny_llama, LookaheadConfig(proposers=(Many,)), input_ids=ids, max_new_tokens=3)
    with pytest.raises(ProposerError, match="31 sources together, got 32"):
        decode(tiny_llama, LookaheadConfig(proposers=("prompt", Many)), input_ids=ids)


def test_an_error_of_a_proposer_leaves_the_model_as_it_was(tiny_llama: PreTrainedModel, ids: torch.Tensor) -> None:
    def fail(row: int, text: list[int], max_nodes: int) -> Proposal:
        raise KeyError("mine")

    before = tiny_llama.config._attn_implementation
    with pytest.raises(KeyError, match="mine"):
        decode(tiny_llama, LookaheadConfig(proposers=(lambda call: Recorder(call, fail),), **FIXED), input_ids=ids)
    assert tiny_llama.config._attn_implementation == before


class Drawing(Proposer):
    """Draws one token evenly of all, told as a function changes it."""

    sources = ("drawing",)

    def __init__(self, call: Call, change: Callable[[Proposal], Proposal]) -> None:
        self.vocab_size = call.vocab_size
        self.change = change
        self.newest = 0

    def start(self, row: int, prompt: IntArray) -> None:
        self.newest = int(prompt[-1])

    def propose(self, row: int, max_nodes: int) -> Proposal:
        tokens = np.array([self.newest, 4, 5], np.int32)
        draws = Draws(torch.full((1, self.vocab_size), 1 / self.vocab_size), np.zeros(3, np.int32))
        chances = np.array([1.0, 0.5, 0.5], np.float32)
        return self.change(Proposal(tokens, np.zeros(3, np.int32), chances, required=3, draws=draws))

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        self.newest = int(feedback.tokens[-1])

    def finish(self, row: int) -> None:
        pass


DRAWN: dict[str, tuple[Callable[[Proposal], Proposal], str]] = {
    "none": (lambda offer: offer._replace(draws=None), "without its draws"),
    "optional": (lambda offer: offer._replace(required=2), "all drawn nodes must be required"),
    "shape": (lambda offer: offer._replace(draws=Draws(torch.ones(9), np.zeros(3, np.int32))), "shapes"),
    "origin": (lambda offer: offer._replace(draws=Draws(torch.ones(1, 9), np.ones(3, np.int32))), "origins outside"),
    "impossible": (lambda offer: offer._replace(draws=Draws(torch.zeros(1, 9), np.zeros(3, np.int32))), "is 0"),
}
for wrong in (math.nan, math.inf, -0.5):
    told = Draws(torch.tensor([[0.1] * 8 + [wrong]]), np.zeros(3, np.int32))
    DRAWN[str(wrong)] = (lambda offer, told=told: offer._replace(draws=told), "negative, infinite or NaN")  # type: ignore[misc]


@pytest.mark.parametrize("fault", DRAWN)
def test_a_proposal_that_tells_its_draws_wrong_is_refused(tiny_llama: PreTrainedModel, fault: str) -> None:
    change, message = DRAWN[fault]
    config = LookaheadConfig(
        proposers=(lambda call: Drawing(call, change),), acceptance="rejection", draft="fixed", min_probability=0.0
    )
    ids = torch.tensor([[3, 4]])
    options = {"custom_generate": lookahead.decode, "lookahead_config": config, "max_new_tokens": 9, "pad_token_id": 0}
    with pytest.raises(ProposerError, match=message):
        tiny_llama.generate(ids, do_sample=True, **options)
