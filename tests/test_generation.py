"""The promise: token for token what `model.generate` gives, whatever is drafted and however it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import lookahead
from lookahead import LookaheadConfig
from lookahead.errors import ConfigError, PromptError, UnsupportedModelError
from tests.support.adversarial_proposers import Offer, always_wrong, drafting_by, perfect, random_trees
from tests.support.engines import engine_of

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING = [
    {"do_sample": True, "temperature": 0.7, "top_k": 0},
    {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
]
PROCESSED = {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 8}
CONFIGS = {
    "plain": LookaheadConfig(proposers=()),
    "default": LookaheadConfig(),
    "prompt": LookaheadConfig(proposers=("prompt",)),
    "recycled": LookaheadConfig(proposers=("recycled",), draft="fixed", min_probability=0.0, memory="request"),
    "outputs": LookaheadConfig(proposers=("outputs",), draft="fixed", min_probability=0.0),
    "jacobi": LookaheadConfig(proposers=("jacobi",), window=(4, 4, 4)),
    "all": LookaheadConfig(proposers=("prompt", "outputs", "recycled", "jacobi"), draft="fixed", window=(5, 3, 3)),
}


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """A prompt that repeats itself, so that there is something to draft."""
    return torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])


@pytest.fixture(scope="module")
def ragged() -> dict[str, torch.Tensor]:
    """Three prompts of 4, 9 and 12 tokens, left-padded."""
    lengths, longest = (4, 9, 12), 12
    rng = np.random.default_rng(1)
    rows = [[0] * (longest - n) + rng.integers(3, 100, n).tolist() for n in lengths]
    mask = [[0] * (longest - n) + [1] * n for n in lengths]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def both(
    model: PreTrainedModel, seed: int = 0, config: LookaheadConfig | None = None, **kwargs: Any
) -> tuple[Any, Any]:
    """What transformers gives and what we give, from the same seed, and where the seed's numbers stand after."""
    torch.manual_seed(seed)
    expected = model.generate(**kwargs)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    got = model.generate(**kwargs, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(torch.get_rng_state(), state), "not the same random numbers were drawn"
    return expected, got


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("options", [GREEDY, PROCESSED, *SAMPLING], ids=["greedy", "processed", "warm", "hot"])
def test_one_prompt_gives_the_tokens_of_generate(
    tiny_llama: PreTrainedModel, ids: torch.Tensor, options: dict[str, Any], config: LookaheadConfig
) -> None:
    expected, got = both(tiny_llama, config=config, input_ids=ids, max_new_tokens=60, **options)
    assert torch.equal(got, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("options", [GREEDY, PROCESSED, *SAMPLING], ids=["greedy", "processed", "warm", "hot"])
def test_same_seed_gives_the_tokens_of_generate_for_a_ragged_batch(
    tiny_llama: PreTrainedModel, ragged: dict[str, torch.Tensor], options: dict[str, Any], config: LookaheadConfig
) -> None:
    # Three ends of sequence of 101 tokens: rows finish at different steps.
    options = {**options, "eos_token_id": [7, 8, 9], "pad_token_id": 0, "max_new_tokens": 40}
    for seed in range(3):
        expected, got = both(tiny_llama, seed, config, **ragged, **options)
        assert torch.equal(got, expected)


def decode_scripted(model: PreTrainedModel, offer: Offer, max_nodes: int, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    config = LookaheadConfig(draft="fixed", max_nodes=max_nodes)
    with drafting_by(offer):
        got = model.generate(**kwargs, custom_generate=lookahead.decode, lookahead_config=config)
        engine = engine_of(model, **kwargs, lookahead_config=config)
    for _ in engine.run():
        pass
    return got, engine.stats[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_nodes", [1, 7, 130])
@pytest.mark.parametrize("limit", [1, 2, 33, 34, 35])
def test_a_perfect_draft_changes_nothing_but_the_number_of_passes(
    tiny_llama: PreTrainedModel, ids: torch.Tensor, max_nodes: int, limit: int
) -> None:
    expected = tiny_llama.generate(ids, max_new_tokens=limit, do_sample=False)
    answer = tiny_llama.generate(ids, max_new_tokens=60, do_sample=False)[0].tolist()
    got, stats = decode_scripted(
        tiny_llama, perfect([answer]), max_nodes, input_ids=ids, max_new_tokens=limit, do_sample=False
    )
    assert torch.equal(got, expected)
    passes = -(-(limit - 1) // (max_nodes + 1))
    assert stats.target_forwards == passes
    assert stats.emitted_tokens == limit
    assert stats.accepted_tokens == limit - 1 - passes


@pytest.mark.parametrize("limit", [1, 20])
def test_an_always_wrong_draft_changes_nothing(tiny_llama: PreTrainedModel, ids: torch.Tensor, limit: int) -> None:
    expected = tiny_llama.generate(ids, max_new_tokens=limit, do_sample=False)
    answer = tiny_llama.generate(ids, max_new_tokens=60, do_sample=False)[0].tolist()
    got, stats = decode_scripted(
        tiny_llama, always_wrong([answer], 101), 5, input_ids=ids, max_new_tokens=limit, do_sample=False
    )
    assert torch.equal(got, expected)
    assert (stats.accepted_tokens, stats.target_forwards) == (0, limit - 1)


@pytest.mark.parametrize("options", [GREEDY, PROCESSED, *SAMPLING], ids=["greedy", "processed", "warm", "hot"])
def test_random_trees_of_maximal_size_change_nothing(
    tiny_llama: PreTrainedModel, ids: torch.Tensor, options: dict[str, Any]
) -> None:
    torch.manual_seed(5)
    expected = tiny_llama.generate(ids, max_new_tokens=12, **options)
    torch.manual_seed(5)
    config = LookaheadConfig(draft="fixed", max_nodes=300, min_probability=0.0)
    with drafting_by(random_trees(101)):
        got = tiny_llama.generate(
            ids, max_new_tokens=12, **options, custom_generate=lookahead.decode, lookahead_config=config
        )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("position", range(6))
def test_an_end_of_sequence_inside_a_perfect_draft_ends_the_output_there(
    tiny_llama: PreTrainedModel, ids: torch.Tensor, position: int
) -> None:
    answer = tiny_llama.generate(ids, max_new_tokens=40, do_sample=False)[0].tolist()
    eos = answer[ids.shape[1] + position]
    kwargs = {"input_ids": ids, "max_new_tokens": 40, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    expected = tiny_llama.generate(**kwargs)
    got, stats = decode_scripted(tiny_llama, perfect([answer]), 30, **kwargs)
    assert torch.equal(got, expected)
    assert stats.emitted_tokens == got.shape[1] - ids.shape[1]


def test_what_one_call_learned_of_a_model_saves_the_next_one_passes() -> None:
    options = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    monotone = LlamaForCausalLM(options).eval()
    monotone.lm_head.weight.data.zero_()  # every logit is equal, so the likeliest token is always token 0
    outputs, passes = [], []
    for _ in range(3):
        engine = engine_of(
            monotone,
            torch.tensor([[5, 0, 7]]),
            max_new_tokens=60,
            do_sample=False,
            eos_token_id=None,
            lookahead_config=LookaheadConfig(draft="fixed", min_probability=0.5),
        )
        outputs.append([token for step in engine.run() for token in step[0].tokens.tolist()])
        passes.append(engine.stats[0].target_forwards)
    assert outputs == [[0] * 60] * 3
    assert passes[2] < passes[0]


class StopAtSum(StoppingCriteria):
    """A user's criterion: stop when the sum of all ids passes a bound."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(1) > self.bound


@pytest.mark.parametrize("bound", [400, 700, 1000, 1500])
def test_a_users_criterion_that_fires_inside_an_accepted_block_ends_the_output_there(
    tiny_llama: PreTrainedModel, ids: torch.Tensor, bound: int
) -> None:
    answer = tiny_llama.generate(ids, max_new_tokens=60, do_sample=False)[0].tolist()
    kwargs = {
        "input_ids": ids,
        "max_new_tokens": 60,
        "do_sample": False,
        "stopping_criteria": StoppingCriteriaList([StopAtSum(bound)]),
    }
    expected = tiny_llama.generate(**kwargs)
    got, _ = decode_scripted(tiny_llama, perfect([answer]), 30, **kwargs)
    assert torch.equal(got, expected)


def test_several_return_sequences_are_those_of_generate(
    tiny_llama: PreTrainedModel, ragged: dict[str, torch.Tensor]
) -> None:
    expected, got = both(tiny_llama, 3, **ragged, do_sample=True, num_return_sequences=3, max_new_tokens=20)
    assert torch.equal(got, expected)


def test_a_dict_is_returned_when_asked_for(tiny_llama: PreTrainedModel, ids: torch.Tensor) -> None:
    expected, got = both(tiny_llama, input_ids=ids, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected.sequences)


def test_the_model_is_left_as_it_was(tiny_llama: PreTrainedModel, ids: torch.Tensor) -> None:
    before = tiny_llama.config._attn_implementation
    tiny_llama.generate(ids, max_new_tokens=5, do_sample=False, custom_generate=lookahead.decode)
    assert tiny_llama.config._attn_implementation == before


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds"),
    ],
)
def test_what_cannot_be_served_exactly_is_refused_by_name(
    tiny_llama: PreTrainedModel, ids: torch.Tensor, options: dict[str, Any], name: str
) -> None:
    inputs = {} if "inputs_embeds" in options else {"input_ids": ids}
    with pytest.raises(UnsupportedModelError, match=name):
        tiny_llama.generate(**inputs, max_new_tokens=5, custom_generate=lookahead.decode, **options)


@pytest.mark.parametrize("ids", [[[5, 6, 7, 8], [5, 6, 0, 0]], [[5, 0, 7, 8]]], ids=["right", "inside"])
def test_padding_that_is_not_on_the_left_is_decoded_as_generate_does(tiny_llama: PreTrainedModel, ids: Any) -> None:
    prompt, options = torch.tensor(ids), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = tiny_llama.generate(prompt, **options)  # which infers a mask
    with pytest.warns(UserWarning, match="zeros after ones.*decoded plainly"):
        assert torch.equal(tiny_llama.generate(prompt, **options, custom_generate=lookahead.decode), expected)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window": 0}, "window"),
        ({"max_nodes": 0}, "max_nodes"),
        ({"max_nodes": True}, "max_nodes"),
        ({"draft": "none"}, "draft"),
        ({"min_probability": 1.5}, "min_probability"),
        ({"min_probability": "0.5"}, "min_probability"),
        ({"trust_user_code": "yes"}, "trust_user_code must be True or False, got 'yes'"),
        ({"proposers": ("oracle",)}, "oracle"),
        ({"proposers": "prompt"}, "sequence"),
        ({"proposers": ("prompt", "prompt")}, "repeat"),
        ({"proposers": ("jacobi",), "max_nodes": 5}, "window"),
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LookaheadConfig(**options)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="windw"):
        LookaheadConfig(windw=3)  # type: ignore[call-arg]


def test_an_empty_prompt_in_a_batch_is_named(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="prompt 1"):
        lookahead.generate(tiny_llama, tiny_tokenizer, ["hello", "", "you"], max_new_tokens=5)


@pytest.mark.parametrize(("name", "value"), [("max_new_tokens", 0), ("max_new_tokens", -3), ("max_length", 0)])
def test_a_limit_without_room_for_a_token_is_refused(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Any, name: str, value: int
) -> None:
    with pytest.raises(ConfigError, match=name):
        lookahead.generate(tiny_llama, tiny_tokenizer, "hello", **{name: value})


def test_a_prompt_already_at_the_length_limit_is_refused(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="max_length"):
        lookahead.generate(tiny_llama, tiny_tokenizer, "hello there", max_length=11)


def test_text_in_gives_the_text_of_generate_row_by_row(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    prompts = ["the cat sat on the mat, the cat", "a b a b a", "x"]
    result = lookahead.generate(tiny_llama, tiny_tokenizer, prompts, max_new_tokens=30, do_sample=False)
    for prompt, text, new in zip(prompts, result.texts, result.token_ids, strict=True):
        ids = torch.tensor([tiny_tokenizer(prompt)["input_ids"]])
        expected = tiny_llama.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :].tolist()
        assert new == expected
        assert text == tiny_tokenizer.decode(expected, skip_special_tokens=True)
    assert result.stats.emitted_tokens == sum(map(len, result.token_ids))
    assert result.stats.to_dict()["mean_acceptance_length"] >= 1


def test_streamed_pieces_add_up_to_the_text(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    kwargs: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "seed": 4}
    pieces = list(lookahead.stream(tiny_llama, tiny_tokenizer, "the cat sat", **kwargs))
    assert len(pieces) > 1
    assert "".join(pieces) == lookahead.generate(tiny_llama, tiny_tokenizer, "the cat sat", **kwargs).texts[0]


def test_stop_strings_end_the_text_where_generate_ends_it(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    free = lookahead.generate(tiny_llama, tiny_tokenizer, "the cat", max_new_tokens=40, do_sample=False)
    stop = free.texts[0][10:12]
    kwargs: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "stop_strings": [stop]}
    got = lookahead.generate(tiny_llama, tiny_tokenizer, "the cat", **kwargs)
    ids = torch.tensor([tiny_tokenizer("the cat")["input_ids"]])
    expected = tiny_llama.generate(ids, tokenizer=tiny_tokenizer, **kwargs)[0, ids.shape[1] :].tolist()
    assert got.token_ids == [expected]
    assert len(expected) < 40


@pytest.mark.parametrize("proposes", [True, False])
def test_the_likeliest_tokens_are_read_only_where_the_proposers_were_asked(
    proposes: bool, tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bool] = []
    whole = lookahead.engine.engine.read_scores

    def listen(logits: torch.Tensor, count: int = 0, ranks: Any = None) -> Any:
        read.append(count > 0)
        return whole(logits, count, ranks)

    monkeypatch.setattr("lookahead.engine.engine.read_scores", listen)
    prices = (0.05, 4.0) if proposes else None
    monkeypatch.setattr("lookahead.drafting.budget.DraftingBudget.prices", lambda *_: prices)
    tiny_llama.generate(
        torch.tensor([[3, 4, 5, 3, 4]]), max_new_tokens=12, do_sample=False, custom_generate=lookahead.decode
    )
    assert read[0], "after the prompt"
    assert any(read[1:]) == proposes
