"""One tiny random model of every architecture family: its tokens are those of `model.generate`."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.errors import UnsupportedModelError
from lookahead.model.facts import modules_of_text
from lookahead.model.state_scope import mixers_of
from tests.support.adversarial_proposers import among_decoys, drafting_by, perfect
from tests.support.families import FAMILIES, IS_NEWEST, PAGE, build, cases, page
from tests.support.pass_recorder import counted_passes

TREES, CHAINS, PLAIN = (
    [family for family in FAMILIES.values() if family.decoded == decoded] for decoded in ("trees", "chains", "plain")
)
ONE = {"input_ids": torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])}
RAGGED = {
    "input_ids": torch.tensor([[0] * 8 + [5, 9, 31, 5], [5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]]),
    "attention_mask": torch.tensor([[0] * 8 + [1] * 4, [1] * 12]),
}
NEW_TOKENS = 13
FIXED = LookaheadConfig(draft="fixed", min_probability=0.0, trust_user_code=True)
BRANCHING = LookaheadConfig(
    trust_user_code=True,
    proposers=("prompt", "outputs", "recycled", "jacobi"),
    window=(3, 4, 3),
    draft="fixed",
    min_probability=0.0,
)


def texts_of(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """The rows of an output without their left padding."""
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    return [row[int((keep == 0).sum()) :] for row, keep in zip(outputs.tolist(), mask, strict=True)]


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    tokens: torch.Tensor = model.generate(**inputs, **{"max_new_tokens": NEW_TOKENS, **options})
    return tokens


def compare(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    config: LookaheadConfig | None = None,
    decoys: bool | None = None,
    **options: Any,
) -> int:
    """Compare with `model.generate`, drafting the answer itself, with decoys or without, where they are said.

    Returns the passes of the model.
    """
    config = replace(config or LookaheadConfig(), trust_user_code=True)  # a hook counts passes
    expected = generate(model, inputs, **options)
    answers = texts_of(expected, inputs)
    offer = among_decoys(answers, 101) if decoys else perfect(answers)
    with nullcontext() if decoys is None else drafting_by(offer), counted_passes(model) as counted:
        got = generate(model, inputs, **options, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(got, expected)
    return len(counted)


@pytest.mark.covering(1)
@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("family", cases(TREES))
def test_a_family_decoded_with_trees_gives_the_tokens_of_generate(family: Any, inputs: dict[str, Any]) -> None:
    model = build(family)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decoded plainly")
        compare(model, RAGGED, BRANCHING, do_sample=True)
        passes = compare(model, inputs, FIXED, decoys=True, do_sample=False)
        prompts = len(inputs["input_ids"]) if mixers_of(model) else 1  # those of states are read apart
        assert passes == prompts + (NEW_TOKENS - 1) // 6  # then steps that accept five of their drafts


@pytest.mark.parametrize("family", cases(CHAINS))
def test_a_family_decoded_with_chains_gives_the_tokens_of_generate(family: Any) -> None:
    model = build(family)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decoded plainly")
        compare(model, ONE, FIXED, do_sample=True)
        assert compare(model, ONE, FIXED, decoys=False, do_sample=False) == 2
        compare(model, ONE, FIXED, decoys=True, do_sample=False)
    with pytest.warns(UserWarning, match="for 2 prompts at once.*decoded plainly"):
        compare(model, RAGGED, do_sample=True)


@pytest.mark.parametrize("family", cases(CHAINS))
def test_demanding_trees_of_a_family_that_verifies_chains_is_refused(family: Any) -> None:
    model = build(family)
    with pytest.warns(UserWarning, match="for 2 prompts at once.*decoded plainly"):
        generate(model, RAGGED, custom_generate=lookahead.decode, lookahead_config=FIXED)
    with pytest.raises(UnsupportedModelError, match="cannot verify the lookahead branch"):
        generate(model, ONE, custom_generate=lookahead.decode, lookahead_config=BRANCHING)


@pytest.mark.parametrize("family", cases(PLAIN))
def test_a_family_that_cannot_take_a_draft_back_is_decoded_plainly_and_says_so(family: Any) -> None:
    model = build(family)
    for inputs in (ONE, RAGGED):
        with pytest.warns(UserWarning, match="decoded plainly"):
            compare(model, inputs, do_sample=True, max_new_tokens=6)
    with pytest.raises(UnsupportedModelError, match=r"cannot be decoded speculatively.*leave out window=\(3, 4, 3\)"):
        generate(model, ONE, custom_generate=lookahead.decode, lookahead_config=BRANCHING)


def test_drafts_reach_across_the_chunks_of_chunked_attention() -> None:
    family = FAMILIES["Llama4"]
    model, chunk = build(family), family.options["attention_chunk_size"]
    for inputs in (ONE, RAGGED):
        compare(model, inputs, FIXED, decoys=True, do_sample=True, max_new_tokens=3 * chunk)
        passes = compare(model, inputs, FIXED, decoys=False, do_sample=False, max_new_tokens=3 * chunk)
        assert passes == 2


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_position_embeddings_that_change_on_the_way_are_not_drafted_across(rope: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
    options: dict[str, Any] = {"rope_parameters": parameters, "max_position_embeddings": 24}
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        options["original_max_position_embeddings"] = 24
    family = FAMILIES["Phi3" if rope == "longrope" else "Llama"]
    model = build(replace(family, options={**family.options, **options}))
    with pytest.warns(UserWarning, match=f"{rope} position embeddings"):
        compare(model, ONE, do_sample=False)


@pytest.mark.skipif(not IS_NEWEST, reason="the page is about a newer transformers")
def test_the_page_of_families_is_what_the_table_gives() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("name", ["Llama", "OPT", "Bloom", "ModernBertDecoder"])  # the last has a head named decoder
def test_a_pass_over_text_may_call_all_modules_of_a_model_that_reads_text_alone(name: str) -> None:
    model = build(FAMILIES[name])
    assert modules_of_text(model) == list(model.modules())
