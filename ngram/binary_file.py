"""Binary files of pools and memories: numbers after a header of 128 bytes, which ends with its own checksum."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from lookahead.utils.atomic import replacing

HEADER_BYTES = 128
_BYTE_ORDER = 0x01020304

Header = TypeVar("Header", bound="FileHeader")


class FileHeader:
    """The header of one kind of file: a frozen dataclass of unsigned 64-bit numbers.

    Example:
        >>> from lookahead.ngram.memory_file import MemoryHeader
        >>> header = MemoryHeader(fingerprint=1, vocabulary=9, contexts=1, max_contexts=8)
        >>> header = header.write("a.memory", np.zeros(5, np.uint64))
        >>> MemoryHeader.read("a.memory") == header, header.file_bytes
        (True, 168)
    """

    __slots__ = ()
    kind, magic, version = "", b"", 0  # a line break in the magic bytes detects a transfer in text mode
    owner = ""  # what the fingerprint is of
    shown: ClassVar[tuple[str, ...]] = ()  # the fields that tell a user what the file holds
    checksum: int  # XXH3 of all bytes after the header

    def sizes(self) -> tuple[int, bool]:
        """Bytes of the file, and whether the numbers are in range."""
        raise NotImplementedError

    @property
    def file_bytes(self) -> int:
        """Size of the file, in bytes."""
        return self.sizes()[0]

    @classmethod
    @contextmanager
    def opened(cls: type[Header], path: Path) -> Iterator[tuple[Header, BinaryIO]]:
        """Open a file after its header; ValueError if that is damaged. Of the rest only the size is checked."""
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise ValueError(f"{path}: not a file")
        with open(path, "rb") as file:
            data, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
            whole, count = data.ljust(HEADER_BYTES, b"\0"), len(fields(cls))  # type: ignore[arg-type]
            _, byte_order, version, *numbers = struct.unpack_from(f"=8sII{count}Q", whole)
            header = cls(*numbers)
            expected, is_possible = header.sizes()
            for is_fault, fault in (
                (not data.startswith(cls.magic), f"not a {cls.kind} file"),
                (len(data) < HEADER_BYTES, f"cut short: {len(data)} bytes, less than a header"),
                (byte_order != _BYTE_ORDER, "made on a machine with another byte order; build it again here"),
                (version != cls.version, f"version {version} of the format; this release reads version {cls.version}"),
                (data != header.pack(), "damaged: the checksum of its header is wrong"),
                (not is_possible, "damaged: its header holds impossible sizes"),
                (size < expected, f"cut short: {size:,} bytes of {expected:,}"),
                (size > expected, f"longer than it should be: {size:,} bytes of {expected:,}"),
            ):
                if is_fault:
                    raise ValueError(f"{path}: {fault}")
            yield header, file

    @classmethod
    def read(cls: type[Header], path: str | os.PathLike[str]) -> Header:
        """The header of a file, with the checks of `opened`."""
        with cls.opened(Path(path)) as (header, _):
            return header

    def check(self, path: Path, checksum: xxhash.xxh3_64) -> None:
        """Raise ValueError unless this is the checksum of the bytes after the header."""
        if (value := checksum.intdigest()) != self.checksum:
            raise ValueError(f"{path}: damaged: its checksum is {value:016x}, expected {self.checksum:016x}")

    def pack(self) -> bytes:
        """The bytes of the header; its own checksum comes last."""
        numbers = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        data = struct.pack(f"=8sII{len(numbers)}Q", self.magic, _BYTE_ORDER, self.version, *numbers)
        data = data.ljust(HEADER_BYTES - 8, b"\0")
        return data + xxhash.xxh3_64_digest(data)

    def write(self: Header, path: str | os.PathLike[str], *sections: NDArray[Any]) -> Header:
        """Write a file with these sections, atomically; returns its header with the checksum."""
        written, checksum = [np.ascontiguousarray(section).data for section in sections], xxhash.xxh3_64()
        for section in written:
            checksum.update(section)
        header = replace(self, checksum=checksum.intdigest())  # type: ignore[type-var]
        with replacing(Path(path)) as file:
            file.writelines((header.pack(), *written))
        return header
