"""The options of the commands, each declared once, and job files, which hold those of `lookahead summarize` in TOML.

The command line flags, the keys of a job file, the arguments of a Ray worker and the identity of a job are all read
from these dataclasses. A field without a help text is not a flag.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar, cast

from lookahead.config import LookaheadConfig, refuse_removed
from lookahead.documents.byte_sources import MEGABYTE, read_bounded
from lookahead.documents.decode_text import decode_bytes
from lookahead.errors import ConfigError
from lookahead.hf.loading import DEFAULT_MODEL, locate_model
from lookahead.utils.atomic import read_regular

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

INPUTS = (
    "Files (.txt .md .html .pdf .docx .jsonl .csv .tsv .parquet), folders, patterns such as 'notes/*.md', URLs of any "
    "kind fsspec knows (https:// s3:// hf:// ...), - for stdin."
)
FORMATS = ("auto", "text", "json")
# How errors name the type of an option, and the TOML types it accepts. Click converts a number to a string: window = 7.
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "str": ("a string", (str, int)),
    "Path": ("a string", (str, int)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
    "list[str]": ("a list of strings", (list,)),
}


def option(default: Any = MISSING, help: str = "", *flags: str, identifies: bool = False, **details: Any) -> Any:
    """A field that is an option; without a default it is required.

    The flags are its names on the command line, none for `--name`. One that `identifies` is part of the identity of a
    job. The details are those of `typer.Option` (`min`, `max`, `metavar`, ...), with `argument=True` those of an
    argument.
    """
    return field(default=default, metadata={"help": help, "flags": flags, "identifies": identifies, **details})


def new_tokens_option(default: int, help: str = "Most tokens to write.", *, min: int = 1, **details: Any) -> Any:
    """The option that limits new tokens, under its two names."""
    return option(default, help, "--max-new-tokens", "--max-tokens", min=min, **details)


def options_of(kind: type) -> list[tuple[Field[Any], type]]:
    """The options of a dataclass with the classes that declare them; a class comes before its bases."""
    classes = kind.__mro__
    owners = {name: i for i, owner in enumerate(classes) for name in get_annotations(owner)}
    ordered = sorted(fields(kind), key=lambda each: owners[each.name])
    return [(each, classes[owners[each.name]]) for each in ordered if each.metadata.get("help")]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    panel: ClassVar[str] = "Model"

    dtype: str = option(
        "auto", "fp32, bf16, fp16, or auto: the checkpoint's own on a GPU, fp32 on a CPU, bf16 with --quantize."
    )
    quantize: str | None = option(
        None, "Linear layers with weights of 8 bits (int8) or 4 (int4), on a CPU.", metavar="int8|int4"
    )
    device: str | None = option(None, "cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    threads: int | None = option(None, "CPU threads. (default: as PyTorch chooses)", min=1, max=1024)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DeviceOptions):
    panel: ClassVar[str] = "Model"

    model: str = option(DEFAULT_MODEL, "Folder of a saved model, a GGUF file, a name on the Hub, or smollm2.")


@dataclass(frozen=True, kw_only=True)
class DraftingOptions:
    panel: ClassVar[str] = "Drafting"

    proposers: str = option(
        ",".join(map(str, LookaheadConfig().proposers)),
        "Sources of drafts: any of prompt, outputs, corpus, recycled, jacobi; or none.",
    )
    pool: str | None = option(None, "Draft from a corpus too, made by 'lookahead pool build'.", metavar="FILE")
    memory: str | None = option(
        None,
        "Start from what the model taught earlier commands, and keep what it teaches this one.",
        metavar="FILE.lkm",
    )
    heads: str | None = option(None, "Draft with heads too: from 'lookahead train', or native.", metavar="DIR")
    max_nodes: int | None = option(None, "Most draft tokens a step verifies. (default: by the proposers)")
    window: str | None = option(None, "Draft from a Jacobi window of W columns too; auto: of 7, only while it pays.")
    ngram_size: int | None = option(None, "N, length of the window's n-grams. (default: 5)")
    guesses: int | None = option(None, "G, most n-grams of the window that a step verifies. (default: 7)")
    exactness: str = option("auto", "auto, or fast: quicker drafts in bf16, whose rounding may change a token.")
    cuda_graphs: bool = option(False, "Record the model's passes as CUDA graphs, on a GPU.")

    def config(self) -> LookaheadConfig | None:
        """The configuration, checked; `None` for defaults alone, with which any model is decoded, if only plainly."""
        sources: list[Any] = [] if self.proposers == "none" else [name.strip() for name in self.proposers.split(",")]
        if self.heads is not None:
            if (quantize := getattr(self, "quantize", None)) is not None:
                raise ConfigError(f"heads draft for a model that is not quantized, got --quantize {quantize}")
            from lookahead.proposers.heads import Heads

            sources.append(Heads(self.heads))
        columns: Any = int(self.window) if self.window is not None and self.window.isdecimal() else self.window
        config = LookaheadConfig(
            proposers=sources, pool=self.pool, max_nodes=self.max_nodes, window=columns, ngram_size=self.ngram_size,
            guesses=self.guesses, exactness=cast(Any, self.exactness),
            cuda_graphs=self.cuda_graphs, memory="shared" if self.memory is None else self.memory,
        )  # fmt: skip
        return None if config == LookaheadConfig() else config


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(DraftingOptions, ModelOptions):
    """Everything a worker process needs to summarize documents, as numbers and strings."""

    panel: ClassVar[str] = "Summaries"

    location: str | None = None  # where workers load the model from; `None` is `model`
    max_new_tokens: int = new_tokens_option(200, identifies=True)
    num_beams: int | None = option(
        None, "Beams of the search for a summary. (default: the model's own, or 1)", min=1, max=64
    )
    prompt: str | None = field(default=None, metadata={"identifies": True})  # the text of the prompt file
    style: str | None = option(
        None, "bullets, paragraph or headline, by a model that follows instructions.", identifies=True
    )
    overlap: int = option(0, "Tokens that each part of a long document repeats of the part before.", identifies=True)
    refine: bool = option(
        False, "Read parts in turn, each with the summary so far; takes an instruction model.", identifies=True
    )
    keep_parts: bool = option(False, "Write the summaries of parts too, level by level.", identifies=True)
    compare: bool = option(False, "Decode plainly too: show both speeds, and whether the tokens are identical.")
    rows: int | None = option(None, "Most documents decoded together. (default: 16, on a GPU 32)", min=1, max=1024)

    @property
    def identity(self) -> dict[str, Any]:
        """The options that are part of the identity of the job."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.metadata.get("identifies")}

    def summarizer_settings(self) -> dict[str, Any]:
        """The keyword arguments of `Summarizer`, checked; ConfigError if an option is out of its range."""
        from lookahead.summarization.prompting import SummaryRequest

        return {
            "max_new_tokens": self.max_new_tokens,
            "num_beams": self.num_beams,
            "request": SummaryRequest(prompt=self.prompt, style=self.style, overlap=self.overlap, refine=self.refine),
            "keep_parts": self.keep_parts,
            "config": self.config(),
            "compare": self.compare,
        }


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    panel: ClassVar[str] = "Documents"

    field: str | None = option(
        None, "Field or column with the document; makes - JSON lines. (default: text)", "--field", "--text-field"
    )
    max_document_mb: float = option(64.0, "Longest document, in megabytes.", min=0.001, max=1_000_000)


