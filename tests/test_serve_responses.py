"""`/v1/responses`: what the official client asks is what a chat answers, in the form of the Responses API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lookahead.serving import responses
from lookahead.serving.message_schemas import Message, text_of
from lookahead.serving.responses import KeptMessages
from tests.support.running_server import LONG, Running, folder, server

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
TOOL: Any = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]},
}
FORCED: Any = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}, "max_output_tokens": 400}


def ask(running: Running, content: Any = "abc", **options: Any) -> Any:
    options = {"max_output_tokens": 30, "temperature": 0, "model": running.name, **options}
    return running.client.responses.create(input=content, **options)


def rendered(running: Running, messages: list[dict[str, Any]]) -> str:
    options: Any = {"model": running.name, "temperature": 0, "max_tokens": 30}
    return str(running.client.chat.completions.create(messages=messages, **options).choices[0].message.content)


def streamed(running: Running, content: Any = "abc", **options: Any) -> tuple[list[Any], Any]:
    options = {"max_output_tokens": 30, "temperature": 0, "model": running.name, **options}
    with running.client.responses.stream(input=content, **options) as stream:
        events = list(stream)
        return events, events[-1].response


def test_a_response_is_the_answer_of_a_chat(server):
    got = ask(server, instructions="be short")
    chat = [{"role": "system", "content": "be short"}, {"role": "user", "content": "abc"}]
    assert got.output_text == rendered(server, chat)
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert got.output[0].status == "incomplete" and got.usage.output_tokens == 30 and got.instructions == "be short"
    whole = ask(server, extra_body={"logit_bias": {"2": 100}, "min_tokens": 3})
    assert (whole.status, whole.usage.output_tokens, whole.incomplete_details) == ("completed", 4, None)


@pytest.mark.parametrize(
    "content",
    [
        [{"role": "user", "content": "abc"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "abc"}], "id": "m"}],
    ],
    ids=str,
)
def test_input_may_be_a_text_or_items(server, content):
    assert ask(server, content).output_text == ask(server).output_text


def test_events_of_a_stream_tell_the_same_response(server):
    events, final = streamed(server, extra_body={"lookahead": {"draft": False}})
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3 and "".join(deltas) == final.output_text == ask(server).output_text
    assert final.usage.output_tokens == 30


@pytest.mark.parametrize("streams", [False, True])
def test_a_function_is_called(server, streams):
    if streams:
        events, got = streamed(server, **FORCED)
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert "".join(deltas) == done.arguments == got.output[0].arguments
    else:
        got = ask(server, **FORCED)
    assert (got.tools[0].name, got.tool_choice.name) == ("f", "f")
    (call,) = got.output
    assert (call.type, call.name, got.status) == ("function_call", "f", "completed")
    assert json.loads(call.arguments)["x"] in ("a", "b") and call.call_id


def test_calls_and_results_become_messages_of_a_chat(server):
    body = responses.ResponsesBody.model_validate(
        {
            "input": [
                {"role": "user", "content": "abc"},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}", "status": "completed"},
                {"type": "function_call_output", "call_id": "1", "output": "x"},
                {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
                {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
            ]
        }
    )
    user, said, first, second, last = body.messages
    assert (user.content, text_of(said.content), said.reasoning_content) == ("abc", "so", "hm")
    assert [call["id"] for call in said.tool_calls or ()] == ["1", "2"]
    assert [(each.role, each.tool_call_id, text_of(each.content)) for each in (first, second)] == [
        ("tool", "1", "x"), ("tool", "2", "y"),
    ]  # fmt: skip
    assert last.role == "assistant" and last.tool_calls[0]["function"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_continues_an_earlier_one(server, streams):
    first = streamed(server, instructions="once")[1] if streams else ask(server, instructions="once")
    second = ask(server, "more", previous_response_id=first.id)
    history = [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    assert second.output_text == rendered(server, history) and second.previous_response_id == first.id
    third = ask(server, "again", previous_response_id=second.id)
    history += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "again"}]
    assert third.output_text == rendered(server, history)


def test_responses_that_are_not_to_be_stored_or_of_other_clients_are_not_kept(server):
    for name in (ask(server, store=False).id, "resp_none"):
        with pytest.raises(server.errors, match="previous_response_id"):
            ask(server, previous_response_id=name)
    kept = KeptMessages()
    kept.put("one", [], "r", Message(role="assistant", content="x"))
    assert kept.get("one", "r")[0].content == "x"
    with pytest.raises(Exception, match="previous_response_id"):
        kept.get("another", "r")


@pytest.mark.parametrize("bound", ["_MOST_KEPT", "_MOST_BYTES"])
def test_the_latest_responses_are_kept_up_to_a_bound(bound, monkeypatch):
    monkeypatch.setattr(responses, bound, 3 if bound == "_MOST_KEPT" else 3 * 2100)
    kept = KeptMessages()
    for number in range(9):
        kept.put("", [], str(number), Message(role="assistant", content="x" * 2000))
    assert [name for _, name in kept._kept] == ["6", "7", "8"]


def test_a_schema_and_log_probabilities_are_those_of_the_chat(server):
    schema = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
    form: Any = {"type": "json_schema", "name": "x", "schema": {**schema, "additionalProperties": False}}
    got = ask(server, text={"format": form}, max_output_tokens=60)
    assert json.loads(got.output_text)["x"] in ("a", "b")
    assert (got.text.format.name, got.text.format.schema_) == ("x", form["schema"])
    for got in (ask(server, top_logprobs=2), streamed(server, top_logprobs=2)[1]):
        logs = got.output[0].content[0].logprobs
        assert len(logs) == 30 and all(len(each.top_logprobs) == 2 for each in logs)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "a function_call needs call_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": []}, "input"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"window": 3}, "window: unknown field"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools: cannot be set by clients"),
        ({"text": {"format": {"type": "json_schema"}}}, "response_format.json_schema"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(server, fields, named):
    status, answer = server.raw("POST", "/v1/responses", {"input": "abc", **fields})
    assert status == 400 and named in answer["error"]["message"]
    assert {*answer["error"]} == {"message", "type", "param", "code"}


def test_a_stream_that_fails_says_why_in_its_last_event(folder):
    running = Running(folder, timeout_s=0.5)
    try:
        body = {"input": "abc", "stream": True, "logit_bias": LONG["logit_bias"], "max_output_tokens": 2000}
        status, text = running.raw("POST", "/v1/responses", body)
        last = json.loads(text.decode().strip().split("\n\n")[-1].partition("data: ")[2])
        assert status == 200 and last["type"] == "response.failed" and "0.5 s" in last["response"]["error"]["message"]
    finally:
        running.end()
