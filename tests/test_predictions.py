"""Texts that an output will largely be: they are followed, lost where they are wrong, and found again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

import lookahead
from lookahead import LookaheadConfig
from lookahead.decoding.assembly import ProposerState
from lookahead.decoding.prediction_reading import read_prediction
from lookahead.drafting.proposal import Proposer
from lookahead.errors import PromptError
from lookahead.model.model_state import state_of
from tests.support.pass_recorder import counted_passes
from tests.test_encoder_decoder import model_of

PROMPTS = ["the cat sat", "a b c d", "what is it?"]
LIMIT = {"max_new_tokens": 40, "do_sample": False}


@pytest.fixture(scope="module")
def plain(tiny_llama, tiny_tokenizer):
    """What transformers alone writes behind a prompt, token ids."""

    def write_plainly(prompt):
        ids = tiny_tokenizer(prompt, return_tensors="pt").input_ids
        return tiny_llama.generate(ids, **LIMIT)[0, ids.shape[1] :].tolist()

    return write_plainly


def cases_of(output):
    """Predictions by name: right, wrong and useless ones."""
    return {
        "right": output,
        "wrong": [(token + 1) % 90 for token in output],
        "edited": [*output[:10], 5, *output[12:30], *output[33:]],
        "several": [[7, 8, 9], output],
        "longer": [*output, *output, 3, 4],
        "array": np.array(output),
        "tensor": torch.tensor(output),
        "empty": [],
        "no text": "",
        "none": None,
    }


def test_no_prediction_changes_a_token(tiny_llama, tiny_tokenizer, plain):
    expected = plain(PROMPTS[0])
    for name, prediction in cases_of(expected).items():
        for given in (prediction, [prediction]):
            result = lookahead.generate(tiny_llama, tiny_tokenizer, PROMPTS[0], prediction=given, **LIMIT)
            assert result.token_ids[0] == expected, name
        pieces = lookahead.stream(tiny_llama, tiny_tokenizer, PROMPTS[0], prediction=prediction, **LIMIT)
        assert "".join(pieces) == tiny_tokenizer.decode(expected, skip_special_tokens=True)
        assert pieces.token_ids == expected


def test_a_right_prediction_is_accepted_and_counted(tiny_llama, tiny_tokenizer, plain):
    fixed = LookaheadConfig(draft="fixed", memory="request", trust_user_code=True)
    for given in ({"config": fixed}, {"config": replace(fixed, proposers=("recycled",))}):
        stats = lookahead.generate(
            tiny_llama, tiny_tokenizer, PROMPTS[0], prediction=plain(PROMPTS[0]), **LIMIT, **given
        ).stats
        assert stats.accepted_by_source["prediction"] == 37  # behind the first token, and before the last of two passes
        assert stats.target_forwards == 2


def test_without_proposers_nothing_is_drafted_from_a_prediction(tiny_llama, tiny_tokenizer, plain):
    config, expected = LookaheadConfig(proposers=()), plain(PROMPTS[0])
    result = lookahead.generate(tiny_llama, tiny_tokenizer, PROMPTS[0], prediction=expected, config=config, **LIMIT)
    assert result.token_ids[0] == expected
    assert not result.stats.drafted_tokens


def test_a_factory_alone_is_joined_by_predictions_and_may_take_them_itself(tiny_llama, tiny_tokenizer, plain):
    told = []

    class Silent(Proposer):
        sources = ("silent",)

        def expect(self, row, predictions):
            told.append((row, [each.tolist() for each in predictions]))

    class Older:  # that was written before predictions were known
        sources, needs_argmax, needs_top, hidden_layers = ("older",), False, False, ()
        start = propose = observe = finish = staticmethod(lambda *_: None)

    expected = plain(PROMPTS[0])
    for factory in (Silent, Older):
        config = LookaheadConfig(proposers=(lambda call, factory=factory: factory(),), draft="fixed")
        given = {"prediction": expected, "config": config, **LIMIT}
        result = lookahead.generate(tiny_llama, tiny_tokenizer, PROMPTS[0], **given)
        assert result.token_ids[0] == expected
        assert result.stats.accepted_by_source["prediction"] == 37
    assert told == [(0, [expected])]


def test_the_rows_of_a_batch_have_predictions_of_their_own(tiny_llama, tiny_tokenizer, plain):
    outputs = [plain(prompt) for prompt in PROMPTS]
    given = [outputs[0], None, [[5, 6], outputs[2]]]
    options = {"config": LookaheadConfig(draft="fixed"), **LIMIT}
    result = lookahead.generate(tiny_llama, tiny_tokenizer, PROMPTS, prediction=given, **options)
    assert result.token_ids == outputs
    assert [row.accepted_by_source["prediction"] > 0 for row in result.row_stats] == [True, False, True]
    done = list(lookahead.stream_many(tiny_llama, tiny_tokenizer, PROMPTS, prediction=iter(given), **LIMIT))
    assert [each.token_ids for each in sorted(done, key=lambda each: each.index)] == outputs


def test_a_seed_draws_the_same_beside_a_prediction(tiny_llama, tiny_tokenizer):
    given = {"max_new_tokens": 30, "do_sample": True, "seed": 3}
    alone = lookahead.generate(tiny_llama, tiny_tokenizer, PROMPTS[0], **given).token_ids
    assert lookahead.generate(tiny_llama, tiny_tokenizer, PROMPTS[0], prediction=alone[0], **given).token_ids == alone
    several = {"num_return_sequences": 3, **given}
    alone = lookahead.generate(tiny_llama, tiny_tokenizer, PROMPTS[0], **several).token_ids
    given = {"prediction": alone[0], **several}
    assert lookahead.generate(tiny_llama, tiny_tokenizer, PROMPTS[0], **given).token_ids == alone


def test_model_generate_takes_a_prediction(tiny_llama, tiny_tokenizer, plain):
    inputs, expected = tiny_tokenizer(PROMPTS[0], return_tensors="pt"), plain(PROMPTS[0])
    text = tiny_tokenizer.decode(expected)
    for prediction in (expected, text, [text, [3, 4]]):
        given = {"lookahead_prediction": prediction, "lookahead_tokenizer": tiny_tokenizer, **LIMIT}
        out = tiny_llama.generate(**inputs, custom_generate=lookahead.decode, **given)
        assert out[0, inputs.input_ids.shape[1] :].tolist() == expected
        got = lookahead.generate(tiny_llama, tiny_tokenizer, PROMPTS[0], prediction=prediction, num_beams=2, **LIMIT)
        beams = tiny_llama.generate(**inputs, num_beams=2, **LIMIT)
        assert got.token_ids[0] == beams[0, inputs.input_ids.shape[1] :].tolist()
    with lookahead.enable(tiny_llama):
        for more in ({}, {"num_beams": 2}, {"assistant_early_exit": None}):
            out = tiny_llama.generate(**inputs, lookahead_prediction=expected, **LIMIT, **more)
            if not more:
                assert out[0, inputs.input_ids.shape[1] :].tolist() == expected
        with pytest.raises(PromptError, match="prediction is text: pass the tokenizer too"):
            tiny_llama.generate(**inputs, lookahead_prediction=text, **LIMIT)


def test_under_the_switch_a_method_that_was_named_gets_the_prediction_itself(tiny_llama, tiny_tokenizer, plain):
    inputs = tiny_tokenizer(PROMPTS[0], return_tensors="pt")
    given = {"lookahead_prediction": plain(PROMPTS[0]), **LIMIT}
    fixed = LookaheadConfig(draft="fixed", memory="request", trust_user_code=True)
    for more in ({}, {"custom_generate": lookahead.decode, "lookahead_config": fixed}):
        with lookahead.enable(tiny_llama, fixed), counted_passes(tiny_llama) as passes:
            tiny_llama.generate(**inputs, **given, **more)
            assert len(passes) <= 3


def test_the_sequences_of_a_prompt_share_its_prediction(tiny_llama, tiny_tokenizer, plain):
    inputs = tiny_tokenizer(PROMPTS[:2], return_tensors="pt", padding=True, padding_side="left")
    outputs = [plain(prompt) for prompt in PROMPTS[:2]]
    several = {"max_new_tokens": 40, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    expected = tiny_llama.generate(**inputs, **several)
    fixed = LookaheadConfig(draft="fixed", memory="request", proposers=("prompt",), trust_user_code=True)
    with counted_passes(tiny_llama) as passes:
        got = tiny_llama.generate(
            **inputs, **several, custom_generate=lookahead.decode, lookahead_config=fixed,
            lookahead_prediction=outputs,
        )  # fmt: skip
        assert torch.equal(got, expected)
        assert len(passes) <= 4


def test_prompts_that_are_decoded_apart_keep_their_predictions(tiny_llama, tiny_tokenizer, plain):
    config = LookaheadConfig(draft="fixed", memory="request")
    sampled = {"do_sample": True, "top_k": 1, "max_new_tokens": 40, "config": config}
    given = [plain(PROMPTS[0]), None, ["no", plain(PROMPTS[2])]]
    for done in lookahead.stream_many(tiny_llama, tiny_tokenizer, PROMPTS, prediction=given, **sampled):
        assert done.token_ids == plain(PROMPTS[done.index])
        assert (done.stats.accepted_prediction_tokens > 30) == (done.index != 1)


def test_tokens_of_predictions_are_counted_as_in_the_output_or_not(tiny_llama, tiny_tokenizer, plain):
    given = {"config": LookaheadConfig(draft="fixed", memory="request"), **LIMIT}
    output = plain(PROMPTS[0])
    for prediction, accepted, rejected in (
        (output, 37, 0), (None, 0, 0), ([*output[:20], *((token + 1) % 90 for token in output[20:])], 18, 1)
    ):  # fmt: skip
        stats = lookahead.generate(tiny_llama, tiny_tokenizer, PROMPTS[0], prediction=prediction, **given).stats
        assert stats.accepted_prediction_tokens >= accepted
        assert stats.rejected_prediction_tokens >= rejected
        if prediction is not None:
            drafted = stats.drafted_by_source["prediction"]
            assert stats.accepted_prediction_tokens + stats.rejected_prediction_tokens == drafted
        assert "prediction" not in stats.accepted_by_source or prediction is not None


class Translator(PreTrainedTokenizerFast):
    """Writes the target language in other tokens than it reads the source language in."""

    def _switch_to_target_mode(self):
        self.backend_tokenizer.normalizer = normalizers.Replace("a", "b")

    def _switch_to_input_mode(self):
        self.backend_tokenizer.normalizer = None


def test_text_is_tokenized_as_the_model_writes_it(tiny_llama, tiny_tokenizer):
    tokenizer = Translator(tokenizer_object=Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str()))
    for model, written in ((tiny_llama, "a cat"), (model_of("Marian"), "b cbt")):
        (got,) = read_prediction(model, tokenizer, "a cat", "prediction")
        assert got.tolist() == tiny_tokenizer(written, add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    ("prompts", "given", "message"),
    [
        ("ab", 3, "prediction must be text or token ids, got int"),
        ("ab", [1.5, 2], "prediction must be text or token ids, got float"),
        ("ab", {"content": "x"}, "prediction must be text or token ids, got dict"),
        ("ab", [100000, 2], "prediction must hold token ids from 0 to 100, got 100000"),
        ("ab", [-1, 2], "prediction must hold token ids from 0 to 100, got -1"),
        ("ab", np.zeros((2, 2), np.int64), "prediction must be whole numbers"),
        ("ab", np.zeros(2), "prediction must be whole numbers"),
        ("ab", np.int64(3), "prediction must be text or token ids, got int64"),
        ("ab", np.array(3), r"prediction must be whole numbers \[tokens\], got int64 \[\]"),
        ("ab", torch.tensor(3), r"prediction must be whole numbers \[tokens\], got int64 \[\]"),
        ("ab", torch.zeros(2, dtype=torch.bfloat16), "prediction must be whole numbers"),
        (["ab", "cd"], torch.tensor([1, 2]), "prediction 0 must be whole numbers"),
        ("ab", "x\ud800", "prediction must be text, got half of a surrogate pair as character 1"),
        (["ab", "cd"], "one text", "prediction must be a list with an entry for each of the 2 prompts, got str"),
        (["ab", "cd"], ["a"], "prediction must have an entry for each of the 2 prompts, got 1"),
        (["ab", "cd"], ["a", 5], "prediction 1 must be text or token ids, got int"),
    ],
)
def test_what_is_no_prediction_is_refused(tiny_llama, tiny_tokenizer, prompts, given, message):
    with pytest.raises(PromptError, match=message):
        lookahead.generate(tiny_llama, tiny_tokenizer, prompts, prediction=given, max_new_tokens=3)


def test_of_many_prompts_a_bad_prediction_ends_its_own(tiny_llama, tiny_tokenizer, plain):
    given = ["ok", 5, None]
    done = {
        each.index: each
        for each in lookahead.stream_many(tiny_llama, tiny_tokenizer, PROMPTS, prediction=given, **LIMIT)
    }
    assert isinstance(done[1].error, PromptError)
    assert [done[i].token_ids for i in (0, 2)] == [plain(PROMPTS[i]) for i in (0, 2)]
    many = lookahead.stream_many(tiny_llama, tiny_tokenizer, PROMPTS, prediction=["a"], **LIMIT)
    assert next(many).index == 0
    with pytest.raises(PromptError, match="has none for prompt 1"):
        next(many)
    with pytest.raises(PromptError, match="an entry for each prompt, got str"):
        lookahead.stream_many(tiny_llama, tiny_tokenizer, PROMPTS, prediction="a")


def test_hit_rates_beside_predictions_are_kept_apart_from_others(tiny_llama, tiny_tokenizer):
    learned = state_of(tiny_llama).learned.of(ProposerState, ProposerState)
    tables, config = (learned.ngram.table, learned.predicted.table), LookaheadConfig(draft="fixed")
    before = [table.copy() for table in tables]
    lookahead.generate(tiny_llama, tiny_tokenizer, PROMPTS[0], prediction=[3, 4, 5], config=config, **LIMIT)
    assert [(table == old).all() for table, old in zip(tables, before, strict=True)] == [True, False]
