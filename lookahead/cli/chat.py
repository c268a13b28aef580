"""The command `lookahead chat`."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from lookahead.cli.habits import last_session, log_answer, note_session
from lookahead.cli.option_files import KeptOptions
from lookahead.cli.options import DraftingOptions, ModelOptions, SamplingOptions, new_tokens_option, option
from lookahead.cli.terminal import (
    console,
    harmless,
    load,
    memory_file_saved_at_exit,
    say,
    show_line,
    tell_if_demonstration,
)
from lookahead.config import check_seed
from lookahead.documents.decode_text import Reject
from lookahead.documents.inputs import find_inputs
from lookahead.documents.readers import read_documents
from lookahead.errors import ConfigError, DocumentError, PromptError, SessionError, count

if TYPE_CHECKING:
    from lookahead import Conversation
    from lookahead.decoding.session_file import SessionFile

_QUOTES = '"""'
_HELP = (
    (_QUOTES, "begins and ends a message of several lines"),
    ("/file FILE", "the next message brings the text of a file along: .txt, .md, .pdf, .docx, .html, a URL"),
    ("/undo", "take the last turn back"),
    ("/save FILE", "write the conversation to a file"),
    ("/reset", "forget the conversation"),
    ("/quit, Ctrl-D", "end the chat"),
    ("Ctrl-C", "stop an answer; its text so far stays"),
)
_REMOVED = {
    "/edit": f"{_QUOTES} begins and ends a message of several lines",
    "/load": "'lookahead chat --session FILE' continues the conversation of a file",
}
"""Commands removed since the last release, with what to do; each is refused by name for one release."""
_HINT = "/help shows the commands, Ctrl-C stops an answer, Ctrl-D ends"

_SHOWN = 76  # characters of a message that is named


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions, DraftingOptions, KeptOptions, ModelOptions):
    system: str | None = option(None, "System message.", metavar="TEXT")
    max_new_tokens: int = new_tokens_option(512, "Most tokens of an answer.")
    session: Path | None = option(
        None, "JSON file of the conversation: read if it exists, and written after each turn.", metavar="FILE"
    )
    is_continued: bool = option(False, "Continue the last chat that had a file, or begin one.", "--continue", "-c")


def chat(options: ChatOptions) -> None:
    """Chat with a model: answers appear as they are written, with the tokens of transformers.

    After each answer stderr shows its speed. When the model's context is full, the oldest turns are left out. Without a
    terminal every line of stdin is a message. /help shows the commands.

    For example:

      lookahead chat --model ./my-model
      lookahead chat --system "Answer in one sentence." --temperature 0.7
      lookahead chat --session french.json
      printf 'Hello!\\nAnd in French?\\n' | lookahead chat > answers.txt
    """
    if sys.stdin is None:
        raise ConfigError("standard input is closed, so there are no messages")
    check_seed(options.seed)
    config = options.config()
    session, messages = None, None
    if (file := last_session(options.session, is_continued=options.is_continued)) is not None:
        from lookahead.decoding.session_file import SessionFile

        session = SessionFile(file)
        messages = session.read()
        note_session(file)
    loaded = load(options)
    import torch

    from lookahead import Conversation

    conversation = Conversation(
        *loaded, system=options.system, config=config, max_new_tokens=options.max_new_tokens, **options.sampling
    )
    if messages is not None:
        conversation.restore(messages)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    tell_if_demonstration(options.model)
    with memory_file_saved_at_exit(options, loaded.model):
        note = partial(log_answer, "chat", options.model)
        are_answered = Chat(conversation, options.max_new_tokens, session, note).run()
    if not are_answered:
        raise typer.Exit(1)


