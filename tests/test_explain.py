"""Explaining a decoding: every token has its source, every step its figures, and the page stands alone."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app
from lookahead.config import LookaheadConfig
from lookahead.decoding.trace import Step, Trace, TracePiece, trace
from lookahead.loading import loading
from lookahead.reporting.trace_page import render_trace, source_rows
from lookahead.stats import DecodingStats
from tests.support.adversarial_proposers import always_wrong, drafting_by, nothing, perfect
from tests.support.outline import Outline

PROMPT = "the cat and the dog, "
NEW = 24
FIXED = LookaheadConfig(proposers=("prompt",), draft="fixed")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tiny_llama, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tiny_llama, tiny_tokenizer):
    """What the model says."""
    return lookahead.generate(tiny_llama, tiny_tokenizer, PROMPT, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def answers(plain, tiny_tokenizer):
    return [tiny_tokenizer(PROMPT)["input_ids"] + plain.token_ids[0]]


def text_of(seen: Trace) -> str:
    return "".join(piece.text for step in seen.steps for piece in step.pieces)


def traced(model, tokenizer, offer) -> Trace:
    clock = itertools.count(0.0, 0.5).__next__
    with drafting_by(offer):
        return trace(model, tokenizer, PROMPT, config=FIXED, max_new_tokens=NEW, clock=clock)


def test_a_perfect_draft_gives_all_tokens_but_the_bonus(tiny_llama, tiny_tokenizer, plain, answers) -> None:
    seen = traced(tiny_llama, tiny_tokenizer, perfect(answers))
    assert text_of(seen) == plain.texts[0]
    first, *steps = seen.steps
    assert [piece.sources for piece in first.pieces] == [()], "the prefill's token is no draft's"
    for step in steps:
        assert [piece.sources for piece in step.pieces] == [("scripted",)] * step.accepted + [()]
        assert step.accepted == step.drafted == pytest.approx(step.expected)
        assert step.seconds == 0.5
    assert seen.stats.calibration_error == pytest.approx(0.0)


def test_a_draft_that_is_always_wrong_gives_none_and_its_claims_are_an_error(
    tiny_llama, tiny_tokenizer, plain, answers
) -> None:
    seen = traced(tiny_llama, tiny_tokenizer, always_wrong(answers, 101))
    assert text_of(seen) == plain.texts[0]
    assert all(piece.sources == () for step in seen.steps for piece in step.pieces)
    assert sum(step.accepted for step in seen.steps) == 0
    assert seen.stats.calibration_error == pytest.approx(1.0)
    assert seen.stats.calibration_error_by_source == {"scripted": pytest.approx(1.0)}
    assert seen.stats.to_dict()["expected_by_source"]["scripted"] == seen.stats.drafted_tokens


def test_without_drafts_every_token_is_the_models_own(tiny_llama, tiny_tokenizer, plain) -> None:
    seen = traced(tiny_llama, tiny_tokenizer, nothing)
    assert text_of(seen) == plain.texts[0]
    assert len(seen.steps) == NEW
    assert {(step.drafted, step.expected, step.accepted) for step in seen.steps} == {(0, 0.0, 0)}
    assert seen.stats.calibration_error == 0.0


def test_stats_expect_what_the_steps_expect(tiny_llama, tiny_tokenizer) -> None:
    seen = trace(tiny_llama, tiny_tokenizer, PROMPT * 3, config=FIXED, max_new_tokens=60)
    assert sum(step.drafted for step in seen.steps) == seen.stats.drafted_tokens > 0
    assert sum(step.expected for step in seen.steps) == pytest.approx(seen.stats.expected_tokens)
    assert sum(step.accepted for step in seen.steps) == seen.stats.accepted_tokens
    assert seen.stats.expected_by_source["prompt"] == pytest.approx(seen.stats.expected_tokens)
    error = (seen.stats.expected_tokens - seen.stats.accepted_tokens) / seen.stats.drafted_tokens
    assert seen.stats.calibration_error == pytest.approx(error)
    drafting = sum(step.drafted > 0 for step in seen.steps)
    assert seen.stats.forwards_by_source["prompt"] == seen.stats.to_dict()["forwards_by_source"]["prompt"] == drafting


def test_a_source_tells_in_how_many_passes_it_drafted(tiny_llama, tiny_tokenizer) -> None:
    config = LookaheadConfig(proposers=("prompt",), window=4, draft="fixed")
    seen = trace(tiny_llama, tiny_tokenizer, PROMPT, config=config, max_new_tokens=30)
    rows = {row["source"]: row for row in source_rows(seen)}
    assert int(rows["jacobi"]["passes"]) == seen.stats.forwards_by_source["jacobi"]
    assert int(rows["jacobi"]["passes"]) >= int(rows["prompt"]["passes"]) > 0
    assert rows["all"]["passes"] == str(seen.stats.target_forwards)


# The page


HOSTILE = '<script>alert("1")</script> & <b>'


def hostile_trace() -> Trace:
    pieces = [TracePiece(HOSTILE, ("prompt",)), TracePiece(HOSTILE)]
    return Trace(HOSTILE, ["prompt", '"><i>'], [Step(pieces, 3, 1.5, 1, 0.01)], DecodingStats(drafted_tokens=3))


def test_a_page_shows_text_as_text() -> None:
    outline = Outline(render_trace(hostile_trace()))
    assert not {"script", "b", "i"} & set(outline.tags)
    assert outline.text.count(HOSTILE) >= 4


@pytest.mark.parametrize(
    ("piece", "visible"),
    [
        (TracePiece("  "), "␣␣"),
        (TracePiece("\n\n"), "⏎\n⏎\n"),
        (TracePiece(" \t"), "␣⇥\t"),
        (TracePiece(" end.\n"), " end.⏎\n"),
        (TracePiece("", (), "</s>"), "</s>"),
        (TracePiece(""), ""),
    ],
)
def test_a_blank_token_can_be_seen_and_its_text_stays_as_it_is(piece, visible) -> None:
    seen = Trace("x", [], [Step([piece], 0, 0.0, 0, 0.01)], DecodingStats())
    assert piece.visible == visible
    assert (text_of(seen), Outline(render_trace(seen)).text.count(visible) > 0) == (piece.text, True)


def test_a_special_token_is_shown_by_its_name(tiny_llama, tiny_tokenizer, plain) -> None:
    end = plain.token_ids[0][5]
    assert end not in plain.token_ids[0][:5]
    name = tiny_tokenizer.convert_ids_to_tokens(end)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"eos_token": name})
    seen = trace(tiny_llama, tokenizer, PROMPT, config=FIXED, max_new_tokens=NEW, eos_token_id=end)
    assert [piece.special for step in seen.steps for piece in step.pieces][-1] == name


def test_a_page_needs_nothing_from_elsewhere_and_has_a_dark_side() -> None:
    page = render_trace(hostile_trace())
    outline = Outline(page)
    assert not {"link", "img", "iframe", "script"} & set(outline.tags)
    assert not {"src", "href"} & {name for name, _ in outline.attributes}
    assert not re.search(r"url\(|@import|https?:", page)
    assert "prefers-color-scheme: dark" in page


# The command


@pytest.fixture
def explain(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "prompt.txt").write_text(PROMPT)

    def run(*arguments, input=None, command="explain"):
        options = ["--model", str(model_folder), "--max-new-tokens", str(NEW), "--device", "cpu"]
        return CliRunner().invoke(app, [command, *arguments, *options], input=input)

    return run


def shown(result) -> str:
    """The text as the command shows it: the tiny tokenizer's tokens are characters, so every space is one."""
    return result.texts[0].replace(" ", "␣")


