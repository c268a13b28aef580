"""The command line: arguments in, text and tables out. The work is done by `jobs` and `generation`.

`lookahead.cli.summarize` has the command on documents, `lookahead.cli.pool` those on pools, `lookahead.cli.train` the
one that trains heads.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead.cli import chat as cli_chat
from lookahead.cli import draft as cli_draft
from lookahead.cli import measure as cli_measure
from lookahead.cli import report as cli_report
from lookahead.cli import serve as cli_serve
from lookahead.cli import summarize as cli_summarize
from lookahead.cli import train as cli_train
from lookahead.cli.options import (
    App,
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
    Raw,
    Seed,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    TrainedHeads,
    Truncate,
    Window,
    drafting_config,
    sampling_options,
    truncation_named,
)
from lookahead.cli.pool import pool_app
from lookahead.cli.terminal import console, harmless, load, reading, say, table, usage_errors
from lookahead.errors import ConfigError
from lookahead.jobs import job_figures as report
from lookahead.models.locating import DEFAULT_MODEL

if TYPE_CHECKING:
    from lookahead.models.loading import LoadedModel

app = App(
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(pool_app, name="pool")

app.command()(cli_summarize.summarize)
app.command()(cli_chat.chat)
app.command()(cli_serve.serve)
app.command()(cli_measure.calibrate)
app.command()(cli_measure.explain)
app.command()(cli_draft.pick_draft)
app.command()(cli_train.train)
app.command()(cli_report.report)


Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="A question or a text to continue, or - for stdin.")]
Stats = Annotated[bool, typer.Option("--stats", help="Show what decoding did, on stderr.")]
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
    raw: Raw = False,
    system: System = None,
    truncate: Truncate = None,
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
    """Answer a prompt or continue it, token for token as transformers does.

    Where the tokenizer has a chat template, the prompt is a user's message to the
    model; with --raw, and for other models, it is text to continue.

    For example:

      lookahead generate "What is the capital of France?"
      lookahead generate - --system "Translate into French." < letter.txt
      lookahead generate "Once upon a time" --model ./my-model
      lookahead generate "Once upon a time" --temperature 0.8 --seed 7 --stats
      lookahead generate - --max-new-tokens 64 < prompt.txt
      lookahead generate "Dear Sir" --model ./large --draft-model ./small
      lookahead generate "Dear Sir" --proposers none --heads ./heads --stats
    """
    from lookahead.documents.readers import read_prompt
    from lookahead.summarization.prompt_fitter import check_max_new_tokens

    with usage_errors():
        check_max_new_tokens(max_new_tokens)
        if raw and system is not None:
            raise ConfigError("--system is part of the chat template, which --raw leaves out")
        config = drafting_config(
            proposers, pool, heads, max_nodes, window, ngram_size, guesses, compile, cuda_graphs, acceptance
        )
        text = read_prompt(prompt)
        loaded = load(model, dtype, device, threads)
        if draft_model is not None:
            config = cli_draft.with_draft_model(config, draft_model, dtype, device, threads)
        _generate(
            loaded,
            text,
            system=None if raw else system,
            is_raw=raw,
            with_stats=stats,
            config=config,
            seed=seed,
            max_new_tokens=max_new_tokens,
            truncate=truncate.value if truncate is not None else None,
            **sampling_options(temperature, top_k, top_p),
        )


def _generate(
    loaded: LoadedModel, text: str, *, system: str | None, is_raw: bool, with_stats: bool, **options: Any
) -> None:
    """Write what a prompt is answered or continued with to stdout as it comes, and stats to stderr."""
    from lookahead.generation.api import stream
    from lookahead.generation.prompts import as_chat

    with reading() as on_prefill:
        prompt = text if is_raw else as_chat(loaded.tokenizer, text, system)
        with truncation_named():
            pieces = stream(*loaded, prompt, on_prefill=on_prefill, **options)
        with pieces.serving():
            for piece in pieces:
                on_prefill(1, 1)  # a model that scores no trees does not tell that the prompt is read
                print(harmless(piece), end="", flush=True)
    print(flush=True)
    if pieces.finish_reason == "length" and len(pieces.token_ids) < options["max_new_tokens"]:
        say("note", f"the model's context is full after {len(pieces.token_ids)} new tokens")
    if with_stats:
        rows = [*report.stats_rows(pieces.stats), ("finish_reason", str(pieces.finish_reason))]
        console(sys.stderr).print(table(("", ""), rows))


if __name__ == "__main__":
    main()
