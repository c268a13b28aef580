"""The commands that make and check files to draft from: build, add, info and merge, for pools and for memories."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from lookahead import prepare_process
from lookahead.cli.commands import App
from lookahead.cli.options import INPUTS, DocumentOptions, ModelOptions, check_draft_file, model_option, option
from lookahead.cli.terminal import ProgressBar, console, find_sources, load, say, show_line, table
from lookahead.documents.byte_sources import MEGABYTE
from lookahead.documents.decode_text import Reject
from lookahead.documents.inputs import Input, check_output
from lookahead.documents.readers import count_documents
from lookahead.errors import ConfigError, count, pool_errors
from lookahead.loading.loading import TOKENIZER_FILES, load_tokenizer, locate_model, prepare_files

if TYPE_CHECKING:
    from lookahead.proposers.pool_files import PoolTotals

Kind = Literal["pool", "memory"]
_MODEL = "The model that will draft from it, or its tokenizer: a folder, a GGUF file, a name on the Hub."
_CONTEXTS: dict[str, Any] = {"min": 1024, "max": 1 << 26}


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    file: str = option(help="The file.", argument=True, metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class InfoOptions(FileOptions):
    model: str | None = model_option(None, "Check that the file was made for this model.")


@dataclass(frozen=True, kw_only=True)
class SourceOptions(DocumentOptions):
    inputs: list[str] = option(help=INPUTS, argument=True, metavar="INPUTS")
    max_tokens: int | None = option(None, "Most tokens to read. (default: all)", min=1)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    output: Path = option(MISSING, "The file to write.", "--output", "-o", metavar="FILE")
    overwrite: bool = option(False, "Replace the file if it exists.")


@dataclass(frozen=True, kw_only=True)
class MergeOptions(OutputOptions):
    files: list[str] = option(help="The files to merge.", argument=True, metavar="FILES")


@dataclass(frozen=True, kw_only=True)
class PoolBuildOptions(SourceOptions, OutputOptions):
    model: str = model_option(help=_MODEL)


@dataclass(frozen=True, kw_only=True)
class PoolAddOptions(FileOptions, SourceOptions):
    model: str = model_option(help=_MODEL)


@dataclass(frozen=True, kw_only=True)
class MemoryBuildOptions(SourceOptions, OutputOptions, ModelOptions):
    inputs: list[str] = option(
        (), f"{INPUTS} (default: the vocabulary)", argument=True, metavar="INPUTS", show_default=False
    )
    max_contexts: int = option(1 << 18, "Most contexts in the file, 40 bytes each.", **_CONTEXTS)


@dataclass(frozen=True, kw_only=True)
class MemoryAddOptions(FileOptions, SourceOptions, ModelOptions):
    pass


@dataclass(frozen=True, kw_only=True)
class MemoryMergeOptions(MergeOptions):
    max_contexts: int | None = option(
        None, "Most contexts in the file. (default: the largest limit of the merged files)", **_CONTEXTS
    )


def build(kind: Kind, options: Any) -> None:
    """Make a {kind} of documents.

    {about} A document that cannot be read is reported and left out. The file appears when it is complete.

    For example:

      lookahead {kind} build corpus.jsonl --model ./my-model -o model{suffix}
      lookahead {kind} build docs.jsonl --field body -m ./my-model -o model{suffix}
      lookahead {kind} build 'notes/*.md' -m ./my-model -o model{suffix}
      lookahead generate - --model ./my-model --{kind} model{suffix} < prompt.txt

    Exit status: 0 all documents were read; 1 some were left out; 2 an argument is wrong, or nothing could be written;
    130 interrupted, and nothing was written.
    """
    _check_name(kind, options.output)
    _fill(kind, options, options.output, overwrite=options.overwrite)


def add(kind: Kind, options: Any) -> None:
    """Add documents to a {kind}.

    The new file replaces the old one when it is complete. Processes that have the old one open continue to use it.

    For example:

      lookahead {kind} add model{suffix} more.jsonl --model ./my-model
      cat notes.txt | lookahead {kind} add model{suffix} - --model ./my-model

    Exit status: 0 all documents were read; 1 some were left out; 2 an argument is wrong, or nothing could be written;
    130 interrupted, and the file is as it was.
    """
    _fill(kind, options, Path(options.file), overwrite=True, adds=True)


def info(kind: Kind, options: InfoOptions) -> None:
    """Show what a {kind} holds, after a check of every byte, and with --model that it was made for that model.

    For example:

      lookahead {kind} info model{suffix}
      lookahead {kind} info model{suffix} --model ./my-model

    Exit status: 0 it can be used; 2 it cannot, and a line says why.
    """
    header = _read_header(kind, options.file, options.model)
    rows = {
        kind: options.file,
        **{name.replace("_", " "): f"{getattr(header, name):,}" for name in header.shown},
        "bytes": f"{header.file_bytes:,}",
        header.owner: f"{header.fingerprint:016x}",
        "checksum": f"{header.checksum:016x}",
        "format": f"version {header.version}",
    }
    console(sys.stdout).print(table([*rows.items()]))


def merge(kind: Kind, options: Any) -> None:
    """Merge several files into one {kind}.

    {merging} Every byte is checked, and a file of another {owner} is refused.

    For example: lookahead {kind} merge monday{suffix} tuesday{suffix} -o week{suffix}

    Exit status: 0 it is written; 2 a file cannot be used, and nothing was written.
    """
    from lookahead.proposers.memory_files import merge_memories
    from lookahead.proposers.pool_files import merge_pools

    output = str(options.output)
    _check_name(kind, options.output)
    check_output(options.output, [Input(file) for file in options.files], overwrite=options.overwrite)
    limited = partial(merge_memories, max_contexts=getattr(options, "max_contexts", None))
    merge_files: Callable[..., Any] = merge_pools if kind == "pool" else limited
    show_line(sys.stderr, f"{output}: {_describe(merge_files(output, options.files))}")


class PoolDisplay(ProgressBar):
    """The progress of a file of documents, with errors on stderr."""

    def __init__(self, total: int | None) -> None:
        super().__init__("documents, {task.fields[tokens]:,} tokens{task.fields[stage]}", total, tokens=0, stage="")

    def __call__(self, totals: PoolTotals, reject: Reject | None) -> None:
        """Show a rejected document, and the progress."""
        if reject is not None:
            say("error", reject.error)
        stage = ", indexing and writing" if totals.is_read else ""
        self.update(self._task, completed=totals.documents + totals.rejected, tokens=totals.tokens, stage=stage)


def _fill(kind: Kind, options: Any, output: Path, *, overwrite: bool, adds: bool = False) -> None:
    """Write what documents give; inputs and file are checked before a model is loaded."""
    inputs = find_sources(options.inputs, field=options.field)[0] if options.inputs else []
    check_output(output, inputs, overwrite=overwrite)
    display, settings = PoolDisplay(count_documents(inputs)), dict[str, Any]()
    if kind == "pool":
        tokenizer, settings["adds"] = load_tokenizer_of(options.model), adds
    else:
        settings["model"], tokenizer = load(options, measures_costs=False)
        settings["max_contexts"] = None if adds else options.max_contexts
    from lookahead.decoding.memory_building import build_memory
    from lookahead.proposers.pool_files import TokenSource, build_pool

    build_file: Callable[..., Any] = build_pool if kind == "pool" else build_memory
    source = TokenSource(inputs, tokenizer, display, options.max_tokens, int(options.max_document_mb * MEGABYTE))
    with display:
        header = build_file(str(output), source, **settings)
    show_line(sys.stderr, f"{source.totals}\n{output}: {_describe(header)}")
    raise typer.Exit(1 if source.totals.rejected else 0)


def _read_header(kind: Kind, path: str, model: str | None) -> Any:
    """The header of a file after a check of every byte, and that it was made for a model."""
    check_draft_file(kind, path)
    tokenizer = load_tokenizer_of(model) if model is not None and kind == "pool" else None
    loaded = load(ModelOptions(model=model), measures_costs=False) if model is not None and kind == "memory" else None
    from lookahead.ngram.memory_file import read_memory
    from lookahead.proposers.memory_files import header_of
    from lookahead.proposers.pool_files import open_pool
    from lookahead.utils.fingerprints import tokenizer_fingerprint

    if kind == "pool":
        return open_pool(path, fingerprint=None if tokenizer is None else tokenizer_fingerprint(tokenizer)).header
    fits = None if loaded is None else header_of(loaded.model)
    with pool_errors(path):
        return read_memory(path, fits)[0]


def load_tokenizer_of(model: str) -> Any:
    """The tokenizer of a model, with a status line while it is loaded."""
    location, _ = locate_model(model, TOKENIZER_FILES)
    with console(sys.stderr).status("loading the tokenizer"):
        prepare_process(None)
        prepare_files(location, announce=lambda line: say("note", line))
        return load_tokenizer(model)


def _check_name(kind: Kind, output: Path) -> None:
    if kind == "memory" and output.suffix != ".lkm":  # --memory takes no other name
        raise ConfigError(f"output must be a file *.lkm, got {str(output)!r}")
    if output.exists() and not (output.is_file() or output.is_dir()):
        raise ConfigError(f"output {output} is not a regular file")


def _describe(header: Any) -> str:
    if header.kind == "memory":
        return count(header.contexts, "context")
    return f"{header.tokens:,} tokens in {count(header.documents, 'document')}"


def _app(kind: Kind, options: tuple[type, ...], purpose: str, **words: str) -> App:
    app = App(help=purpose)
    for command, kinds in zip((build, add, info, merge), options, strict=True):
        app.add(update_wrapper(partial(command, kind), command), kinds, kind=kind, **words)
    return app


pool_app = _app(
    "pool",
    (PoolBuildOptions, PoolAddOptions, InfoOptions, MergeOptions),
    "Make pools: files of your documents to draft from.",
    about="It holds their tokens: only the tokenizer of the model is loaded.",
    merging="It holds the documents of all, in the order of the files.",
    owner="tokenizer",
    suffix=".lkp",
)
memory_app = _app(
    "memory",
    (MemoryBuildOptions, MemoryAddOptions, InfoOptions, MemoryMergeOptions),
    "Make memories: files of the tokens that a model expects after each context, to draft from.",
    about=(
        "It holds the tokens that the model expects after each context: the model reads the texts and generates "
        "nothing. Without texts it reads every token of its vocabulary once, which takes minutes on a CPU. If there "
        "are more contexts than fit, the last ones are kept. Decoding with --memory drafts from the file and adds to "
        "it."
    ),
    merging="If several files hold the same context, the newest entry stays.",
    owner="model",
    suffix=".lkm",
)
