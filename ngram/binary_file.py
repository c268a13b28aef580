"""The header that pool files and memory files begin with: 128 bytes, with a checksum of their own at the end."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash

HEADER_BYTES = 128
_BYTE_ORDER = 0x01020304
_CHECKSUM_BYTES = 8


def pack_header(magic: bytes, version: int, numbers: tuple[int, ...]) -> bytes:
    """The bytes of a header of unsigned 64-bit numbers; its own checksum comes last."""
    fields = struct.pack(f"=8sII{len(numbers)}Q", magic, _BYTE_ORDER, version, *numbers)
    fields = fields.ljust(HEADER_BYTES - _CHECKSUM_BYTES, b"\0")
    return fields + xxhash.xxh3_64_digest(fields)


def unpack_header(path: Path, file: BinaryIO, kind: str, magic: bytes, version: int, count: int) -> tuple[int, ...]:
    """Read `count` numbers of a header from the beginning of a file; ValueError says what is wrong with it."""
    data = file.read(HEADER_BYTES)
    if not data.startswith(magic):
        raise ValueError(f"{path}: not a {kind} file")
    if len(data) < HEADER_BYTES:
        raise ValueError(f"{path}: cut short: {len(data)} bytes, less than a header")
    _, byte_order, found, *numbers = struct.unpack_from(f"=8sII{count}Q", data)
    if byte_order != _BYTE_ORDER:
        raise ValueError(f"{path}: made on a machine with another byte order; build it again here")
    if found != version:
        raise ValueError(f"{path}: version {found} of the format; this release reads version {version}")
    if data != pack_header(magic, version, tuple(numbers)):
        raise ValueError(f"{path}: damaged: the checksum of its header is wrong")
    return tuple(numbers)


def check_size(path: Path, file: BinaryIO, expected: int) -> None:
    """Raise ValueError unless an open file has the size that its header tells, in bytes."""
    size = os.fstat(file.fileno()).st_size
    if size != expected:
        what = "cut short" if size < expected else "longer than it should be"
        raise ValueError(f"{path}: {what}: {size:,} bytes of {expected:,}")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file and nothing else: opening a pipe would wait for a writer."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a file")
    with open(path, "rb") as file:
        yield file
