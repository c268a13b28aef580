"""What a user asks to keep between commands: the last chat, and a log of prompts and answers."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_data_path

from lookahead.cli.options import option
from lookahead.cli.terminal import harmless, say, show_line
from lookahead.errors import ConfigError, one_line
from lookahead.utils.atomic import read_json, write_atomically

if TYPE_CHECKING:
    from sqlite3 import Connection

_COLUMNS = ("time", "command", "model", "prompt", "answer")
_LAST_CHAT = "last_chat.json"
_ON = 1  # the `user_version` of a log that is written to


def kept(name: str) -> Path:
    """The file of something that is kept, in the platform's folder of user data."""
    return user_data_path("lookahead", appauthor=False) / name


def kept_folder(name: str = "") -> Path:
    """A folder of what is kept, which exists, and in which nobody else may read."""
    kept("").mkdir(mode=0o700, parents=True, exist_ok=True)
    kept(name).mkdir(exist_ok=True)
    return kept(name)


def last_session(session: Path | None, *, is_continued: bool) -> Path | None:
    """The file of a chat: the named one, or with `is_continued` that of the last chat that had one."""
    if not is_continued:
        return session
    if session is not None:
        raise ConfigError("--continue means the last chat, and --session names another: pass one of them")
    note = kept(_LAST_CHAT)
    try:
        return Path(read_json(note))
    except FileNotFoundError:
        return kept_folder() / "chat.json"
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{note}: not the name of a chat: {one_line(error)}; remove it to begin one") from error


def note_session(session: Path) -> None:
    """Note the file of a chat, for `last_session`."""
    # JSON has every name, also one with a line break or with bytes that are no text.
    write_atomically(kept_folder() / _LAST_CHAT, f"{json.dumps(str(session.expanduser().absolute()))}\n")


def log_answer(command: str, model: str, prompt: str, answer: str) -> None:
    """Add an answer to the log, if the user has turned it on."""
    file = kept("log.db")
    if not os.path.exists(file):  # pathlib's raises for a folder that nobody may enter
        return
    import sqlite3

    try:
        with closing(sqlite3.connect(file)) as base, base:
            if _is_on(base):
                row = command, model, prompt, answer
                base.execute(
                    "INSERT INTO answers VALUES (datetime('now'), ?, ?, ?, ?)", [_text(value) for value in row]
                )
    except sqlite3.Error as error:
        say("warning", f"the answer is not in the log {file}: {error}")


def _text(value: str) -> str:
    """Text without halves of surrogate pairs, which SQLite does not take."""
    return value.encode("utf-8", "replace").decode()


def _is_on(base: Connection) -> bool:
    return bool(base.execute("PRAGMA user_version").fetchone()[0] == _ON)


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    on: bool = option(False, "Keep prompts and answers from now on.")
    off: bool = option(False, "Keep no more; the file stays.")
    count: int = option(10, "Show the last N.", "--count", "-n", min=0, max=1 << 31)
    as_json: bool = option(False, "Print one JSON object per line.", "--json")


def log(options: LogOptions) -> None:
    """Show the last prompts and answers, if you had them kept: by default nothing is.

    The log is a file of SQLite, which nobody else may read. A line on stderr says where it is; remove it to forget all.

    For example:

      lookahead log --on
      lookahead log -n 3
      lookahead log --off
    """
    if options.on and options.off:
        raise ConfigError("pass either --on or --off")
    file = kept("log.db")
    if not file.exists() and not options.on:
        show_line(sys.stderr, f"nothing is kept; 'lookahead log --on' keeps prompts and answers in {file}")
        return
    import sqlite3

    (kept_folder() / file.name).touch(mode=0o600)
    try:
        with closing(sqlite3.connect(file)) as base, base:
            base.execute(f"CREATE TABLE IF NOT EXISTS answers ({', '.join(_COLUMNS)})")
            if options.on or options.off:
                base.execute(f"PRAGMA user_version = {_ON if options.on else 0}")
            is_on = _is_on(base)
            last = "SELECT * FROM answers ORDER BY rowid DESC LIMIT ?"
            answers: list[Any] = base.execute(last, [options.count]).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"{file}: {error}") from error
    for row in reversed(answers):
        if options.as_json:
            print(json.dumps(dict(zip(_COLUMNS, row, strict=True))))
        else:
            time, command, model, prompt, answer = map(harmless, map(str, row))
            print(f"{time} {command} -m {model}\n> {prompt}\n{answer}\n")
    show_line(sys.stderr, f"prompts and answers are {'kept' if is_on else 'no longer kept'} in {file}")
