"""Grammars as options of calls and of the command, and what is refused."""

from __future__ import annotations

import copy
import gc
import json
import re
import sys
import weakref
from contextlib import nullcontext
from threading import Barrier, Thread
from typing import Any

import llguidance.hf
import pytest
from typer.testing import CliRunner

import lookahead
from lookahead import ConfigError
from lookahead.cli.app import app
from tests.support.grammars import (
    END,
    GRAMMARS,
    ONE,
    OTHER_END,
    PERSON,
    TEXTS,
    allowed_by,
    both,
    json_model,
    json_tokenizer,
    prompts,
)
from tests.support.text_tokenizers import byte_level, stripping, unigram, word_pieces
from tests.support.token_prompts import DRAFTING


@pytest.fixture
def tokenizer() -> Any:
    return json_tokenizer()


@pytest.fixture
def model() -> Any:
    return json_model()


@pytest.mark.parametrize("kind", GRAMMARS)
def test_generate_stream_and_stream_many_take_a_grammar_by_name(model, tokenizer, kind):
    given, text = GRAMMARS[kind], "a person: "
    options: dict[str, Any] = {"config": DRAFTING, "max_new_tokens": 60, "do_sample": False, **given}
    (expected,), _ = both(model, prompts(tokenizer, 1), lookahead.Grammar(tokenizer, **given), max_new_tokens=60)
    assert lookahead.generate(model, tokenizer, text, **options).token_ids == [expected.tolist()]
    pieces = lookahead.stream(model, tokenizer, text, **options)
    assert "".join(pieces) == tokenizer.decode(expected, skip_special_tokens=True)
    assert [each.token_ids for each in lookahead.stream_many(model, tokenizer, [text], **options)] == [
        expected.tolist()
    ]


def test_an_output_ends_with_its_grammar_whatever_ends_the_model_has(model, tokenizer):
    """Several ends, those of a call, and none of the model's own, where the tokenizer's serves."""
    plain = copy.deepcopy(model)
    plain.generation_config.eos_token_id = plain.config.eos_token_id = None
    for used, ends in ((model, [OTHER_END, END]), (model, OTHER_END), (plain, None)):
        options = {} if ends is None else {"eos_token_id": ends}
        done = lookahead.generate(
            used,
            tokenizer,
            ["a", "bcd"],
            regex="[0-9]{2}",
            config=DRAFTING,
            max_new_tokens=20,
            do_sample=False,
            **options,
        )
        assert done.finish_reasons == ["stop"] * 2 and all(re.fullmatch("[0-9]{2}", text) for text in done.texts)
        assert all(ids[-1] in (END, OTHER_END) and len(ids) <= 3 for ids in done.token_ids)


def test_a_bad_grammar_is_an_error_before_anything_is_decoded(model, tokenizer):
    for call in (lookahead.generate, lookahead.stream, lookahead.stream_many):
        with pytest.raises(ConfigError, match="regex is not valid"):
            call(model, tokenizer, "a", regex="(", max_new_tokens=3)
        with pytest.raises(ConfigError, match="got json_schema and regex"):
            call(model, tokenizer, "a", regex="a", json_schema={}, max_new_tokens=3)
        with pytest.raises(ConfigError, match="tokenizer must be a tokenizer"):
            call(model, None, "a", regex="a", max_new_tokens=3)


