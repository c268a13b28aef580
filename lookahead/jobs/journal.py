"""What a job has finished, on disk: lines that only grow until the job is done, and are then put in order."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from filelock import FileLock, Timeout

from lookahead.documents.decode_text import Document, DocumentId, Reject
from lookahead.errors import ConfigError
from lookahead.jobs.identity import JobIdentity, id_key, key_of, text_hash
from lookahead.jobs.json_results import JsonLinesFile, copy_of
from lookahead.jobs.manifest import Manifest, manifest_path, read_manifest
from lookahead.jobs.ordering import Record, arrange, records_in
from lookahead.jobs.output_location import OutputPaths
from lookahead.ngram.replacing import remove_leftovers
from lookahead.utils.atomic import parse_json


class Journal:
    """The files of a job: results, rejects and the manifest.

    What is finished is what has a line: a document by its id and text, as often as it stands in the inputs.

    Args:
        paths: The files, checked.
        identity: The job.
        retry_rejects: Whether documents that failed before are tried again.
        is_part: Whether there are documents that are not taken, so that a line of an id may be of one of those.

    Raises:
        ConfigError: Another job wrote the results, another process is writing them, or they are damaged in the middle.
    """

    def __init__(
        self, paths: OutputPaths, identity: JobIdentity, *, retry_rejects: bool = False, is_part: bool = False
    ) -> None:
        if paths.results is None or paths.running is None or paths.rejects is None:
            raise ValueError("a journal needs files")
        self._notes: list[str] = []
        self._same_ids = 0  # documents with the id of another, of a different text
        self._first_same_id: DocumentId = ""
        self._paths, self._identity, self._is_part = paths, identity, is_part
        self._results, self._running, self._rejects = paths.results, paths.running, paths.rejects
        self._finished: Counter[bytes] = Counter()
        self._places: dict[bytes, int] = {}  # of the first line of each text, by the hash of the text
        self._rejected: set[bytes] = set()
        self._order: list[bytes] = []
        self._order_of_rejects: list[bytes] = []
        self._texts: dict[int, int] = {}  # what tells a text from others, by its id
        self._unread: set[int] = set()  # ids of what could not be read
        self._lock = _locked(self._results)
        try:
            self._open(retry_rejects)
        except BaseException:
            self._lock.release()
            raise

    def take(self, document: Document) -> tuple[bytes | None, str | None]:
        """Note that a document stands in the inputs.

        Returns:
            The hash of its text, and what was done about it before: `"finished"`, `"rejected"` or `None`.
        """
        content = text_hash(document.text)
        key = key_of(document.id, content)
        self._order.append(key)
        self._note_id(document.id, content)
        if self._finished[key] > 0:
            self._finished[key] -= 1
            return bytes.fromhex(content), "finished"
        if key in self._rejected:
            self._order_of_rejects.append(key)
            return bytes.fromhex(content), "rejected"
        return bytes.fromhex(content), None

    def write(self, document: Document, record: Record) -> None:
        """Write the line of a document.

        Raises:
            OSError: It could not be written; the lines before it are whole.
        """
        content = text_hash(document.text)
        self._append({"id": document.id, **record, **self._signature(content)}, bytes.fromhex(content))

    def has(self, content: bytes) -> bool:
        """Whether a document of this text has a line."""
        return content in self._places

    def copy(self, name: DocumentId, content: bytes) -> None:
        """Write the line of a document whose text has one already.

        Raises:
            OSError: As `write`.
        """
        with open(self._running, "rb") as file:
            file.seek(self._places[content])
            record = json.loads(file.readline())
        self._append(copy_of(record, name), content)

    def reject(self, reject: Reject, content: bytes | None = None) -> None:
        """Write the line of a document that failed, unless it stands there already.

        Args:
            reject: What failed.
            content: The hash of its text, where it could be read.

        Raises:
            OSError: As `write`.
        """
        key = key_of(reject.id, content.hex() if content else reject.error)
        if content is None:
            self._unread.add(id_key(reject.id))
        self._order_of_rejects.append(key)
        if key not in self._rejected:
            known = {"document": content.hex()} if content else {}
            self._reject_file.write({"id": reject.id, "error": reject.error, **known})
            self._rejected.add(key)

    def finish(self) -> None:
        """Put all lines in the order of the inputs, and say so in the manifest; every document of the run was taken.

        Raises:
            OSError: The files cannot be written anew; what is finished stays as it is.
        """
        if self._same_ids:
            have = "document has" if self._same_ids == 1 else "documents have"
            self._notes.append(
                f"{self._same_ids} {have} the id of another with a different text, the first of them "
                f"{self._first_same_id!r}; lines of one id stand in the order of the inputs"
            )
        dropped = arrange(self._running, self._order, self._has_changed, _key_of_result)
        if dropped:
            self._notes.append(f"{self._results}: left out {dropped} lines of documents that have changed since")
        if self._rejects.exists():
            self._arrange_rejects()
        count = sum(1 for _ in records_in(self._running))
        if self._paths.is_parquet:
            from lookahead.jobs.parquet_results import write_parquet

            write_parquet(self._running, self._results)
        manifest = Manifest(self._identity.to_dict(), self._identity.fingerprint, True, count)
        manifest.write(manifest_path(self._results))
        if self._paths.is_parquet:
            self._running.unlink()

    def take_notes(self) -> list[str]:
        """What was found and repaired since this was last asked, in words."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._reject_file.close()
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _signature(self, content: str) -> Record:
        """What every line tells of its document and its job."""
        return {"document": content, "model": self._identity.model, "fingerprint": self._identity.fingerprint}

    def _append(self, record: Record, content: bytes) -> None:
        """Write a line and remember where it is."""
        place = self._file.size
        self._file.write(record)
        self._places.setdefault(content, place)

    def _note_id(self, name: DocumentId, content: str) -> None:
        """Note an id, and whether it is that of another text too."""
        known, now = id_key(name), int(content[:16], 16)
        if self._texts.setdefault(known, now) != now:
            self._same_ids += 1
            if self._same_ids == 1:
                self._first_same_id = name

    def _has_changed(self, record: Record) -> bool:
        """Whether the document of a line has another text now, given that none of this run has the line's."""
        return not self._is_part and id_key(record["id"]) in self._texts

    def _arrange_rejects(self) -> None:
        """Put the lines of rejects in order; none is left of what is finished now."""
        taken = set(self._order)

        def is_outdated(record: Record) -> bool:
            is_newer = not self._is_part and id_key(record["id"]) in self._unread  # the reason why it cannot be read
            return is_newer or self._has_changed(record) or _key_of_reject(record) in taken

        arrange(self._rejects, self._order_of_rejects, is_outdated, _key_of_reject, newest_only=True)
        if self._rejects.stat().st_size == 0:
            self._rejects.unlink()

    def _open(self, retry_rejects: bool) -> None:
        """Read what earlier runs left, and open the files to go on."""
        self._paths.clear()
        earlier = read_manifest(self._results)
        if earlier is not None:
            earlier.check(self._identity, self._results)
        self._begin()
        self._file = JsonLinesFile(self._running, append=True)
        try:
            self._recover(retry_rejects)
        except BaseException:
            self._file.close()
            raise
        self._file.size = self._running.stat().st_size
        self._reject_file = JsonLinesFile(self._rejects, lazy=True, append=True)

    def _begin(self) -> None:
        """Make the lines ready that an earlier run left, and write the manifest."""
        try:
            self._thaw()
            Manifest(self._identity.to_dict(), self._identity.fingerprint).write(manifest_path(self._results))
        except OSError as error:
            raise ConfigError(f"output {self._results} cannot be written: {error.strerror}") from error

    def _thaw(self) -> None:
        """Make JSON lines of a finished Parquet file again, and remove what a killed run was about to put in place."""
        for path in {self._running, self._results, self._rejects, manifest_path(self._results)}:
            remove_leftovers(path)
        if self._paths.is_parquet and self._results.is_file() and not self._running.exists():
            from lookahead.jobs.parquet_results import read_parquet_lines

            read_parquet_lines(self._results, self._running, self._is_own)

    def _recover(self, retry_rejects: bool) -> None:
        """Read what earlier runs finished."""
        self._repair(self._running)
        for offset, _, record in self._records(self._running):
            self._finished[_key_of_result(record)] += 1
            self._places.setdefault(bytes.fromhex(record["document"]), offset)
        if self._rejects.exists():
            self._repair(self._rejects)
            for _, _, record in self._records(self._rejects):
                if not retry_rejects:
                    self._rejected.add(_key_of_reject(record))

    def _repair(self, path: Path) -> None:
        """Cut a torn last line off: one without a line break, or without all of its content."""
        with open(path, "r+b") as file:
            torn = _torn(_tail(file))
            if torn:
                file.truncate(file.seek(0, os.SEEK_END) - torn)
                os.fsync(file.fileno())
                self._notes.append(f"{path}: cut off its last line, which was torn ({torn} bytes)")

    def _records(self, path: Path) -> Iterator[tuple[int, int, Record]]:
        """The lines of a file, each checked to be of a job."""
        checked = 0
        try:
            for offset, length, record in records_in(path):
                if path == self._rejects:
                    _key_of_reject(record)
                elif not self._is_own(record):
                    raise ValueError("of another job")
                checked += 1
                yield offset, length, record
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}:{checked + 1}: no line of this job; remove the line, or pass --overwrite to begin anew"
            ) from error

    def _is_own(self, record: Record) -> bool:
        """Whether a line of results is of this job."""
        try:
            _key_of_result(record)
            bytes.fromhex(record["document"])
            return bool(record["fingerprint"] == self._identity.fingerprint)
        except (ValueError, KeyError, TypeError):
            return False


