"""The output files of a job, checked before any work, and the journal or stream that writes them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lookahead.documents.decode_text import Document, DocumentId, Reject
from lookahead.documents.inputs import Input, check_output, load_packages
from lookahead.errors import ConfigError, count
from lookahead.jobs.identity import JobIdentity, key_of, text_hash
from lookahead.jobs.line import Line, Record, read_entries
from lookahead.jobs.line_file import LineFile, read_earlier, unpack_parquet, write_errors, write_parquet
from lookahead.utils.atomic import read_json, remove_leftovers, replacing, write_atomically
from lookahead.utils.locks import locked

EarlierOutcome = Literal["finished", "rejected"] | None  # the outcome of a document in an earlier run
Sink = Callable[[Record], None]  # receives the lines of results

VERSION = 1  # of the manifest
_read_reject = partial(Line.from_json, is_reject=True)


def manifest_path(results: Path) -> Path:
    """The path of the manifest of a results file."""
    return Path(f"{results}.manifest.json")


def write_manifest(results: Path, identity: JobIdentity, documents: int | None = None) -> None:
    """Write the manifest of a results file atomically. `documents` is `None` while the job runs."""
    record = {
        "version": VERSION,
        "state": "running" if documents is None else "finished",
        "documents": documents,
        "fingerprint": identity.fingerprint,
        "job": identity.to_dict(),
    }
    write_atomically(manifest_path(results), json.dumps(record, indent=2) + "\n")


def read_manifest(results: Path) -> dict[str, Any] | None:
    """`state` and `job` of the manifest of a results file, `None` if there is none; ConfigError if it is unreadable."""
    path = manifest_path(results)
    try:
        record = read_json(path)
        version = record["version"]
        if version == VERSION:
            return {"state": record["state"], "job": dict(record["job"])}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        what = "remove it to continue with lines that name their job, or pass --overwrite to start over"
        raise ConfigError(f"{path}: not the manifest of a job; {what}") from error
    raise ConfigError(f"{path}: version {version!r}; this release continues version {VERSION}")


@dataclass(slots=True)
class OutputPaths:
    """The files that a job writes."""

    results: Path | None = None  # `None`: the summaries are shown
    rejects: Path | None = None  # `None`: `RESULTS.rejects.jsonl`, or no file without results
    overwrite: bool = False  # replace existing files
    resume: bool = False  # continue the results of an earlier run
    retry_rejects: bool = False  # retry documents that failed in an earlier run
    is_parquet: bool = field(init=False)  # whether the results become a Parquet file
    running: Path | None = field(init=False)  # the file of JSON lines while the job runs

    def __post_init__(self) -> None:
        self.is_parquet = self.results is not None and self.results.suffix.lower() == ".parquet"
        self.running = Path(f"{self.results}.running.jsonl") if self.is_parquet else self.results
        if self.rejects is None and self.results is not None:
            self.rejects = Path(f"{self.results}.rejects.jsonl")

    @property
    def is_journal(self) -> bool:
        """Whether the results are written to a file that can be resumed, not to a pipe or a device."""
        return self.results is not None and (self.results.is_file() or not self.results.exists())

    @property
    def files(self) -> dict[str, Path]:
        """The files of the job by what they hold, existing or not."""
        files = {"the summaries": self.results, "the running job": self.running, "the rejects": self.rejects}
        if self.results is not None and self.is_journal:
            files["the manifest"] = manifest_path(self.results)
        return {content: path for content, path in files.items() if path is not None}

    def check(self, inputs: Sequence[Input]) -> None:
        """Raise a ConfigError, before any work, for a path that cannot be written or that holds something else."""
        results = self.results
        if self.resume and self.overwrite:
            raise ConfigError("--resume continues an output and --overwrite replaces it; pass one of them")
        if self.resume and not self.is_journal:
            raise ConfigError("--resume needs --output, the file to continue")
        for content, path in self.files.items():
            if self.rejects is not None and content != "the rejects" and path.resolve() == self.rejects.resolve():
                raise ConfigError(f"output {path} cannot hold both {content} and the rejects")
        manifest = read_manifest(results) if results is not None and self.is_journal and not self.overwrite else None
        if manifest is None and self.resume:
            if self.running is not None and not _begins_with_result(self.running):
                raise ConfigError(
                    f"output {results} has no manifest ({results}.manifest.json), so what wrote it is unknown; name "
                    "another --output, or pass --overwrite to start over"
                )
        elif manifest is not None and not self.resume:
            state = "a finished job" if manifest["state"] == "finished" else "a job that did not finish"
            raise ConfigError(
                f"output {results} is of {state}; pass --resume to do the rest, or --overwrite to start over"
            )
        if self.is_parquet:
            load_packages("parquet", str(results))
        for path in self.files.values():
            check_output(path, inputs, overwrite=self.overwrite or self.resume)

    def clear(self) -> None:
        """With `overwrite`, empty the files of an earlier job, after `check`; its manifest stays until replaced."""
        for content, path in self.files.items() if self.overwrite else ():
            if path.is_file() and content != "the manifest":
                with replacing(path):
                    pass


class Stream(ExitStack):
    """Writes to standard output, a pipe or a device, or to `shown`: nothing is resumed or copied."""

    def __init__(self, paths: OutputPaths, shown: Sink | None) -> None:
        super().__init__()
        self.lines = 0  # lines of results written by this run
        paths.clear()
        self._rejects = self.enter_context(LineFile(paths.rejects, _read_reject, lazy=True)) if paths.rejects else None
        self._sink = self.enter_context(LineFile(paths.results)).write if paths.results else shown

    def register(self, document: Document) -> tuple[None, None]:
        """No hash of a document's text, since there are no copies, and no earlier outcome."""
        return None, None

    def reject(self, reject: Reject, content: bytes | None = None) -> None:
        """Write the line of a failed document."""
        if self._rejects is not None:
            self._rejects.write(Line(id=reject.id, error=reject.error).to_json())

    def append(self, line: Line, content: bytes) -> None:
        """Write the line of a document."""
        if self._sink is not None:
            self._sink(line.to_json())
        self.lines += 1

    def line_of(self, content: bytes) -> None:
        """None: no line is copied."""


