"""A processor of every row for itself sees what it would see if its row were alone, and rows keep their drafts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lookahead
from lookahead import ConfigError, LookaheadConfig, PerRow, UnsupportedModelError
from tests.support.stateful import Grammar
from tests.support.token_prompts import DRAFTING, IDS, INPUTS, RAGGED

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": [58, 48], "pad_token_id": 0}


class Counting(Grammar):
    """Favours every third token, by its state and the number of its calls."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == 1
        scores = super().__call__(input_ids, scores)
        return scores + len(self.calls) * torch.sin(torch.arange(scores.shape[1]) * len(self.calls))


@pytest.fixture
def made() -> list[Counting]:
    """Every processor that `make` has made."""
    return []


@pytest.fixture
def make(made: list[Counting]) -> Callable[[], Counting]:
    def factory() -> Counting:
        made.append(Counting())
        return made[-1]

    return factory


@pytest.fixture
def no_warning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def seen_by(processors: list[Counting]) -> list[list[list[int]]]:
    """The ids that processors were shown, in order."""
    return [[ids[0] for ids, _ in each.calls] for each in processors]


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("rows", INPUTS)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["tiny_llama", "looping_llama"])
def test_rows_get_the_tokens_of_transformers_own_loop(kind, do_sample, rows, made, make, accepted, request):
    model, options = request.getfixturevalue(kind), {**OPTIONS, **INPUTS[rows], "do_sample": do_sample}
    torch.manual_seed(0)
    expected = model.generate(**options, logits_processor=[PerRow(make)])
    shown = seen_by(made)
    made.clear()
    torch.manual_seed(0)
    ours = model.generate(
        **options, logits_processor=[PerRow(make)], custom_generate=lookahead.decode, lookahead_config=DRAFTING
    )
    assert torch.equal(ours, expected)
    width = options["input_ids"].shape[1]
    # Each object saw its row once for every token that it emitted; transformers asks on behind the end of a row.
    for row, (mine, theirs) in enumerate(zip(seen_by(made), shown, strict=True)):
        emitted = expected[row, width:].tolist()
        ends = [at + 1 for at, token in enumerate(emitted) if token in (58, 48)]
        assert len(mine) == min([*ends, len(emitted)])
        assert mine == theirs[: len(mine)]
    assert kind == "tiny_llama" or rows == "one" or sum(accepted) > 0


@pytest.mark.usefixtures("no_warning")
def test_rows_of_a_batch_are_as_if_each_were_alone(looping_llama, made, make):
    together = looping_llama.generate(
        **RAGGED,
        **OPTIONS,
        logits_processor=[PerRow(make)],
        custom_generate=lookahead.decode,
        lookahead_config=DRAFTING,
    )
    for row, mask in enumerate(RAGGED["attention_mask"]):
        ids = RAGGED["input_ids"][row][mask.bool()][None]
        alone = looping_llama.generate(ids, **OPTIONS, logits_processor=[Counting()])[0, ids.shape[1] :].tolist()
        assert together[row, IDS.shape[1] :].tolist()[: len(alone)] == alone


def test_processors_of_transformers_own_stand_beside_them_in_their_order(looping_llama, make):
    options = {
        **OPTIONS,
        **INPUTS["ragged"],
        "repetition_penalty": 1.3,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
    }
    outputs = []
    for ours in ({}, {"custom_generate": lookahead.decode, "lookahead_config": DRAFTING}):
        torch.manual_seed(5)
        given = [PerRow(make), PerRow(make)]
        outputs.append(looping_llama.generate(**options, logits_processor=given, **ours))
    assert torch.equal(*outputs)


@pytest.mark.usefixtures("no_warning")
def test_several_outputs_of_a_prompt_have_an_object_each(looping_llama, made, make):
    options = {**OPTIONS, **INPUTS["one"], "do_sample": True, "num_return_sequences": 3}
    outputs = []
    for ours in ({}, {"custom_generate": lookahead.decode, "lookahead_config": DRAFTING}):
        torch.manual_seed(5)
        outputs.append(looping_llama.generate(**options, logits_processor=[PerRow(make)], **ours))
    assert torch.equal(*outputs) and len(made) == 6


@pytest.mark.parametrize("enabled", [False, True])
def test_every_call_begins_with_new_objects(looping_llama, made, make, enabled):
    processor, outputs = PerRow(make), []
    switch = lookahead.enable(looping_llama, config=DRAFTING) if enabled else None
    try:
        for _ in range(3):
            outputs.append(looping_llama.generate(**RAGGED, **OPTIONS, logits_processor=[processor]))
    finally:
        if switch is not None:
            switch.disable()
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    assert len(made) == 6