def test_the_command_shows_the_text_its_steps_and_the_totals(explain, plain, model_folder) -> None:
    result = explain("prompt.txt")
    assert result.exit_code == 0, result.output
    assert shown(plain) in result.stdout
    assert f"model: {model_folder} (LlamaForCausalLM, " in result.stdout
    assert re.search(r"tokens/s \(\d+\.\d\dx of \d+\.\d tokens/s without drafts\)", " ".join(result.stdout.split()))
    assert "from: prompt, outputs, recycled, plain: the model itself" in result.stdout
    assert f"{NEW} tokens from" in result.stdout
    assert "calibration error" in result.stdout


def test_the_command_shows_the_totals_of_a_decoding_without_a_draft(explain, plain) -> None:
    result = explain("prompt.txt", "--proposers", "none")
    assert result.exit_code == 0, result.output
    assert shown(plain) in result.stdout
    assert re.search(r"\nall +23 +0 +0\.0 +0 ", result.stdout), result.stdout


def test_the_command_takes_a_window(explain, plain) -> None:
    result = explain("prompt.txt", "--window", "4")
    assert result.exit_code == 0, result.output
    assert shown(plain) in result.stdout
    assert "from: prompt, outputs, recycled, jacobi, plain" in result.stdout
    assert explain("prompt.txt", "--window", "auto").exit_code == 0
    assert (
        "window must be auto, a tuple (W, N) or (W, N, G), or a whole number"
        in explain("prompt.txt", "--window", "x").stderr
    )