@dataclass(frozen=True, kw_only=True)
class JobOptions(DocumentOptions, WorkerOptions):
    """A job of `lookahead summarize`: what a job file can set."""

    panel: ClassVar[str] = "Job"

    inputs: list[str] | None = option(None, INPUTS, argument=True, metavar="INPUTS...", show_default=False)
    output: Path | None = option(None, "File for the summaries: a JSON line each, or .parquet.", "--output", "-o")
    id_field: str | None = option(None, "Field or column that names the document. (default: id, where there is one)")
    prompt_file: Path | None = option(
        None, "Instruction in your words; {document} in it stands for the document.", metavar="FILE"
    )
    format: str = option("auto", "Format of stdout: text, json, or auto: text on a terminal, else JSON lines.")
    overwrite: bool = option(False, "Replace output files that exist.")
    resume: bool = option(False, "Continue an output: do what is missing in it.")
    rejects: Path | None = option(None, "File for documents that fail. (default: OUTPUT.rejects.jsonl)")
    retry_rejects: bool = option(False, "With --resume: try documents that failed again.")
    limit: int | None = option(None, "Only the first N documents.", min=1)
    sample: int | None = option(None, "Only N documents, drawn at random.", min=1)
    seed: int = option(0, "Seed of --sample and --dry-run: the same seed draws the same documents.")
    dry_run: bool = option(False, "Only count documents and tokens, and estimate the time.")
    price_per_hour: float | None = option(
        None, "Price of an hour on this machine, for --dry-run.", min=0, max=1_000_000
    )
    pool: str | None = option(
        None,
        "Draft from this too: a corpus made by 'lookahead pool build', or a file that keeps this job's outputs for "
        "later jobs.",
        metavar="FILE",
    )
    ray: bool = option(False, "Use workers on a Ray cluster, or several on this machine.")
    ray_address: str | None = option(
        None,
        "The cluster: HOST:PORT, auto (on this machine), local (for this job). (default: auto, else local)",
        metavar="ADDRESS",
    )
    workers: int | None = option(
        None, "Workers, each with the model. (default: one a GPU, without GPUs one a machine)", min=1, max=1024
    )

    def check(self) -> None:
        """Refuse options that exclude each other with a ConfigError, before any work is done."""
        self.summarizer_settings()
        for name, other in (("pool", self.pool), ("memory", self.memory), ("prompt_file", self.prompt_file)):
            for path in (self.output, self.rejects):
                if other is not None and path is not None and os.path.realpath(other) == os.path.realpath(path):
                    raise ConfigError(f"{name} {other} cannot be a file that the job writes results or rejects to")
        if self.retry_rejects and not self.resume:
            raise ConfigError("--retry-rejects tries again what an earlier run put aside; it needs --resume")
        if self.price_per_hour is not None and not self.dry_run:
            raise ConfigError("--price-per-hour is for --dry-run, which estimates the cost")
        if self.dry_run and self.resume:
            raise ConfigError("--dry-run estimates a whole job; leave --resume out")
        if not self.ray and (self.ray_address is not None or self.workers is not None):
            raise ConfigError("--ray-address and --workers are for --ray, which works on a cluster")
        if self.ray and self.dry_run:
            raise ConfigError("--dry-run measures the time on this machine alone; leave --ray out")
        if self.format not in FORMATS:
            raise ConfigError(f"format must be {', '.join(FORMATS)}, got {self.format!r}")
        if self.output is not None and self.format != "auto":
            raise ConfigError("format is that of stdout; with --output the summaries go to that file as JSON lines")

    def read_prompt_file(self) -> str | None:
        """The text of the prompt file, if one is given."""
        path = self.prompt_file
        return None if path is None else decode_bytes(read_bounded(str(path), MEGABYTE), str(path))

    def for_workers(self) -> dict[str, Any]:
        """The arguments of `WorkerOptions`, with absolute paths."""
        location, is_local = locate_model(self.model)
        sent = {each.name: getattr(self, each.name) for each in fields(WorkerOptions)}
        # Other machines may have the package, and with it the default model, in another folder.
        is_absolute = is_local and self.model != DEFAULT_MODEL
        sent["location"] = str(Path(location).absolute()) if is_absolute else self.model
        for name in ("pool", "memory", "heads"):
            if sent[name] is not None and (path := Path(sent[name]).expanduser()).exists():
                sent[name] = str(path.absolute())
        return sent


