"""Models and tokenizers that do not fit: what cannot be served is refused in words, everything else is decoded."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

import lookahead
from lookahead import LookaheadConfig
from lookahead.errors import PromptError, UnsupportedModelError

DRAFTING = LookaheadConfig(draft="fixed")
PROMPTS = ["the cat sat on the cat", "a b"]
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
}
SPECIAL: dict[str, dict[str, str]] = {
    "pad and end": {"pad_token": "<pad>", "eos_token": "<eos>"},
    "end only": {"eos_token": "<eos>"},
    "pad only": {"pad_token": "<pad>"},
    "neither": {},
}


def seeded(model_class: Any, config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(config).eval()


def tokenizer_of(characters: str, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters; the special tokens are the last ones of its vocabulary."""
    vocabulary = {token: i for i, token in enumerate([*characters, "<unk>", *special.values()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


def tokens_of_generate(model: Any, tokenizer: Any, prompt: str, **options: Any) -> list[int]:
    """What `model.generate` gives for one prompt alone."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


@pytest.fixture(scope="module")
def learned_positions() -> PreTrainedModel:
    """A model with a table of 32 positions."""
    sizes = {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.4}
    model: PreTrainedModel = seeded(GPT2LMHeadModel, GPT2Config(**sizes, bos_token_id=1, eos_token_id=None))
    return model


def no_weights(like: PreTrainedModel) -> PreTrainedModel:
    with torch.device("meta"):
        return LlamaForCausalLM(like.config).eval()


NO_CAUSAL_LM = {
    "BertModel": (BertModel, BertConfig(**SIZES), "cannot generate"),
    "BertForMaskedLM": (BertForMaskedLM, BertConfig(**SIZES), "cannot generate"),
    "BertLMHeadModel": (BertLMHeadModel, BertConfig(**SIZES), "is_decoder"),
    "T5EncoderModel": (
        T5EncoderModel,
        T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
        "cannot generate",
    ),
}


@pytest.mark.parametrize("name", NO_CAUSAL_LM)
def test_what_is_no_causal_model_is_refused_by_name(name: str, tiny_tokenizer: Any) -> None:
    model_class, config, reason = NO_CAUSAL_LM[name]
    model = seeded(model_class, config)
    with pytest.raises(UnsupportedModelError, match=f"{name} .*{reason}"):
        lookahead.enable(model)
    with pytest.raises(UnsupportedModelError, match=f"{name} .*{reason}"):
        lookahead.generate(model, tiny_tokenizer, "hello", max_new_tokens=3)
    with pytest.raises(UnsupportedModelError, match=f"{name} .*{reason}"):
        lookahead.stream(model, tiny_tokenizer, "hello", max_new_tokens=3)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("model_class", [LlamaModel, LlamaForSequenceClassification])
def test_a_model_without_its_language_head_is_refused(
    model_class: Any, tiny_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    model = seeded(model_class, tiny_llama.config)
    with pytest.raises(UnsupportedModelError, match=f"{model_class.__name__} cannot generate.*AutoModelForCausalLM"):
        lookahead.enable(model)
    with pytest.raises(UnsupportedModelError, match=f"{model_class.__name__} cannot generate.*AutoModelForCausalLM"):
        lookahead.generate(model, tiny_tokenizer, "hello", max_new_tokens=3)


@pytest.mark.parametrize(
    ("model_class", "config"),
    [(BertLMHeadModel, BertConfig(**SIZES, is_decoder=True)), (GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES))],
    ids=["an encoder made a decoder", "a decoder that does not say so"],
)
def test_a_decoder_is_not_taken_for_an_encoder(model_class: Any, config: Any, tiny_tokenizer: Any) -> None:
    model = seeded(model_class, config)
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    with lookahead.enable(model):
        got = lookahead.generate(model, tiny_tokenizer, PROMPTS, config=DRAFTING, **options)
    assert got.token_ids == [tokens_of_generate(model, tiny_tokenizer, prompt, **options) for prompt in PROMPTS]
    assert got.stats.drafted_tokens > 0


class OwnGenerate(LlamaForCausalLM):
    """Its `generate` passes no loop of others on."""

    def generate(self, *args: Any, custom_generate: Any = None, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


def test_a_generate_that_ignores_our_loop_is_refused(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    model = seeded(OwnGenerate, tiny_llama.config)
    for call in (lookahead.generate, lookahead.stream):
        with pytest.raises(UnsupportedModelError, match=r"OwnGenerate\.generate ignores custom_generate"):
            list(call(model, tiny_tokenizer, "hello", max_new_tokens=3))


def test_a_model_without_weights_is_refused(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    model = no_weights(tiny_llama)
    with pytest.raises(UnsupportedModelError, match=r"meta device.*no weights"):
        lookahead.generate(model, tiny_tokenizer, "hello", max_new_tokens=3)
    with pytest.raises(UnsupportedModelError, match=r"meta device.*no weights"):
        model.generate(torch.tensor([[5, 9]]), max_new_tokens=3, custom_generate=lookahead.decode)
    with pytest.raises(UnsupportedModelError, match=r"meta device.*no weights"):
        lookahead.enable(model)


@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL.keys())
def test_a_tokenizer_may_lack_special_tokens(tiny_llama: PreTrainedModel, special: dict[str, str]) -> None:
    tokenizer = tokenizer_of("".join(map(chr, range(32, 127))), **special)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    got = lookahead.generate(tiny_llama, tokenizer, PROMPTS, **options)
    assert got.token_ids == [tokens_of_generate(tiny_llama, tokenizer, prompt, **options) for prompt in PROMPTS]
    assert [len(new) for new in got.token_ids] == [20, 20]
    for text, new in zip(got.texts, got.token_ids, strict=True):
        assert text == tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL.keys())
def test_an_end_and_a_padding_that_nobody_names_change_nothing(
    tiny_llama: PreTrainedModel, special: dict[str, str]
) -> None:
    model = deepcopy(tiny_llama)
    model.generation_config.pad_token_id = None
    tokenizer = tokenizer_of("".join(map(chr, range(32, 127))), **special)
    for end in (None, [7, 8, 9]):
        options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": end}
        got = lookahead.generate(model, tokenizer, PROMPTS, **options)
        assert got.token_ids == [tokens_of_generate(model, tokenizer, prompt, **options) for prompt in PROMPTS]


def test_a_padding_token_outside_the_vocabulary_is_never_read(tiny_llama: PreTrainedModel) -> None:
    # As tokenizer.add_special_tokens leaves it where the embedding was not resized.
    tokenizer = tokenizer_of("".join(map(chr, range(32, 127))), eos_token="<eos>")
    tokenizer.pad_token_id = tiny_llama.config.vocab_size + 7
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    got = lookahead.generate(tiny_llama, tokenizer, PROMPTS, **options)
    assert got.token_ids == [tokens_of_generate(tiny_llama, tokenizer, prompt, **options) for prompt in PROMPTS]


def test_a_token_outside_the_vocabulary_is_named_with_the_last_one_inside(tiny_llama: PreTrainedModel) -> None:
    tokenizer = tokenizer_of("".join(map(chr, range(32, 532))))
    prompt = "a" + chr(332)  # tokens 65 and 300
    with pytest.raises(PromptError, match=r"prompt 1 .*\b300\b.*\b100\b"):
        lookahead.generate(tiny_llama, tokenizer, ["abc", prompt], max_new_tokens=3)
    with pytest.raises(PromptError, match=r"\b300\b.*\b100\b"):
        lookahead.stream(tiny_llama, tokenizer, prompt, max_new_tokens=3)
    for wrong in (101, -1):
        with pytest.raises(PromptError, match=rf"(?<!\w){wrong}\b.*\b100\b"):
            tiny_llama.generate(torch.tensor([[5, wrong]]), max_new_tokens=3, custom_generate=lookahead.decode)


def test_a_prompt_longer_than_the_positions_is_refused_with_both_numbers(
    learned_positions: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    with pytest.raises(PromptError, match=r"\b40\b.*\b32\b"):
        lookahead.generate(learned_positions, tiny_tokenizer, "x" * 40, max_new_tokens=3)
    with pytest.raises(PromptError, match=r"\b40\b.*\b32\b"):
        learned_positions.generate(torch.full((1, 40), 9), max_new_tokens=3, custom_generate=lookahead.decode)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_an_output_may_go_on_to_the_last_position_and_no_further(
    learned_positions: PreTrainedModel, options: dict[str, Any]
) -> None:
    ids = torch.tensor([[0] * 8 + [5, 9, 31, 5], [5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])
    arguments: dict[str, Any] = {"attention_mask": (ids > 0).long(), "pad_token_id": 0, **options}
    ours: dict[str, Any] = {"custom_generate": lookahead.decode, "lookahead_config": DRAFTING}
    torch.manual_seed(1)
    # The newest token takes no position until another one is wanted: 33 tokens for 32 positions.
    expected = learned_positions.generate(ids, max_new_tokens=21, **arguments)
    torch.manual_seed(1)
    assert torch.equal(learned_positions.generate(ids, max_new_tokens=21, **arguments, **ours), expected)
    with pytest.raises(IndexError):
        learned_positions.generate(ids, max_new_tokens=22, **arguments)
    with pytest.raises(PromptError, match=r"\b32\b"):
        learned_positions.generate(ids, max_new_tokens=22, **arguments, **ours)


@pytest.mark.parametrize("length", [20, 40])
def test_rotary_positions_go_on_beyond_what_the_configuration_names(tiny_llama: PreTrainedModel, length: int) -> None:
    config = deepcopy(tiny_llama.config)
    config.max_position_embeddings = 24
    model = seeded(LlamaForCausalLM, config)
    ids = torch.randint(3, 101, (2, length), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(ids, **options)
    got = model.generate(ids, **options, custom_generate=lookahead.decode, lookahead_config=DRAFTING)
    assert torch.equal(got, expected)
