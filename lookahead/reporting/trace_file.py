"""What `lookahead explain` reads and writes."""

from __future__ import annotations

from pathlib import Path

from lookahead.documents.byte_sources import opened
from lookahead.errors import ConfigError, PromptError
from lookahead.reporting.trace import Trace
from lookahead.reporting.trace_page import render_page
from lookahead.utils.atomic import write_atomically


def read_prompt_file(name: str) -> str:
    """The prompt a file holds, or standard input where the name is `-`.

    Raises:
        DocumentError: Nothing comes through a pipe, or a URL cannot be read.
        PromptError: It is empty or no UTF-8.
        OSError: The file cannot be read.
    """
    with opened(name) as file:
        content = file.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is no UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise PromptError(f"{name} holds no prompt: it is empty")
    return text


def check_page(path: Path | None) -> None:
    """Refuse, before the work, a page that could not be written after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"html must be a file in a folder that exists, got {str(path)!r}")


def write_page(trace: Trace, path: Path) -> None:
    """Write a trace as a page, as a whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    write_atomically(path, render_page(trace))
