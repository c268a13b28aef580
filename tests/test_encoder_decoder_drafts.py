"""A small encoder-decoder model drafts for another, and changes no token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import lookahead
from lookahead import DraftModel, LookaheadConfig
from lookahead.backend.support import support_of
from lookahead.errors import ProposerError, UnsupportedModelError
from tests.support.families import ENCODER_DECODERS, build
from tests.support.pass_recorder import counted_passes
from tests.test_encoder_decoder import NEW_TOKENS, ONE, PADDED, WANDERING, generate, model_of
from tests.test_encoder_decoder_batches import PADDED_BEFORE, RAGGED


def drafts(model: PreTrainedModel, draft: Any = "fixed", **options: Any) -> LookaheadConfig:
    return LookaheadConfig(
        proposers=(DraftModel(model, **options),), draft=draft, min_probability=0.0, trust_user_code=True
    )


def compare(model: PreTrainedModel, inputs: Any, *configs: LookaheadConfig, **options: Any) -> list[int]:
    """Compare with `model.generate`, whatever drafts; returns the passes of the decoder for each of them."""
    expected = generate(model, inputs, **options)
    passes = []
    for config in configs:
        with counted_passes(model) as counted:
            got = generate(model, inputs, **options, custom_generate=lookahead.decode, lookahead_config=config)
        assert torch.equal(got, expected)
        passes.append(len(counted))
    return passes


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["Bart", "Pegasus", "T5"])
@pytest.mark.parametrize("inputs", [ONE, PADDED, RAGGED, PADDED_BEFORE], ids=["one", "padded", "ragged", "left"])
def test_a_model_that_drafts_for_itself_is_right_and_another_one_changes_nothing(name: str, inputs: Any) -> None:
    model: Any = copy.deepcopy(model_of(name))
    with torch.no_grad():
        model.get_output_embeddings().weight[0] = 0.0  # behind padding that is written a chain is split
    support_of(model, shortest=1, max_length=NEW_TOKENS)
    same = copy.deepcopy(model)  # whose passes are not counted
    (passes,) = compare(model, inputs, drafts(same, depth=8), do_sample=False)
    # An encoder with positions of its own reads another text where that is padded in front.
    assert passes < NEW_TOKENS / 3 or (inputs is PADDED_BEFORE and name != "T5")
    others = [model_of(other) for other in ("Bart", "T5", "Marian")]
    compare(model, inputs, *(drafts(other) for other in others), **WANDERING)
    compare(model, inputs, *(drafts(other, "auto") for other in others), do_sample=True)


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_rows_end_inside_a_draft_of_a_model(name: str) -> None:
    model = model_of(name)
    text = generate(model, RAGGED, **WANDERING)
    for row, place in ((0, 1), (0, 7), (1, 3), (2, 3), (2, 7)):
        ends = {"eos_token_id": int(text[row, place]), "pad_token_id": 0}
        compare(model, RAGGED, drafts(model), drafts(model_of("Marian")), **WANDERING, **ends)


def test_it_drafts_one_tree_with_other_sources(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model, small = model_of("T5"), model_of("Bart")
    config = LookaheadConfig(proposers=("prompt", "recycled", DraftModel(small)), draft="fixed", memory="request")
    for text in ("A boy met a dog.", ["A boy met a dog.", "A cat."]):
        options = {"max_new_tokens": 20, "do_sample": False}
        plain = lookahead.generate(model, tiny_tokenizer, text, config=LookaheadConfig(proposers=()), **options)
        assert lookahead.generate(model, tiny_tokenizer, text, config=config, **options).token_ids == plain.token_ids


def test_it_drafts_trees_for_decoders_that_verify_them(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    small, options = model_of("Bart"), {"max_new_tokens": 20, "do_sample": False}
    for texts in (["A boy met a dog."], ["A boy met a dog.", "A cat."]):
        config = drafts(small, depth=2, children=4)
        stats = lookahead.generate(model_of("T5"), tiny_tokenizer, texts, config=config, **options).stats
        assert stats.drafted_tokens > 4 * stats.target_forwards


def test_a_decoder_that_verifies_no_trees_neither_drafts_nor_is_drafted_for() -> None:
    with pytest.raises(ProposerError, match="M2M100ForConditionalGeneration cannot draft: "):
        compare(model_of("T5"), ONE, drafts(model_of("M2M100")), **WANDERING)
    with pytest.raises(UnsupportedModelError, match="cannot be decoded speculatively"):
        compare(model_of("M2M100"), ONE, drafts(model_of("Bart")), **WANDERING)


def test_its_encoder_reads_every_input_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, small = model_of("T5"), build(ENCODER_DECODERS["Bart"])
    read, encoder = [], type(small.get_encoder()).forward

    def counted(self: Any, **kwargs: Any) -> Any:
        read.append(len(kwargs["input_ids"]))
        return encoder(self, **kwargs)

    config = drafts(small)
    monkeypatch.setattr(type(small.get_encoder()), "forward", counted)
    generate(model, ONE, custom_generate=lookahead.decode, lookahead_config=config)  # probes it
    read.clear()
    compare(model, RAGGED, config, **WANDERING)
    assert read == [3]


def test_an_input_that_its_encoder_cannot_read_is_not_drafted_for() -> None:
    model = model_of("T5")
    small = build(ENCODER_DECODERS["Bart"])
    small.config.max_position_embeddings = 12
    assert compare(model, ONE, drafts(small), **WANDERING) == [NEW_TOKENS]
    compare(model, RAGGED, drafts(small), **WANDERING)
    embeds = {"inputs_embeds": model.get_input_embeddings()(ONE["input_ids"])}
    expected = model.generate(**embeds, max_new_tokens=9)
    got = model.generate(**embeds, max_new_tokens=9, custom_generate=lookahead.decode, lookahead_config=drafts(small))
    assert torch.equal(got, expected)


def test_a_causal_target_is_not_drafted_for(tiny_llama: LlamaForCausalLM) -> None:
    with pytest.raises(UnsupportedModelError, match="encoder-decoder model, which cannot draft for a causal one"):
        tiny_llama.generate(
            ONE["input_ids"], max_new_tokens=9, custom_generate=lookahead.decode,
            lookahead_config=drafts(model_of("Bart")),
        )  # fmt: skip


def test_a_causal_model_that_is_larger_drafts_too() -> None:
    model = model_of("T5")
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    large = LlamaForCausalLM(LlamaConfig(vocab_size=model.config.vocab_size, **sizes)).eval()
    assert large.num_parameters() > model.num_parameters()
    compare(model, ONE, drafts(large), do_sample=False)
