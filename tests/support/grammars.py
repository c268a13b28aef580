"""Grammars, and a tokenizer and a random model to decode with them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lookahead
from lookahead import LookaheadConfig
from tests.support.text_tokenizers import byte_level
from tests.support.token_prompts import DRAFTING

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "car", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 4},
                "zip": {"type": "string", "pattern": "^[0-9]{3}$"},
            },
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "home"],
    "additionalProperties": False,
}
OPEN = {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": 3}
ONE = "the only text that there is, 42 times over"
GRAMMARS: dict[str, dict[str, Any]] = {
    "nested": {"json_schema": PERSON},
    "open": {"json_schema": json.dumps(OPEN)},
    "white space": {"json_schema": {**PERSON, "x-guidance": {"whitespace_flexible": True}}},
    "words": {"regex": "(ab|abc|b+d){1,9}"},
    "one text": {"regex": ONE},
    "sums": {"grammar": 'start: sum "."\nsum: num | sum "+" num\nnum: /[0-9]{1,2}/ | "(" sum ")"'},
}
TEXTS = [
    json.dumps({"name": "abba", "kind": "dog", "home": {"city": "rome", "zip": "123"}, "tags": [True, False]}),
    ONE,
]
END, OTHER_END, PAD = 2, 1, 0


@cache
def json_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows the words of the texts."""
    return byte_level(TEXTS)


@cache
def json_model() -> LlamaForCausalLM:
    """A random model with a larger vocabulary than the tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vocabulary = len(json_tokenizer()) + 7
    config = LlamaConfig(vocab_size=vocabulary, **sizes, initializer_range=0.4, eos_token_id=END, pad_token_id=PAD)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(config).float().eval()


def prompts(tokenizer: Any, rows: int) -> dict[str, Any]:
    """Up to three prompts, padded."""
    texts = ["a person: ", "cats and dogs, ", "x"][:rows]
    return dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False))


def both(model: Any, inputs: dict[str, Any], grammar: Any, config: LookaheadConfig = DRAFTING, **options: Any) -> Any:
    """The outputs of transformers' own loop and of ours from the same seed."""
    options = {"max_new_tokens": 90, "do_sample": False, **options, "logits_processor": [grammar]}
    torch.manual_seed(1)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(1)
    ours = model.generate(**inputs, **options, custom_generate=lookahead.decode, lookahead_config=config)
    width = inputs["input_ids"].shape[1]
    return expected[:, width:], ours[:, width:]


def allowed_by(processor: Any, ids: list[int], vocabulary: int) -> list[int]:
    """The tokens that a processor allows after `ids`."""
    scores = processor(torch.tensor([ids]), torch.zeros(1, vocabulary))
    return torch.isfinite(scores[0]).nonzero().flatten().tolist()
