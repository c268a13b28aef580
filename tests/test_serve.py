"""`lookahead serve`: what clients ask for is honoured or refused by name, and nothing they send stops the server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import lookahead
from lookahead.serving.api_errors import ApiError
from lookahead.serving.parsing import parsed
from lookahead.serving.request_schemas import ChatBody
from lookahead.serving.tool_calls import StopTexts
from lookahead.serving.translation import Translator
from tests.support.running_server import folder, server

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
QUESTIONS = ["the cat sat on the cat", "abab abab", "what? what?", "xyz"]
DRAWN = {"do_sample": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]},
    },
}


@pytest.fixture(scope="module")
def plain(folder: str) -> Any:
    """What `lookahead.generate` answers."""
    model, tokenizer = lookahead.load(folder, device="cpu")

    def answer(prompt: Any, **options: Any) -> Any:
        prompt = [{"role": "user", "content": prompt}] if options.pop("chat", True) else prompt
        return lookahead.generate(model, tokenizer, prompt, **{"max_new_tokens": 30, "do_sample": False, **options})

    return answer


@pytest.mark.parametrize("streams", [False, True])
def test_four_clients_at_once_each_get_the_answer_they_get_alone(server, plain, streams):
    def ask(text: str) -> str:
        if not streams:
            return str(server.ask(text).choices[0].message.content)
        chunks = list(server.ask(text, stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage.completion_tokens == 30 and chunks[-2].choices[0].finish_reason == "length"
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, QUESTIONS)) == [plain(text).texts[0] for text in QUESTIONS]


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"temperature": 2.0, "seed": 5}, {"do_sample": True, "temperature": 2.0, "seed": 5}),
        ({"temperature": 0.7, "top_p": 0.5, "seed": 1}, {**DRAWN, "temperature": 0.7, "top_p": 0.5, "seed": 1}),
        (
            {"temperature": 1, "extra_body": {"top_k": 3, "min_p": 0.1}, "seed": 2},
            {**DRAWN, "temperature": 1.0, "top_k": 3, "min_p": 0.1, "seed": 2},
        ),
        ({"extra_body": {"repetition_penalty": 1.4}}, {"repetition_penalty": 1.4}),
        ({"logit_bias": {"70": 3.5}}, {"sequence_bias": {(70,): 3.5}}),
        ({"temperature": None}, {}),
        ({"extra_body": {"regex": "[ab]{3,9}"}}, {"regex": "[ab]{3,9}"}),
        ({"max_tokens": None, "max_completion_tokens": 7}, {"max_new_tokens": 7}),
    ],
    ids=str,
)  # fmt: skip
def test_options_are_honoured(server, plain, asked, options):
    got = server.ask(QUESTIONS[0], **{name: value for name, value in asked.items() if value is not None})
    assert got.choices[0].message.content == plain(QUESTIONS[0], **options).texts[0]


def test_penalties_lower_the_tokens_that_were_written(server):
    free, bound = (server.complete("aaaa", presence_penalty=each, frequency_penalty=each) for each in (0, 2))
    repeated = [len(each.choices[0].text) - len({*each.choices[0].text}) for each in (free, bound)]
    assert repeated[1] < repeated[0]


def test_choices_have_seeds_that_follow_each_other(server, plain):
    got = server.ask(QUESTIONS[0], n=3, seed=7, temperature=0.9)
    options = {"do_sample": True, "temperature": 0.9}
    expected = [plain(QUESTIONS[0], seed=7 + i, **options).texts[0] for i in range(3)]
    assert [choice.message.content for choice in got.choices] == expected and len({*expected}) == 3
    assert got.usage.completion_tokens == 90


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(server, plain, streams):
    whole = plain(QUESTIONS[0]).texts[0]
    stop = [whole[7:10], "never written"]
    got = server.ask(QUESTIONS[0], stop=stop, stream=streams)
    if streams:
        chunks = list(got)
        text, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = got.choices[0].message.content, got.choices[0].finish_reason
    assert (text, reason) == (whole[: whole.index(stop[0])], "stop")


def test_a_special_token_may_be_a_stop_text(server):
    text, token = next(iter(server.models.wait().tokenizer.get_added_vocab().items()))
    got = server.ask("abc", stop=[text], logit_bias={str(token): 100})
    assert got.choices[0].finish_reason == "stop" and got.usage.completion_tokens == 1
    assert server.ask("abc", logit_bias={str(token): 100}).usage.completion_tokens > 1


def test_what_may_begin_a_stop_text_is_held_back():
    for stops in (["abc"], ["bcd", "abc"], ["c"], ["aabb", "b"]):
        for text in ("xxaabcabcab", "aab", "ab", "", "aaabbab"):
            cut = StopTexts(stops)
            pieces = [cut.put(each) for each in text] + [cut.put("", is_last=True)]
            ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
            assert "".join(pieces) == (text[: min(ends)[1]] if ends else text)


def test_logarithms_come_with_tokens(server):
    chat = server.ask(QUESTIONS[0], logprobs=True, top_logprobs=2, max_tokens=5).choices[0].logprobs.content
    text = server.complete("abab", logprobs=2, max_tokens=5).choices[0].logprobs
    assert len(chat) == len(text.tokens) == 5
    assert all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in chat)
    assert all(each.top_logprobs[0].token == each.token for each in chat)  # greedily
    offsets = [len("".join(text.tokens[:at])) for at in range(5)]
    assert text.text_offset == offsets
    chunks = [each.choices[0].logprobs for each in server.complete("abab", logprobs=2, max_tokens=5, stream=True)]
    assert [at for each in chunks if each for at in each.text_offset] == offsets


def test_several_prompts_are_continued_in_order(server, plain):
    for prompts in (["abab", "xyz"], [[10, 11, 12], [7, 8]], [10, 11, 12], "abab"):
        got = server.complete(prompts, n=1)
        each = prompts if isinstance(prompts, list) and not isinstance(prompts[0], int) else [prompts]
        assert [choice.text for choice in got.choices] == [plain(prompt, chat=False).texts[0] for prompt in each]


def test_a_schema_is_followed(server):
    schema = {
        "type": "object",
        "properties": {"x": {"enum": ["a", "b"]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    got = json.loads(server.ask("abc", response_format=asked, max_tokens=60).choices[0].message.content)
    assert got["x"] in ("a", "b")


def test_a_prediction_is_counted(server, plain):
    question = "a question that nobody asked before"
    text = plain(question).texts[0]
    got = server.ask(question, prediction={"type": "content", "content": text})
    assert got.choices[0].message.content == text
    assert got.usage.completion_tokens_details.accepted_prediction_tokens > 3


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_that_must_be_called_is_called(server, streams):
    asked = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "max_tokens": 400}
    got = server.ask("abc", stream=streams, **asked)
    if streams:
        chunks = [chunk.choices[0] for chunk in got]
        (call, *more), reason = [p for c in chunks for p in c.delta.tool_calls or ()], chunks[-1].finish_reason
        call.function.arguments += "".join(part.function.arguments for part in more)
    else:
        (call,), reason = got.choices[0].message.tool_calls, got.choices[0].finish_reason
    assert (call.function.name, reason) == ("f", "tool_calls")
    assert json.loads(call.function.arguments)["x"] in ("a", "b")


def test_tools_are_refused_where_the_template_of_the_model_takes_none(tiny_llama, chat_tokenizer):
    body = {"messages": [{"role": "user", "content": "abc"}], "tools": [TOOL]}
    with pytest.raises(ApiError, match="tools: the chat template of the model takes none"):
        Translator(tiny_llama, chat_tokenizer, 50).of_chat(parsed(ChatBody, json.dumps(body).encode()))
