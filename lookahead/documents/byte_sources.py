"""Files, URLs and standard input, opened to be read in bounded bites."""

from __future__ import annotations

import io
import os
import re
import select
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager, nullcontext
from typing import Any, BinaryIO, TypeVar, cast

from lookahead.errors import DocumentError

STDIN = "-"
MEGABYTE = 1 << 20
TIMEOUT_S = 120.0  # a server, or the writer of a pipe, that says nothing for so long is given up
MOST_COPIED = 16 << 30  # bytes of a temporary file
Answer = TypeVar("Answer")
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*(::[a-zA-Z0-9+.-]+)*://")
_EXTRA = "pip install 'lookahead-decoding[remote]'"


def is_url(path: str) -> bool:
    """Whether a path is a URL such as `s3://bucket/notes/a.txt`."""
    return _URL.match(path) is not None


def file_system(url: str) -> tuple[Any, str]:
    """What reads a URL, by fsspec, and the path it has there.

    Raises:
        DocumentError: Nothing that is installed reads such URLs.
    """
    from fsspec.core import url_to_fs

    try:
        system, path = in_time(lambda: url_to_fs(url))
    except ImportError as error:
        raise DocumentError(f"{url}: {error}; for http, https and s3: {_EXTRA}") from error
    except Exception as error:  # drivers raise what they like for a wrong address or missing credentials
        raise DocumentError(f"{url}: {_line(error)}") from error
    return system, str(path)


@contextmanager
def opened(path: str, *, seekable: bool = False) -> Iterator[io.BufferedReader[Any]]:
    """Open a file, a URL or standard input (`-`) to read bytes.

    Args:
        path: Which.
        seekable: Whether the reader jumps about; what cannot be is copied to a temporary file.

    Raises:
        DocumentError: A URL cannot be read; also while it is read.
        OSError: A file cannot be.
    """
    if path == STDIN:
        stdin = _peekable(sys.stdin.buffer)
        with _seekable(stdin, path) if seekable else nullcontext(stdin) as stream:
            yield stream
    elif is_url(path):
        system, inner = file_system(path)
        with _told(path):
            file = in_time(lambda: system.open(inner, "rb"))
        with file:
            remote: io.BufferedReader[Any] = io.BufferedReader(_Remote(file, path), MEGABYTE)
            with _seekable(remote, path) if seekable else nullcontext(remote) as stream:
                yield stream
    else:
        with (
            _opened_here(path) as file,
            _seekable(file, path) if seekable and not file.seekable() else nullcontext(file) as stream,
        ):
            yield stream


def in_time(call: Callable[[], Answer]) -> Answer:
    """What a call to a server gives: some of them take a connection and say nothing for ever.

    Raises:
        TimeoutError: Nothing, for `TIMEOUT_S` seconds.
    """
    answer: Future[Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()  # one that is never answered does not keep the process
    try:
        return answer.result(TIMEOUT_S)
    except TimeoutError:
        if answer.done():
            raise  # the driver's own
        raise TimeoutError(f"no answer within {TIMEOUT_S:g} s") from None


def _opened_here(path: str) -> io.BufferedReader[Any]:
    """Open a file; a pipe must have something to be read in time, since it may have no writer at all.

    Raises:
        DocumentError: Nothing came through a pipe.
        OSError: It cannot be opened.
    """
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        return open(path, "rb")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not select.select([descriptor], [], [], TIMEOUT_S)[0]:
        os.close(descriptor)
        raise DocumentError(f"{path}: a pipe through which nothing came within {TIMEOUT_S:g} s")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def read_bounded(path: str, limit: int) -> bytes:
    """All bytes of a file, a URL or standard input.

    Raises:
        DocumentError: There are more than `limit` bytes; no more than those are read.
    """
    with opened(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise DocumentError(too_long(path, limit))
    return data


def too_long(place: str, limit: int) -> str:
    """What is said of a document above the limit of bytes."""
    return f"{place}: longer than {limit / MEGABYTE:.3g} MB; --max-document-mb raises the limit"


def bounded_lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a file with the byte offset of each; `None` in place of a line of more than `limit` bytes.

    Of such a line no more than that is held in memory.
    """
    offset = 0
    while line := file.readline(limit + 2):
        length = len(line)
        if length <= limit or line.endswith(b"\n"):
            yield offset, line
        else:
            while rest := file.readline(MEGABYTE):
                length += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield offset, None
        offset += length


class _Remote(io.RawIOBase):
    """A file of fsspec as a plain stream: some of them know neither `readline` nor `seek`."""

    def __init__(self, file: Any, url: str) -> None:
        self._file = file
        self._url = url

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _told(self._url):
            data: bytes = in_time(lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Turn what a driver raises into an error that names the URL."""
    try:
        yield
    except DocumentError:
        raise
    except FileNotFoundError as error:
        raise DocumentError(f"{url}: not found, or not to be reached") from error
    except Exception as error:  # a driver's own, of dozens of types
        raise DocumentError(f"{url}: cannot be read: {_line(error)}") from error


def _peekable(stream: BinaryIO) -> io.BufferedReader[Any]:
    """A stream whose first bytes can be looked at."""
    return stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(cast(Any, stream))


@contextmanager
def _seekable(stream: io.BufferedReader[Any], path: str) -> Iterator[io.BufferedReader[Any]]:
    """A temporary file with all that a stream holds, at its beginning.

    Raises:
        DocumentError: It holds more than 16 GiB, or than half of what is free on the disk of temporary files.
    """
    with tempfile.TemporaryFile() as copy:
        most = min(MOST_COPIED, shutil.disk_usage(tempfile.gettempdir()).free // 2)
        while data := stream.read(MEGABYTE):
            if copy.tell() + len(data) > most:
                raise DocumentError(
                    f"{path}: more than {most / (1 << 30):.3g} GiB to copy to a temporary file first; download it, and "
                    "name the file"
                )
            copy.write(data)
        copy.seek(0)
        yield cast("io.BufferedReader[Any]", copy)


def _line(error: Exception) -> str:
    """An error in one line, with its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
