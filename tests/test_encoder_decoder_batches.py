"""Several inputs of an encoder-decoder model at once: every row has the tokens of `model.generate`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import lookahead
from lookahead.backend.support import support_of
from lookahead.model.facts import CACHE
from tests.support.adversarial_proposers import among_decoys, drafting_by, perfect, random_trees
from tests.support.families import ENCODER_DECODERS, build, cases
from tests.support.pass_recorder import probe
from tests.test_encoder_decoder import (
    BATCH,
    BRANCH,
    DRAFTED,
    FIXED,
    NEW_TOKENS,
    ONE,
    OPTIONS,
    READ,
    WANDERING,
    StopsAfter,
    compare,
    generate,
    model_of,
    texts_of,
)

NAMES = ["Bart", "Pegasus", "T5"]
OWN_ATTENTION = "LED", "Mvp"
LENGTHS = 15, 5, 11
ROWS = [READ[:length] for length in LENGTHS]
RAGGED = {
    "input_ids": torch.tensor([row + [0] * (15 - len(row)) for row in ROWS]),
    "attention_mask": torch.tensor([[1] * len(row) + [0] * (15 - len(row)) for row in ROWS]),
}
PADDED_BEFORE = {name: torch.stack([row.flip(0) for row in rows]) for name, rows in RAGGED.items()}


@pytest.fixture(autouse=True)
def _nothing_is_decoded_plainly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decoded plainly")
        yield


@pytest.mark.parametrize("family", cases([family for family in DRAFTED if family.name not in OWN_ATTENTION]))
def test_ragged_inputs_give_the_tokens_of_generate(family: Any) -> None:
    model = model_of(family.name)
    assert compare(model, RAGGED, "perfect", "empty", "always wrong", **WANDERING)[:2] == [2, NEW_TOKENS]
    compare(model, BATCH, "real", "among decoys", random_trees(101), do_sample=True)


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_batch_of_a_decoder_with_its_own_attention_is_decoded_plainly(name: str) -> None:
    told = "must keep one length for its own attention code.*decoded plainly"
    with pytest.warns(UserWarning, match=told), warnings.catch_warnings():
        warnings.simplefilter("always")
        compare(model_of(name), BATCH, "real", **WANDERING)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inputs", [RAGGED, PADDED_BEFORE], ids=["padded behind", "padded before"])
def test_sampled_rows_get_the_random_numbers_of_generate(name: str, inputs: Any) -> None:
    compare(model_of(name), inputs, "perfect", "among decoys", "real", do_sample=True, temperature=1.3)
    compare(model_of(name), inputs, "real", do_sample=True, num_return_sequences=3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", [1, 2, 4, 7])
@pytest.mark.parametrize("name", NAMES)
def test_rows_end_at_their_own_tokens_inside_a_draft(name: str, place: int) -> None:
    model = model_of(name)
    text = generate(model, RAGGED, **WANDERING)
    for row in range(len(ROWS)):  # the first row to end, or one of several
        ends = {"eos_token_id": int(text[row, place]), "pad_token_id": 0}
        compare(model, RAGGED, "perfect", "among decoys", "real", **WANDERING, **ends)


@pytest.mark.parametrize("name", NAMES)
def test_rows_end_at_a_limit_inside_a_draft(name: str) -> None:
    model = model_of(name)
    text = generate(model, RAGGED, **WANDERING)
    for limit in (2, 3, 7):
        answers = texts_of(text, RAGGED)
        compare(model, RAGGED, perfect(answers), among_decoys(answers, 101), **WANDERING, max_length=limit)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_processors_see_every_row_as_generate_would_show_it(name: str, options: dict[str, Any]) -> None:
    compare(model_of(name), RAGGED, "perfect", "among decoys", "always wrong", "real", **options)


@pytest.mark.parametrize("name", [*NAMES, "T5Gemma"])
def test_every_row_accepts_what_is_right_of_its_own_tree(name: str) -> None:
    model, rows = model_of(name), []
    right = among_decoys(texts_of(generate(model, RAGGED, **WANDERING), RAGGED), 101)

    def for_some(row: int, text: list[int], max_nodes: int) -> Any:  # six tokens a pass, three, and one
        return None if row == 2 else right(row, text, max_nodes if row == 0 else 6)

    handle = model.register_forward_pre_hook(
        lambda _, inputs, options: rows.append(len(options["decoder_input_ids"])), with_kwargs=True
    )
    probe(model)
    rows.clear()
    with drafting_by(for_some):
        got = generate(model, RAGGED, **WANDERING, custom_generate=lookahead.decode, lookahead_config=FIXED)
    handle.remove()
    assert torch.equal(got, generate(model, RAGGED, **WANDERING))
    assert rows == [3] * 3 + [2] * 2 + [1] * 8  # with the prompt


def test_a_decoder_that_adds_biases_by_itself_verifies_trees_for_one_input_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As T5 does in older releases of transformers."""
    model = build(ENCODER_DECODERS["T5"])
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", staticmethod(lambda: False))
    assert support_of(model, shortest=1, max_length=NEW_TOKENS, trusted=True).shape == "trees"
    assert compare(model, ONE, "among decoys", **WANDERING) == [1 + (NEW_TOKENS - 1) // 6]
    with pytest.warns(UserWarning, match="decoded plainly"), warnings.catch_warnings():
        warnings.simplefilter("always")
        compare(model, RAGGED, "perfect", "real", **WANDERING)


@pytest.mark.parametrize("name", ["Bart", "Pegasus"])
def test_the_rows_of_a_batch_have_no_more_nodes_than_positions_are_left(name: str) -> None:
    family = ENCODER_DECODERS[name]
    model = build(replace(family, options={**family.options, "max_position_embeddings": 20}))
    right = perfect(texts_of(generate(model, RAGGED, **WANDERING, max_length=20), RAGGED))

    def for_the_first(row: int, text: list[int], max_nodes: int) -> Any:
        return (right if row == 0 else random_trees(101))(row, text, max_nodes)

    compare(model, RAGGED, for_the_first, random_trees(101), **WANDERING, max_length=20)


def test_scores_and_the_cache_are_those_of_generate() -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    for name in ("Bart", "T5"):
        model = model_of(name)
        text = generate(model, RAGGED, **WANDERING)
        ends = {**WANDERING, "eos_token_id": int(text[1, 6]), "pad_token_id": 0}
        expected: Any = generate(model, RAGGED, **ends, **wanted)
        right = perfect(texts_of(expected.sequences, RAGGED))
        with drafting_by(lambda row, text, size, right=right: right(row, text, size) if row == 1 else None):
            got: Any = generate(  # the second row ends first
                model, RAGGED, **ends, **wanted, custom_generate=lookahead.decode, lookahead_config=FIXED
            )
        assert torch.equal(got.sequences, expected.sequences)
        lengths = (expected.sequences[:, 1:] != 0).sum(1) + 1
        for step, (one, other) in enumerate(zip(got.scores, expected.scores, strict=True)):
            running = lengths > step + 1
            torch.testing.assert_close(one[running], other[running], rtol=1e-3, atol=1e-3)
        for which in ("self_attention_cache", "cross_attention_cache"):
            caches = [getattr(output[CACHE], which) for output in (got, expected)]
            for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
                assert mine.keys.shape == theirs.keys.shape
                for row, length in enumerate((lengths - 1).tolist()):  # behind an end there is padding
                    seen = slice(length) if which == "self_attention_cache" else slice(None)
                    torch.testing.assert_close(mine.keys[row, :, seen], theirs.keys[row, :, seen], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_the_lookahead_branch_is_verified_for_several_inputs(name: str) -> None:
    for options in (WANDERING, {"do_sample": True}):
        compare(model_of(name), RAGGED, "real", config=BRANCH, **options)


def test_a_criterion_of_the_users_own_sees_the_whole_batch() -> None:
    with pytest.warns(UserWarning, match="StopsAfter may keep a state"), warnings.catch_warnings():
        warnings.simplefilter("always")
        compare(model_of("T5"), RAGGED, "perfect", **WANDERING, stopping_criteria=[StopsAfter(5)])


def test_rows_behind_padding_verify_trees_where_positions_heed_it() -> None:
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1]])

    def decode_behind_padding(model: Any, rows: slice = slice(None)) -> None:
        start: int = model.generation_config.decoder_start_token_id
        prompts = torch.tensor([[start, 31, 9], [start, start, 44], [start, 60, 8]])
        inputs = {name: each[rows] for name, each in RAGGED.items()}
        given = {"decoder_input_ids": prompts[rows], "decoder_attention_mask": mask[rows]}
        compare(model, inputs, random_trees(101), "real", **WANDERING, **given)

    decode_behind_padding(model_of("T5"))
    for model in (model_of("Bart"), build(ENCODER_DECODERS["T5"]).to(torch.bfloat16)):
        with pytest.warns(UserWarning, match=r"(padding of decoder_attention_mask|change its bits).*decoded plainly"):
            decode_behind_padding(model, slice(1, 2))