def test_the_command_takes_a_schema_an_expression_or_a_grammar(model, tokenizer, tmp_path, workplace):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "schema.json").write_text(json.dumps(PERSON))
    (tmp_path / "bad.json").write_text('{"type": "objekt"}')
    (tmp_path / "sums.lark").write_text(GRAMMARS["sums"]["grammar"])

    def run(*arguments: str) -> Any:
        options = ["--model", "model", "--dtype", "fp32", "--max-new-tokens", "80"]
        return CliRunner().invoke(app, ["generate", "a person: ", *options, *arguments])

    assert run("--json-schema", "schema.json").stdout.startswith('{"name": "')
    assert run("--regex", ONE).stdout == ONE + "\n"
    assert re.match(r"[0-9(+)]+\.?\n", run("--grammar", "sums.lark").stdout)
    for arguments, said in (
        (["--json-schema", "bad.json"], "error: --json-schema: bad.json is not valid: Invalid type: objekt"),
        (["--grammar", "none.lark"], "error: none.lark: No such file"),
        (
            ["--regex", "a", "--grammar", "sums.lark"],
            "error: pass one of json_schema, regex and grammar, got regex and",
        ),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "one of json_schema, regex and grammar, got none"),
        ({"regex": "a", "grammar": "b"}, "got regex and grammar"),
        ({"regex": "("}, "regex is not valid.*unclosed group"),
        ({"regex": 3}, "regex must be text, got 3"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": [1]}, "json_schema must be a dict"),
        ({"json_schema": {"type": "objekt"}}, "json_schema is not valid: .*objekt"),
        ({"json_schema": {"not": {"type": "string"}}}, "json_schema is not valid: Unimplemented keys"),
        ({"json_schema": {"type": {1, 2}}}, "json_schema is not valid"),
        ({"grammar": "start: b"}, 'grammar is not valid: .*unknown name: "b"'),
        ({"regex": "a", "eos_token_id": []}, "eos_token_id must be one or more tokens"),
        ({"regex": "a", "eos_token_id": [1, 9999]}, "eos_token_id must be one or more tokens.*got"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_reason(tokenizer, given, said):
    with pytest.raises(ConfigError, match=said):
        lookahead.Grammar(tokenizer, **given)


def test_a_model_class_of_pydantic_is_a_schema(tokenizer):
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int
        y: int

    (processor,) = lookahead.Grammar(tokenizer, json_schema=Point).objects(1)
    text = tokenizer('{"x": 3, "y": 4}')["input_ids"]
    for n in range(len(text)):
        assert text[n] in allowed_by(processor, [9, *text[:n]], len(tokenizer))
    assert allowed_by(processor, [9, *text], len(tokenizer)) == [END]


def test_tokenizers_are_known_by_their_bytes_or_refused():
    (processor,) = lookahead.Grammar(stripping(), regex="é").objects(1)
    assert allowed_by(processor, [5], 277) == [4 + 0xC3]
    for other in (unigram(), word_pieces()):
        with pytest.raises(ConfigError, match="does not know this kind of tokenizer"):
            lookahead.Grammar(other, regex="a")
    with pytest.raises(ConfigError, match="fast tokenizer, got ByT5Tokenizer"):
        from transformers import ByT5Tokenizer

        lookahead.Grammar(ByT5Tokenizer(extra_ids=3), regex="a")


def test_what_is_kept_of_a_tokenizer_goes_with_it():
    tokenizer = byte_level(TEXTS)
    lookahead.Grammar(tokenizer, regex="a")
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_threads_that_begin_together_make_one_table_of_the_tokenizer(monkeypatch):
    tokenizer, own, made, beginning = byte_level(TEXTS), llguidance.hf.from_tokenizer, list[Any](), Barrier(4)

    def from_tokenizer(*arguments: Any, **options: Any) -> Any:
        made.append(arguments)
        return own(*arguments, **options)

    def begin() -> None:
        beginning.wait()
        lookahead.Grammar(tokenizer, regex="a")

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", from_tokenizer)
    threads = [Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_missing_library_is_named_with_the_extra(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"lookahead-decoding\[grammar\]"):
        lookahead.Grammar(tokenizer, regex="a")


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_other_ways_of_acceptance_follow_grammars_too(model, tokenizer, acceptance):
    drafting = lookahead.DraftModel(model) if acceptance == "rejection" else "prompt"
    config = lookahead.LookaheadConfig(proposers=(drafting,), acceptance=acceptance, draft="fixed")
    options: dict[str, Any] = {"config": config, "do_sample": True, "seed": 4, "max_new_tokens": 60}
    with pytest.warns(UserWarning, match="decoded plainly") if acceptance == "typical" else nullcontext():
        done = lookahead.generate(model, tokenizer, ["a", "bcd"], regex="([ab]{2}|[0-9]{3}){3,9}", **options)
    assert done.finish_reasons == ["stop"] * 2
    assert all(re.fullmatch("([ab]{2}|[0-9]{3}){3,9}", text) for text in done.texts)
