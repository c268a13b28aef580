"""The commands that make and check pools and memories: files to draft from."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lookahead.cli.commands import App
from lookahead.cli.options import INPUTS, DocumentOptions, ModelOptions, model_option, option
from lookahead.cli.terminal import ProgressBar, console, find_sources, load, say, show_line, table
from lookahead.documents.byte_sources import MEGABYTE
from lookahead.documents.decode_text import Reject
from lookahead.documents.inputs import Input, check_output
from lookahead.documents.readers import count_documents
from lookahead.errors import ConfigError, count
from lookahead.loading.loading import TOKENIZER_FILES, load_tokenizer, locate_model, prepare_files, prepare_process

if TYPE_CHECKING:
    from lookahead.ngram.memory_file import MemoryHeader
    from lookahead.proposers.pool_files import PoolTotals

_MODEL = "The model that will draft from it, or its tokenizer: a folder, a GGUF file, a name on the Hub."


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    file: str = option(help="The file.", argument=True, metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(FileOptions):
    model: str | None = model_option(None, "Check that it belongs to this model.")


@dataclass(frozen=True, kw_only=True)
class SourceOptions(DocumentOptions):
    inputs: list[str] = option(help=INPUTS, argument=True, metavar="INPUTS")
    max_tokens: int | None = option(None, "Most tokens to read. (default: all)", min=1)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    output: Path = option(MISSING, "The file to write.", "--output", "-o", metavar="FILE")
    overwrite: bool = option(False, "Replace the file if it exists.")


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
    max_contexts: int = option(1 << 18, "Most contexts in the file, 40 bytes each.", min=1024, max=1 << 26)


@dataclass(frozen=True, kw_only=True)
class MemoryAddOptions(FileOptions, SourceOptions, ModelOptions):
    pass


@dataclass(frozen=True, kw_only=True)
class MemoryMergeOptions(OutputOptions):
    files: list[str] = option(help="Memories of one model.", argument=True, metavar="FILES")
    max_contexts: int | None = option(
        None, "Most contexts in the file. (default: the largest limit of the merged files)", min=1024, max=1 << 26
    )


def pool_build(options: PoolBuildOptions) -> None:
    """Make a pool of documents.

    A document that cannot be read is reported and left out. The file appears when it is complete.

    For example:

      lookahead pool build corpus.jsonl --model ./my-model -o pool.lkp
      lookahead pool build 'notes/*.md' -m ./my-model -o pool.lkp
      lookahead pool build docs.jsonl --field body -m ./my-model -o pool.lkp
      lookahead summarize article.txt --model ./my-model --pool pool.lkp

    Exit status: 0 the pool holds all documents; 1 some were left out; 2 an argument is wrong, or nothing could be
    written; 130 interrupted, and nothing was written.
    """
    _fill(options, options.output, overwrite=options.overwrite)


def pool_add(options: PoolAddOptions) -> None:
    """Add documents to a pool.

    The new file replaces the old one when it is complete. Processes that have the old one open continue to read it.

    For example:

      lookahead pool add pool.lkp more.jsonl --model ./my-model
      cat notes.txt | lookahead pool add pool.lkp - --model ./my-model

    Exit status: 0 all documents were added; 1 some were left out; 2 an argument is
    wrong, or nothing could be written; 130 interrupted, and the pool is as it was.
    """
    _fill(options, Path(options.file), overwrite=True, add=True)


def pool_info(options: FileOptions) -> None:
    """Show the header of a pool file; its contents are not read.

    For example: lookahead pool info pool.lkp
    """
    from lookahead.ngram.pool_file import VERSION, PoolHeader
    from lookahead.proposers.pool_files import pool_errors

    with pool_errors(options.file):
        header = PoolHeader.read(options.file)
    rows = [
        ("pool", options.file),
        ("documents", f"{header.documents:,}"),
        ("tokens", f"{header.tokens:,}"),
        ("largest token id", str(header.largest_token)),
        ("bytes", f"{header.file_bytes:,}"),
        ("bytes per token", f"{header.file_bytes / header.tokens:.1f}"),
        ("tokenizer", f"{header.fingerprint:016x}"),
        ("checksum", f"{header.checksum:016x}"),
        ("format", f"version {VERSION}"),
    ]
    console(sys.stdout).print(table(rows))


def pool_verify(options: VerifyOptions) -> None:
    """Check every byte of a pool, and with --model that it was made for that model.

    For example:

      lookahead pool verify pool.lkp
      lookahead pool verify pool.lkp --model ./my-model

    Exit status: 0 it can be used; 2 it cannot, and a line says why.
    """
    from lookahead.proposers.pool_files import describe_pool, open_pool

    fingerprint, fits = None, ""
    if options.model is not None:
        tokenizer = _load_tokenizer(options.model)
        from lookahead.utils.fingerprints import tokenizer_fingerprint

        fingerprint, fits = tokenizer_fingerprint(tokenizer), f", made for {options.model}"
    header = open_pool(options.file, fingerprint=fingerprint).header
    show_line(sys.stdout, f"{describe_pool(options.file, header)}: intact{fits}")


def memory_build(options: MemoryBuildOptions) -> None:
    """Make a memory: the tokens that a model expects after each context of a text.

    The model reads the texts and generates nothing. Without texts it reads every token of its vocabulary once, which
    takes minutes on a CPU. If there are more contexts than fit, the last ones are kept. Decoding with --memory drafts
    from the file and adds to it.

    For example:

      lookahead memory build --model ./my-model -o my-model.lkm
      lookahead memory build corpus.jsonl --model ./my-model -o my-model.lkm
      lookahead memory build 'notes/*.md' --max-tokens 100000 -o smollm2.lkm
      lookahead generate - --model ./my-model --memory my-model.lkm < prompt.txt

    Exit status: 0 all documents were read; 1 some were left out; 2 an argument is wrong, or nothing could be written;
    130 interrupted, and nothing was written.
    """
    _check_name(options.output)
    _fill(options, options.output, overwrite=options.overwrite, max_contexts=options.max_contexts)


def memory_add(options: MemoryAddOptions) -> None:
    """Add more texts to a memory.

    For example: lookahead memory add my-model.lkm more.jsonl --model ./my-model

    Exit status: 0 all documents were read; 1 some were left out; 2 an argument is
    wrong, or nothing could be written; 130 interrupted, and the memory is as it was.
    """
    _fill(options, Path(options.file), overwrite=True)


def memory_merge(options: MemoryMergeOptions) -> None:
    """Merge memories of one model into one.

    If several files hold the same context, the newest entry stays. Every byte is checked, and a memory of another model
    is refused.

    For example: lookahead memory merge monday.lkm tuesday.lkm -o week.lkm

    Exit status: 0 it is written; 2 a file cannot be used, and nothing was written.
    """
    from lookahead.proposers.memory_files import merge_files

    _check_name(options.output)
    check_output(options.output, [Input(file, None, "text") for file in options.files], overwrite=options.overwrite)
    header = merge_files(str(options.output), options.files, options.max_contexts)
    show_line(sys.stderr, _describe_memory(str(options.output), header))


def memory_info(options: FileOptions) -> None:
    """Show the header of a memory file; its contents are not read.

    For example: lookahead memory info my-model.lkm
    """
    from lookahead.ngram.memory_file import VERSION, MemoryHeader
    from lookahead.proposers.pool_files import pool_errors

    with pool_errors(options.file):
        header = MemoryHeader.read(options.file)
    rows = [
        ("memory", options.file),
        ("contexts", f"{header.contexts:,}"),
        ("most contexts", f"{header.max_contexts:,}"),
        ("vocabulary", f"{header.vocabulary:,}"),
        ("bytes", f"{header.file_bytes:,}"),
        ("model", f"{header.fingerprint:016x}"),
        ("checksum", f"{header.checksum:016x}"),
        ("format", f"version {VERSION}"),
    ]
    console(sys.stdout).print(table(rows))


def memory_verify(options: VerifyOptions) -> None:
    """Check every byte of a memory, and with --model that it was learned from that model.

    For example:

      lookahead memory verify my-model.lkm
      lookahead memory verify my-model.lkm --model ./my-model

    Exit status: 0 it can be used; 2 it cannot, and a line says why.
    """
    from lookahead.ngram.memory_file import read_memory
    from lookahead.proposers.pool_files import pool_errors

    header, fits = None, ""
    if options.model is not None:
        model = load(ModelOptions(model=options.model), measures_costs=False).model
        from lookahead.proposers.memory_files import header_of

        header, fits = header_of(model), f", learned from {options.model}"
    with pool_errors(options.file):
        header = read_memory(options.file, header)[0]
    show_line(sys.stdout, f"{_describe_memory(options.file, header)}: intact{fits}")


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


def _fill(options: Any, output: Path, *, overwrite: bool, **settings: Any) -> None:
    """Write what documents give, a memory if a model is loaded, else a pool; inputs and file are checked first."""
    inputs = find_sources(options.inputs, options.field)[0] if options.inputs else []
    check_output(output, inputs, overwrite=overwrite)
    display, is_memory = PoolDisplay(count_documents(inputs)), isinstance(options, ModelOptions)
    if is_memory:
        settings["model"], tokenizer = load(options, measures_costs=False)
    else:
        tokenizer = _load_tokenizer(options.model)
    from lookahead.decoding.memory_building import build_memory
    from lookahead.proposers.pool_files import TokenSource, build_pool, describe_pool

    build: Any = build_memory if is_memory else build_pool
    describe: Any = _describe_memory if is_memory else describe_pool
    source = TokenSource(inputs, tokenizer, display, options.max_tokens, int(options.max_document_mb * MEGABYTE))
    with display:
        header = build(str(output), source, **settings)
    show_line(sys.stderr, f"{source.totals}\n{describe(str(output), header)}")
    raise typer.Exit(1 if source.totals.rejected else 0)


def _load_tokenizer(model: str) -> Any:
    location, _ = locate_model(model, TOKENIZER_FILES)
    with console(sys.stderr).status("loading the tokenizer"):
        prepare_process(None)
        prepare_files(location, announce=lambda line: say("note", line))
        return load_tokenizer(model)


def _check_name(output: Path) -> None:
    if output.suffix != ".lkm":  # --memory takes no other name
        raise ConfigError(f"output must be a file *.lkm, got {str(output)!r}")


def _describe_memory(path: str, header: MemoryHeader) -> str:
    return f"{path}: {count(header.contexts, 'context')}"


pool_app = App(help="Make pools: files of your documents to draft from.")
memory_app = App(help="Make memories: files of the tokens that a model expects after each context, to draft from.")
for pool_command in (pool_build, pool_add, pool_info, pool_verify):
    pool_app.add(pool_command, pool_command.__name__.removeprefix("pool_"))
for memory_command in (memory_build, memory_add, memory_info, memory_verify, memory_merge):
    memory_app.add(memory_command, memory_command.__name__.removeprefix("memory_"))
