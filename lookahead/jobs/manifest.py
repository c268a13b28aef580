"""The manifest beside a results file: which job wrote it, and whether it came to its end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead.errors import ConfigError
from lookahead.jobs.identity import JobIdentity
from lookahead.utils.atomic import read_json, write_atomically

VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says.

    Attributes:
        job: The identity of the job, as `JobIdentity.to_dict` gives it.
        fingerprint: Its fingerprint.
        is_finished: Whether the job saw all of its documents, and so the lines stand in their order.
        documents: How many lines of results there are, where it is finished.
    """

    job: dict[str, Any]
    fingerprint: str
    is_finished: bool = False
    documents: int | None = None

    def write(self, path: Path) -> None:
        """Write it beside its results, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        record = {
            "version": VERSION,
            "state": "finished" if self.is_finished else "running",
            "documents": self.documents,
            "fingerprint": self.fingerprint,
            "job": self.job,
        }
        write_atomically(path, json.dumps(record, indent=2) + "\n")

    def check(self, identity: JobIdentity, results: Path) -> None:
        """Refuse to go on with what another job wrote.

        Raises:
            ConfigError: With what is different, and how to proceed.
        """
        different = identity.differences(self.job)
        if different:
            raise ConfigError(
                f"output {results} was written by another job: {different}; name another --output, or pass "
                "--overwrite to begin anew"
            )


def manifest_path(results: Path) -> Path:
    """Where the manifest of a results file is."""
    return Path(f"{results}.manifest.json")


def read_manifest(results: Path) -> Manifest | None:
    """The manifest of a results file; `None` where there is none.

    Raises:
        ConfigError: It cannot be read, or is none of this release.
    """
    path = manifest_path(results)
    try:
        record = read_json(path)
        if record["version"] != VERSION:
            raise ConfigError(f"{path}: version {record['version']!r}; this release goes on with version {VERSION}")
        return Manifest(
            dict(record["job"]), str(record["fingerprint"]), record["state"] == "finished", record["documents"]
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: no manifest of a job; pass --overwrite to begin anew") from error
