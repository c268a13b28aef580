"""The files a job writes, checked before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lookahead.documents.inputs import Input, check_output, load_packages
from lookahead.errors import ConfigError
from lookahead.jobs.identity import manifest_path, read_manifest


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """The files a job writes."""

    results: Path | None = None  # `None` if the summaries are shown
    rejects: Path | None = None  # `None` is `RESULTS.rejects.jsonl`, or no file without results
    overwrite: bool = False  # replace existing files
    resume: bool = False  # continue what an earlier run wrote
    retry_rejects: bool = False  # try again what failed there

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
        journal = (self.running, manifest_path(self.results)) if self.results is not None and self.is_journal else ()
        return list(dict.fromkeys(path for path in (self.results, *journal, self.rejects) if path is not None))

    @property
    def no_inputs(self) -> list[Path]:
        """Files that are not read from a folder of inputs: all but results that exist and that no job wrote."""
        results = self.results
        is_strange = results is not None and results.is_file() and not manifest_path(results).exists()
        return [path for path in self.all if not (is_strange and path == results)]

    def check(self, inputs: Sequence[Input]) -> None:
        """Refuse a path that cannot be written or that holds something else with a ConfigError, before any work."""
        results = self.results
        if self.resume and self.overwrite:
            raise ConfigError("--resume goes on with an output and --overwrite begins anew; pass one of them")
        if self.resume and not self.is_journal:
            raise ConfigError("--resume needs --output, the file to go on with")
        if results is not None and self.rejects is not None:
            named = {self.running: "the running job", results: "the summaries", manifest_path(results): "the manifest"}
            for path, content in named.items():
                if path is not None and path.resolve() == self.rejects.resolve():
                    raise ConfigError(f"output {path} cannot hold both {content} and the rejects")
        manifest = read_manifest(results) if results is not None and self.is_journal and not self.overwrite else None
        if manifest is None and self.resume:
            if any(path is not None and path.is_file() and path.stat().st_size for path in (results, self.running)):
                raise ConfigError(
                    f"output {results} has no manifest ({results}.manifest.json), so what wrote it is unknown; name "
                    "another --output, or pass --overwrite to begin anew"
                )
        elif manifest is not None and not self.resume:
            state = "a finished job" if manifest["state"] == "finished" else "a job that did not finish"
            raise ConfigError(
                f"output {results} is of {state}; pass --resume to do what is missing, or --overwrite to begin anew"
            )
        if self.is_parquet:
            load_packages("parquet", str(results))
        for path in self.all:
            check_output(path, inputs, overwrite=self.overwrite or self.resume)

    def clear(self) -> None:
        """With `overwrite`, remove the files of an earlier job; call it after `check`."""
        for path in self.all if self.overwrite else ():
            if path.is_file():
                path.unlink()
