"""The command line: `lookahead` and its commands."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

import lookahead
from lookahead.cli.bench import bench
from lookahead.cli.chat import chat
from lookahead.cli.commands import App
from lookahead.cli.doctor import doctor
from lookahead.cli.draft_files import memory_app, pool_app
from lookahead.cli.generate import generate
from lookahead.cli.habits import log
from lookahead.cli.measure import explain, train
from lookahead.cli.models import models, pull, tokens
from lookahead.cli.serve import serve
from lookahead.cli.summarize import report, summarize
from lookahead.cli.terminal import raise_on_signals
from lookahead.cli.transcribe import transcribe

app = App(pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
_DAILY = (summarize, generate, chat, transcribe, serve)
for command in (*_DAILY, bench, explain, train, report, models, pull, tokens, log, doctor):
    app.add(command)
app.add_typer(pool_app, name="pool")
app.add_typer(memory_app, name="memory")


def main() -> None:
    """Run the command line."""
    if sys.stdout is None:  # closed by the caller: what would be written to it fails, and is not lost in silence
        sys.stdout = open(os.devnull)  # noqa: SIM115 - as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names can hold bytes that are not UTF-8
    raise_on_signals()
    app(prog_name="lookahead")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lookahead {lookahead.__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Faster generation with HuggingFace models: no draft model, not a token changed.

    For example: lookahead summarize article.txt --compare
    """
