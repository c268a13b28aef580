"""Sessions: JSON files that hold the messages of a conversation, `[{"role": ..., "content": ...}, ...]`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from lookahead.errors import SessionError
from lookahead.utils.atomic import read_json, write_atomically
from lookahead.utils.locks import locked

Messages: TypeAlias = "list[Mapping[str, Any]]"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def read_session(file: str | os.PathLike[str]) -> Messages:
    """The messages of a session; SessionError if the file holds none, or cannot be read."""
    path = _path_of(file)
    with _one_error(path):
        messages = read_json(path)
    if not isinstance(messages, list):
        raise SessionError(f"{path} is not a session file: expected a list of messages, got {type(messages).__name__}")
    for number, message in enumerate(messages):
        if not _is_message(message):
            raise SessionError(
                f"{path} is not a session file: message {number} is not an object with 'role' and 'content'"
            )
    return messages


class SessionFile:
    """A session that is read once and written as a whole, under its lock, after every change.

    Args:
        file: The path; `~` is the home folder.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.path = _path_of(file)
        self._is_followed = False
        self._seen: Messages | None = None  # content when last read or written

    def read(self) -> Messages | None:
        """The messages; None if there is no file yet. `write` then refuses to overwrite other processes' changes."""
        with _one_error(self.path), locked(self.path):  # the lock fails early if the file cannot be written
            self._seen = self._messages()
        self._is_followed = True
        return self._seen

    def write(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Write the messages; SessionError, with the file untouched, if it is not a session or was changed."""
        with _one_error(self.path), locked(self.path):
            chat = self._messages()
            if self._is_followed and chat != self._seen:
                raise SessionError(f"{self.path} was changed by another process; save this conversation elsewhere")
            write_atomically(self.path, _text_of(messages) + "\n")
            self._seen = list(messages)

    def is_at(self, file: str | os.PathLike[str]) -> bool:
        """Whether a name stands for this file."""
        return os.path.realpath(_path_of(file)) == os.path.realpath(self.path)

    def _messages(self) -> Messages | None:
        try:
            self.path.stat()
        except FileNotFoundError:
            return None
        return read_session(self.path)


def _path_of(file: str | os.PathLike[str]) -> Path:
    path = Path(os.path.expanduser(file))  # pathlib's raises for an unknown user
    if "\0" in str(path):
        raise SessionError(f"{str(path)!r} is not the name of a file: it holds a null character")
    return path


def _text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The messages as JSON; halves of surrogate pairs, which UTF-8 does not encode, are escaped."""
    try:
        text = json.dumps(list(messages), ensure_ascii=False, indent=1)
    except (TypeError, ValueError) as error:
        raise SessionError(f"the conversation holds a value that JSON does not have: {error}") from error
    return text if text.isascii() or not _LONE_SURROGATE.search(text) else json.dumps(list(messages), indent=1)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str | list) or "tool_calls" in message


@contextmanager
def _one_error(path: Path) -> Iterator[None]:
    """Turn errors of the file system and the parser into SessionError."""
    try:
        yield
    except SessionError:
        raise
    except OSError as error:
        raise SessionError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise SessionError(f"{path} is not a session file: it is not JSON ({error})") from error
