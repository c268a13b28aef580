"""The commands that make and check memory files of a model."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path

from lookahead.cli.options import App
from lookahead.cli.terminal import console, fill, find_sources, load, table
from lookahead.jobs.job_options import INPUTS, DocumentOptions, ModelOptions, option


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Options of `lookahead memory info`."""

    memory: str = option(help="A memory file.", argument=True, metavar="MEMORY")


@dataclass(frozen=True, kw_only=True)
class MemoryVerifyOptions(MemoryOptions):
    """Options of `lookahead memory verify`."""

    model: str | None = option(None, "Check that it was learned from this model.")


@dataclass(frozen=True, kw_only=True)
class MemoryAddOptions(DocumentOptions, ModelOptions):
    """Options of `lookahead memory add`."""

    memory: str = option(help="A memory file.", argument=True, metavar="MEMORY")
    inputs: list[str] = option(help=INPUTS, argument=True, metavar="INPUTS...")
    max_tokens: int | None = option(None, "Most tokens to read. (default: all)", min=1)


@dataclass(frozen=True, kw_only=True)
class MemoryBuildOptions(DocumentOptions, ModelOptions):
    """Options of `lookahead memory build`."""

    inputs: list[str] = option(help=INPUTS, argument=True, metavar="INPUTS...")
    output: Path = option(MISSING, "The memory file to write.", "--output", "-o", metavar="MEMORY")
    max_contexts: int = option(1 << 18, "Most contexts that it may hold, 40 bytes each.", min=1024, max=1 << 26)
    max_tokens: int | None = option(None, "Most tokens to read. (default: all)", min=1)
    overwrite: bool = option(False, "Replace the memory if it exists.")


def build(options: MemoryBuildOptions) -> None:
    """Make a memory of texts: the model reads them, and what it expects after each context is kept.

    Nothing is generated. Where there are more contexts than fit, those read last
    are kept. Decoding with --memory starts from them and adds its own.

    For example:

      lookahead memory build corpus.jsonl --model ./my-model -o my-model.lkm
      lookahead memory build 'notes/*.md' --model ./my-model --max-tokens 100000 -o my-model.lkm
      lookahead generate - --model ./my-model --memory my-model.lkm < prompt.txt

    Exit status: 0 all documents were read; 1 some are left out; 2 an argument is
    wrong, or nothing could be written; 130 interrupted, and nothing was written.
    """
    _fill(options, options.output, overwrite=options.overwrite, max_contexts=options.max_contexts)


def add(options: MemoryAddOptions) -> None:
    """Add what a model expects in more texts to a memory.

    For example: lookahead memory add my-model.lkm more.jsonl --model ./my-model

    Exit status: 0 all documents were read; 1 some were left out; 2 an argument is
    wrong, or nothing could be written; 130 interrupted, and the memory is as it was.
    """
    _fill(options, Path(options.memory), overwrite=True, max_contexts=None)


def _fill(
    options: MemoryBuildOptions | MemoryAddOptions, output: Path, *, overwrite: bool, max_contexts: int | None
) -> None:
    """Write a memory of documents and show the progress."""
    sources = find_sources(options.inputs, options.field, output, overwrite=overwrite)
    model, tokenizer = load(options, measures_costs=False)
    from lookahead.generation.model_memory import build_memory

    make = partial(build_memory, max_contexts=max_contexts, max_tokens=options.max_tokens)
    path = str(output)
    fill(options, sources, lambda **reading: _line(path, make(path, model, tokenizer, **reading).contexts))


def info(options: MemoryOptions) -> None:
    """Show the header of a memory file; its contents are not read.

    For example: lookahead memory info my-model.lkm
    """
    from lookahead.ngram.memory_file import VERSION, read_memory_header
    from lookahead.pools.open_pool import pool_errors

    with pool_errors(options.memory):
        header = read_memory_header(options.memory)
    rows = [
        ("memory", options.memory),
        ("contexts", f"{header.contexts:,}"),
        ("most contexts", f"{header.max_contexts:,}"),
        ("vocabulary", f"{header.vocabulary:,}"),
        ("bytes", f"{header.file_bytes:,}"),
        ("model", f"{header.fingerprint:016x}"),
        ("checksum", f"{header.checksum:016x}"),
        ("format", f"version {VERSION}"),
    ]
    console(sys.stdout).print(table(("", ""), rows))


def verify(options: MemoryVerifyOptions) -> None:
    """Check every byte of a memory, and with --model that it was learned from that model.

    For example:

      lookahead memory verify my-model.lkm
      lookahead memory verify my-model.lkm --model ./my-model

    Exit status: 0 it can be used; 2 it cannot, and a line says why.
    """
    from lookahead.ngram.memory_file import read_memory
    from lookahead.pools.open_pool import pool_errors

    header = None
    if options.model is not None:
        model = load(ModelOptions(model=options.model), measures_costs=False).model
        from lookahead.proposers.file_memory import header_of

        header = header_of(model)
    with pool_errors(options.memory):
        contexts = read_memory(options.memory, header)[0].contexts
    fits = "" if options.model is None else f", learned from {options.model}"
    console(sys.stdout).print(f"{_line(options.memory, contexts)}: whole{fits}")


def _line(path: str, contexts: int) -> str:
    """The size of a memory in one line."""
    return f"{path}: {contexts:,} context{'' if contexts == 1 else 's'}"


memory_app = App(help="Make memories: files of what a model expects after each context, to draft from.")
for command in (build, add, info, verify):
    memory_app.add(command)
