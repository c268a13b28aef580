"""Where the lines of a job go that keeps no journal: standard output, a pipe, a device."""

from __future__ import annotations

from collections import OrderedDict
from types import TracebackType
from typing import Any, Protocol

from lookahead.documents.decode_text import Document, DocumentId, Reject
from lookahead.jobs.identity import JobIdentity, text_hash
from lookahead.jobs.json_results import JsonLinesFile, copy_of
from lookahead.jobs.output_location import OutputPaths

_REMEMBERED = 4096  # lines, so that memory does not grow with the documents


class Sink(Protocol):
    """Where lines go."""

    def write(self, record: dict[str, Any]) -> None:
        """Write one line, whole or not at all."""


class Stream:
    """Writes lines as they come: nothing is resumed, and only the newest texts are known again.

    Args:
        paths: Files to write, checked.
        identity: The job.
        shown: Gets the lines of results where `paths` has no file for them.
    """

    def __init__(self, paths: OutputPaths, identity: JobIdentity, shown: Sink | None) -> None:
        paths.clear()
        self._signature = {"model": identity.model, "fingerprint": identity.fingerprint}
        self._rejects = JsonLinesFile(paths.rejects, lazy=True) if paths.rejects else None
        self._file = JsonLinesFile(paths.results) if paths.results else None
        self._results: Sink | None = self._file or shown
        self._lines: OrderedDict[bytes, dict[str, Any]] = OrderedDict()  # the newest, by the hash of their text

    def take(self, document: Document) -> tuple[bytes | None, str | None]:
        """Note a document.

        Returns:
            The hash of its text, where lines are written that could be copied; and that nothing was done before.
        """
        return (bytes.fromhex(text_hash(document.text)) if self._results is not None else None), None

    def has(self, content: bytes) -> bool:
        """Whether a document of this text has a line that can be copied."""
        return content in self._lines

    def write(self, document: Document, record: dict[str, Any]) -> None:
        """Write the line of a document.

        Raises:
            OSError: It could not be written.
        """
        if self._results is not None:
            content = text_hash(document.text)
            self._append({"id": document.id, **record, "document": content, **self._signature}, bytes.fromhex(content))

    def copy(self, name: DocumentId, content: bytes) -> None:
        """Write the line of a document whose text has one already.

        Raises:
            OSError: As `write`.
        """
        self._append(copy_of(self._lines[content], name), content)

    def _append(self, record: dict[str, Any], content: bytes) -> None:
        """Write a line and remember it."""
        assert self._results is not None
        self._results.write(record)
        self._lines[content] = record
        self._lines.move_to_end(content)
        if len(self._lines) > _REMEMBERED:
            self._lines.popitem(last=False)

    def reject(self, reject: Reject, content: bytes | None = None) -> None:
        """Write the line of a document that failed.

        Raises:
            OSError: It could not be written.
        """
        if self._rejects is not None:
            self._rejects.write({"id": reject.id, "error": reject.error})

    def finish(self) -> None:
        """Nothing is left to do."""

    def take_notes(self) -> list[str]:
        """There is nothing to say."""
        return []

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._file, self._rejects):
            if file is not None:
                file.close()
