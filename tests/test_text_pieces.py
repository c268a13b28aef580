"""Streamed text: the pieces add up to what the tokenizer makes of all tokens at once, whatever it is and does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lookahead
from lookahead import LookaheadConfig
from lookahead.decoding.conversation import Conversation
from lookahead.decoding.text_pieces import TextPieces
from lookahead.decoding.trace import trace
from tests.support.text_tokenizers import BYTES, TEXTS, TOKENIZERS, stripping

every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    return TOKENIZERS[name]()


def whole(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def pieces_of(tokenizer: Any, blocks: Sequence[Sequence[int]]) -> list[str]:
    text = TextPieces(tokenizer)
    return [*(text.put(block) for block in blocks), text.end()]


@st.composite
def blocks_of(draw: st.DrawFn, tokenizer: Any) -> list[list[int]]:
    """Tokens as steps accept them: those of texts, any ones, or few ones again and again; special ones among them."""
    text = st.lists(st.sampled_from([*TEXTS, *tokenizer.all_special_tokens]), max_size=4).map(" ".join)
    encoded = text.map(lambda each: tokenizer(each, add_special_tokens=False)["input_ids"])
    token = st.integers(0, len(tokenizer) - 1)
    some = st.lists(token, min_size=1, max_size=4).map(lambda each: [*each, *each, *tokenizer.all_special_ids])
    few = some.flatmap(lambda each: st.lists(st.sampled_from(each), max_size=60))
    tokens = draw(encoded | st.lists(token, max_size=60) | few)
    cuts = draw(st.lists(st.integers(0, len(tokens)), max_size=40).map(sorted)) if tokens else []
    ends = [0, *cuts, len(tokens)] if draw(st.booleans()) else [*range(len(tokens) + 1)]
    return [tokens[begin:end] for begin, end in pairwise(ends)]


@every_tokenizer
@given(data=st.data())
def test_pieces_of_any_blocks_add_up_to_the_text_of_all_tokens(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name)
    blocks = data.draw(blocks_of(tokenizer))
    assert "".join(pieces_of(tokenizer, blocks)) == whole(tokenizer, [*chain(*blocks)])


@pytest.mark.parametrize(
    "tokens",
    [
        "a <0xE4> </s> <0xBD> <|turn|> <0xA0>",
        "<0xE4> <0xBD> <0xA0> <|turn|> <0xFF> a <0xE4> <0xBD> <0xA0>",
        "<0x0A> <0x0A> </s> <0xFF> ▁ ▁▁ a",
        "</s> ▁ </s> <0x0A> <|turn|> ▁a </s> <tool> </s> ▁a",
    ],
)
def test_a_special_token_ends_no_run_of_bytes_and_no_beginning(tokens: str) -> None:
    tokenizer = tokenizer_of("stripping")
    ids = tokenizer.convert_tokens_to_ids(tokens.split())
    assert "".join(pieces_of(tokenizer, [[each] for each in ids])) == whole(tokenizer, ids)


@every_tokenizer
def test_text_is_given_with_its_last_token_unless_a_later_one_may_change_it(name: str) -> None:
    tokenizer = tokenizer_of(name)
    fallback = set(map(tokenizer.convert_tokens_to_ids, BYTES)) if name == "stripping" else set()
    for sample in TEXTS:
        tokens, text, given = tokenizer(sample, add_special_tokens=False)["input_ids"], TextPieces(tokenizer), ""
        for i, token in enumerate(tokens):
            given += text.put([token])
            left, may_change = whole(tokenizer, tokens[: i + 1]).removeprefix(given), token in fallback
            if tokenizer.clean_up_tokenization_spaces:
                options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
                behind = re.split("[^ ]{3,}", tokenizer.decode(tokens[: i + 1], **options))[-1]
                may_change = len(left.replace(" ", "")) <= len(behind.replace(" ", ""))
            assert may_change or left in ("", "\ufffd"), (given, left)


@every_tokenizer
@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_piece_costs_the_decoding_of_a_few_tokens_however_long_the_text_is(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of(name)
    text, lengths = TextPieces(tokenizer), list[int]()
    decode = tokenizer.decode

    def counting(tokens: list[int], **options: Any) -> Any:
        lengths.append(len(tokens))
        return decode(tokens, **options)

    monkeypatch.setattr(tokenizer, "decode", counting)
    endless = [[token] * 100 for token in range(len(tokenizer)) if token % 9 == 0 or token < 8]
    tokens = [*tokenizer(TEXTS * 20, add_special_tokens=False)["input_ids"], *endless]
    for each in tokens:
        for begin in range(0, len(each), size):
            text.put(each[begin : begin + size])
    steps = lengths.copy()
    assert len(steps) > 100
    most = 2 * 16 + size
    assert name == "stripping" or max(steps) <= most  # a run of byte fallback is decoded as a whole, once
    assert sum(steps) <= sum(map(len, tokens)) / size * 5 * most


# The ways in


@pytest.fixture(scope="module")
def indenting() -> PreTrainedTokenizerBase:
    """A tokenizer for a model of 101 tokens, most of which end lines or begin with spaces."""
    words = [f"{mark}{letter}{end}" for letter in "abcdefghijklmn" for mark in ("▁▁", "▁", "") for end in ("\n", "")]
    tokenizer = stripping(["<0x0A>", *BYTES[0xE4:0xF0], *words])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


@pytest.mark.parametrize("draft", ["fixed", "off"])
def test_a_stream_gives_the_indentation_that_the_text_has(
    looping_llama: PreTrainedModel, indenting: PreTrainedTokenizerBase, draft: Any
) -> None:
    config = LookaheadConfig(draft="fixed") if draft == "fixed" else LookaheadConfig(proposers=())
    options: dict[str, Any] = {"max_new_tokens": 80, "do_sample": True, "temperature": 2.0, "config": config}
    for seed in range(2):
        stream = lookahead.stream(looping_llama, indenting, "a b c", seed=seed, **options)
        text = "".join(stream)
        assert "\n " in text
        assert text == whole(indenting, stream.token_ids)
        assert text == lookahead.generate(looping_llama, indenting, "a b c", seed=seed, **options).texts[0]


def test_a_chat_remembers_an_answer_with_its_indentation(
    looping_llama: PreTrainedModel, indenting: PreTrainedTokenizerBase
) -> None:
    conversation = Conversation(looping_llama, indenting, max_new_tokens=80, do_sample=True, temperature=2.0)
    for question in ("a b", "c d"):
        said = "".join(conversation.ask(question))
        assert conversation.stream is not None and "\n " in said
        assert said == whole(indenting, conversation.stream.token_ids) == conversation.messages[-1]["content"]


def test_an_explained_decoding_holds_the_whole_text(
    looping_llama: PreTrainedModel, indenting: PreTrainedTokenizerBase
) -> None:
    ends = set()
    for limit in range(8, 24):
        options: dict[str, Any] = {"max_new_tokens": limit, "do_sample": True, "temperature": 2.0, "seed": 1}
        seen = trace(looping_llama, indenting, "a b c", **options)
        expected = lookahead.generate(looping_llama, indenting, "a b c", **options).texts[0]
        assert "".join(piece.text for step in seen.steps for piece in step.pieces) == expected
        ends.add(expected[-1])
    assert "\ufffd" in ends, "no text ends inside a character"
