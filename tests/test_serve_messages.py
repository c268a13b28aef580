"""`/v1/messages`: what the official client asks is what a chat answers, in the form of Anthropic's API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from lookahead.serving.message_schemas import text_of
from lookahead.serving.messages import MessagesBody
from tests.support.running_server import LONG, Running, folder, server

__all__ = ["folder", "server"]  # fixtures
SCHEMA = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
FORCED: Any = {
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "max_tokens": 400,
}


def client_of(running: Running, key: str = "secret") -> Any:
    anthropic = pytest.importorskip("anthropic")  # takes seconds
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{running.port}", api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def messages(server: Running) -> Iterator[Any]:
    with client_of(server) as client:
        yield client.messages


def of(running: Running, **options: Any) -> dict[str, Any]:
    asked = [{"role": "user", "content": "abc"}]
    return {"model": running.name, "messages": asked, "max_tokens": 30, "extra_body": {"temperature": 0}, **options}


def test_a_message_is_the_answer_of_a_chat(server, messages):
    got = messages.create(**of(server, system="be short"))
    chat: Any = [{"role": "system", "content": "be short"}, {"role": "user", "content": "abc"}]
    expected = server.client.chat.completions.create(messages=chat, model=server.name, max_tokens=30, temperature=0)
    (block,) = got.content
    assert block.text == expected.choices[0].message.content
    assert (got.role, got.stop_reason, got.model) == ("assistant", "max_tokens", server.name)
    usage = got.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert usage.output_tokens == 30
    ended = messages.create(**of(server, extra_body={"logit_bias": {"2": 100}, "min_tokens": 3}))
    assert (ended.stop_reason, ended.usage.output_tokens) == ("end_turn", 4)


def test_a_stop_sequence_is_named(server, messages):
    text = messages.create(**of(server)).content[0].text
    got = messages.create(**of(server, stop_sequences=["never written", text[5:8]]))
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", text[5:8])
    assert got.content[0].text == text[: text.index(text[5:8])]


def test_events_of_a_stream_tell_the_same_message(server, messages):
    whole = messages.create(**of(server))
    asked = of(server, extra_body={"temperature": 0, "lookahead": {"draft": False}})
    with messages.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_message()
    texts = [event.text for event in events if event.type == "text"]
    assert len(texts) > 3 and "".join(texts) == final.content[0].text == whole.content[0].text
    raw = [event.type for event in messages.create(**asked, stream=True)]
    assert list(dict.fromkeys(raw)) == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 30
    read = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert read == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "f"}, {"type": "any"}], ids=str)
@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_used(server, messages, streams, choice):
    asked = of(server, **{**FORCED, "tool_choice": choice})
    if streams:
        with messages.stream(**asked) as stream:
            got = stream.get_final_message()
    else:
        got = messages.create(**asked)
    (call,) = got.content
    assert (call.type, call.name, got.stop_reason) == ("tool_use", "f", "tool_use")
    assert call.input["x"] in ("a", "b") and call.id


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f", "arguments": {"x": no}}', '{"x": no}'),
        ('{"arguments": {"x": "\\ud800"}, "name": "f"}', '{"x": "\\ud800"}'),
        ('{"arguments": "all", "name": "f"}', "all"),
    ],
)
def test_arguments_that_are_no_object_of_json_are_told_as_text(server, messages, call, arguments):
    regex = re.escape(f"<tool_call>{call}</tool_call>")
    got = messages.create(**of(server, tools=FORCED["tools"], max_tokens=300, extra_body={"regex": regex}))
    (block,) = got.content
    assert (block.name, block.input, got.stop_reason) == ("f", {"INVALID_JSON": arguments}, "tool_use")


def test_blocks_become_messages_of_a_chat():
    body = MessagesBody.model_validate(
        {
            "max_tokens": 3,
            "system": [{"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}}, TEXT],
            "messages": [
                {"role": "user", "content": "abc"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        TEXT,
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [TEXT], "is_error": True},
                        {"type": "tool_result", "tool_use_id": "2"},
                        {"type": "text", "text": "go"},
                    ],
                },
            ],
        }
    )
    assert [(each.role, text_of(each.content)) for each in body.messages] == [
        ("system", "be short"), ("user", "abc"), ("assistant", "short"), ("tool", "short"), ("tool", ""),
        ("user", "go"),
    ]  # fmt: skip
    said = body.messages[2]
    assert said.reasoning_content == "hm" and body.messages[3].tool_call_id == "1"
    assert said.tool_calls == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]


TEXT = {"type": "text", "text": "short"}


def test_tokens_are_counted_as_they_are_read(server, messages):
    asked = of(server, system="be short " * 9, tools=FORCED["tools"])
    messages.create(**asked)
    whole = messages.create(**asked).usage
    assert whole.cache_read_input_tokens > 9
    del asked["max_tokens"], asked["extra_body"]
    assert messages.count_tokens(**asked).input_tokens == whole.input_tokens + whole.cache_read_input_tokens


def test_what_coding_agents_send_besides_is_accepted(server, messages):
    more = {
        "metadata": {"user_id": "me"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "system": [{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}],
        "service_tier": "auto",
    }
    assert messages.create(**of(server, **more)).content[0].text
    form = {"format": {"type": "json_schema", "schema": {**SCHEMA, "additionalProperties": False}}}
    got = messages.create(**of(server, output_config=form, max_tokens=60))
    assert json.loads(got.content[0].text)["x"] in ("a", "b")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content.0.source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "a tool_use needs id"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"window": 3}, "window: unknown field"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools: cannot be set by clients"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_in_the_form_of_the_api(server, fields, named):
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, **fields}
    status, answer = server.raw("POST", "/v1/messages", body)
    assert status == 400 and answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"]


def test_errors_are_those_of_the_client(folder):
    anthropic = pytest.importorskip("anthropic")
    running = Running(folder, api_keys=["secret"], max_body=3000, timeout_s=0.5)
    try:
        with client_of(running, "wrong") as client, pytest.raises(anthropic.AuthenticationError, match="API key"):
            client.messages.create(**of(running))
        with client_of(running) as client:
            assert client.messages.create(**of(running, max_tokens=2)).content
            with pytest.raises(anthropic.NotFoundError, match="none"):
                client.messages.create(**of(running, model="none"))
            with pytest.raises(anthropic.RequestTooLargeError):
                client.messages.create(**of(running, system="x" * 4000))
            endless = of(running, extra_body={"logit_bias": LONG["logit_bias"]}, max_tokens=2000)
            with pytest.raises(anthropic.APIStatusError, match="timeout_error"):
                list(client.messages.create(**endless, stream=True))
    finally:
        running.end()
