"""What clients ask about prompts: echoes and their log-probabilities, cuts, infilling, and what is continued."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import lookahead
from lookahead.serving import requests, service
from lookahead.serving.parsing import parsed
from lookahead.serving.request_schemas import CompletionBody
from lookahead.serving.requests import prompt_logprobs
from lookahead.serving.translation import Translator
from tests.support.grammars import json_model
from tests.support.running_server import Running, folder, server, wait_until_idle

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
PROMPT = "the cat sat on the cat"


@pytest.fixture(scope="module")
def loaded(folder: str) -> tuple[Any, Any]:
    return lookahead.load(folder, device="cpu")


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities `[tokens, vocab]` by transformers."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1).clamp_min(-9999)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("as_ids", [True, False])
def test_an_echo_has_the_log_probabilities_that_transformers_gives(server, loaded, streams, tokens, as_ids):
    """What lm-eval sends."""
    model, tokenizer = loaded
    ids = tokenizer(PROMPT)["input_ids"]
    options: Any = {"max_tokens": tokens, "echo": True, "logprobs": 2, "stream": streams}
    got = server.complete([ids] if as_ids else PROMPT, **options)
    chunks = [chunk.choices[0] for chunk in got] if streams else got.choices
    text, logs = "".join(chunk.text for chunk in chunks), [chunk.logprobs for chunk in chunks if chunk.logprobs]
    found = [log for each in logs for log in each.token_logprobs]
    likely = [top for each in logs for top in each.top_logprobs]
    assert text.startswith(PROMPT) and chunks[-1].finish_reason == "length" and len(found) == len(ids) + tokens
    table = expected(model, ids)
    assert found[0] is None and likely[0] is None
    torch.testing.assert_close(torch.tensor(found[1 : len(ids)]), table[range(len(ids) - 1), ids[1:]])
    assert [max(top.values()) for top in likely[1 : len(ids)]] == pytest.approx(table.max(-1).values[:-1].tolist())
    assert [offset for each in logs for offset in each.text_offset][:2] == [0, len(tokenizer.decode(ids[:1]))]


def test_an_echo_without_log_probabilities_is_the_prompt_and_the_answer(server):
    plain = server.complete(["abab", "xyz"], n=2, seed=1)
    echoed = server.complete(["abab", "xyz"], n=2, seed=1, echo=True)
    texts = [choice.text for choice in plain.choices]
    assert [choice.text for choice in echoed.choices] == [
        "abab" + texts[0], "abab" + texts[1], "xyz" + texts[2], "xyz" + texts[3],
    ]  # fmt: skip
    assert server.complete("abab", echo=True, max_tokens=0).usage.completion_tokens == 0


@pytest.mark.parametrize("path", ["chat", "completion"])
def test_prompt_logprobs_name_each_token_and_likely_ones(server, loaded, path):
    model, tokenizer = loaded
    extra = {"extra_body": {"prompt_logprobs": 3}}
    if path == "chat":
        told = server.ask("abc", **extra).prompt_logprobs
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], add_generation_prompt=True)
        ids = ids["input_ids"]
    else:
        told, ids = server.complete(PROMPT, **extra).choices[0].prompt_logprobs, tokenizer(PROMPT)["input_ids"]
    table = expected(model, ids)
    assert told[0] is None and len(told) == len(ids)
    for token, row, each in zip(ids[1:], table, told[1:], strict=False):
        assert each[str(token)]["logprob"] == pytest.approx(float(row[token]))
        assert each[str(token)]["decoded_token"] == tokenizer.decode([token])
        assert {int(name) for name in each} == {*row.topk(3).indices.tolist(), token}
        best = str(int(row.argmax()))
        assert each[best]["rank"] == 1


def test_a_prompt_is_read_in_parts_for_its_log_probabilities(loaded, monkeypatch):
    model, _ = loaded
    ids = [5 + at % 40 for at in range(70)]
    whole = prompt_logprobs(model, ids, 2)
    for part in (1, 7, 69):
        monkeypatch.setattr(requests, "_PART", part)
        in_parts = prompt_logprobs(model, ids, 2)
        assert [each.token for each in in_parts] == ids
        expected = [each.logprob for each in whole[1:]]
        assert [each.logprob for each in in_parts[1:]] == pytest.approx(expected, abs=1e-4)


def test_a_client_that_leaves_ends_the_reading_of_its_prompt(server, monkeypatch):
    begun, ended = Event(), Event()

    def endless(*_: Any) -> None:
        begun.set()
        try:
            while True:
                sleep(0.01)  # a thread is interrupted between two statements
        finally:
            ended.set()

    monkeypatch.setattr(requests, "_logprobs_of", endless)
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    connection = HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps(body))
    assert begun.wait(60)
    assert not ended.is_set()
    connection.close()
    assert ended.wait(60)
    monkeypatch.undo()
    assert server.complete(PROMPT, max_tokens=0, echo=True, logprobs=1).choices[0].text == PROMPT
    wait_until_idle(server)


def test_log_probabilities_of_prompts_are_bounded(server, monkeypatch):
    monkeypatch.setattr(service, "_MOST_SCORED", 20)
    body = {"prompt": [[9] * 7] * 3, "max_tokens": 0, "echo": True, "logprobs": 1}
    status, answer = server.raw("POST", "/v1/completions", body)
    assert status == 400 and "at most 20 tokens have log-probabilities, got 21" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"suffix": "x"}, "suffix: the model has no tokens"),
        ({"echo": 1}, "echo"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice: cannot be combined"),
        ({"structured_outputs": {"jason": {}}}, "structured_outputs.jason"),
        ({"guided_json": {}, "regex": "a"}, "regex: cannot be combined with guided_json"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_of_a_prompt_is_refused_by_name(server, fields, named):
    status, answer = server.raw("POST", "/v1/completions", {"prompt": "abc", **fields})
    assert status == 400 and named in answer["error"]["message"]


def test_the_last_tokens_of_a_prompt_are_kept_however_long_it_is(server):
    context = server.models.wait().translator.context
    ids = [5 + at % 40 for at in range(context + 100)]
    got = server.complete(ids, extra_body={"truncate_prompt_tokens": 9})
    assert got.choices[0].text == server.complete(ids[-9:]).choices[0].text and got.usage.prompt_tokens == 9
    echoed = server.complete(
        "abab xyz " * 9, echo=True, max_tokens=0, logprobs=1, extra_body={"truncate_prompt_tokens": 3}
    )
    choice = echoed.choices[0]
    assert choice.text == "".join(choice.logprobs.tokens) and len(choice.logprobs.tokens) == 3
    chat = server.ask("abab " * context, extra_body={"truncate_prompt_tokens": 9})
    assert chat.usage.prompt_tokens == 9


def test_a_suffix_is_put_between_the_tokens_of_the_model(folder):
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    added = tokenizer.add_special_tokens({"additional_special_tokens": names})
    model = json_model()
    assert added == 3 and len(tokenizer) <= model.config.vocab_size
    body = parsed(CompletionBody, json.dumps({"prompt": ["ab", "cd"], "suffix": "yz"}).encode())
    first, second = Translator(model, tokenizer, 50).of_completion(body)
    before, between, after = tokenizer.convert_tokens_to_ids(names)
    words = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "cd", "yz")]
    assert first.ids == [before, *words[0], between, *words[2], after]
    assert second.ids == [before, *words[1], between, *words[2], after]


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_text_may_be_part_of_the_answer(server, streams):
    whole = str(server.ask("abc").choices[0].message.content)
    stop = whole[5:8]
    options: Any = {"stop": [stop], "stream": streams, "extra_body": {"include_stop_str_in_output": True}}
    got = server.ask("abc", **options)
    chunks = [chunk.choices[0].delta for chunk in got] if streams else [got.choices[0].message]
    text = "".join(chunk.content or "" for chunk in chunks)
    assert text == whole[: whole.index(stop) + len(stop)]


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["a.b", "c\nd", "x|y"]}},
        {"structured_outputs": {"regex": "a\\.b|c\nd|x\\|y"}},
        {"structured_outputs": {"grammar": 'start: "a.b" | "c\\nd" | "x|y"'}},
    ],
    ids=str,
)
def test_forms_of_outputs_have_the_names_of_vllm(server, fields):
    assert server.complete("abc", extra_body=fields).choices[0].text in ("a.b", "c\nd", "x|y")


@pytest.mark.parametrize("name", ["guided_json", "json", "response_format"])
def test_a_schema_has_several_names(server, name):
    schema = {"enum": [{"x": 1}, {"x": 2}]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields = {"guided_json": schema, "structured_outputs": {"json": json.dumps(schema)}, "response_format": form}
    key = "structured_outputs" if name == "json" else name
    for got in (
        server.complete("abc", extra_body={key: fields[key]}).choices[0].text,
        server.ask("abc", extra_body={key: fields[key]}).choices[0].message.content,
    ):
        assert json.loads(got)["x"] in (1, 2)


def test_a_final_message_of_the_assistant_is_continued_and_no_other(server):
    def ask(role: str, **fields: Any) -> tuple[int, Any]:
        chat = [{"role": "user", "content": "abc"}, {"role": role, "content": "so"}]
        body = {"messages": chat, "max_tokens": 5, "temperature": 0, **fields}
        return server.raw("POST", "/v1/chat/completions", body)

    plain = ask("assistant")[1]["choices"][0]["message"]["content"]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert ask("assistant", **fields)[1]["choices"][0]["message"]["content"] == plain
    for role, name, value in (
        ("assistant", "continue_final_message", False),
        ("assistant", "add_generation_prompt", True),
        ("user", "continue_final_message", True),
        ("user", "add_generation_prompt", False),
    ):
        status, answer = ask(role, **{name: value})
        assert status == 400 and f"{name}: must be {not value}" in answer["error"]["message"]


def test_options_of_drafts_are_honoured_where_only_the_prompt_is_read(folder: str):
    running = Running(folder)
    try:
        body = {"prompt": ["ab", "cd"], "echo": True, "max_tokens": 0, "lookahead": {"draft": False}}
        status, answer = running.raw("POST", "/v1/completions", body)
        assert status == 200 and [choice["text"] for choice in answer["choices"]] == ["ab", "cd"]
        assert answer["usage"]["prompt_tokens"] > 1 and not running.is_busy
    finally:
        running.end()
