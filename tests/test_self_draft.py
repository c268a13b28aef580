"""The model's own copy as its draft: whatever it says or leaves behind, the output is that of `model.generate`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from copy import deepcopy
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import lookahead
from lookahead import LookaheadConfig, ProposerError
from lookahead.drafting.budget import Ema
from lookahead.drafting.proposal import Proposal
from lookahead.kernels import block_product
from lookahead.loading.quantized import QuantizedLinear
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.plugins.draft_models.draft_tree import LEVELS, DraftTree, DraftTreeBatch
from lookahead.plugins.draft_models.self_draft import SelfDraft
from tests.support.engines import engine_of
from tests.support.near_models import like
from tests.support.token_prompts import IDS, INPUTS, RAGGED, both

pytestmark = pytest.mark.skipif(not block_product.is_supported(), reason="the CPU has no products of 4-bit weights")

FIXED: dict[str, Any] = {"draft": "fixed", "min_probability": 0.0}
ALONE = LookaheadConfig(proposers=("self",), **FIXED)
BESIDE = LookaheadConfig(proposers=("prompt", "recycled", "self"), **FIXED)
BY_TIME = LookaheadConfig(proposers=("prompt", "outputs", "recycled", "self"), memory="request")
CONFIGS = {"alone": ALONE, "beside": BESIDE, "by time": BY_TIME}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0},
    "processed": {"do_sample": True, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
}
SMALL = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def model(looping_llama: PreTrainedModel) -> Iterator[PreTrainedModel]:
    yield like(looping_llama, 0.0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_tokens_are_those_of_generate(
    model: PreTrainedModel, config: LookaheadConfig, way: dict[str, Any], inputs: dict[str, Any]
) -> None:
    expected, got = both(model, config, **inputs, **way, eos_token_id=[7, 8])
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_a_single_row_keeps_its_tokens(model: PreTrainedModel, dtype: torch.dtype) -> None:
    half = model.to(dtype)
    for config in CONFIGS.values():
        expected, got = both(half, config, input_ids=IDS, do_sample=False)
        assert torch.equal(got, expected)


def test_its_drafts_are_accepted(model: PreTrainedModel, accepted: list[int]) -> None:
    both(model, ALONE, input_ids=IDS, do_sample=False)
    assert accepted[0] > 20


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_limit_inside_a_draft_ends_the_output(model: PreTrainedModel, limit: int) -> None:
    expected, got = both(model, BESIDE, input_ids=IDS, do_sample=False, max_new_tokens=limit)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("position", range(6))
def test_an_end_of_sequence_inside_a_draft_ends_the_output(model: PreTrainedModel, position: int) -> None:
    end = int(model.generate(IDS, max_new_tokens=20, do_sample=False)[0, IDS.shape[1] + position])
    expected, got = both(model, BESIDE, input_ids=IDS, do_sample=False, eos_token_id=end)
    assert torch.equal(got, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("value", [0.0, 1e30, float("nan")], ids=["zeros", "overflow", "NaN"])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
def test_a_copy_that_writes_nonsense_changes_no_token(
    model: PreTrainedModel, value: float, inputs: dict[str, Any]
) -> None:
    draft = SelfDraft.of(model)
    # Its keys and values stay in the model's own cache until the model overwrites them.
    norms = [module for name, module in draft.model.named_modules() if name.endswith("input_layernorm")]
    for norm in norms:
        norm.weight = torch.nn.Parameter(torch.full_like(norm.weight, value), requires_grad=False)
    assert SelfDraft.of(model) is draft
    for config in (ALONE, BESIDE):
        expected, got = both(model, config, **inputs, do_sample=False)
        assert torch.equal(got, expected)
    assert not any(weight.isnan().any() for weight in model.parameters())


def test_the_copy_shares_all_weights_but_those_of_linear_layers(model: PreTrainedModel) -> None:
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    draft = SelfDraft.of(model)
    own = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    shared = {name for name, weight in draft.model.named_parameters() if weight.data_ptr() == own.get(name)}
    assert shared == {name for name in own if "norm" in name or "embed" in name}
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert type(model.lm_head) is torch.nn.Linear


def test_the_memory_of_the_copy_is_told_before_it_is_made(model: PreTrainedModel) -> None:
    told = SelfDraft.bytes_for(model)
    copies = [
        layer.weight.nbytes for layer in SelfDraft.of(model).model.modules() if isinstance(layer, QuantizedLinear)
    ]
    assert told <= sum(copies) <= 4 * told  # small layers are padded to whole panels


def test_the_copy_reads_no_text_of_its_own(model: PreTrainedModel) -> None:
    engine = engine_of(model, IDS, max_new_tokens=20, do_sample=False, lookahead_config=ALONE)
    proposer = engine._proposers[0]._proposer
    assert proposer._backend.cache is engine.cache
    for _ in engine.run():
        pass
    assert engine.stats[0].accepted_by_source["self"] > 0


@pytest.mark.parametrize("change", ["in place", "another tensor"])
def test_after_the_weights_change_another_copy_drafts(model: PreTrainedModel, change: str) -> None:
    both(model, ALONE, input_ids=IDS, do_sample=False)
    first = SelfDraft.of(model)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.down_proj.weight
            if change == "in place":
                weight.data.mul_(-1.0)
            else:
                layer.mlp.down_proj.weight = torch.nn.Parameter(-weight)
    expected, got = both(model, ALONE, input_ids=IDS, do_sample=False)
    assert torch.equal(got, expected)
    assert SelfDraft.of(model) is not first


def test_the_copy_goes_with_the_model(looping_llama: PreTrainedModel) -> None:
    model = like(looping_llama, 0.0)
    both(model, ALONE, input_ids=IDS, do_sample=False)
    kept = weakref.ref(SelfDraft.of(model).model)
    del model
    gc.collect()
    assert kept() is None


def test_rows_that_join_and_leave_keep_their_tokens(
    model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = ["abcab" * count for count in (1, 4, 2, 7, 3)]
    expected = [lookahead.generate(model, tiny_tokenizer, text, max_new_tokens=30).token_ids[0] for text in texts]
    options: dict[str, Any] = {"max_new_tokens": 30, "rows": 2, "config": BESIDE}
    done = list(lookahead.stream_many(model, tiny_tokenizer, texts, **options))
    assert [each.token_ids for each in sorted(done, key=lambda each: each.index)] == expected


def test_threads_that_share_a_model_keep_their_tokens(model: PreTrainedModel) -> None:
    expected = model.generate(IDS, max_new_tokens=40, do_sample=False, pad_token_id=0)
    wrong: list[int] = []

    def decode(number: int) -> None:
        for _ in range(3):
            got = model.generate(
                IDS, max_new_tokens=40, do_sample=False, pad_token_id=0, custom_generate=lookahead.decode,
                lookahead_config=BESIDE,
            )  # fmt: skip
            wrong.extend([number] if not torch.equal(got, expected) else [])

    threads = [Thread(target=decode, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_behind_a_sliding_window_the_tokens_are_those_of_generate() -> None:
    torch.manual_seed(0)
    config = MistralConfig(**SMALL, **HEADS, sliding_window=6)
    model = MistralForCausalLM(config).eval()
    for inputs in ({"input_ids": IDS}, RAGGED):
        expected, got = both(model, BESIDE, **inputs, do_sample=False)
        assert torch.equal(got, expected)


def test_its_draws_are_accepted_by_rejection(model: PreTrainedModel, accepted: list[int]) -> None:
    config = LookaheadConfig(proposers=("self",), acceptance="rejection", **FIXED)
    both(model, config, **RAGGED, do_sample=True, top_k=0)
    assert accepted[0] > 10


def guessing(tokens: list[int], ranked: list[list[int]]) -> tuple[DraftTree, Proposal]:
    """The tree after a pass over the unread tokens 8 and 9 and a guess, and its proposal; 9 is the root.

    `ranked` are the tokens that the draft model finds likeliest after the root and every node of the guess.
    """
    tree = DraftTree(np.array([8, 9], np.int32), np.array(tokens, np.int32))
    logits = torch.full((1, len(ranked), 20), -30.0)
    for column, likeliest in enumerate(ranked):
        logits[0, column, likeliest] = torch.tensor([0.0, -1.0])
    options: dict[str, Any] = {"max_nodes": 8, "width": 1, "children": 2, "vocabulary": 20, "warp": None}
    batch = DraftTreeBatch([tree], AcceptanceTable(LEVELS), **options, by_rejection=False)
    batch.add(logits)
    return tree, batch.proposals()[0]


def test_a_guess_that_the_copy_shares_is_drafted_with_what_follows() -> None:
    tree, proposal = guessing([3, 4], [[3, 5], [4, 6], [7, 2]])
    assert proposal.tokens.tolist()[:4] == [9, 3, 4, 7]
    assert proposal.parents.tolist()[:4] == [0, 0, 1, 2]
    path = tree.learn(AcceptanceTable(LEVELS), Ema(0.1), np.array([3, 4, 7, 1], np.int32))
    assert path.tolist() == [0, 1, 2, 3]  # the unread tokens, and what was scored of the accepted ones


def test_a_guess_that_the_copy_does_not_share_is_left_out() -> None:
    tree, proposal = guessing([11, 4], [[3, 5], [4, 6], [7, 2]])
    assert proposal.tokens.tolist() == [9, 3, 5]
    # The model chose the guess all the same: its keys and values are those of accepted tokens.
    assert tree.learn(AcceptanceTable(LEVELS), Ema(0.1), np.array([11, 4, 6], np.int32)).tolist() == [0, 1, 2, 3]
    assert tree.learn(AcceptanceTable(LEVELS), Ema(0.1), np.array([3, 4], np.int32)).tolist() == [0, 1]


def test_a_guess_ends_where_the_copy_disagrees() -> None:
    _, proposal = guessing([3, 11], [[3, 5], [4, 6], [7, 2]])
    assert sorted(proposal.tokens.tolist()) == [3, 4, 5, 6, 9]


def test_models_that_can_have_no_copy_are_refused_by_name(model: PreTrainedModel) -> None:
    refused: dict[str, tuple[PreTrainedModel, str]] = {
        "states": (MambaForCausalLM(MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=1)), "keep states"),
        "encoder": (
            T5ForConditionalGeneration(
                T5Config(vocab_size=101, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
            ),
            "has an encoder",
        ),
        "mixture": (
            Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**SMALL, **HEADS, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=64)
            ),
            "its copy reads .* of the model's bytes",
        ),
        "quantized": (deepcopy(SelfDraft.of(model).model), "already quantized"),
    }
    for other, reason in refused.values():
        with pytest.raises(
            ProposerError, match=f"'self' cannot draft for {type(other).__name__}: .*{reason}.*leave it"
        ):
            SelfDraft.of(other.eval())


def test_adapters_stay_as_they_are_in_the_copy(model: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    draft = SelfDraft.of(adapted.eval().base_model.model)
    kinds = {name.split(".")[-1]: type(layer) for name, layer in draft.model.named_modules()}
    assert kinds["base_layer"] is kinds["default"] is torch.nn.Linear and kinds["k_proj"] is QuantizedLinear
    expected, got = both(adapted, BESIDE, input_ids=IDS, do_sample=False)
    assert torch.equal(got, expected)


def test_code_of_a_user_is_not_copied(model: PreTrainedModel) -> None:
    calls: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    config = LookaheadConfig(proposers=("self",), trust_user_code=True, **FIXED)
    with pytest.raises(ProposerError, match=r"your own code, .*, would run in its copy too; leave it out"):
        both(model, config, input_ids=IDS, do_sample=False)