def _key_of_result(record: Record) -> bytes:
    """The key of a line of results."""
    return key_of(record["id"], record["document"])


def _key_of_reject(record: Record) -> bytes:
    """The key of a line of rejects."""
    return key_of(record["id"], record.get("document") or record["error"])


def _torn(tail: bytes) -> int:
    """How many bytes at the end of a file are no whole lines of JSON: after a loss of power some may be missing."""
    whole = tail.rfind(b"\n") + 1
    if whole < len(tail):
        return len(tail) - whole
    last = tail[tail.rfind(b"\n", 0, max(0, whole - 1)) + 1 :]
    try:
        return 0 if not last or isinstance(parse_json(last), dict) else len(last)
    except ValueError:
        return len(last)


def _tail(file: BinaryIO) -> bytes:
    """The end of a file with all of its last line, and the line break before it if there is one."""
    size = file.seek(0, os.SEEK_END)
    reach = 1 << 16
    while True:
        file.seek(max(0, size - reach))
        data = file.read(reach)
        if data.count(b"\n") > 1 or reach >= size:
            return data
        reach *= 2


def _locked(results: Path) -> FileLock:
    """What keeps other processes from the files of a job until it is released.

    The lock is on a file of its own: the results and the manifest are replaced by new files.

    Raises:
        ConfigError: Another process has it, or it cannot be made.
    """
    results = Path(os.path.realpath(results))
    lock = FileLock(results.with_name(f".{results.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        if not Path(lock.lock_file).exists():  # a folder in which none can be made, as far as filelock tells
            raise ConfigError(f"output {results} cannot be written: no lock can be made beside it") from error
        raise ConfigError(f"output {results} is being written by another process; wait for it, or stop it") from error
    except NotImplementedError:  # a file system without locks
        pass
    except OSError as error:
        raise ConfigError(f"output {results} cannot be written: {error.strerror}") from error
    return lock
