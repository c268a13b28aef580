"""The commands that make and check pools of documents."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead.cli.options import App
from lookahead.cli.terminal import console, convert, fill, find_sources, table
from lookahead.jobs.job_options import INPUTS, DocumentOptions, option
from lookahead.models.loading import locate_model

if TYPE_CHECKING:
    from lookahead.ngram.pool_file import PoolHeader

_MODEL = "The model that will draft from it, or its tokenizer: a folder, a GGUF file, a name on the Hub."


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """Options of `lookahead pool info`."""

    pool: str = option(help="A pool file.", argument=True, metavar="POOL")


@dataclass(frozen=True, kw_only=True)
class PoolVerifyOptions(PoolOptions):
    """Options of `lookahead pool verify`."""

    model: str | None = option(None, "Check that it was made for this model.")


@dataclass(frozen=True, kw_only=True)
class PoolAddOptions(DocumentOptions):
    """Options of `lookahead pool add`."""

    pool: str = option(help="A pool file.", argument=True, metavar="POOL")
    inputs: list[str] = option(help=INPUTS, argument=True, metavar="INPUTS...")
    model: str = option(help=_MODEL)


@dataclass(frozen=True, kw_only=True)
class PoolBuildOptions(DocumentOptions):
    """Options of `lookahead pool build`."""

    inputs: list[str] = option(help=INPUTS, argument=True, metavar="INPUTS...")
    output: Path = option(MISSING, "The pool file to write.", "--output", "-o", metavar="POOL")
    model: str = option(help=_MODEL)
    max_tokens: int | None = option(None, "Most tokens to take. (default: all)", min=1)
    overwrite: bool = option(False, "Replace the pool if it exists.")


def build(options: PoolBuildOptions) -> None:
    """Make a pool of documents.

    A document that cannot be read is reported and left out. The file appears only
    when all of it is written.

    For example:

      lookahead pool build corpus.jsonl --model ./my-model -o pool.lkp
      lookahead pool build 'notes/*.md' docs.jsonl --field body --model ./my-model -o pool.lkp
      lookahead summarize article.txt --model ./my-model --pool pool.lkp

    Exit status: 0 all documents are in it; 1 some are left out; 2 an argument is
    wrong, or nothing could be written; 130 interrupted, and nothing was written.
    """
    from lookahead.pools.build_pool import build_pool

    write = partial(build_pool, str(options.output), max_tokens=options.max_tokens)
    _fill(options, options.output, write, overwrite=options.overwrite)


def add(options: PoolAddOptions) -> None:
    """Add documents to a pool.

    A new file replaces the old one when all of it is written; processes that have
    the old one open continue to read it.

    For example:

      lookahead pool add pool.lkp more.jsonl --model ./my-model
      cat notes.txt | lookahead pool add pool.lkp - --model ./my-model

    Exit status: 0 all documents were added; 1 some were left out; 2 an argument is
    wrong, or nothing could be written; 130 interrupted, and the pool is as it was.
    """
    from lookahead.pools.build_pool import build_pool

    _fill(options, Path(options.pool), partial(build_pool, options.pool, add=True), overwrite=True)


def _fill(
    options: PoolBuildOptions | PoolAddOptions, output: Path, write: partial[PoolHeader], *, overwrite: bool
) -> None:
    """Write a pool of documents and show the progress."""
    sources = find_sources(options.inputs, options.field, output, overwrite=overwrite)
    tokenizer = _load_tokenizer(options.model)
    from lookahead.pools.open_pool import describe_pool

    fill(options, sources, lambda **reading: describe_pool(str(output), write(tokenizer=tokenizer, **reading)))


def info(options: PoolOptions) -> None:
    """Show the header of a pool file; its contents are not read.

    For example: lookahead pool info pool.lkp
    """
    from lookahead.pools.open_pool import header_rows, read_pool_header

    console(sys.stdout).print(table(("", ""), header_rows(options.pool, read_pool_header(options.pool))))


def verify(options: PoolVerifyOptions) -> None:
    """Check every byte of a pool, and with --model that it was made for that model.

    For example:

      lookahead pool verify pool.lkp
      lookahead pool verify pool.lkp --model ./my-model

    Exit status: 0 it can be used; 2 it cannot, and a line says why.
    """
    from lookahead.pools.open_pool import describe_pool, open_pool

    fingerprint = None
    if options.model is not None:
        tokenizer = _load_tokenizer(options.model)
        from lookahead.utils.fingerprints import tokenizer_fingerprint

        fingerprint = tokenizer_fingerprint(tokenizer)
    header = open_pool(options.pool, fingerprint=fingerprint).header
    fits = "" if options.model is None else f", made for {options.model}"
    console(sys.stdout).print(f"{describe_pool(options.pool, header)}: whole{fits}")


def _load_tokenizer(model: str) -> Any:
    """Load a tokenizer with a status line."""
    from lookahead.models.loading import TOKENIZER_FILES, load_tokenizer, prepare_process

    location, _ = locate_model(model, TOKENIZER_FILES)
    with console(sys.stderr).status("loading the tokenizer"):
        prepare_process(None)
        convert(location)
        return load_tokenizer(model)


pool_app = App(help="Make pools: files of your documents to draft from.")
for command in (build, add, info, verify):
    pool_app.add(command)
