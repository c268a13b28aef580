"""The command line: arguments in, text and tables out. The work is done by `summarize` and `generation`.

`lookahead.cli_pool` has the commands on pools, `lookahead.cli_train` the one that trains heads.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lookahead import cli_draft, cli_measure, cli_train
from lookahead.cli_pool import pool_app
from lookahead.config import LookaheadConfig
from lookahead.errors import ConfigError
from lookahead.summarize import report
from lookahead.terminal import Display, console, load, table, usage_errors

if TYPE_CHECKING:
    from lookahead.files.inputs import Input
    from lookahead.loading import LoadedModel
    from lookahead.summarize.results import OutputPaths
    from lookahead.summarize.summarizer import Summarizer

FORMATS = ("auto", "text", "json")
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(pool_app, name="pool")

app.command()(cli_measure.calibrate)
app.command()(cli_measure.explain)
app.command()(cli_draft.pick_draft)
app.command()(cli_train.train)

Inputs = Annotated[
    list[str],
    typer.Argument(metavar="FILES...", help="Text files, .jsonl files, patterns such as 'notes/*.md', - for stdin."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="File for the summaries, a JSON line each.")]
Field = Annotated[
    str | None, typer.Option(help="Field of a JSON line with the document; makes - JSON lines. (default: text)")
]
Compare = Annotated[
    bool, typer.Option("--compare", help="Decode plainly too: both speeds, and are the tokens identical?")
]
Format = Annotated[
    str, typer.Option("--format", help="Of stdout: text, json, or auto: text on a terminal, else JSON lines.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace output files that exist.")]
Rejects = Annotated[Path | None, typer.Option(help="File for documents that fail. (default: OUTPUT.rejects.jsonl)")]
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue, or - for stdin.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="Sample at this temperature; 0 takes the likeliest.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this mass.")]
Seed = Annotated[int | None, typer.Option(help="The same seed samples the same text.")]
Stats = Annotated[bool, typer.Option("--stats", help="Show what decoding did, on stderr; the text comes at the end.")]
Model = Annotated[str, typer.Option(help="Folder of a saved model, its name on the Hub, or 'bundled'.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to write.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16, or auto: the checkpoint's own on a GPU, fp32 on a CPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. (default: as PyTorch chooses)")]
Proposers = Annotated[str, typer.Option(help="Drafts' sources, of prompt, outputs, corpus, recycled, jacobi; or none.")]
Draft = Annotated[str | None, typer.Option("--draft-model", metavar="MODEL", help="Draft with this model too.")]
Pool = Annotated[str | None, typer.Option(metavar="FILE", help="Draft from this too, made by 'lookahead pool build'.")]
TrainedHeads = Annotated[
    str | None,
    typer.Option(
        "--heads", metavar="DIR", help="And from these, see 'lookahead train'; eagle, mtp: the bundled model's."
    ),
]
Acceptance = Annotated[
    str, typer.Option(help="exact; rejection: other tokens, the same distribution; typical: another one, lossy.")
]
MaxNodes = Annotated[int | None, typer.Option(help="Most draft tokens a step verifies. (default: by the proposers)")]
NgramSize = Annotated[int | None, typer.Option(help="N, length of its n-grams. (default: 5, or as suits auto)")]
Guesses = Annotated[int | None, typer.Option(help="G, most of them a step verifies. (default: 7, or as suits auto)")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the model on the way: for long outputs and many.")]
Graphs = Annotated[bool, typer.Option("--cuda-graphs", help="Record its passes as CUDA graphs, on a GPU.")]


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files can hold bytes that are no text
    app(prog_name="lookahead")


def _show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        from lookahead import __version__

        typer.echo(f"lookahead {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Faster generation with HuggingFace models: no draft model, not a token changed.

    For example: lookahead summarize article.txt --compare
    """


@app.command()
def summarize(
    inputs: Inputs,
    output: Output = None,
    model: Model = "bundled",
    field: Field = None,
    max_new_tokens: MaxNewTokens = 128,
    compare: Compare = False,
    shape: Format = "auto",
    overwrite: Overwrite = False,
    rejects: Rejects = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    proposers: Proposers = "prompt,outputs,recycled",
    pool: Pool = None,
    heads: TrainedHeads = None,
    max_nodes: MaxNodes = None,
    window: cli_measure.Window = None,
    ngram_size: NgramSize = None,
    guesses: Guesses = None,
    compile: Compile = False,
    cuda_graphs: Graphs = False,
) -> None:
    """Summarize documents of any length.

    A document longer than the model's context is cut between sentences; its parts
    are summarized, then their summaries together. One that cannot be read is
    reported and put aside, and the others go on.

    For example:

      lookahead summarize article.txt --compare
      lookahead summarize article.txt 'notes/*.md' -o summaries.jsonl
      cat article.txt | lookahead summarize -
      lookahead summarize docs.jsonl --field body -o out.jsonl --model ./my-model

    Exit status: 0 all are summarized; 1 a document failed, a file could not be
    written, or --compare found a difference in fp32; 2 an argument is wrong, and
    nothing was written; 130 interrupted, and what was finished is written.
    """
    from lookahead.files.inputs import find_inputs
    from lookahead.summarize.fitting import check_max_new_tokens
    from lookahead.summarize.results import OutputPaths

    with usage_errors():
        check_max_new_tokens(max_new_tokens)
        config = _config(proposers, pool, heads, max_nodes, window, ngram_size, guesses, compile, cuda_graphs)
        sources = find_inputs(inputs, field)
        paths = OutputPaths(output, rejects, overwrite)
        paths.check(sources)
        as_text = _as_text(shape, output)
        loaded = load(model, dtype, device, threads)
        from lookahead.summarize.summarizer import Summarizer

        summarizer = Summarizer(*loaded, max_new_tokens=max_new_tokens, config=config, compare=compare)
        with console(sys.stderr).status("warming up"):
            summarizer.warm_up()
        status = _run(summarizer, sources, paths, as_text=as_text)
    raise typer.Exit(status)


