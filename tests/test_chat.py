"""`lookahead chat` and the conversation behind it, and chat templates in `lookahead generate`."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.torch_backend import TorchBackend
from lookahead.cli import chat as cli_chat
from lookahead.cli.app import app
from lookahead.decoding.conversation import Conversation
from lookahead.decoding.session_file import SessionFile
from lookahead.errors import PromptError, SessionError
from lookahead.model.facts import CACHE
from tests.support.chats import GREEDY, answers


@pytest.fixture
def run(cli_folder, chat_folder):
    """Runs a command with that model."""

    def invoke(command, *arguments, input=None):
        options = ["--model", str(chat_folder), "--max-new-tokens", "12"]
        return CliRunner().invoke(app, [command, *options, *arguments], input=input)

    return invoke


# The conversation


def test_every_answer_is_that_of_the_whole_history(tiny_llama, chat_tokenizer):
    conversation = Conversation(tiny_llama, chat_tokenizer, system="so", max_new_tokens=12, **GREEDY)
    questions = ["abab", "what?", "and xyz"]
    got = ["".join(conversation.ask(question)) for question in questions]
    assert got == answers(tiny_llama, chat_tokenizer, *questions, system="so")
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 3]


def test_a_prediction_of_an_answer_changes_none(tiny_llama, chat_tokenizer):
    expected = answers(tiny_llama, chat_tokenizer, "abab", "what?")
    conversation = Conversation(
        tiny_llama, chat_tokenizer, config=LookaheadConfig(draft="fixed"), max_new_tokens=12, **GREEDY
    )
    for question, text in zip(("abab", "what?"), expected, strict=True):
        assert "".join(conversation.ask(question, prediction=text)) == text
        assert conversation.stream.stats.accepted_prediction_tokens > 0
    assert "".join(conversation.ask("again")) and not conversation.stream.stats.accepted_prediction_tokens


def test_what_was_read_is_not_read_again(tiny_llama, chat_tokenizer, monkeypatch):
    read: list[int] = []
    plain = TorchBackend.read

    def counting(self, prompts, *rest, **options):
        held = int(self.cache.slots.lengths[0])
        read.append(sum(map(len, prompts)) - held)
        return plain(self, prompts, *rest, **options)

    monkeypatch.setattr(TorchBackend, "read", counting)
    conversation = Conversation(tiny_llama, chat_tokenizer, system="x" * 100, max_new_tokens=12, **GREEDY)
    for question in ("abab", "what?"):
        "".join(conversation.ask(question))
    assert read[0] > 100
    assert read[1] < 40


def test_an_answer_that_is_stopped_stays_as_far_as_it_was_said(tiny_llama, chat_tokenizer):
    conversation = Conversation(tiny_llama, chat_tokenizer, max_new_tokens=40, **GREEDY)
    "".join(conversation.ask("abab"))
    pieces = conversation.ask("what?")
    begun = next(pieces)
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": begun}
    options = {**GREEDY, "max_new_tokens": 40}
    whole = lookahead.generate(tiny_llama, chat_tokenizer, conversation.messages[:-1], **options).texts[0]
    assert whole.startswith(begun)
    assert len(begun) < len(whole)
    history = [*conversation.messages, {"role": "user", "content": "go on"}]
    expected = lookahead.generate(tiny_llama, chat_tokenizer, history, **options).texts[0]
    assert "".join(conversation.ask("go on")) == expected


def test_a_full_context_loses_the_oldest_turns_and_never_the_system(tiny_llama, chat_tokenizer):
    conversation = Conversation(tiny_llama, chat_tokenizer, system="so", max_new_tokens=12, **GREEDY)
    dropped = []
    for turn in range(6):
        "".join(conversation.ask(f"{turn}" * 120))
        dropped.append(conversation.dropped)
        assert conversation.messages[0]["content"] == "so"
        assert conversation.messages[-2]["content"] == f"{turn}" * 120
    assert dropped[0] == 0
    assert set(dropped[1:]) >= {2}
    conversation.reset()
    assert [message["role"] for message in conversation.messages] == ["system"]
    assert ["".join(conversation.ask("abab"))] == answers(tiny_llama, chat_tokenizer, "abab", system="so")


def test_a_message_longer_than_the_context_is_refused_and_forgotten(tiny_llama, chat_tokenizer):
    conversation = Conversation(tiny_llama, chat_tokenizer, max_new_tokens=12, **GREEDY)
    "".join(conversation.ask("abab"))
    before = list(conversation.messages)
    with pytest.raises(PromptError, match=r"the message has 6\d\d tokens, and there is room for 500"):
        conversation.ask("x" * 600)
    assert conversation.messages == before


def test_a_tokenizer_without_a_chat_template_does_not_chat(tiny_llama, tiny_tokenizer):
    with pytest.raises(PromptError, match="has no chat template; chat with an instruction model"):
        Conversation(tiny_llama, tiny_tokenizer)


# The command


def test_every_line_of_a_pipe_is_answered_in_turn(run, tiny_llama, chat_tokenizer):
    result = run("chat", "--system", "so", input="abab\n\nwhat?\n/reset\nabab\n")
    first, second = answers(tiny_llama, chat_tokenizer, "abab", "what?", system="so")
    assert (result.exit_code, result.stdout) == (0, f"{first}\n{second}\n{first}\n")
    status = result.stderr.splitlines()
    assert len(status) == 3
    for line in status:
        assert line.startswith("12 tokens, the first after ")
        assert " tokens/s, " in line
        assert line.endswith(" tokens a pass, cut at --max-new-tokens")


def test_the_figures_of_an_answer_say_that_it_loops(cli_folder, float32_summarizer, tmp_path):
    folder = shutil.copytree(float32_summarizer, tmp_path / "writer")
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    result = CliRunner().invoke(app, ["chat", "-m", str(folder), "-n", "100"], input="Once\n")
    assert result.stderr.splitlines()[-1].endswith(" tokens a pass, loops, cut at --max-new-tokens")


def test_a_chat_takes_the_options_of_drafting(run, tiny_llama, chat_tokenizer):
    result = run("chat", "--window", "3", "--max-nodes", "16", input="abab\n")
    assert (result.exit_code, result.stdout) == (0, answers(tiny_llama, chat_tokenizer, "abab")[0] + "\n")
    refused = run("chat", "--max-nodes", "0", input="abab\n")
    assert refused.exit_code == 2 and "max_nodes must be" in refused.stderr


def test_commands_are_no_messages_and_quit_ends(run):
    result = run("chat", input="/help\n/hepl\n/quit\nabab\n")
    assert (result.exit_code, result.stdout) == (0, "")
    *shown, unknown = result.stderr.splitlines()
    assert [line.split("  ")[0] for line in shown] == [command for command, _ in cli_chat._HELP]
    assert unknown.startswith("no command /hepl; /help shows the commands")


def test_a_session_of_a_pipe_holds_its_turns_and_what_is_none_is_refused(run, cli_folder, tiny_llama, chat_tokenizer):
    first, second = answers(tiny_llama, chat_tokenizer, "ab\ncd", "what?")
    result = run("chat", "--session", "chat.json", input='"""ab\ncd"""\n/save\n')
    assert (result.exit_code, result.stdout) == (1, f"{first}\n")
    assert result.stderr.endswith("error: /save needs the name of a file\n")
    result = run("chat", "--session", "chat.json", input="what?\nlost\n/undo\n")
    assert result.stdout.splitlines()[0] == second
    assert result.stderr.startswith("chat.json: 2 messages\n") and result.stderr.endswith("taken back: lost\n")
    written = (cli_folder / "chat.json").read_text()
    assert [each["content"] for each in json.loads(written)] == ["ab\ncd", first, "what?", second]
    refused = run("chat", "--session", "a.txt", input="abab\n")
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "a.txt is not a session file: it is not JSON" in refused.stderr
    for command in ("/load b.json", "/save a.txt", "/edit"):
        told = run("chat", "--session", "chat.json", input=f"{command}\n")
        assert told.exit_code == 1 and told.stderr.count("\n") == 2
    assert (cli_folder / "chat.json").read_text() == written


def test_a_message_that_is_too_long_does_not_end_a_pipe_but_its_status_tells(run, tiny_llama, chat_tokenizer):
    result = run("chat", input="x" * 600 + "\nabab\n")
    assert (result.exit_code, result.stdout) == (1, answers(tiny_llama, chat_tokenizer, "abab")[0] + "\n")
    assert result.stderr.startswith("error: the message has 6")


def test_a_model_without_a_chat_template_is_refused_in_one_line(run, model_folder):
    result = run("chat", "--model", str(model_folder), input="abab\n")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "has no chat template" in result.stderr


def test_what_commands_a_terminal_is_taken_out_of_answers(run, monkeypatch):
    class Stream:
        token_ids, finish_reason = [5], "stop"
        serving = torch.no_grad

        def __iter__(self):
            return iter(["a\x1b[2Jb", "\x07c\n\td"])

    monkeypatch.setattr("lookahead.stream", lambda *_, **__: Stream())
    assert run("generate", "abab").stdout == "a\ufffd[2Jb\ufffdc\n\td\n"


# Generate


def test_generate_asks_by_the_chat_template_unless_told_otherwise(run, tiny_llama, tiny_tokenizer, chat_tokenizer):
    assert run("generate", "abab").stdout == answers(tiny_llama, chat_tokenizer, "abab")[0] + "\n"
    assert run("generate", "-", input="abab").stdout == answers(tiny_llama, chat_tokenizer, "abab")[0] + "\n"
    told = run("generate", "abab", "--system", "so").stdout
    assert told == answers(tiny_llama, chat_tokenizer, "abab", system="so")[0] + "\n"
    raw = lookahead.generate(tiny_llama, tiny_tokenizer, "abab", max_new_tokens=12, **GREEDY).texts[0]
    assert run("generate", "abab", "--raw").stdout == raw + "\n"


def test_generate_truncates_when_asked_to(run, tiny_llama, tiny_tokenizer):
    text = "ab" * 200 + "xyz" * 50
    options = {**GREEDY, "max_new_tokens": 12}
    for side, kept in (("left", text[-500:]), ("right", text[:500])):
        expected = lookahead.generate(tiny_llama, tiny_tokenizer, kept, **options).texts[0]
        assert run("generate", text, "--raw", "--truncate", side).stdout == expected + "\n"
    assert run("generate", text, "--raw", "--truncate", "middle").exit_code == 2


def test_generate_says_why_it_ended(run):
    result = run("generate", "x" * 505, "--raw", "--stats")
    assert "note: the model's context is full after 8 new tokens" in result.stderr
    assert "finish_reason" in result.stderr


def test_a_cache_passed_in_is_continued_from_and_grows(tiny_llama, tiny_tokenizer):
    from transformers import DynamicCache

    cache, options = DynamicCache(config=tiny_llama.config), {**GREEDY, "max_new_tokens": 8}
    first = lookahead.generate(tiny_llama, tiny_tokenizer, "abab", **{CACHE: cache}, **options)
    assert cache.get_seq_length() == 4 + 7
    ids = [*tiny_tokenizer("abab")["input_ids"], *first.token_ids[0], 40, 41]
    expected = lookahead.generate(tiny_llama, tiny_tokenizer, ids, **options).token_ids
    again = copy.deepcopy(cache)
    assert lookahead.generate(tiny_llama, tiny_tokenizer, ids, **{CACHE: cache}, **options).token_ids == expected
    pieces = lookahead.stream(tiny_llama, tiny_tokenizer, ids, **{CACHE: again}, **options)
    assert list(pieces)
    assert pieces.token_ids == expected[0]
    assert cache.get_seq_length() == again.get_seq_length() == len(ids) + 7


def test_a_command_of_a_chat_that_cannot_be_done_is_one_line_and_the_chat_goes_on(run, cli_folder):
    (cli_folder / "loop").symlink_to("loop")
    lines = {
        "/save ~nobody-here/x": "No such file or directory",
        "/save loop": "Too many levels of symbolic links",
        "/save a\0b": "null character",
        "/load missing.json": "/load was removed: 'lookahead chat --session FILE' continues",
        "/undo now": "/undo takes nothing after it, got 'now'",
        "/save": "/save needs the name of a file",
        "/save\tnamed.json": "",
    }
    for session in ([], ["--session", "chat.json"]):
        result = run("chat", *session, input="abab\n" + "\n".join([*lines, "abab"]) + "\n")
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 6 and all(map(str.__contains__, errors, list(lines.values())[:6])), result.stderr
        assert result.stdout.count("\n") == 2
        assert len(json.loads((cli_folder / "named.json").read_text())) == 2
    assert len(json.loads((cli_folder / "chat.json").read_text())) == 4


def test_a_session_of_another_process_is_kept_and_one_that_cannot_be_kept_stays(cli_folder, tiny_llama, chat_tokenizer):
    ours, theirs = SessionFile("chat.json"), SessionFile("chat.json")
    conversation = Conversation(tiny_llama, chat_tokenizer, max_new_tokens=12, **GREEDY)
    chat = cli_chat.Chat(conversation, 12, ours)
    assert ours.read() is theirs.read() is None
    chat._handle("abab")
    held = list(conversation.history)
    theirs.read()
    other = [{"role": "user", "content": "xyz"}, {"role": "assistant", "content": "zyx"}]
    theirs.write(other)
    for line in ("abab", "/save ./chat.json"):
        with pytest.raises(SessionError, match="was changed by another process"):
            chat._handle(line)
        assert conversation.history[:2] == held and not conversation.history[4:]
    assert json.loads((cli_folder / "chat.json").read_text()) == other