def test_the_command_takes_the_options_of_drafting(explain, plain) -> None:
    result = explain("prompt.txt", "--proposers", "prompt", "--max-nodes", "4")
    assert result.exit_code == 0, result.output
    assert shown(plain) in result.stdout
    assert "from: prompt, plain: the model itself" in result.stdout
    assert "max_nodes must be" in explain("prompt.txt", "--max-nodes", "0").stderr


def test_the_command_asks_through_the_chat_template_unless_it_is_to_continue(
    explain, tiny_llama, tiny_tokenizer, model_folder, monkeypatch
) -> None:
    template = "{% for message in messages %}q {{ message.content }} a {% endfor %}"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    asked = lookahead.generate(tiny_llama, tiny_tokenizer, [{"role": "user", "content": PROMPT}], max_new_tokens=NEW)
    continued = lookahead.generate(tiny_llama, tiny_tokenizer, PROMPT, max_new_tokens=NEW)
    assert asked.texts != continued.texts
    monkeypatch.setattr(loading, "load", lambda *_, **__: loading.LoadedModel(tiny_llama, tiny_tokenizer))
    result = explain("prompt.txt", "--html", "page.html")
    assert shown(asked) in result.stdout, result.output
    assert f"q {PROMPT} a " in Outline(Path("page.html").read_text()).text
    assert shown(continued) in explain("prompt.txt", "--raw").stdout


@pytest.mark.parametrize("command", [("explain", "prompt.txt"), ("generate", "-")])
def test_a_prompt_that_is_too_long_names_the_option_that_truncates_it(explain, tmp_path, tiny_llama, command) -> None:
    positions = tiny_llama.config.max_position_embeddings
    text = "abc " * positions
    (tmp_path / "prompt.txt").write_text(text)
    result = explain(*command[1:], input=text, command=command[0])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"the model has {positions} positions; " in result.stderr
    assert "--truncate left" in result.stderr
    assert "truncate=" not in result.stderr
    shortened = explain(*command[1:], "--truncate", "left", input=text, command=command[0])
    assert shortened.exit_code == 0, shortened.output


def test_the_command_writes_the_page_whole_and_leaves_nothing_beside_it(explain, tmp_path) -> None:
    result = explain("prompt.txt", "--html", "page.html")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "prompt.txt"]
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")
    assert explain("prompt.txt", "--html", "page.html").exit_code == 0  # a page of its own may be replaced


def test_a_prompt_comes_from_stdin_too(explain, plain) -> None:
    assert shown(plain) in explain("-", input=PROMPT).stdout


@pytest.mark.parametrize(
    ("arguments", "content", "told"),
    [
        (["none.txt"], b"", "none.txt: No such file"),
        (["bad.txt"], b"", "bad.txt has no prompt"),
        (["bad.txt"], b"\xff\xfe\x00", "bad.txt: not UTF-16 text: byte 0x00 at byte offset 2"),
        (["bad.txt"], b"\x80", "bad.txt: not UTF-8 text"),
        (["prompt.txt", "--html", "none/page.html"], b"", "html must be a file in a folder that exists"),
        (
            ["prompt.txt", "--html", "prompt.txt"],
            b"",
            "html prompt.txt exists and is not a page of explain; name another",
        ),
    ],
)
def test_what_cannot_be_read_or_written_is_one_line(explain, tmp_path, arguments, content, told) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    result = explain(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_help_shows_an_example() -> None:
    result = CliRunner().invoke(app, ["explain", "--help"])
    assert result.exit_code == 0
    assert "lookahead explain " in result.stdout.split("For example")[1]
