"""Calls of tools: read as an output grows, forced by a grammar, and cut where the output is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from lookahead.serving.message_schemas import Message
from lookahead.serving.request_schemas import Function, Tool
from lookahead.serving.tool_calls import CallReader, schema_of_call
from tests.support.running_server import folder, server

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
CALL = '{"name": "f", "arguments": {"x": 1}}'


def read(pieces: list[str], **options: Any) -> tuple[str, list[dict[str, Any]], CallReader, list[Any]]:
    """The text and the calls that a client puts together, and the deltas."""
    reader = CallReader(["f", "g"], **options)
    deltas = [delta for piece in pieces for delta in reader.put(piece)] + reader.put("", is_last=True)
    text, calls = "", list[dict[str, Any]]()
    for delta in deltas:
        text += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append({**part["function"]})
            else:
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
    assert text == reader.text and calls == [call["function"] for call in reader.calls]
    return text, calls, reader, deltas


@pytest.mark.parametrize(
    ("text", "before", "arguments"),
    [
        (f"Well.\n<tool_call>\n{CALL}\n</tool_call>", "Well.", [{"x": 1}]),
        (f'<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call><tool_call>{CALL}', "", [{}, {"x": 1}]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}</tool_call> and more", "", [{"x": 1}, {"x": 1}]),
        ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", [{"x": 1}]),
        (f"[TOOL_CALLS][{CALL}]", "", [{"x": 1}]),
        (f"so: [TOOL_CALLS] [{CALL}, {CALL}]", "so:", [{"x": 1}, {"x": 1}]),
        (CALL, "", [{"x": 1}]),
        (f"\n {CALL}; {CALL}", "", [{"x": 1}, {"x": 1}]),
        (f"[{CALL}]", "", [{"x": 1}]),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [{"x": 1}]),
        ('{"type": "function", "name": "f", "parameters": {"x": 1}}', "", [{"x": 1}]),
        ('{"name": "f"}', "", [{}]),
        ('{"name": "f", "arguments": {"x": "}{\\"]", "y": [{}]}} ', "", [{"x": '}{"]', "y": [{}]}]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        ('<tool_call>{"name": "other", "arguments": {}}', '<tool_call>{"name": "other", "arguments": {}}', []),
        ('{"name": "Ann", "age": 3}\n', '{"name": "Ann", "age": 3}\n', []),
        ('{"id": 3, "x": [1, 2]}', '{"id": 3, "x": [1, 2]}', []),
        ('[1, {"name": "f"}]', '[1, {"name": "f"}]', []),
        ("<tool_call>broken", "<tool_call>broken", []),
        ("plain text {", "plain text {", []),
        ("a <tool and [TOOL", "a <tool and [TOOL", []),
        (" \n", " \n", []),
    ],
)
def test_calls_are_read_in_the_formats_of_models_however_they_arrive(text, before, arguments):
    for size in (1, 2, 3, 7, len(text)):
        got, calls, reader, _ = read([text[at : at + size] for at in range(0, len(text), size)])
        assert (got, [json.loads(call["arguments"]) for call in calls]) == (before, arguments)
        assert not reader.is_cut


def test_text_is_told_at_once_and_arguments_in_pieces():
    reader = CallReader(["f"])
    assert reader.put("Well, ") == [{"content": "Well,"}]
    assert reader.put("so it is.\n<tool") == [{"content": " so it is."}]
    assert reader.put('_call>{"name": "f", "argu') == []
    (begun, more) = reader.put('ments": {"x"')
    assert begun["tool_calls"][0]["function"] == {"name": "f", "arguments": "{"} and begun["tool_calls"][0]["id"]
    assert more == {"tool_calls": [{"index": 0, "function": {"arguments": '"x"'}}]}
    assert reader.put(": 1}}</tool_call>") == [{"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}]
    assert reader.put('{"x', is_last=True) == []


@pytest.mark.parametrize("size", range(len(CALL)))
@pytest.mark.parametrize("is_forced", [True, False])
def test_a_call_that_is_cut_is_a_call_from_its_arguments_on(size, is_forced):
    text, calls, reader, _ = read([CALL[:size]], is_forced=is_forced)
    begun = CALL.index('{"x"')
    if size > begun:
        assert (text, calls) == (
            "",
            [{"name": "f", "arguments": CALL[begun:size].removesuffix("}}") or "{"}],
        ) or size >= 35
        assert reader.is_cut == (size < len(CALL) - 1)
    else:
        assert (text, calls) == ("" if is_forced else CALL[:size], []) and reader.is_cut == is_forced


def test_a_forced_call_that_is_cut_before_its_arguments_names_the_only_tool():
    reader = CallReader(["f"], is_forced=True)
    assert reader.put('{"na') == []
    (delta,) = reader.put("", is_last=True)
    assert delta["tool_calls"][0]["function"] == {"name": "f", "arguments": ""} and reader.is_cut


class Street(BaseModel):
    name: str
    number: int


class Person(BaseModel):
    home: Street
    friends: list[Person] = []


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_schemas_of_nested_models_are_followed(server, streams, choice):
    """Each tool has definitions of the same names."""

    class Street(BaseModel):
        zip: bool

    class Other(BaseModel):
        home: Street

    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": model.model_json_schema()}}
        for name, model in (("f", Person), ("g", Other))
    ]
    named: Any = {"type": "function", "function": {"name": "g"}}
    got = server.ask(
        "abc", tools=tools, tool_choice=named if choice == "named" else "required", max_tokens=900, stream=streams
    )
    if streams:
        parts = [part for chunk in got for part in chunk.choices[0].delta.tool_calls or ()]
        name, arguments = parts[0].function.name, "".join(part.function.arguments for part in parts)
        assert len(parts) > 1
    else:
        (call,) = got.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    (Other if name == "g" else Person).model_validate_json(arguments)


def test_references_hold_where_the_schema_of_a_tool_is_put():
    parameters = {
        "$ref": "#/$defs/A",
        "$defs": {"A": {"properties": {"$ref": {"type": "string"}, "b": {"items": [{"$ref": "#"}]}}}},
        "const": {"$ref": "#/as/it/is"},
        "else": {"$ref": "https://example.com/x"},
    }
    tool = Tool(type="function", function=Function(name="f", parameters=parameters))
    arguments = schema_of_call([tool, tool])["anyOf"][1]["properties"]["arguments"]
    place = "#/anyOf/1/properties/arguments"
    assert arguments["$ref"] == f"{place}/$defs/A"
    assert arguments["$defs"]["A"]["properties"]["b"]["items"] == [{"$ref": place}]
    assert arguments["$defs"]["A"]["properties"]["$ref"] == {"type": "string"}
    assert arguments["const"] == {"$ref": "#/as/it/is"} and arguments["else"]["$ref"].startswith("https:")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 25])
def test_a_forced_call_that_is_cut_is_a_call_that_ends_by_its_length(server, streams, tokens):
    schema = {"type": "object", "properties": {"x": {"type": "string", "minLength": 900}}, "required": ["x"]}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named: Any = {"type": "function", "function": {"name": "f"}}
    got = server.ask("abc", tools=[tool], tool_choice=named, max_tokens=tokens, stream=streams)
    if streams:
        chunks = [chunk.choices[0] for chunk in got]
        assert not any(chunk.delta.content for chunk in chunks)
        calls = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
        assert (calls[0].function.name, chunks[-1].finish_reason) == ("f", "length")
    else:
        (choice,) = got.choices
        (call,) = choice.message.tool_calls
        assert (call.function.name, choice.finish_reason, choice.message.content) == ("f", "length", None)
        assert tokens < 25 or call.function.arguments.startswith('{"x": "')


def test_text_beside_tools_is_streamed_as_it_is_without_them(server):
    schema = {"type": "object", "properties": {}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    options: Any = {"tools": [tool], "logprobs": True, "extra_body": {"lookahead": {"draft": False}}}
    whole = server.ask("abc", **options).choices[0]
    chunks = [chunk.choices[0] for chunk in server.ask("abc", stream=True, **options)]
    texts = [chunk.delta.content for chunk in chunks if chunk.delta.content]
    assert len(texts) > 3 and "".join(texts) == whole.message.content and not whole.message.tool_calls
    logs = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert logs == whole.logprobs.content and len(logs) == 30


@pytest.mark.parametrize("streams", [False, True])
def test_functions_are_tools_in_their_older_form(server, streams):
    functions: Any = [{"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}]
    given: Any = {"functions": functions, "function_call": {"name": "f"}, "max_tokens": 60, "stream": streams}
    got = server.ask("abc", **given)
    if streams:
        chunks = [chunk.choices[0] for chunk in got]
        pieces = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
        assert pieces[0].name == "f" and chunks[-1].finish_reason == "function_call"
        assert json.loads("".join(piece.arguments for piece in pieces)) == {}
        return
    (choice,) = got.choices
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert (choice.message.function_call.name, json.loads(choice.message.function_call.arguments)) == ("f", {})
    none = server.ask("abc", functions=functions, function_call="none", max_tokens=9)
    assert none.choices[0].message.function_call is None
    back: Any = [choice.message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
    body = {"messages": back, "functions": functions, "max_tokens": 9}
    assert server.raw("POST", "/v1/chat/completions", body)[0] == 200


def test_calls_and_results_in_the_older_form_are_those_of_tools_for_templates():
    call, result = {"name": "f", "arguments": "{}"}, {"role": "function", "name": "f", "content": "3"}
    said = {"role": "assistant", "content": None, "function_call": call}
    older = [Message.model_validate(message).for_template() for message in (said, result)]
    assert older == [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "f", "content": "3"},
    ]
