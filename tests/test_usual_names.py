"""The names by which other tools know options, prompts and models."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app
from lookahead.decoding.loops import loops
from lookahead.errors import UnsupportedModelError
from lookahead.loading import gguf_files, loading
from lookahead.loading.loading import locate_model
from lookahead.loading.local_models import local_models

GREEDY = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture
def run(cli_folder, model_folder):
    """Runs a command with a tiny model."""

    def invoke(command, *arguments, input=None):
        return CliRunner().invoke(app, [command, "-m", str(model_folder), *arguments], input=input)

    return invoke


@pytest.fixture
def hub(tmp_path, monkeypatch, model_folder):
    """A cache of the Hub that holds a model with a GGUF file beside it, and no way to the Hub."""
    cache = tmp_path / "hub"
    repository = cache / "models--maker--tiny"
    snapshot = repository / "snapshots" / "0123abcd"
    shutil.copytree(model_folder, snapshot)
    (snapshot / "tiny.Q4_K_M.gguf").write_bytes(b"GGUF" * 100)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(gguf_files, "user_cache_path", lambda name, **_: tmp_path / "cache" / name)
    loading._check_hub.cache_clear()
    return cache


def one_line(result):
    """What is said of a mistake."""
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    return result.stderr


# Options


def test_a_prompt_has_the_same_answer_by_all_its_names(run, tiny_llama, tiny_tokenizer):
    expected = lookahead.generate(tiny_llama, tiny_tokenizer, "Once", max_new_tokens=12, **GREEDY).texts[0] + "\n"
    for limit in ("-n", "--max-tokens", "--max-new-tokens"):
        assert run("generate", "Once", limit, "12").stdout == expected
    assert run("generate", "-n", "12", "-p", "Once").stdout == expected
    assert run("generate", "-n", "12", "--prompt", "Once").stdout == expected
    for arguments in ((), ("-",), ("-p", "-")):
        assert run("generate", "-n", "12", *arguments, input="Once").stdout == expected


def test_two_prompts_and_none_are_told_in_a_line(run):
    for command in ("generate", "explain"):
        assert "name one prompt: the argument or --prompt, got both" in one_line(run(command, "a.txt", "-p", "Once"))
        assert "- has no prompt: it is empty" in one_line(run(command, input=""))
        assert "the prompt is empty" in one_line(run(command, "-p", ""))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pseudo terminal")
def test_no_prompt_at_a_terminal_is_a_mistake_and_is_not_waited_for():
    from tests.support.pseudo_terminal import at_terminal

    with at_terminal("generate") as terminal:
        terminal.until("error: no prompt: pass it as the argument, by --prompt, or through a pipe")
        assert terminal.wait() == 2


def test_explain_takes_a_file_a_text_and_a_pipe(run):
    Path("prompt.txt").write_text("Once upon")
    texts = [
        run("explain", "-n", "8", *arguments, input="Once upon").stdout.splitlines()[2]
        for arguments in (["prompt.txt"], ["-p", "Once upon"], ["-"], [])
    ]
    assert len({*texts}) == 1 and texts[0]


def test_models_to_serve_are_arguments_or_options_but_not_both():
    result = CliRunner().invoke(app, ["serve", "here", "-m", "there"])
    assert "name models as arguments or by --model, got both" in one_line(result)
    assert "model './gone' does not exist" in one_line(CliRunner().invoke(app, ["serve", "-m", "./gone"]))


def test_an_output_ends_at_the_first_of_several_stop_texts(run, tiny_llama, tiny_tokenizer):
    whole = lookahead.generate(tiny_llama, tiny_tokenizer, "Once", max_new_tokens=40, **GREEDY).texts[0]
    stops = [whole[20:22], whole[10:12]]
    expected = lookahead.generate(
        tiny_llama, tiny_tokenizer, "Once", max_new_tokens=40, stop_strings=stops, **GREEDY
    ).texts[0]
    result = run("generate", "Once", "-n", "40", "--stop", stops[0], "--stop", stops[1])
    assert (result.stdout, result.stderr) == (expected + "\n", "")
    assert len(expected) <= 12 < len(whole)
    assert "stop must be a text of at least one character" in one_line(run("generate", "Once", "--stop", ""))


def test_json_is_one_line_with_the_text_its_tokens_why_it_ended_and_the_figures(run, tiny_llama, tiny_tokenizer):
    result = run("generate", "Once", "-n", "12", "--json")
    expected = lookahead.generate(tiny_llama, tiny_tokenizer, "Once", max_new_tokens=12, **GREEDY)
    assert result.stdout.count("\n") == 1
    shown = json.loads(result.stdout)
    assert (shown["text"], shown["token_ids"]) == (expected.texts[0], expected.token_ids[0])
    assert (shown["finish_reason"], shown["prompt_tokens"], shown["emitted_tokens"]) == ("length", 4, 12)
    assert {"ttft_s", "decode_s", "tokens_per_s", "drafted_tokens", "accepted_by_source"} <= shown.keys()
    assert result.stderr == "note: cut at --max-new-tokens, after 12 new tokens\n"
    stopped = run("generate", "Once", "-n", "12", "--json", "--stop", expected.texts[0][4:6])
    assert json.loads(stopped.stdout)["finish_reason"] == "stop" and not stopped.stderr


def test_a_system_message_is_that_of_every_command_that_asks(cli_folder, chat_folder, tiny_llama, chat_tokenizer):
    messages = [{"role": "system", "content": "so"}, {"role": "user", "content": "abab"}]
    expected = lookahead.generate(tiny_llama, chat_tokenizer, messages, max_new_tokens=8, **GREEDY)
    options = ["-m", str(chat_folder), "-n", "8", "--system", "so"]
    assert CliRunner().invoke(app, ["generate", "abab", *options]).stdout == expected.texts[0] + "\n"
    explained = CliRunner().invoke(app, ["explain", "-p", "abab", *options]).stdout
    assert expected.texts[0].strip() in explained
    for command in ("generate", "explain", "bench"):
        refused = CliRunner().invoke(app, [command, *options, "--raw"], input="abab")
        assert "--system is part of the chat template, which --raw leaves out" in one_line(refused)


# Models


def test_an_address_of_the_hub_is_the_model_of_that_name(hub, tiny_llama):
    assert locate_model("hf://maker/tiny") == ("maker/tiny", False)
    model, _ = lookahead.load("hf://maker/tiny", device="cpu")
    assert all((ours == theirs).all() for ours, theirs in zip(model.parameters(), tiny_llama.parameters(), strict=True))
    path, is_local = locate_model("hf://maker/tiny/tiny.Q4_K_M.gguf")
    assert is_local and Path(path).read_bytes() == b"GGUF" * 100


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf://tiny", "must be hf://OWNER/NAME or hf://OWNER/NAME/FILE.gguf"),
        ("hf://", "must be hf://OWNER/NAME or hf://OWNER/NAME/FILE.gguf"),
        ("hf://maker/tiny/config.json", "must be hf://OWNER/NAME or hf://OWNER/NAME/FILE.gguf"),
        ("hf://maker/tiny/../../tiny.gguf", "must be hf://OWNER/NAME or hf://OWNER/NAME/FILE.gguf"),
        ("hf://maker/tiny/./tiny.gguf", "must be hf://OWNER/NAME or hf://OWNER/NAME/FILE.gguf"),
        ("hf://maker/tiny//tiny.gguf", "must be hf://OWNER/NAME or hf://OWNER/NAME/FILE.gguf"),
        ("hf://maker/../tiny.gguf", "is neither a folder nor a name on the Hub"),
        ("hf://ma--ker/tiny", "is neither a folder nor a name on the Hub"),
        ("hf://ma--ker/tiny/tiny.gguf", "is neither a folder nor a name on the Hub"),
        ("hf://maker/tiny.git/tiny.gguf", "is neither a folder nor a name on the Hub"),
        (f"hf://maker/{'a' * 300}/tiny.gguf", "is neither a folder nor a name on the Hub"),
        (f"hf://maker/tiny/{'a' * 300}.gguf", "the Hugging Face Hub cannot be asked for it"),
        ("hf://maker/gone", "the Hugging Face Hub cannot be asked for it"),
        ("hf://maker/tiny/gone.gguf", "the Hugging Face Hub cannot be asked for it"),
    ],
)
def test_an_address_that_is_none_or_leads_nowhere_is_told(hub, name, message):
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        locate_model(name)
    assert "\n" not in str(caught.value)


def test_an_address_is_no_folder_of_the_same_name(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maker" / "tiny").mkdir(parents=True)
    with pytest.raises(UnsupportedModelError, match="has the name of the folder maker/tiny here"):
        locate_model("hf://maker/tiny")


def test_the_models_on_this_machine_are_listed_by_names_that_are_taken(hub, tmp_path, monkeypatch, model_folder):
    default = tmp_path / "default.Q4_1.gguf"
    default.write_bytes(b"GGUF")
    monkeypatch.setattr(loading, "_default_file", lambda: default)
    kept = gguf_files.kept_models() / "other-2-0123456789abcdef"
    shutil.copytree(model_folder, kept)
    found = local_models()
    names = ["smollm2", str(kept), "hf://maker/tiny/tiny.Q4_K_M.gguf", "maker/tiny"]
    assert [model.name for model in found] == names
    assert [model.dtype for model in found] == ["Q4_1", "fp32", "Q4_K_M", "fp32"]
    weights = (model_folder / "model.safetensors").stat().st_size
    assert [model.bytes for model in found[:3]] == [4, weights, 400] and found[3].bytes > weights
    for model in found:
        assert locate_model(model.name)
        assert Path(model.path).exists()
    shown = CliRunner().invoke(app, ["models", "--json"]).stdout.splitlines()
    assert [json.loads(line)["name"] for line in shown] == names


@pytest.mark.parametrize("columns", [1, 20, 80, 500])
def test_a_program_that_reads_the_models_gets_a_line_for_each_whatever_the_width(hub, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    kept = gguf_files.kept_models() / "two  words\n:smile: [b]\u65e5\u672c"
    shutil.copytree(hub / "models--maker--tiny" / "snapshots" / "0123abcd", kept)
    found = local_models()
    lines = CliRunner().invoke(app, ["models"]).stdout.splitlines()
    for model in found:
        (line,) = (each for each in lines if each.startswith(f"{model.name}  ".replace("\n", "\ufffd")))
        assert model.path in line or model.path == model.name
    assert len(lines) == len(found)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pseudo terminal")
@pytest.mark.parametrize("columns", [3, 20, 60, 80, 120])
def test_names_of_models_are_whole_at_a_terminal_of_any_width(hub, columns, monkeypatch):
    from tests.support.pseudo_terminal import at_terminal

    monkeypatch.delenv("COLUMNS", raising=False)
    with at_terminal("models", columns=columns) as terminal:
        assert terminal.wait() == 0
        shown = terminal.shown
    for model in local_models():
        assert model.name in shown and (model.dtype or "") in shown and model.path in shown


def test_a_machine_without_models_has_an_empty_list(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "gone"))
    monkeypatch.setattr(gguf_files, "user_cache_path", lambda name, **_: tmp_path / "cache" / name)
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    assert local_models() == []
    assert CliRunner().invoke(app, ["models", "--json"]).stdout == ""


@pytest.mark.parametrize("damage", ["file", "loop", "home", "reference"])
def test_an_unreadable_hub_cache_is_one_line_and_other_models_are_listed(hub, monkeypatch, damage):
    if damage == "reference":
        (hub / "models--maker--tiny" / "refs" / "main").write_bytes(b"\xff")
    else:
        cache = Path("~nobody-of-this-name/hub") if damage == "home" else hub.with_name(damage)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        if damage == "file":
            cache.write_text("")
        elif damage == "loop":
            cache.symlink_to(cache)
    default = hub.with_name("default.gguf")
    default.write_bytes(b"GGUF")
    monkeypatch.setattr(loading, "_default_file", lambda: default)
    result = CliRunner().invoke(app, ["models", "--json"])
    assert [json.loads(line)["name"] for line in result.stdout.splitlines()] == ["smollm2"]
    assert result.stderr.startswith("warning: the models in the cache of the Hugging Face Hub, ")
    assert f"{damage if damage in ('file', 'loop') else 'hub'}, are not listed: " in result.stderr
    assert result.stderr.count("\n") == 1 and result.exit_code == 0
    one_line(CliRunner().invoke(app, ["generate", "Once", "-m", "hf://maker/tiny/gone.gguf"]))


def test_an_output_that_loops_is_flagged_wherever_it_is_shown(cli_folder, float32_summarizer):
    loaded, options = lookahead.load(float32_summarizer), {"max_new_tokens": 100, "do_sample": False}
    result = lookahead.generate(*loaded, ["Once", [5, 6]], **options)
    assert result.loops == [loops(tokens) for tokens in result.token_ids] and result.loops[0]
    pieces = lookahead.stream(*loaded, "Once", **options)
    assert "".join(pieces) and pieces.loops
    (done,) = lookahead.stream_many(*loaded, ["Once"], **options)
    assert done.loops
    for tokens, looping in (("100", True), ("12", False)):
        words = ["generate", "-m", str(float32_summarizer), "--raw", "Once", "-n", tokens, "--json"]
        shown = CliRunner().invoke(app, words)
        assert json.loads(shown.stdout)["loops"] is looping is ("note: the output loops" in shown.stderr)
