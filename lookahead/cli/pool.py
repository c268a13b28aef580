"""The commands on pools: arguments in, files and tables out. The work is done by `pools`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lookahead.cli.options import App, MaxDocument
from lookahead.cli.terminal import PoolDisplay, console, convert, say_skipped, table, usage_errors
from lookahead.models.locating import locate_model

pool_app = App(help="Make files of documents of yours to draft from.")

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUTS...",
        help="Files (.txt .md .html .jsonl .csv .tsv .parquet), folders, patterns such as 'notes/*.md', URLs, - for "
        "stdin.",
    ),
]
PoolFile = Annotated[str, typer.Argument(metavar="POOL", help="A pool file.")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="POOL", help="The pool file to write.")]
Model = Annotated[
    str,
    typer.Option(help="The model that will draft from it, or its tokenizer: a folder, a GGUF file, a name on the Hub."),
]
CheckedModel = Annotated[str | None, typer.Option("--model", help="Check that it was made for this model.")]
Field = Annotated[
    str | None,
    typer.Option(
        "--field", "--text-field", help="Field or column with the document; makes - JSON lines. (default: text)"
    ),
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens to take. (default: all)")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the pool if it exists.")]


@pool_app.command()
def build(
    inputs: Inputs,
    output: Output,
    model: Model,
    field: Field = None,
    max_tokens: MaxTokens = None,
    max_document_mb: MaxDocument = 64.0,
    overwrite: Overwrite = False,
) -> None:
    """Make a pool of documents.

    A document that cannot be read is reported and left out. The file is there once
    all of it is written, and not before.

    For example:

      lookahead pool build corpus.jsonl --model ./my-model -o pool.lkp
      lookahead pool build 'notes/*.md' docs.jsonl --field body --model ./my-model -o pool.lkp
      lookahead summarize article.txt --model ./my-model --pool pool.lkp

    Exit status: 0 all documents are in it; 1 some are left out; 2 an argument is
    wrong, or nothing could be written; 130 interrupted, and nothing was written.
    """
    from lookahead.documents.byte_sources import MEGABYTE
    from lookahead.documents.inputs import find_inputs
    from lookahead.documents.output_paths import check_output
    from lookahead.documents.readers import check_readers

    with usage_errors():
        skipped: list[str] = []
        sources = find_inputs(inputs, field, on_skip=skipped.append)
        say_skipped(skipped)
        check_readers(sources)
        check_output(output, sources, overwrite=overwrite)
        tokenizer = _load_tokenizer(model)
        from lookahead.documents.readers import count_documents
        from lookahead.pools import pool_figures as report
        from lookahead.pools.build_pool import PoolTotals, build_pool

        totals = PoolTotals()
        display = PoolDisplay(count_documents(sources))
        with display.progress:
            header = build_pool(
                str(output), sources, tokenizer, max_tokens=max_tokens, limit=int(max_document_mb * MEGABYTE),
                totals=totals, observer=display,
            )  # fmt: skip
        console(sys.stderr).print(report.describe_reading(totals))
        console(sys.stderr).print(report.describe_pool(str(output), header))
    raise typer.Exit(1 if totals.rejected else 0)


@pool_app.command()
def add(pool: PoolFile, inputs: Inputs, model: Model, field: Field = None, max_document_mb: MaxDocument = 64.0) -> None:
    """Add documents to a pool.

    A new file takes the place of the old one when all of it is written; processes
    that have the old one open go on with that.

    For example:

      lookahead pool add pool.lkp more.jsonl --model ./my-model
      cat notes.txt | lookahead pool add pool.lkp - --model ./my-model

    Exit status: 0 all documents were added; 1 some were left out; 2 an argument is
    wrong, or nothing could be written; 130 interrupted, and the pool is as it was.
    """
    from lookahead.documents.byte_sources import MEGABYTE
    from lookahead.documents.inputs import find_inputs
    from lookahead.documents.output_paths import check_output
    from lookahead.documents.readers import check_readers

    with usage_errors():
        skipped: list[str] = []
        sources = find_inputs(inputs, field, on_skip=skipped.append)
        say_skipped(skipped)
        check_readers(sources)
        check_output(Path(pool), sources, overwrite=True)
        tokenizer = _load_tokenizer(model)
        from lookahead.documents.readers import count_documents
        from lookahead.pools import pool_figures as report
        from lookahead.pools.build_pool import PoolTotals, add_to_pool

        totals = PoolTotals()
        display = PoolDisplay(count_documents(sources))
        with display.progress:
            limit = int(max_document_mb * MEGABYTE)
            header = add_to_pool(pool, sources, tokenizer, limit=limit, totals=totals, observer=display)
        console(sys.stderr).print(report.describe_reading(totals))
        console(sys.stderr).print(report.describe_pool(pool, header))
    raise typer.Exit(1 if totals.rejected else 0)


@pool_app.command()
def info(pool: PoolFile) -> None:
    """Show what a pool file says of itself; its contents are not read.

    For example: lookahead pool info pool.lkp
    """
    with usage_errors():
        from lookahead.pools import pool_figures as report
        from lookahead.pools.open_pool import read_pool_header

        console(sys.stdout).print(table(("", ""), report.header_rows(pool, read_pool_header(pool))))


@pool_app.command()
def verify(pool: PoolFile, model: CheckedModel = None) -> None:
    """Check every byte of a pool, and with --model that it was made for it.

    For example:

      lookahead pool verify pool.lkp
      lookahead pool verify pool.lkp --model ./my-model

    Exit status: 0 it can be used; 2 it cannot, and a line says why.
    """
    with usage_errors():
        from lookahead.pools import pool_figures as report
        from lookahead.pools.open_pool import open_pool

        fingerprint = None
        if model is not None:
            tokenizer = _load_tokenizer(model)
            from lookahead.utils.fingerprints import tokenizer_fingerprint

            fingerprint = tokenizer_fingerprint(tokenizer)
        header = open_pool(pool, fingerprint=fingerprint).header
        fits = "" if model is None else f", made for {model}"
        console(sys.stdout).print(f"{report.describe_pool(pool, header)}: whole{fits}")


def _load_tokenizer(model: str) -> Any:
    """Load a tokenizer, with a sign of life for the seconds that takes."""
    from lookahead.models.loading import TOKENIZER_FILES, load_tokenizer, prepare_process

    location, _ = locate_model(model, TOKENIZER_FILES)
    with console(sys.stderr).status("loading the tokenizer"):
        prepare_process(None)
        convert(location)
        return load_tokenizer(model)