class Chat:
    """Reads messages and commands from stdin, and answers them.

    `session` keeps the messages after every change, and `log` receives every message with its answer.
    """

    def __init__(
        self,
        conversation: Conversation,
        max_new_tokens: int,
        session: SessionFile | None = None,
        log: Callable[[str, str], None] = lambda message, answer: None,
    ) -> None:
        self._conversation, self._max_new_tokens, self._session, self._log = conversation, max_new_tokens, session, log
        self._files: list[str] = []  # texts that the next message brings along
        self._is_terminal = sys.stdin.isatty()
        self._commands = {"/help": _show_help, "/undo": self._undo, "/reset": self._reset}

    def run(self) -> bool:
        """Answer until the input ends; returns False if a message or a command of a pipe failed."""
        are_answered = True
        if self._is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  # gives input() a history and editing
            _hint(_HINT)
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        if self._session is not None and self._conversation.history:
            _hint(f"{self._session.path}: {count(len(self._conversation.history), 'message')}")
        while True:
            try:
                line = self._read_line("> ").strip()
                if line in ("/quit", "/exit"):
                    return are_answered
                self._handle(line)
            except EOFError:
                return are_answered
            except (ConfigError, DocumentError, PromptError, SessionError) as error:
                say("error", str(error))
                are_answered = self._is_terminal
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                _hint(f"\n{_HINT}")

    def _read_line(self, prompt: str) -> str:
        is_shown = self._is_terminal and sys.stdout.isatty()
        if self._is_terminal and not is_shown:
            console(sys.stderr).print(prompt, end="")
        return input(prompt if is_shown else "")

    def _handle(self, line: str) -> None:
        """Answer a line, or do what it commands."""
        name, *rest = line.split(maxsplit=1) or [""]
        if line.startswith(_QUOTES):
            self._answer(self._read_quoted(line.removeprefix(_QUOTES)))
        elif name in _REMOVED:
            raise ConfigError(f"{name} was removed: {_REMOVED[name]}")
        elif name == "/save":
            self._save_as(*rest)
        elif name == "/file":
            self._attach(*rest)
        elif name in self._commands:
            if rest:
                raise ConfigError(f"{name} takes nothing after it, got {rest[0]!r}")
            self._commands[name]()
        elif line.startswith("/") and line[1:].isalpha():
            _hint(f"no command {line}; {_HINT}")
        else:
            self._answer(line)

    def _read_quoted(self, text: str) -> str:
        """A message up to the quotes that end it, or the end of the input; `text` is its first line."""
        with suppress(EOFError):
            while not text.rstrip().endswith(_QUOTES):
                text += "\n" + self._read_line("... ")
        return text.strip().removesuffix(_QUOTES).strip()

    def _undo(self) -> None:
        question = self._conversation.undo()
        shown = "there is no turn to take back" if question is None else f"taken back: {question.get('content')}"
        _hint(textwrap.shorten(harmless(shown), _SHOWN))
        self._save()

    def _reset(self) -> None:
        self._conversation.reset()
        self._save()

    def _save_as(self, file: str = "") -> None:
        if not file:
            raise ConfigError("/save needs the name of a file")
        if self._session is not None and self._session.is_at(file):
            self._save()
        else:
            self._conversation.save(file)
        _hint(f"{file}: {count(len(self._conversation.history), 'message')}")

    def _attach(self, file: str = "") -> None:
        """Read a document, whose text the next message brings along."""
        if not file:
            raise ConfigError("/file needs the name of a file")
        (source,) = find_inputs([file])
        for document in read_documents([source]):
            if isinstance(document, Reject):
                raise PromptError(document.error)
            self._files.append(document.text)
            _hint(f"{file}: {len(document.text):,} characters, for the next message")

    def _save(self) -> None:
        if self._session is not None:
            self._session.write(self._conversation.history)

    def _answer(self, message: str) -> None:
        """Stream the answer to stdout, and print its speed to stderr."""
        if not message:
            return
        message, self._files = "\n\n".join([*self._files, message]), []
        conversation, ending, was_stopped = self._conversation, "", False
        pieces = conversation.ask(message)
        if conversation.dropped:
            say("note", f"the context is full: {conversation.dropped} of the oldest messages were left out")
        try:
            with closing(pieces):  # so that the history has the pieces so far
                for piece in map(harmless, pieces):
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            ending, was_stopped = ", stopped", True
        finally:
            print(flush=True)
        assert conversation.stream is not None
        stats = conversation.stream.stats
        if conversation.stream.loops:
            ending = f", loops{ending}"
        if conversation.stream.finish_reason == "length" and not was_stopped:
            is_limit = stats.emitted_tokens >= self._max_new_tokens
            ending += ", cut at --max-new-tokens" if is_limit else ", cut because the context is full"
        _hint(
            f"{count(stats.emitted_tokens, 'token')}, the first after {stats.ttft_s:.1f} s, "
            f"{stats.tokens_per_s:.1f} tokens/s, {stats.mean_acceptance_length:.2f} tokens a pass{ending}"
        )
        self._save()
        self._log(message, str(conversation.history[-1].get("content", "")))


def _hint(text: str) -> None:
    show_line(sys.stderr, Text(text, "dim"))


def _show_help() -> None:
    rows = Table.grid(padding=(0, 2))
    for command, meaning in _HELP:
        rows.add_row(command, meaning)
    console(sys.stderr).print(rows)
