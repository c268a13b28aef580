"""Draft models: whatever they say, the output is that of `model.generate`; what they read is taken back exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import lookahead
from lookahead import ConfigError, DraftModel, LookaheadConfig, ProposerError, UnsupportedModelError
from lookahead.drafting.proposal import Call, Proposal
from lookahead.plugins.draft_models.draft_model import ModelProposer
from tests.support.engines import engine_of
from tests.support.near_models import like, small
from tests.support.token_prompts import both

FIXED: dict[str, Any] = {"draft": "fixed", "min_probability": 0.0}
SHAPES: dict[str, dict[str, int]] = {
    "chain": {"children": 1, "width": 1, "depth": 5},
    "tree": {},
    "wide": {"children": 8, "width": 16, "depth": 3},
    "one pass": {"depth": 1},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0},
    "processed": {"do_sample": True, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
}


@pytest.fixture(scope="module")
def near(looping_llama: PreTrainedModel) -> PreTrainedModel:
    return like(looping_llama, 0.02)


@pytest.fixture
def ragged() -> dict[str, torch.Tensor]:
    rows = [[0] * 8 + [5, 9, 31, 77], [0] * 3 + [5, 9, 31, 77, 5, 9, 31, 2, 60], [40, 41, 42, 43, 44, 45] * 2]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_ragged_batch_gives_the_tokens_of_generate(
    looping_llama: PreTrainedModel,
    near: PreTrainedModel,
    ragged: dict[str, torch.Tensor],
    accepted: list[int],
    shape: dict[str, int],
    way: dict[str, Any],
) -> None:
    config = LookaheadConfig(proposers=(DraftModel(near, **shape),), **FIXED)
    expected, got = both(looping_llama, config, **ragged, **way, eos_token_id=[7, 8, 9])
    assert torch.equal(got, expected)
    assert accepted[0] > 0


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_beside_the_names_and_with_time_deciding_it_gives_the_tokens_of_generate(
    looping_llama: PreTrainedModel, near: PreTrainedModel, ragged: dict[str, torch.Tensor], way: dict[str, Any]
) -> None:
    config = LookaheadConfig(proposers=("prompt", "recycled", DraftModel(near)))
    expected, got = both(looping_llama, config, **ragged, **way)
    assert torch.equal(got, expected)
    torch.manual_seed(0)  # once more, with what was learned of costs
    call = {**ragged, **way, "max_new_tokens": 40, "pad_token_id": 0}
    again = looping_llama.generate(**call, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_draft_model_that_knows_nothing_changes_nothing(
    tiny_llama: PreTrainedModel, ragged: dict[str, torch.Tensor], way: dict[str, Any]
) -> None:
    config = LookaheadConfig(proposers=(DraftModel(small()),), **FIXED)
    expected, got = both(tiny_llama, config, **ragged, **way)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("limit", [1, 2, 30])
def test_a_perfect_draft_model_is_accepted_to_its_last_token(looping_llama: PreTrainedModel, limit: int) -> None:
    ids = torch.tensor([[5, 9, 31, 77]])
    config = LookaheadConfig(proposers=(DraftModel(looping_llama, depth=4, children=1),), **FIXED)
    engine = engine_of(looping_llama, ids, max_new_tokens=limit + 1, do_sample=False, lookahead_config=config)
    tokens = [token for step in engine.run() for token in step[0].tokens.tolist()]
    assert tokens == looping_llama.generate(ids, max_new_tokens=limit + 1, do_sample=False)[0, 4:].tolist()
    assert engine.stats[0].target_forwards == -(-limit // 5)


@pytest.mark.parametrize("position", range(6))
def test_an_end_of_sequence_inside_a_draft_ends_the_output_there(tiny_llama: PreTrainedModel, position: int) -> None:
    ids = torch.tensor([[5, 9, 31, 77]])
    eos = int(tiny_llama.generate(ids, max_new_tokens=20, do_sample=False)[0, 4 + position])
    config = LookaheadConfig(proposers=(DraftModel(tiny_llama),), **FIXED)
    expected, got = both(tiny_llama, config, input_ids=ids, do_sample=False, eos_token_id=eos)
    assert torch.equal(got, expected)


def test_two_draft_models_draft_one_tree(looping_llama: PreTrainedModel, ragged: dict[str, torch.Tensor]) -> None:
    drafts = [DraftModel(like(looping_llama, noise), name=f"noise {noise}") for noise in (0.3, 0.4)]
    config = LookaheadConfig(proposers=drafts, **FIXED)
    expected, got = both(looping_llama, config, **ragged, **WAYS["processed"])
    assert torch.equal(got, expected)
    engine = engine_of(
        looping_llama, **ragged, max_new_tokens=40, do_sample=False, lookahead_config=config, pad_token_id=0
    )
    for _ in engine.run():
        pass
    assert all(min(stats.accepted_by_source[draft.name] for draft in drafts) > 0 for stats in engine.stats)


def test_two_draft_models_of_one_name_are_refused(tiny_llama: PreTrainedModel) -> None:
    config = LookaheadConfig(proposers=(DraftModel(small()), DraftModel(small())))
    with pytest.raises(ProposerError, match="called 'draft': rename one of them"):
        both(tiny_llama, config, input_ids=torch.tensor([[5]]))


class Watched(DraftModel):
    """A draft model whose drafts can be looked at."""

    def __call__(self, call: Call) -> Any:
        self.proposer = super().__call__(call)
        return self.proposer


def fresh(draft: DraftModel, call: Call, texts: dict[int, list[int]], max_nodes: int) -> list[Proposal | None]:
    """What is drafted by one that reads the texts for the first time."""
    proposer: Any = DraftModel(draft.model, depth=draft.depth, children=draft.children, width=draft.width)(call)
    proposer._rates = draft.proposer._rates
    for row, text in texts.items():
        proposer.start(row, np.array(text, np.int32))
    with torch.inference_mode():
        return proposer.propose_batch(list(texts), max_nodes)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_after_every_step_the_draft_is_that_of_a_fresh_cache(
    tiny_llama: PreTrainedModel,
    ragged: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, int],
    family: str,
) -> None:
    models: dict[str, Callable[[], PreTrainedModel]] = {
        "llama": lambda: like(tiny_llama, 0.05),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=16, n_layer=1, n_head=2, n_positions=99)),
        "mistral": lambda: MistralForCausalLM(
            MistralConfig(
                vocab_size=101,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                sliding_window=6,
            )
        ),
    }
    torch.manual_seed(0)
    # In float64: two candidates that float32 can hardly tell apart may change places.
    draft = Watched(models[family]().double().eval(), **shape)
    compared = 0
    original = ModelProposer.propose_batch

    def comparing(self: ModelProposer, rows: list[int], max_nodes: int, offers: Any = ()) -> Any:
        nonlocal compared  # the offers of others, which it would score with the root, are left out
        offers = original(self, rows, max_nodes)
        if self is draft.proposer:
            texts = {row: self._rows[row].ids.tolist() for row in rows}
            for mine, other in zip(offers, fresh(draft, self._call, texts, max_nodes), strict=True):
                if mine is None or other is None:
                    assert mine is other  # nothing to draft before the last token
                    continue
                assert mine.tokens.tolist() == other.tokens.tolist()
                assert mine.parents.tolist() == other.parents.tolist()
                np.testing.assert_allclose(mine.probabilities, other.probabilities, atol=1e-4)
                compared += len(mine.tokens) > 1
        return offers

    monkeypatch.setattr(ModelProposer, "propose_batch", comparing)
    config = LookaheadConfig(proposers=("prompt", draft), **FIXED)
    expected, got = both(tiny_llama, config, **ragged, do_sample=False, max_new_tokens=25, eos_token_id=[50])
    assert torch.equal(got, expected)
    assert compared > 10


def test_a_draft_model_that_was_not_asked_for_a_while_reads_what_it_missed(tiny_llama: PreTrainedModel) -> None:
    draft = Watched(tiny_llama, depth=3, children=1)
    ids = torch.tensor([[5, 9, 31, 77]])
    answer = tiny_llama.generate(ids, max_new_tokens=60, do_sample=False)[0].tolist()
    config = LookaheadConfig(proposers=(draft,), **FIXED)
    engine_of(tiny_llama, ids, max_new_tokens=60, lookahead_config=config)
    proposer = draft.proposer
    proposer.start(0, np.array(answer[:4], np.int32))
    at = 4
    from lookahead.drafting.proposal import Feedback

    nothing, root = np.zeros(0, np.int32), np.zeros(1, np.int32)
    with torch.inference_mode():
        for many in (1, 7, 20):
            proposer.observe(0, Feedback(np.array(answer[at : at + many], np.int32), root, nothing), nothing)
            at += many
            offer = proposer.propose(0, 3)
            assert offer.tokens.tolist() == answer[at - 1 : at + 3]
            proposer.observe(0, Feedback(np.array(answer[at : at + 1], np.int32), root, nothing), np.zeros(4, np.int32))
            at += 1


def test_a_draft_model_of_another_dtype_and_table_size_drafts(
    tiny_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    padded = small(128).bfloat16()
    config = LookaheadConfig(proposers=(DraftModel(padded, tokenizer=tiny_tokenizer),), **FIXED)
    expected = lookahead.generate(tiny_llama, tiny_tokenizer, ["abcab", "b"], max_new_tokens=30)
    got = lookahead.generate(tiny_llama, tiny_tokenizer, ["abcab", "b"], config=config, max_new_tokens=30)
    assert got.token_ids == expected.token_ids and got.stats.drafted_tokens > 0
    shorter = DraftModel(small(99), tokenizer=tiny_tokenizer)  # it does not know the target's last two tokens
    config = LookaheadConfig(proposers=(shorter,), **FIXED)
    got = lookahead.generate(tiny_llama, tiny_tokenizer, ["~", "b"], config=config, max_new_tokens=30)
    assert got.token_ids == lookahead.generate(tiny_llama, tiny_tokenizer, ["~", "b"], max_new_tokens=30).token_ids


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_a_good_draft_model_in_half_precision_is_accepted_by_a_target_in_full(
    looping_llama: PreTrainedModel, near: PreTrainedModel, ragged: dict[str, torch.Tensor], acceptance: str
) -> None:
    draft = like(near, 0.0).bfloat16()
    config = LookaheadConfig(proposers=(DraftModel(draft),), acceptance=acceptance, **FIXED)
    engine = engine_of(
        looping_llama, **ragged, max_new_tokens=20, do_sample=True, pad_token_id=0, lookahead_config=config
    )
    for _ in engine.run():
        pass
    assert sum(stats.accepted_tokens for stats in engine.stats) > 10
    assert draft.dtype == torch.bfloat16 and looping_llama.dtype == torch.float32
    if acceptance == "exact":
        expected, got = both(looping_llama, config, **ragged, do_sample=True)
        assert torch.equal(got, expected)


def test_other_vocabularies_and_tokenizers_are_refused_with_what_to_do(
    tiny_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, ragged: dict[str, torch.Tensor]
) -> None:
    config = LookaheadConfig(proposers=(DraftModel(small(128)),))
    with pytest.raises(ProposerError, match=r"knows 128 token ids and the target 101.*DraftModel\(model, tokenizer="):
        both(tiny_llama, config, **ragged)
    other = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    other.add_tokens(["<new>"])
    config = LookaheadConfig(proposers=(DraftModel(small(), tokenizer=other),))
    with pytest.raises(ProposerError, match="gives other ids than the target's: choose"):
        lookahead.generate(tiny_llama, tiny_tokenizer, "abc", config=config)
    with pytest.raises(ProposerError, match="gives other ids"):
        tiny_llama.generate(
            **ragged,
            custom_generate=lookahead.decode,
            lookahead_config=config,
            lookahead_tokenizer=tiny_tokenizer,
            pad_token_id=0,
        )


def test_a_larger_draft_model_warns_once(tiny_llama: PreTrainedModel, ragged: dict[str, torch.Tensor]) -> None:
    config = LookaheadConfig(proposers=(DraftModel(tiny_llama),))
    target = small()
    with pytest.warns(UserWarning, match="the draft model has .* parameters and the target .* hardly pay"):
        both(target, config, **ragged)
    both(target, config, **ragged)


def test_a_tree_of_draws_is_narrower_unless_a_shape_is_asked_for(tiny_llama: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 9, 31, 77]])
    shapes = []
    for draft in (Watched(small()), Watched(small(), children=5, width=6)):
        for acceptance in ("exact", "rejection"):
            both(tiny_llama, LookaheadConfig(proposers=(draft,), acceptance=acceptance), input_ids=ids, do_sample=True)
            shapes.append((draft.proposer._children, draft.proposer._width))
    assert shapes == [(8, 4), (3, 2), (5, 6), (5, 6)]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "depth": ({"depth": 0}, "depth must be a whole number from 1 to 64, got 0"),
    "children": ({"children": 17}, "children must be a whole number from 1 to 16, got 17"),
    "width": ({"width": 2.0}, "width must be a whole number from 1 to 64, got 2.0"),
    "flag": ({"width": True}, "width must be"),
    "name": ({"name": ""}, "name must be a string that is not empty, got ''"),
}


@pytest.mark.parametrize("bad", BAD)
def test_options_out_of_range_are_refused(bad: str) -> None:
    options, message = BAD[bad]
    with pytest.raises(ConfigError, match=message):
        DraftModel(small(), **options)


def test_a_name_instead_of_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a loaded causal LM, got 'gpt2': load it with AutoModelForCausalLM"):
        DraftModel("gpt2")


def test_models_that_cannot_take_a_draft_back_do_not_draft(
    tiny_llama: PreTrainedModel, ragged: dict[str, torch.Tensor]
) -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=101, hidden_size=16, num_hidden_layers=1)).eval()
    with pytest.raises(ProposerError, match="MambaForCausalLM cannot draft: its layers keep states"):
        both(tiny_llama, LookaheadConfig(proposers=(DraftModel(mamba),)), **ragged)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=101, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).eval()
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        both(tiny_llama, LookaheadConfig(proposers=(DraftModel(t5),)), **ragged)
    training = small().train()
    training.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ProposerError, match="training mode"):
        both(tiny_llama, LookaheadConfig(proposers=(DraftModel(training),)), **ragged)


@pytest.mark.parametrize("side", ["draft", "target"])
@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_models_that_score_chains_only_draft_and_are_drafted_for(
    tiny_llama: PreTrainedModel, ragged: dict[str, torch.Tensor], side: str, acceptance: Any
) -> None:
    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=101, hidden_size=16, n_layer=1, n_head=2)).eval()
    target, draft = (tiny_llama, bloom) if side == "draft" else (bloom, like(bloom, 0.02))
    config = LookaheadConfig(proposers=(DraftModel(draft),), acceptance=acceptance, **FIXED)
    ids = torch.tensor([[5, 9, 31, 77]])
    expected, got = both(target, config, input_ids=ids, do_sample=False)
    assert torch.equal(got, expected)
    expected, got = both(target, config, input_ids=ids, do_sample=True)
    assert torch.equal(got, expected) == (acceptance == "exact")
    if side == "draft":
        with pytest.raises(ProposerError, match="BloomForCausalLM cannot draft for 3 prompts at once"):
            both(target, config, **ragged)
    elif acceptance == "rejection":
        two = [DraftModel(draft), DraftModel(draft, name="second")]
        with pytest.raises(UnsupportedModelError, match="several proposers draw"):
            both(target, LookaheadConfig(proposers=two, acceptance="rejection", **FIXED), input_ids=ids)


def test_a_draft_model_out_of_positions_drafts_no_more(tiny_llama: PreTrainedModel) -> None:
    short = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=16, n_layer=1, n_head=2, n_positions=24)).eval()
    draft = Watched(short, depth=4)
    rows = torch.tensor([[0] * 10 + [5, 9], [3] * 12])
    config = LookaheadConfig(proposers=(draft,), **FIXED)
    options = {"input_ids": rows, "attention_mask": (rows != 0).long(), "do_sample": False}
    expected, got = both(tiny_llama, config, **options)
    assert torch.equal(got, expected)
    assert draft.proposer._slots == []
    long = torch.tensor([[3] * 60])
    expected, got = both(tiny_llama, config, input_ids=long, do_sample=False)
    assert torch.equal(got, expected)