@app.command()
def generate(
    prompt: Prompt,
    model: Model = "bundled",
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stats: Stats = False,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    proposers: Proposers = "prompt,outputs,recycled",
    draft_model: Draft = None,
    pool: Pool = None,
    heads: TrainedHeads = None,
    acceptance: Acceptance = "exact",
    max_nodes: MaxNodes = None,
    window: cli_measure.Window = None,
    ngram_size: NgramSize = None,
    guesses: Guesses = None,
    compile: Compile = False,
    cuda_graphs: Graphs = False,
) -> None:
    """Continue a prompt, token for token as transformers does.

    For example:

      lookahead generate "Once upon a time" --model ./my-model
      lookahead generate "Once upon a time" --temperature 0.8 --seed 7 --stats
      lookahead generate - --max-new-tokens 64 < prompt.txt
      lookahead generate "Dear Sir" --model ./large --draft-model ./small
      lookahead generate "Dear Sir" --proposers none --heads eagle --stats
    """
    from lookahead.files.documents import read_prompt
    from lookahead.summarize.fitting import check_max_new_tokens, check_room

    with usage_errors():
        check_max_new_tokens(max_new_tokens)
        config = _config(
            proposers, pool, heads, max_nodes, window, ngram_size, guesses, compile, cuda_graphs, acceptance
        )
        text = read_prompt(prompt)
        loaded = load(model, dtype, device, threads)
        check_room(*loaded, text, max_new_tokens)
        if draft_model is not None:
            config = cli_draft.with_draft_model(config, draft_model, dtype, device, threads)
        chosen = {"temperature": temperature or None, "top_k": top_k, "top_p": top_p}
        sampling = {name: value for name, value in chosen.items() if value is not None and temperature != 0}
        _generate(
            loaded,
            text,
            with_stats=stats,
            config=config,
            seed=seed,
            max_new_tokens=max_new_tokens,
            do_sample=bool(sampling),
            **sampling,
        )


def _generate(loaded: LoadedModel, prompt: str, *, with_stats: bool, **options: Any) -> None:
    """Write the continuation of one prompt to stdout: as it comes, or at once with stats on stderr."""
    from lookahead import generation

    if not with_stats:
        for piece in generation.stream(*loaded, prompt, **options):
            print(piece, end="", flush=True)
        print()
        return
    result = generation.generate(*loaded, prompt, **options)
    print(result.texts[0], flush=True)
    console(sys.stderr).print(table(("", ""), report.stats_rows(result.stats)))


def _config(
    proposers: str,
    pool: str | None,
    heads: str | None,
    max_nodes: int | None,
    window: str | None,
    ngram_size: int | None,
    guesses: int | None,
    compile: bool,
    cuda_graphs: bool,
    acceptance: str = "exact",
) -> LookaheadConfig | None:
    """The options on drafting as a configuration, which checks them; None where all are the defaults.

    Asking for nothing in particular lets a model that cannot verify drafts be decoded plainly.
    """
    sources: list[Any] = [] if proposers == "none" else [name.strip() for name in proposers.split(",")]
    if heads is not None:
        from lookahead.proposers.heads import Heads

        sources.append(Heads(heads))
    columns = cli_measure.read_window(window)
    config = LookaheadConfig(
        proposers=sources, pool=pool, max_nodes=max_nodes, window=columns, ngram_size=ngram_size, guesses=guesses,
        compile=compile, cuda_graphs=cuda_graphs, acceptance=cast(Any, acceptance),
    )  # fmt: skip
    return None if config == LookaheadConfig() else config


def _as_text(shape: str, output: Path | None) -> bool:
    """Whether summaries are shown to be read, not as JSON lines."""
    if shape not in FORMATS:
        raise ConfigError(f"format must be {', '.join(FORMATS)}, got {shape!r}")
    if output is not None and shape != "auto":
        raise ConfigError("format is that of stdout; with --output the summaries go to that file as JSON lines")
    return output is None and (shape == "text" or (shape == "auto" and sys.stdout.isatty()))


def _run(summarizer: Summarizer, sources: Sequence[Input], paths: OutputPaths, *, as_text: bool) -> int:
    """Summarize the documents of all inputs; the exit status."""
    from lookahead.files.documents import count_documents
    from lookahead.summarize.job import Totals, run_job
    from lookahead.summarize.results import JsonLinesStdout

    totals = Totals()
    shown = None if as_text else JsonLinesStdout()
    lines_on_terminal = not as_text and paths.results is None and sys.stdout.isatty()
    display = Display(count_documents(sources), as_text=as_text, with_bar=not lines_on_terminal)
    with display.progress:
        try:
            run_job(sources, summarizer, paths, totals=totals, observer=display, shown=shown)
        except KeyboardInterrupt:
            display.say("interrupted", report.describe_stop(totals, paths.results))
            return 130
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # a reader such as `head` has seen enough
                done = report.describe_stop(totals, paths.results)
                display.say("error", f"writing failed: {error.strerror}; {done}")
            return 1
    display.conclude(totals, exact=summarizer.exact)
    return 1 if totals.rejected or (totals.different and summarizer.exact) else 0


if __name__ == "__main__":
    main()