@pytest.mark.usefixtures("no_warning")
def test_prompts_of_a_stream_join_each_other_with_an_object_each(looping_llama, tiny_tokenizer, made, make):
    prompts = ["abcabcabc", "xyz xyz", "hello hello hel", "0123", "q"]
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [58, 48]}
    expected = []
    for prompt in prompts:
        ids = torch.tensor([tiny_tokenizer(prompt)["input_ids"]])
        plain = looping_llama.generate(
            ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options, logits_processor=[Counting()]
        )
        expected.append(plain[0, ids.shape[1] :].tolist())
    done = list(
        lookahead.stream_many(
            looping_llama, tiny_tokenizer, prompts, rows=3, config=DRAFTING, **options, logits_processor=[PerRow(make)]
        )
    )
    assert {each.index: each.token_ids for each in done} == dict(enumerate(expected))
    assert sum(each.stats.accepted_tokens for each in done) > 0
    assert len(made) == len(prompts)


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_factory_is_an_option_of_generate_stream_and_stream_many(looping_llama, tiny_tokenizer, do_sample):
    options: dict[str, Any] = {"config": DRAFTING, "max_new_tokens": 20, "do_sample": do_sample}
    torch.manual_seed(3)
    expected = lookahead.generate(
        looping_llama, tiny_tokenizer, "abcabcabc", **options, logits_processor=[PerRow(Counting)]
    )
    options["per_row"] = Counting
    torch.manual_seed(3)
    assert lookahead.generate(looping_llama, tiny_tokenizer, "abcabcabc", **options).token_ids == expected.token_ids
    torch.manual_seed(3)
    assert "".join(lookahead.stream(looping_llama, tiny_tokenizer, "abcabcabc", **options)) == expected.texts[0]
    torch.manual_seed(3)
    (done,) = lookahead.stream_many(looping_llama, tiny_tokenizer, ["abcabcabc"], **options)
    assert done.token_ids == expected.token_ids[0]


class Failing(Counting):
    """Raises at its fifth token, where the prompt has marks."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(self.calls) == 4 and input_ids[0].tolist().count(4) > 2:
            raise RuntimeError("the state is lost")
        return super().__call__(input_ids, scores)


def test_what_a_processor_raises_ends_its_row_alone(looping_llama, tiny_tokenizer):
    prompts = ["abcabcabc", [4, 61, 4, 61, 4, 61], "hello hello hel"]
    options = {"config": DRAFTING, "max_new_tokens": 12, "do_sample": False, "logits_processor": [PerRow(Failing)]}
    done = sorted(
        lookahead.stream_many(looping_llama, tiny_tokenizer, prompts, rows=3, **options), key=lambda each: each.index
    )
    assert [type(each.error) for each in done] == [type(None), RuntimeError, type(None)]
    assert len(done[0].token_ids) == len(done[2].token_ids) == 12
    with pytest.raises(RuntimeError, match="the state is lost"):
        lookahead.generate(looping_llama, tiny_tokenizer, prompts, **options)


def test_a_factory_must_make_a_new_processor_for_every_row(looping_llama):
    shared = Counting()
    for given, said in (
        (lambda: shared, "a new logits processor whenever it is called, got one Counting twice"),
        (lambda: "nothing", "must make logits processors, got 'nothing'"),
    ):
        for ours in ({}, {"custom_generate": lookahead.decode}):
            with pytest.raises(ConfigError, match=said):
                looping_llama.generate(**RAGGED, **OPTIONS, logits_processor=[PerRow(given)], **ours)
    one_row = PerRow(lambda: shared)
    looping_llama.generate(IDS, **OPTIONS, logits_processor=[one_row], custom_generate=lookahead.decode)
    with pytest.raises(ConfigError, match="twice"):
        looping_llama.generate(IDS, **OPTIONS, logits_processor=[one_row], custom_generate=lookahead.decode)
    with pytest.raises(ConfigError, match="per_row must be a function"):
        PerRow(shared.calls)


@pytest.mark.parametrize("ours", [{}, {"custom_generate": lookahead.decode}], ids=["transformers", "lookahead"])
def test_beams_are_refused(looping_llama, made, make, ours):
    with pytest.raises(UnsupportedModelError, match="cannot follow beams"):
        looping_llama.generate(**RAGGED, **OPTIONS, num_beams=4, logits_processor=[PerRow(make)], **ours)
    assert not ours or not made  # before anything is decoded


def test_typical_acceptance_does_not_ask_them_about_tokens_that_may_not_be_emitted(looping_llama, make):
    config = LookaheadConfig(acceptance="typical")
    options = {**OPTIONS, "do_sample": True}
    torch.manual_seed(0)
    expected = looping_llama.generate(**RAGGED, **options, logits_processor=[PerRow(make)])
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="PerRow may keep a state"):
        ours = looping_llama.generate(
            **RAGGED,
            **options,
            logits_processor=[PerRow(make)],
            custom_generate=lookahead.decode,
            lookahead_config=config,
        )
    assert torch.equal(ours, expected)


def test_a_call_with_other_ids_of_the_same_width_begins_anew_in_the_own_loop(make, made):
    """The ids of the next call may be as long as those of another token would be."""
    processor, scores = PerRow(make), torch.zeros(1, 9)
    processor(torch.tensor([[1, 2, 3]]), scores)
    processor(torch.tensor([[1, 2, 3, 4]]), scores)
    processor(torch.tensor([[5, 6, 7, 8, 9]]), scores)
    assert seen_by(made) == [[[1, 2, 3], [1, 2, 3, 4]], [[5, 6, 7, 8, 9]]]


def test_a_call_with_drafts_between_two_of_transformers_own_loop_is_no_part_of_them(looping_llama, make, made):
    processor, scores = PerRow(make), torch.zeros(1, 101)
    processor(IDS[:, :3], scores)
    options = {**OPTIONS, "logits_processor": [processor], "custom_generate": lookahead.decode}
    looping_llama.generate(IDS, **options)
    processor(IDS[:, :4], scores)
    assert len(made) == 3 and [len(each.calls) for each in made[::2]] == [1, 1]
