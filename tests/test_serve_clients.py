"""What clients of other servers send: it is served as they mean it, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app
from lookahead.cli.serve import ServeOptions, _keys
from lookahead.errors import ConfigError
from lookahead.serving.parsing import parsed
from lookahead.serving.request_schemas import ChatBody
from lookahead.serving.served_models import ServedModels
from tests.support.running_server import Running, folder, server

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
ASKED = [{"role": "user", "content": "abc"}]


def answer_of(running: Running, **fields: Any) -> dict[str, Any]:
    body = {"messages": ASKED, "max_tokens": 12, "temperature": 0, **fields}
    status, answer = running.raw("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return dict(answer)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_what_an_answer_contained_can_be_sent_back(server):
    message = server.ask("abc").choices[0].message.model_dump()
    assert None in message.values()
    history = [*ASKED, message, {"role": "user", "content": "more"}]
    plain = [*ASKED, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": "more"}]
    assert text_of(answer_of(server, messages=history)) == text_of(answer_of(server, messages=plain))


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no", "annotations": [{"type": "url_citation"}]},
        {"cache_control": {"type": "ephemeral"}},
        {"content": [{"type": "text", "text": "xy", "cache_control": {"type": "ephemeral"}}]},
        {"audio": None, "function_call": None, "some_field": None},
    ],
    ids=str,
)
def test_fields_of_other_servers_in_a_history_are_accepted(server, fields):
    def of(message: dict[str, Any]) -> dict[str, Any]:
        return answer_of(server, messages=[*ASKED, {"role": "assistant", "content": "xy", **message}, *ASKED])

    assert text_of(of(fields)) == text_of(of({}))


def test_reasoning_is_passed_to_the_template():
    body = {"messages": [*ASKED, {"role": "assistant", "content": "x", "reasoning": "hm"}]}
    message = parsed(ChatBody, json.dumps(body).encode()).messages[1].for_template()
    assert message == {"role": "assistant", "content": "x", "reasoning_content": "hm"}


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool"])
@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": []}], ids=str)
def test_a_message_without_content_is_refused_unless_the_assistant_wrote_it(server, role, fields):
    assert "needs content" in server.refused(messages=[{"role": role, "tool_call_id": "1", **fields}])


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ""},
        {"top_k": -1},
        {"store": True},
        {"verbosity": "low"},
        {"reasoning_effort": "low"},
        {"modalities": ["text"]},
        {"skip_special_tokens": True},
        {"priority": 3},
        {"min_tokens": 0},
        {"ignore_eos": False},
        {"unknown_field": None},
        {"prompt": None},
    ],
    ids=str,
)
def test_fields_without_effect_are_accepted(server, fields):
    assert text_of(answer_of(server, **fields)) == text_of(answer_of(server))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"modalities": ["audio"]}, "modalities"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"min_tokens": 13}, "min_tokens"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids: entries must be token ids"),
        ({"lookahead": {"draft": "no"}}, "lookahead.draft"),
        ({"lookahead": {"window": 3}}, "lookahead.window: unknown field"),
        ({"top_k": -2}, "top_k"),
    ],
    ids=str,
)
def test_what_they_cannot_have_is_refused_by_name(server, fields, named):
    assert named in server.refused(**{"max_tokens": 12, **fields})


def test_the_end_can_be_put_off_or_ignored(server):
    ends = {"logit_bias": {"2": 100}}  # the end-of-sequence token
    assert answer_of(server, **ends)["usage"]["completion_tokens"] == 1
    later = answer_of(server, min_tokens=5, **ends)
    assert later["usage"]["completion_tokens"] == 6 and later["choices"][0]["finish_reason"] == "stop"
    never = answer_of(server, ignore_eos=True, **ends)
    assert never["usage"]["completion_tokens"] == 12 and never["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("streams", [False, True])
def test_a_token_may_end_an_answer_and_is_no_part_of_its_text(server, streams):
    tokenizer = server.models.wait().tokenizer
    whole = server.ask("abc", logprobs=True).choices[0]
    tokens = [entry.token for entry in whole.logprobs.content]
    at = next(at for at in range(3, len(tokens)) if tokens[at] not in tokens[:at])
    end = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(tokens[at]))
    got = server.ask("abc", stream=streams, extra_body={"stop_token_ids": end})
    if streams:
        chunks = list(got)
        text, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = got.choices[0].message.content, got.choices[0].finish_reason
    assert (text, reason) == ("".join(tokens[:at]), "stop")


def test_drafts_can_be_turned_off_by_request_and_are_counted(server):
    options: Any = {"messages": [{"role": "user", "content": "abab " * 20}], "max_tokens": 60, "n": 2, "seed": 1}
    drafted = answer_of(server, **options)
    plain = answer_of(server, lookahead={"draft": False}, **options)
    assert [each["message"] for each in plain["choices"]] == [each["message"] for each in drafted["choices"]]
    counts = drafted["usage"]["lookahead"]
    assert counts["drafted_tokens"] >= counts["accepted_tokens"]  # none, if passes were slow when they were measured
    assert counts["accepted_tokens"] == drafted["usage"]["completion_tokens"] - 2 - counts["passes"]
    counts = plain["usage"]["lookahead"]
    assert (counts["drafted_tokens"], counts["passes"]) == (0, plain["usage"]["completion_tokens"] - 2)


def test_a_model_has_a_name_a_date_and_a_length_and_no_path(server, folder):
    status, listed = server.raw("GET", "/v1/models")
    (model,) = listed["data"]
    assert status == 200 and model["id"] == Path(folder).name and model["created"] > 1.7e9
    assert server.raw("GET", f"/v1/models/{model['id']}") == (200, model)
    assert model["max_model_len"] == server.models.wait().translator.context
    assert server.raw("GET", "/v1/models/other/name")[0] == 404
    assert server.raw("GET", "/version") == (200, {"version": lookahead.__version__})
    assert server.raw("GET", "/ping")[0] == 200
    assert folder not in json.dumps(listed) and folder not in json.dumps(answer_of(server))


def test_models_may_be_given_names(folder):
    options: Any = {"config": None, "max_new_tokens": 9, "loading": {"device": "cpu"}, "decoding": {}}
    models = ServedModels([folder], ["mine/own"], **options)
    assert models.wait().name == "mine/own" and models.get("mine/own").done()
    models.close()
    for names in (["a"], ["a", "a"], ["a", "b", "c"], None):
        with pytest.raises(ConfigError, match="a name of its own"):
            ServedModels([folder, folder], names, **options)
    named = ["--served-model-name", "a", "--served-model-name", "b"]
    result = CliRunner().invoke(app, ["serve", "--device", "cpu", folder, *named])
    assert result.exit_code == 2 and "a name of its own" in result.output.replace("\n", " ")


def test_keys_come_from_the_command_line_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("LOOKAHEAD_API_KEY", raising=False)
    path = tmp_path / "keys"
    path.write_text("one\n\n schl\u00fcssel \n", "utf-8")
    assert _keys(ServeOptions()) == [] and _keys(ServeOptions(api_key="k")) == ["k"]
    assert _keys(ServeOptions(api_key_file=path)) == ["one", "schl\u00fcssel"]
    monkeypatch.setenv("LOOKAHEAD_API_KEY", "of the environment")
    assert _keys(ServeOptions()) == ["of the environment"] and _keys(ServeOptions(api_key="k")) == ["k"]
    path.write_text("\n")
    for options in ({"api_key_file": path}, {"api_key_file": tmp_path / "none"}, {"api_key": " "}):
        with pytest.raises(ConfigError):
            _keys(ServeOptions(**options))
    with pytest.raises(ConfigError, match="pass either --api-key or --api-key-file"):
        _keys(ServeOptions(api_key="k", api_key_file=path))


def test_special_tokens_of_users_are_control_tokens_unless_their_text_is_plain(server, folder):
    tokenizer = server.models.wait().tokenizer
    end = tokenizer.eos_token
    question = f"a{end}b{end[0]}{end}{end[1:]} c"
    body = {"messages": [{"role": "user", "content": question}]}
    assert tokenizer.eos_token_id in server.raw("POST", "/tokenize", body)[1]["tokens"]
    plain = Running(folder, plain_user_text=True)
    try:
        tokens = plain.raw("POST", "/tokenize", body)[1]["tokens"]
        assert tokenizer.eos_token_id not in tokens
        assert tokenizer.decode(tokens) == f"<user>{question}<assistant>"
        known = {"messages": [{"role": "user", "content": "no token"}, {"role": "assistant", "content": f"x{end}"}]}
        assert plain.raw("POST", "/tokenize", known)[1] == server.raw("POST", "/tokenize", known)[1]
    finally:
        plain.end()