class Journal(ExitStack):
    """The results, rejects and manifest of a job that can be resumed.

    A document is finished if it has a line with its id and the hash of its text. Lines are appended as documents
    finish, and sorted into the order of the inputs at the end. With `is_part` the job takes only a part of the inputs,
    and the lines of other documents are kept. `notes` receives messages to the user about the files.

    Raises:
        ConfigError: The results belong to another job, are being written by another process, or are damaged.
        ResultsError: Another program changed or removed the files while the job ran; the job can be resumed.
    """

    def __init__(self, paths: OutputPaths, identity: JobIdentity, notes: list[str], *, is_part: bool = False) -> None:
        super().__init__()
        assert paths.results is not None and paths.running is not None and paths.rejects is not None
        self._identity, self._notes, self._is_part, self._is_parquet = identity, notes, is_part, paths.is_parquet
        self._results, self._running, self._rejects = paths.results, paths.running, paths.rejects
        self._read = partial(Line.from_json, job=identity.fingerprint)
        self._finished: Counter[bytes] = Counter()  # unmatched lines of earlier runs, by key
        self._offsets: dict[bytes, int] = {}  # the offset of the first line of each text, by text hash
        self._order: list[bytes] = []  # keys of the documents of the inputs
        self._text_of_id: dict[bytes, bytes] = {}  # the first text hash of each id, by its key
        self._unreadable: set[bytes] = set()  # keys of the ids of unreadable documents, without `is_part`
        self._same_ids: list[DocumentId] = []  # ids of documents that share an id with a different text
        with ExitStack() as files:  # releases the lock if opening fails
            own = Path(f"{self._results}.rejects.jsonl")  # others may be those of several jobs
            for path in (self._results, self._rejects)[: 1 + (self._rejects != own)]:
                with write_errors(path):
                    files.enter_context(locked(path, timeout_s=0))
            paths.clear()
            earlier = None if paths.overwrite else read_manifest(self._results)
            if earlier is not None and (different := identity.differences(earlier["job"])):
                raise ConfigError(
                    f"output {self._results} was written by another job: {different}; name another --output, or pass "
                    "--overwrite to start over"
                )
            with write_errors(self._results):
                self._read_earlier(paths)
                write_manifest(self._results, identity)  # after reading the lines, which may be of another job
            files.callback(self._keep_manifest)
            self._file = files.enter_context(LineFile(self._running, self._read))
            self._reject_file = files.enter_context(LineFile(self._rejects, _read_reject, lazy=True))
            self.enter_context(files.pop_all())

    def _read_earlier(self, paths: OutputPaths) -> None:
        """Read the documents that earlier runs finished and rejected. A Parquet file is unpacked to JSON lines."""
        for path in paths.files.values():
            remove_leftovers(path)
        if self._is_parquet and self._results.is_file() and not self._running.exists():
            unpack_parquet(self._results, self._running, self._read)
        for line, offset in read_earlier(self._running, self._read, self._notes):
            self._finished[line.key] += 1
            self._offsets.setdefault(bytes.fromhex(line.document or ""), offset)
        rejected = {line.key for line, _ in read_earlier(self._rejects, _read_reject, self._notes)}
        self._rejected = set() if paths.retry_rejects else rejected  # keys of the lines of rejects

    def _keep_manifest(self) -> None:
        """Write the manifest again if it was deleted while the job ran, so that it can be resumed."""
        if not os.path.lexists(manifest_path(self._results)):
            with suppress(OSError):
                write_manifest(self._results, self._identity)

    @property
    def lines(self) -> int:
        """Lines of results written by this run."""
        return self._file.whole[1]

    def register(self, document: Document) -> tuple[bytes | None, EarlierOutcome]:
        """Register a document of the inputs; returns the hash of its text and its outcome in an earlier run."""
        content = text_hash(document.text)
        key = key_of(document.id, content)
        self._order.append(key)
        if self._text_of_id.setdefault(key_of(document.id), content) != content:
            self._same_ids.append(document.id)
        if self._finished[key] > 0:
            self._finished[key] -= 1
            return content, "finished"
        return content, "rejected" if key in self._rejected else None

    def reject(self, reject: Reject, content: bytes | None = None) -> None:
        """Write the line of a failed document unless an earlier run did; `content` is its text hash, if readable."""
        key = key_of(reject.id, content or reject.error)
        if content is None and not self._is_part:
            self._unreadable.add(key_of(reject.id))
        self._order.append(key)
        if key not in self._rejected:
            line = Line(id=reject.id, error=reject.error, document=content.hex() if content else None)
            self._reject_file.write(line.to_json())
            self._rejected.add(key)

    def finish(self) -> None:
        """Sort the lines into the order of the inputs, and mark the job as finished; an error keeps the lines."""
        self._file.release()
        self._reject_file.release()
        if self._same_ids:
            have = count(len(self._same_ids), "document has", "documents have")
            self._notes.append(
                f"{have} the id of another with a different text, the first of them {self._same_ids[0]!r}; lines of "
                "one id stand in the order of the inputs"
            )
        # A line that matches no document of this run is outdated if a document of this run has its id.
        ids = set() if self._is_part else {*self._text_of_id}
        done = self._file.sort(self._order, lambda line: key_of(line.id) in ids)
        unnamed = 0 if self._is_part else done.unnamed
        for number, noun, what in (
            (done.doubled, "duplicate line", "left out {}"),
            (done.outdated, "line", "left out {} of documents that have changed since"),
            (unnamed, "line", "kept {} of documents that are not among the inputs, at its end"),
        ):
            if number:
                self._notes.append(f"{self._results}: {what.format(count(number, noun))}")
        if self._rejects.exists():
            # Rejects are also outdated if they have a newer error, or if their document is finished.
            others, taken = ids | self._unreadable, {*self._order}
            self._reject_file.sort(
                (key for key in self._order if key in self._rejected),
                lambda line: key_of(line.id) in others or line.key in taken,
                newest_only=True,
            )
        if self._is_parquet:
            write_parquet(self._running, self._results)
        write_manifest(self._results, self._identity, done.kept)
        if self._is_parquet:
            self._running.unlink()

    def append(self, line: Line, content: bytes) -> None:
        """Write the line of a document; `content` is its text hash. After an OSError the earlier lines are intact."""
        offset, _ = self._file.whole
        self._file.write(line.to_json())
        self._offsets.setdefault(content, offset)

    def line_of(self, content: bytes) -> Line | None:
        """The first line with a text hash; `None` if there is none."""
        offset = self._offsets.get(content)
        return None if offset is None else self._file.line_at(offset, content)


def _begins_with_result(path: Path) -> bool:
    """Whether a file is missing, is empty, or begins with a line of results."""
    first = next(read_entries(path, Line.from_json), None) if path.is_file() else None
    return first is None or first.line is not None
