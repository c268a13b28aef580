"""The options of `lookahead summarize`."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lookahead.cli.option_files import KeptOptions
from lookahead.cli.options import (
    FASTEST,
    INPUTS,
    DocumentOptions,
    DraftingOptions,
    ModelOptions,
    RepetitionOptions,
    new_tokens_option,
    option,
)
from lookahead.documents.byte_sources import MEGABYTE, read_bounded
from lookahead.documents.decode_text import decode_bytes
from lookahead.errors import ConfigError
from lookahead.loading.loading import DEFAULT_MODEL, locate_model

if TYPE_CHECKING:
    from lookahead.jobs.identity import JobSettings


@dataclass(frozen=True, kw_only=True)
class SummaryOptions(RepetitionOptions, DraftingOptions, ModelOptions):
    panel: ClassVar[str] = "Summaries"

    max_new_tokens: int = new_tokens_option(200)
    num_beams: int | None = option(
        None, "Beams of the search for a summary. (default: the model's own, or 1)", min=1, max=64
    )
    style: str | None = option(None, "bullets, paragraph or headline, by a model that follows instructions.")
    refine: bool = option(False, "Read parts in turn, each with the summary so far; needs an instruction model.")
    part_tokens: int | None = option(
        None, "Most tokens of a prompt with its summary; more are cut into parts. (default: the model's context)", min=1
    )
    compare: bool = option(
        False, "Decode with model.generate too: show both speeds, and whether the tokens are identical."
    )
    rows: int | None = option(None, "Most documents decoded together. (default: 16, on a GPU 32)", min=1, max=1024)


@dataclass(frozen=True, kw_only=True)
class JobOptions(DocumentOptions, KeptOptions, SummaryOptions):
    panel: ClassVar[str] = "Job"

    inputs: list[str] | None = option(None, INPUTS, argument=True, metavar="INPUTS", show_default=False)
    output: Path | None = option(None, "File for the summaries: a JSON line each, or .parquet.", "--output", "-o")
    id_field: str | None = option(None, "Field or column that names the document. (default: id, where there is one)")
    prediction_field: str | None = option(
        None, "Field or column with a text close to the expected summary, to draft from."
    )
    prompt_file: Path | None = option(
        None, "File with your own instruction; {document} in it stands for the document.", metavar="FILE"
    )
    as_json: bool = option(False, "Print JSON lines on stdout, as --format json does.", "--json")
    format: Literal["auto", "text", "json"] = option(
        "auto", "Format of stdout: text, json, or auto: text on a terminal, else JSON lines."
    )
    overwrite: bool = option(False, "Replace output files that exist.")
    resume: bool = option(False, "Continue an output: add its missing summaries.")
    rejects: Path | None = option(None, "File for documents that fail. (default: OUTPUT.rejects.jsonl)")
    retry_rejects: bool = option(False, "With --resume: try failed documents again.")
    limit: int | None = option(None, "Only the first N documents.", min=1)
    seed: int = option(0, "Seed of --dry-run and --min-p.")
    dry_run: bool = option(False, "Only count documents and tokens, and estimate the time.")
    ray: bool = option(False, "Use workers on a Ray cluster, or several on this machine.")
    ray_address: str | None = option(
        None,
        "The cluster: HOST:PORT, auto (on this machine), local (for this job). (default: auto, else local)",
        metavar="ADDRESS",
    )
    workers: int | None = option(
        None, "Number of workers. (default: one per GPU, or one per machine without GPUs)", min=1, max=1024
    )

    def check(self) -> None:
        """Refuse options that exclude each other with a ConfigError, before any work is done."""
        for name, other in (("pool", self.pool), ("memory", self.memory), ("prompt_file", self.prompt_file)):
            for path in (self.output, self.rejects):
                if other is not None and path is not None and os.path.realpath(other) == os.path.realpath(path):
                    raise ConfigError(f"{name} {other} cannot be a file that the job writes results or rejects to")
        is_address = self.ray_address in (None, "auto", "local") or ":" in str(self.ray_address)
        needs_ray = self.ray_address is not None or self.workers is not None
        for is_wrong, told in (
            (self.retry_rejects and not self.resume, "--retry-rejects repeats what failed before: add --resume"),
            (self.dry_run and self.resume, "--dry-run estimates a whole job; leave --resume out"),
            (needs_ray and not self.ray, "--ray-address and --workers are for --ray, which works on a cluster"),
            (self.ray and self.dry_run, "--dry-run measures the time on this machine alone; leave --ray out"),
            (not is_address, f"--ray-address must be HOST:PORT, auto or local, got {self.ray_address!r}"),
            (self.as_json and self.format == "text", "--json and --format text exclude each other"),
            (
                self.output is not None and (self.as_json or self.format != "auto"),
                "--json and --format are for stdout; with --output the summaries go to that file instead",
            ),
        ):
            if is_wrong:
                raise ConfigError(told)

    def settings(self) -> JobSettings:
        """What these options ask the job for; ConfigError if one of them is out of its range."""
        from lookahead.jobs.identity import JobSettings
        from lookahead.summarization.prompting import DEFAULT_SAMPLING, SummaryRequest

        path = self.prompt_file
        prompt = None if path is None else decode_bytes(read_bounded(str(path), MEGABYTE), str(path))
        request = SummaryRequest(prompt=prompt, style=self.style, refine=self.refine, part_tokens=self.part_tokens)
        own = {field.name for field in fields(self)}
        shared = {field.name: getattr(self, field.name) for field in fields(JobSettings) if field.name in own}
        if self.dtype == FASTEST:  # workers on several machines would choose several types
            shared["dtype"] = "auto"
        predicts = self.prediction_field is not None
        sampling = self.sampling
        if self.model == DEFAULT_MODEL and not {"repetition_penalty", "no_repeat_ngram_size"} & sampling.keys():
            sampling |= DEFAULT_SAMPLING
        return JobSettings(**shared, request=request, config=self.config(), predicts=predicts, sampling=sampling)

    def for_workers(self, settings: JobSettings) -> JobSettings:
        """These settings for processes in other folders, on this machine or others: with absolute paths."""
        location, is_local = locate_model(self.model)
        # Other machines may have the package, and with it the default model, in another folder.
        is_absolute = is_local and self.model != DEFAULT_MODEL
        location = str(Path(location).absolute()) if is_absolute else self.model
        paths: dict[str, Any] = {}
        for name in ("pool", "memory", "heads"):
            if (file := getattr(self, name)) is not None and (path := Path(os.path.expanduser(file))).exists():
                paths[name] = str(path.absolute())
        return replace(settings, location=location, config=replace(self, **paths).config())
