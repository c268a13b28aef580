"""The command line: arguments in, text and tables out. The work is done by `jobs` and `generation`.

`lookahead.cli_summarize` has the command on documents, `lookahead.cli_pool` those on pools, `lookahead.cli_train` the
one that trains heads.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead import cli_draft, cli_measure, cli_report, cli_summarize, cli_train
from lookahead.cli_measure import Window
from lookahead.cli_options import (
    Compile,
    Device,
    Dtype,
    Graphs,
    Guesses,
    MaxNewTokens,
    MaxNodes,
    Model,
    NgramSize,
    Proposers,
    Threads,
    TrainedHeads,
    drafting_config,
)
from lookahead.cli_pool import pool_app
from lookahead.jobs import report
from lookahead.locating import DEFAULT_MODEL
from lookahead.terminal import console, load, reading, table, usage_errors

if TYPE_CHECKING:
    from lookahead.loading import LoadedModel

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(pool_app, name="pool")

app.command()(cli_summarize.summarize)
app.command()(cli_measure.calibrate)
app.command()(cli_measure.explain)
app.command()(cli_draft.pick_draft)
app.command()(cli_train.train)
app.command()(cli_report.report)

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue, or - for stdin.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="Sample at this temperature; 0 takes the likeliest.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this mass.")]
Seed = Annotated[int | None, typer.Option(help="The same seed samples the same text.")]
Stats = Annotated[bool, typer.Option("--stats", help="Show what decoding did, on stderr; the text comes at the end.")]
Draft = Annotated[str | None, typer.Option("--draft-model", metavar="MODEL", help="Draft with this model too.")]
Pool = Annotated[str | None, typer.Option(metavar="FILE", help="Draft from this too, made by 'lookahead pool build'.")]
Acceptance = Annotated[
    str, typer.Option(help="exact; rejection: other tokens, the same distribution; typical: another one, lossy.")
]


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
def generate(
    prompt: Prompt,
    model: Model = DEFAULT_MODEL,
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
    window: Window = None,
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
      lookahead generate "Dear Sir" --proposers none --heads ./heads --stats
    """
    from lookahead.files.documents import read_prompt
    from lookahead.summarize.fitting import check_max_new_tokens, check_room

    with usage_errors():
        check_max_new_tokens(max_new_tokens)
        config = drafting_config(
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

    with reading() as on_prefill:
        if not with_stats:
            for piece in generation.stream(*loaded, prompt, on_prefill=on_prefill, **options):
                on_prefill(1, 1)  # a model that scores no trees does not tell that the prompt is read
                print(piece, end="", flush=True)
            print()
            return
        result = generation.generate(*loaded, prompt, on_prefill=on_prefill, **options)
    print(result.texts[0], flush=True)
    console(sys.stderr).print(table(("", ""), report.stats_rows(result.stats)))


if __name__ == "__main__":
    main()
