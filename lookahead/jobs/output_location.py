"""The files a job writes, checked before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lookahead.documents.inputs import Input, check_output
from lookahead.documents.table_files import load_pyarrow
from lookahead.errors import ConfigError
from lookahead.jobs.identity import manifest_path, read_manifest


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """The files a job writes.

    Attributes:
        results: The file for the summaries; `None` if they are shown. With the suffix `.parquet`, lines go to a file of
            JSON lines beside it while the job runs.
        rejects: The file for documents that failed; `None` is `RESULTS.rejects.jsonl`, or no file without results.
        overwrite: Whether existing files may be replaced.
        resume: Whether to continue what an earlier run wrote.
    """

    results: Path | None = None
    rejects: Path | None = None
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        if self.rejects is None and self.results is not None:
            object.__setattr__(self, "rejects", Path(f"{self.results}.rejects.jsonl"))

    @property
    def is_parquet(self) -> bool:
        """Whether the results become a Parquet file."""
        return self.results is not None and self.results.suffix.lower() == ".parquet"

    @property
    def running(self) -> Path | None:
        """The file of JSON lines while the job runs."""
        return Path(f"{self.results}.running.jsonl") if self.is_parquet else self.results

    @property
    def is_journal(self) -> bool:
        """Whether the results go to a file that can be resumed, not to a pipe or a device."""
        return self.results is not None and (self.results.is_file() or not self.results.exists())

    @property
    def all(self) -> list[Path]:
        """Every file of the job, existing or not."""
        paths: list[Path | None] = [self.results, self.rejects]
        if self.results is not None and self.is_journal:
            paths[1:1] = [self.running, manifest_path(self.results)]
        return list(dict.fromkeys(path for path in paths if path is not None))

    def check(self, inputs: Sequence[Input]) -> None:
        """Refuse a path that cannot be written or that holds something else, before any work is done.

        Raises:
            ConfigError: With the path and the reason.
            DocumentError: It is a Parquet file, and pyarrow is not installed.
        """
        if self.resume and self.overwrite:
            raise ConfigError("--resume goes on with an output and --overwrite begins anew; pass one of them")
        if self.resume and not self.is_journal:
            raise ConfigError("--resume needs --output, the file to go on with")
        if self.results is not None and self.rejects is not None and self.results.resolve() == self.rejects.resolve():
            raise ConfigError(f"output {self.results} cannot hold both the summaries and the rejects")
        if self.results is not None and self.is_journal and not self.overwrite:
            self._check_earlier(self.results)
        if self.is_parquet:
            load_pyarrow(str(self.results))
        for path in self.all:
            check_output(path, inputs, overwrite=self.overwrite or self.resume)

    def _check_earlier(self, results: Path) -> None:
        """Refuse existing results unless they are resumed, and results to resume without a manifest."""
        manifest = read_manifest(results)
        exists = any(path is not None and path.is_file() and path.stat().st_size for path in (results, self.running))
        if self.resume and exists and manifest is None:
            raise ConfigError(
                f"output {results} has no manifest ({manifest_path(results).name}), so what wrote it is unknown; name "
                "another --output, or pass --overwrite to begin anew"
            )
        if not self.resume and manifest is not None:
            state = "a finished job" if manifest.is_finished else "a job that did not finish"
            raise ConfigError(
                f"output {results} is of {state}; pass --resume to do what is missing, or --overwrite to begin anew"
            )

    def clear(self) -> None:
        """With `overwrite`, remove the files of an earlier job; call it after `check`."""
        if self.overwrite:
            for path in self.all:
                if path.is_file():
                    path.unlink()
