"""What a server says of a wrong field: what is allowed there, by the type that the value was meant to have."""

from __future__ import annotations

import json

import pytest

from lookahead.serving.api_errors import ApiError
from lookahead.serving.parsing import parsed
from lookahead.serving.request_schemas import ChatBody, CompletionBody

TEXT = {"type": "text", "text": "a"}
PARTS = "Input should be 'text', 'input_text', 'output_text', 'reasoning_text' or 'summary_text'"
OBJECTS = "Input should be a string or an array"
ITEMS = "Input should be a string or an array of a string or an array of an integer or an array of an array"


def message(kind, **fields):
    """What is said of the fields of a request."""
    with pytest.raises(ApiError) as raised:
        parsed(kind, json.dumps(fields).encode())
    told = raised.value.body["error"]
    assert raised.value.status == 400 and told["message"].startswith(f"{told['param']}: ")
    return told["message"]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["x"] * 100, "stop: List should have at most 16 items after validation, not 100, got ['x', "),
        (["x" * 300] * 100, "stop: List should have at most 16 items after validation, not 100, got ['x"),
        ("x" * 300, "stop: String should have at most 200 characters, got 'x"),
        ([""], "stop.0: String should have at least 1 character, got ''"),
        (["", ""], "stop.0: String should have at least 1 character, got ''"),
        (["a", 5], "stop.1: Input should be a valid string, got 5"),
        (5, f"stop: {OBJECTS}, got 5"),
        ({"a": 1}, f"stop: {OBJECTS}, got {{'a': 1}}"),
    ],
)
def test_of_a_text_or_several_what_was_sent_is_told_apart(stop, expected):
    assert message(CompletionBody, prompt="abc", stop=stop).startswith(expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (5, f"content: {OBJECTS}, got 5"),
        (TEXT, f"content: {OBJECTS}, got {TEXT}"),
        (["a"], "content.0: Input should be an object, got 'a'"),
        ([{"type": "text", "text": 5}], "content.0.text: Input should be a valid string, got 5"),
        ([{**TEXT, "shade": {}}], "content.0.shade: unknown field"),
    ],
)
def test_of_a_text_the_wrong_part_is_named(content, expected):
    assert message(ChatBody, messages=[{"role": "user", "content": content}]) == f"messages.0.{expected}"
    chat = [{"role": "user", "content": "x"}]
    told = message(ChatBody, messages=chat, prediction={"type": "content", "content": content})
    assert told == f"prediction.{expected}"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image_url", "image_url": {}}, "0.image_url.url: Field required"),
        ({"type": "image_url"}, "0: a image_url needs image_url, got {'type': 'image_url'}"),
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "flac"}},
            "0.input_audio.format: Input should be",
        ),
        (
            {"type": "image", "source": {"type": "url", "url": "x"}},
            "0.source.type: Input should be 'base64', got 'url'",
        ),
        ({"type": "text"}, "0: a text needs text, got {'type': 'text'}"),
        ({"type": "video_url"}, "0.type: Input should be 'text', "),
    ],
)
def test_of_a_message_the_wrong_part_is_named(part, expected):
    told = message(ChatBody, messages=[{"role": "user", "content": [part]}])
    assert told.startswith(f"messages.0.content.{expected}")
    told = message(
        ChatBody, messages=[{"role": "user", "content": "x"}], prediction={"type": "content", "content": [part]}
    )
    assert told.startswith("prediction.content.0.t")  # a prediction is text


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (5, f"prompt: {ITEMS}, got 5"),
        ([1, "a"], "prompt.1: Input should be a valid integer, got 'a'"),
        (["a", 1], "prompt.1: Input should be a valid string, got 1"),
        ([[1, "a"]], "prompt.0.1: Input should be a valid integer, got 'a'"),
        ([[1], "a"], "prompt.1: Input should be a valid array, got 'a'"),
        ([1.5], f"prompt: {ITEMS}, got [1.5]"),
        ([None], f"prompt: {ITEMS}, got [None]"),
    ],
)
def test_of_several_prompts_the_first_that_is_unlike_those_before_is_named(prompt, expected):
    assert message(CompletionBody, prompt=prompt) == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("any", ": Input should be 'none', 'auto' or 'required', got 'any'"),
        (5, ": Input should be a string or an object, got 5"),
        ({}, ".type: Field required"),
        ({"type": "function"}, ".function: Field required"),
        ({"type": "function", "function": {}}, ".function.name: Field required"),
        ({"type": "function", "function": {"name": ""}}, ".function.name: String should have at least 1 character"),
        ({"type": "function", "function": {"name": "f", "strict": True}}, ".function.strict: unknown field"),
    ],
)
def test_of_a_choice_of_tools_the_wrong_field_is_named(choice, expected):
    told = message(ChatBody, messages=[{"role": "user", "content": "x"}], tool_choice=choice)
    assert told.startswith(f"tool_choice{expected}")


def test_of_several_wrong_fields_one_is_told_with_its_own_mistake():
    assert message(CompletionBody, prompt="x", n=0, stop=[""], seed=1.5).startswith(("n: ", "stop.0: ", "seed: "))
    assert message(CompletionBody, prompt=[1, "a"], stop=["", ""]).startswith(("prompt.1: ", "stop.0: "))
    tools = [{"type": "function", "function": {"name": "f", "strict": "yes"}}]
    told = message(ChatBody, messages=[{"role": "user", "content": "x"}], tools=tools)
    assert told == "tools.0.function.strict: Input should be a valid boolean, got 'yes'"
