"""The command that chats with a model."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from lookahead.cli.options import SamplingOptions
from lookahead.cli.terminal import console, harmless, load, remembering, say
from lookahead.errors import PromptError
from lookahead.jobs.job_options import DraftingOptions, ModelOptions, new_tokens_option, option

if TYPE_CHECKING:
    from lookahead.generation.conversation import Conversation

_HELP = "/reset forgets what was said, /quit or Ctrl-D ends, Ctrl-C stops an answer, /help shows this"


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions, DraftingOptions, ModelOptions):
    """Options of `lookahead chat`."""

    system: str | None = option(None, "System message.", metavar="TEXT")
    max_new_tokens: int = new_tokens_option(512, "Most tokens of an answer.")


def chat(options: ChatOptions) -> None:
    """Chat with a model: answers are shown as they are generated, token for token those of transformers.

    Each answer is followed by its speed, on stderr. When the model's context is
    full, the oldest turns are left out. Without a terminal every line of stdin is
    a message.

    For example:

      lookahead chat --model ./my-model
      lookahead chat --system "Answer in one sentence." --temperature 0.7
      printf 'Hello!\\nAnd in French?\\n' | lookahead chat > answers.txt
    """
    from lookahead.summarization.prompt_fitter import check_max_new_tokens

    check_max_new_tokens(options.max_new_tokens)
    config = options.config()
    loaded = load(options)
    import torch

    from lookahead.generation.conversation import Conversation
    from lookahead.generation.validation import check_seed

    check_seed(options.seed)

    conversation = Conversation(
        *loaded, system=options.system, config=config, max_new_tokens=options.max_new_tokens, **options.sampling
    )
    if options.seed is not None:
        torch.manual_seed(options.seed)
    with remembering(options, loaded.model):
        are_answered = _talk(conversation, options.max_new_tokens)
    if not are_answered:
        raise typer.Exit(1)


def _talk(conversation: Conversation, max_new_tokens: int) -> bool:
    """Answer every line of input; returns False if a message of a pipe was not answered."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history and editing
        console(sys.stderr).print(_HELP, style="dim", soft_wrap=True)
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    are_answered = True
    while True:
        try:
            shows_prompt = is_terminal and sys.stdout.isatty()
            if is_terminal and not shows_prompt:
                console(sys.stderr).print("> ", end="")
            line = input("> " if shows_prompt else "").strip()
            if line in ("/quit", "/exit"):
                return are_answered
            are_answered = _take(conversation, line, max_new_tokens, is_terminal) and are_answered
        except EOFError:
            return are_answered
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            console(sys.stderr).print(f"\n{_HELP}", style="dim", soft_wrap=True)


def _take(conversation: Conversation, line: str, max_new_tokens: int, is_terminal: bool) -> bool:
    """Run a command or answer a message; returns False if a message of a pipe cannot be answered."""
    if line == "/reset":
        conversation.reset()
    elif line.startswith("/") and line[1:].isalpha():
        console(sys.stderr).print(_HELP if line == "/help" else f"no command {line}: {_HELP}", soft_wrap=True)
    elif line:
        try:
            _answer(conversation, line, max_new_tokens, stops_alone=is_terminal)
        except PromptError as error:
            say("error", str(error))
            return is_terminal
    return True


def _answer(conversation: Conversation, line: str, max_new_tokens: int, *, stops_alone: bool) -> None:
    """Stream the answer to stdout, and print its speed to stderr."""
    pieces = conversation.ask(line)
    if conversation.dropped:
        say("note", f"the context is full: {conversation.dropped} of the oldest messages were left out")
    ending = ""
    try:
        for piece in pieces:
            print(harmless(piece), end="", flush=True)
    except KeyboardInterrupt:
        if not stops_alone:
            raise
        ending = ", stopped"
    print(flush=True)
    assert conversation.stream is not None
    stats = conversation.stream.stats
    if conversation.stream.finish_reason == "length" and not ending:
        is_limit = stats.emitted_tokens >= max_new_tokens
        ending = ", cut at --max-new-tokens" if is_limit else ", cut as the context is full"
    status = (
        f"{stats.emitted_tokens} tokens, the first after {stats.ttft_s:.1f} s, {stats.tokens_per_s:.1f} tokens/s, "
        f"{stats.mean_acceptance_length:.2f} tokens a pass{ending}"
    )
    console(sys.stderr).print(Text(status, "dim"), soft_wrap=True)