def read_job_file(path: Path) -> dict[str, Any]:
    """The options in a job file, by the fields of `JobOptions`; ConfigError with the file and what is wrong in it."""
    try:
        table = tomllib.loads(read_regular(path).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"job {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"job {path}: not valid TOML: {error}") from error
    names, values = _names(), dict[str, Any]()
    refuse_removed((name.replace("-", "_") for name in table), f"job {path}: ")
    for name, value in table.items():
        option = names.get(name.replace("_", "-"))
        if option is None:
            raise ConfigError(f"job {path}: no option {name!r}; the options are {', '.join(names)}")
        if option.name in values:
            raise ConfigError(f"job {path}: {name} stands there twice, with - and with _")
        allowed, types = _TYPES[str(option.type).removesuffix(" | None")]
        least, most = option.metadata.get("min", -math.inf), option.metadata.get("max", math.inf)
        if list in types:
            value = [value] if isinstance(value, str) else value
            is_right = isinstance(value, list) and all(isinstance(each, str) for each in value)
        else:  # of exactly this type, since bool is a subclass of int
            is_right = type(value) in types and (isinstance(value, str) or least <= value <= most)
        if not is_right:
            if "min" in option.metadata:
                allowed += f" of at least {least}" if most == math.inf else f" from {least} to {most}"
            received = str(value).lower() if isinstance(value, bool) else repr(value)
            raise ConfigError(f"job {path}: {name} must be {allowed}, got {received}")
        values[option.name] = value
    return values


def to_toml(options: JobOptions) -> str:
    """All options as a job file, without those that are `None`."""
    values = {name: getattr(options, option.name) for name, option in _names().items()}
    set_values = ((name, value) for name, value in values.items() if value is not None)
    lines = "".join(f"{name} = {json.dumps(value, ensure_ascii=False, default=str)}\n" for name, value in set_values)
    # JSON values are TOML values, except for the delete character and lone surrogates in strings.
    return lines.replace("\x7f", "\\u007f").encode("utf-8", "replace").decode()


def _names() -> dict[str, Field[Any]]:
    """The options by their keys in a job file: the longest flag without dashes."""
    named = [(max(each.metadata["flags"] or (each.name,), key=len), each) for each, _ in options_of(JobOptions)]
    return {name.lstrip("-").replace("_", "-"): each for name, each in named}
