"""Files, URLs and standard input as byte streams with limits on memory, disk space and waiting time."""

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
from contextlib import ExitStack, contextmanager
from typing import IO, Any, AnyStr, TypeVar, cast

from lookahead.errors import DocumentError, one_line

STDIN = "-"
MEGABYTE = 1 << 20
TIMEOUT_S = 120.0  # for each response of a server, and for the first byte of a pipe
MAX_COPIED_BYTES = 16 << 30  # maximum size of a temporary file
Answer = TypeVar("Answer")
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*(::[a-zA-Z0-9+.-]+)*://")
_EXTRA = "pip install 'lookahead-decoding[remote]'"


def is_url(path: str) -> bool:
    """Whether a path is a URL such as `s3://bucket/notes/a.txt`."""
    return _URL.match(path) is not None


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it; DocumentError if no installed package reads the URL."""
    from fsspec.core import url_to_fs

    system, path = ask(url, lambda: url_to_fs(url))
    return system, str(path)


@contextmanager
def opened(path: str, *, seekable: bool = False) -> Iterator[io.BufferedReader[Any]]:
    """Open a file, a URL or standard input (`-`) for reading bytes.

    With `seekable`, a stream without `seek` is copied to a temporary file, which uses at most half of the free space.

    Raises:
        DocumentError: The path is a device, a URL cannot be opened or read, or a pipe stays empty.
        OSError: A file cannot be opened or read.
    """
    with ExitStack() as stack:
        if path == STDIN:
            if sys.stdin is None:
                raise DocumentError(f"{STDIN}: standard input is closed")
            stdin: Any = sys.stdin.buffer
            stream = stdin if isinstance(stdin, io.BufferedReader) else io.BufferedReader(stdin)
        elif is_url(path):
            system, inner = file_system(path)
            file = stack.enter_context(ask(path, lambda: system.open(inner, "rb")))
            stream = io.BufferedReader(_Remote(file, path), MEGABYTE)
        else:
            stream = stack.enter_context(_open_local(path))
        if seekable and (path == STDIN or not stream.seekable()):
            copy = stack.enter_context(tempfile.TemporaryFile())
            most = min(MAX_COPIED_BYTES, shutil.disk_usage(tempfile.gettempdir()).free // 2)
            while data := stream.read(MEGABYTE):
                if copy.tell() + len(data) > most:
                    raise DocumentError(
                        f"{path}: cannot copy more than {most / (1 << 30):.3g} GiB to a temporary file; download it, "
                        "and name the file"
                    )
                copy.write(data)
            copy.seek(0)
            stream = cast("io.BufferedReader[Any]", copy)
        yield stream


def in_time(call: Callable[[], Answer], seconds: float) -> Answer:
    """The result of a call to a server; TimeoutError if it takes longer than `seconds`."""
    answer: Future[Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()  # a daemon: the process can exit while the call hangs
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():
            raise  # raised by the driver
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def ask(url: str, call: Callable[[], Answer]) -> Answer:
    """The result of a call to the fsspec driver of a URL. Its many error types become a `DocumentError`."""
    try:
        return in_time(call, TIMEOUT_S)
    except FileNotFoundError as error:
        raise DocumentError(f"{url}: not found or not reachable") from error
    except ImportError as error:
        raise DocumentError(f"{url}: {error}; for http, https and s3: {_EXTRA}") from error
    except Exception as error:
        raise DocumentError(f"{url}: cannot be read: {one_line(error)}") from error


@contextmanager
def read_errors(path: str, kind: str) -> Iterator[None]:
    """Turn the many error types of a library for damaged files into a `DocumentError` that names the file."""
    try:
        yield
    except DocumentError:
        raise
    except Exception as error:
        raise DocumentError(f"{path}: cannot be read as {kind}: {one_line(error)}") from error


def read_bounded(path: str, limit: int) -> bytes:
    """All bytes of a file, a URL or standard input; DocumentError if there are more than `limit`."""
    with opened(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise DocumentError(too_long(path, limit))
    return data


def too_long(place: str, limit: int) -> str:
    """The error message for a document of more than `limit` bytes."""
    return f"{place}: longer than {limit / MEGABYTE:.3g} MB; --max-document-mb raises the limit"


def bounded_lines(file: IO[AnyStr], limit: int) -> Iterator[tuple[int, AnyStr | None]]:
    """The offset and the content of each line; `None` for a line over `limit`, which is not kept in memory."""
    offset = 0
    while line := file.readline(limit + 2):
        length = len(line)
        yield offset, line if length <= limit or line[-1:] in ("\n", b"\n") else None
        while line and line[-1:] not in ("\n", b"\n"):
            line = file.readline(MEGABYTE)
            length += len(line)
        offset += length


def _open_local(path: str) -> io.BufferedReader[Any]:
    mode = os.stat(path).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # /dev/zero has no end
        raise DocumentError(f"{path}: a device, not a file; - reads standard input")
    if not stat.S_ISFIFO(mode) or not hasattr(os, "O_NONBLOCK"):  # Windows waits for a pipe as for a file
        return open(path, "rb")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a blocking open waits for a writer
    if not select.select([descriptor], [], [], TIMEOUT_S)[0]:
        os.close(descriptor)
        raise DocumentError(f"{path}: no data came through this pipe within {TIMEOUT_S:g} s")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


class _Remote(io.RawIOBase):
    """An fsspec file as a raw stream: some fsspec files have no `readline` or `seek`."""

    def __init__(self, file: Any, url: str) -> None:
        self._file = file
        self._url = url

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data: bytes = ask(self._url, lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)
