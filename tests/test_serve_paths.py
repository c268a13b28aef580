"""Paths beside those of OpenAI's API: what vLLM and llama-server have, and the description of all of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.running_server import folder, server

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
GREEDY = {"temperature": 0, "n_predict": 12}


def told(running: Any, path: str, body: Any) -> Any:
    status, answer = running.raw("POST", path, body)
    assert status == 200, answer
    return answer


def test_tokens_are_made_of_text_and_text_of_tokens(server):
    for field in ("prompt", "content"):
        tokens = told(server, "/tokenize", {field: "abab xyz"})["tokens"]
        assert tokens == server.models.wait().tokenizer("abab xyz")["input_ids"]
    assert told(server, "/detokenize", {"tokens": tokens}) == {"prompt": "abab xyz", "content": "abab xyz"}
    for wrong in ([10**9], [-1], ["a"], "ab"):
        status, answer = server.raw("POST", "/detokenize", {"tokens": wrong})
        assert status == 400 and "tokens" in answer["error"]["message"]


def test_a_template_is_applied(server):
    chat = [{"role": "user", "content": "abc"}]
    assert told(server, "/apply-template", {"messages": chat}) == {"prompt": "<user>abc<assistant>"}


def test_a_completion_in_the_words_of_llama_server(server):
    whole = told(server, "/completion", {"prompt": "the cat", **GREEDY})
    assert whole["content"] == server.complete("the cat", max_tokens=12).choices[0].text
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 12)
    status, streamed = server.raw("POST", "/completion", {"prompt": "the cat", **GREEDY, "stream": True})
    *events, last = [json.loads(event[6:]) for event in streamed.decode().strip().split("\n\n")]
    assert status == 200 and "".join(event["content"] for event in events) == whole["content"]
    assert last["stop"] and not any(event["stop"] for event in events) and last["tokens_predicted"] == 12
    stop = whole["content"][3:5]
    cut = told(server, "/completion", {"prompt": "the cat", **GREEDY, "stop": [stop], "cache_prompt": True})
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", stop)
    assert cut["content"] == whole["content"][: whole["content"].index(stop)]
    ended = told(server, "/completion", {"prompt": [5, 6], **GREEDY, "logit_bias": {"2": 100}})
    assert (ended["stop_type"], ended["tokens_predicted"]) == ("eos", 1)
    form = told(server, "/completion", {"prompt": "a", "json_schema": {"enum": ["x", "y"]}, "n_predict": -1})
    assert json.loads(form["content"]) in ("x", "y")


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/completion", {"mirostat": 2}, "mirostat: unknown field"),
        ("/completion", {"n": 2}, "n"),
        ("/completion", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "suffix: the model has no tokens"),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
    ],
    ids=str,
)
def test_what_they_cannot_have_is_refused_by_name(server, path, fields, named):
    status, answer = server.raw("POST", path, {**({"prompt": "a"} if path == "/completion" else {}), **fields})
    assert status == 400 and named in answer["error"]["message"]


def test_nothing_is_written_after_a_prompt_if_nothing_is_asked_for(server):
    answer = told(server, "/completion", {"prompt": "a", "n_predict": 0})
    assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")
    assert server.complete("a", max_tokens=0).choices[0].text == ""


def test_the_model_and_its_rows_are_told_without_a_path(server, folder):
    status, props = server.raw("GET", "/props")
    assert status == 200 and props["total_slots"] == 3 and "assistant" in props["chat_template"]
    assert props["default_generation_settings"]["n_ctx"] == server.models.wait().translator.context
    status, slots = server.raw("GET", "/slots")
    assert status == 200 and [slot["id"] for slot in slots] == [0, 1, 2]
    assert not any(slot["is_processing"] for slot in slots) and folder not in json.dumps([props, slots])


def test_every_path_and_field_is_described(server):
    status, document = server.raw("GET", "/openapi.json")
    assert status == 200
    for path in (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/completion", "/infill", "/tokenize", "/detokenize", "/apply-template",
    ):  # fmt: skip
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert document["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
    for path in ("/v1/models", "/health", "/ping", "/version", "/props", "/slots", "/metrics"):
        assert "get" in document["paths"][path]
    text = json.dumps(document)
    for name in {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in document["components"]["schemas"]
    assert "top_logprobs" in document["components"]["schemas"]["ChatBody"]["properties"]
