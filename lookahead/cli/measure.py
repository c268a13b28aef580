"""The commands that trace a decoding and train heads."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer
from rich.text import Text

import lookahead
from lookahead import LookaheadConfig
from lookahead.cli.options import (
    DraftingOptions,
    ModelOptions,
    OnePromptOptions,
    new_tokens_option,
    option,
)
from lookahead.cli.terminal import console, load, memory_file_saved_at_exit, say, show_line, status_of, table
from lookahead.errors import ConfigError
from lookahead.loading.loading import locate_model
from lookahead.utils.atomic import write_atomically

_STYLES = ("black on green", "black on yellow", "white on blue", "white on magenta")


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(OnePromptOptions, DraftingOptions, ModelOptions):
    prompt: str | None = option(
        None, "A text file with the prompt, or - for stdin. (default: stdin)", argument=True, metavar="FILE",
        show_default=False,
    )  # fmt: skip
    max_new_tokens: int = new_tokens_option(128)
    html: Path | None = option(None, "Write the trace as an HTML page too.", metavar="PAGE")


def explain(options: ExplainOptions) -> None:
    """Answer a prompt and show, step by step, the drafted and accepted tokens.

    If the tokenizer has a chat template, the prompt is a user's message; with --raw, and for other models, it is text
    to continue.

    Each token of the text has the colour of its source; the model's own tokens are plain. A table lists, for every
    step, the drafted nodes, the expected and the actual number of accepted ones, and the time. Another table has the
    same figures by source. The prompt is decoded a second time without drafts, to compare the speeds.

    For example:

      lookahead explain prompt.txt --model ./my-model
      lookahead explain prompt.txt --max-new-tokens 200 --html page.html
      lookahead explain prompt.txt --raw --window auto
    """
    locate_model(options.model)
    config = options.config()
    from lookahead.reporting.charts import check_page

    text = options.read_prompt(names_file=True)
    if options.html is not None:
        check_page(options.html, "html", "explain")
    loaded = load(options)
    from lookahead.loading.quantized import weight_count
    from lookahead.reporting.trace_page import render_trace, source_rows, step_rows, total_line

    prompt = options.prompt_of(loaded.tokenizer, text)
    settings: Any = {"max_new_tokens": options.max_new_tokens, "truncate": options.truncate, "do_sample": False}
    # The first passes of a process pack weights and compile, which would count against the traced run alone.
    lookahead.generate(*loaded, "The", config=LookaheadConfig(memory="request"), max_new_tokens=3, do_sample=False)
    with memory_file_saved_at_exit(options, loaded.model):
        traced = lookahead.trace(*loaded, prompt, config=config, **settings)
    plain = lookahead.generate(*loaded, prompt, config=LookaheadConfig(proposers=()), **settings).stats
    model, dtype = loaded.model, str(loaded.model.dtype).removeprefix("torch.")
    described = f"{options.model} ({type(model).__name__}, {weight_count(model):,} parameters, {dtype})"
    traced = replace(traced, model=described, plain=plain)
    styles = dict(zip(traced.sources, itertools.cycle(_STYLES), strict=False))
    pieces = [piece for step in traced.steps for piece in step.pieces]
    coloured = [(piece.visible, styles[piece.sources[0]] if piece.sources else "") for piece in pieces]
    legend = [part for named in styles.items() for part in (named, ", ")]
    out = console(sys.stdout)
    show_line(sys.stdout, f"model: {described}\n")
    out.print(Text.assemble(*coloured))
    out.print(Text.assemble("\nfrom: ", *legend, "plain: the model itself"))
    out.print(table(step_rows(traced)))
    *rows, total = source_rows(traced)
    out.print(table(rows, total))
    out.print(total_line(traced))
    if options.html is not None:
        write_atomically(options.html, render_trace(traced))


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    kind: Literal["medusa", "eagle3"] = option(help="The kind of heads.", argument=True, metavar="KIND")
    data: Path = option(
        help="JSON lines with 'text', with 'prompt' and 'output', or with 'prompt' alone.", metavar="FILE"
    )
    output: Path = option(MISSING, "Folder for the heads.", "--output", "-o", metavar="DIR")
    heads: int = option(4, "Tokens drafted beyond the next one: heads, or steps of EAGLE.", min=1)
    draft_vocab: int = option(32_000, "eagle3: size of the draft vocabulary, the most frequent tokens.", min=1)
    steps: int | None = option(None, "Batches to train on. (default: the data once)", min=1)
    batch_size: int = option(8, "Examples in a batch.", min=1)
    learning_rate: float = option(1e-3, "Peak learning rate.", min=1e-9)
    max_length: int = option(1024, "Most tokens of an example.", min=2)
    max_new_tokens: int = new_tokens_option(256, "Most tokens of an answer that the model writes itself.")
    hold_out_every: int = option(20, "One example in N is held out for evaluation.", min=2)
    seed: int = option(0, "Seed of the initial weights and the order of the examples.", min=0, max=(1 << 32) - 1)
    dtype: str = option("auto", "fp32, bf16, fp16, or auto: the checkpoint's own on a GPU, fp32 on a CPU.")
    resume: bool = option(False, "Continue from the last checkpoint in DIR.")
    as_json: bool = option(False, "Print one JSON object.", "--json")


def train(options: TrainOptions) -> None:
    r"""Train heads that draft several tokens at once.

    The model first answers every prompt that has no output, since its heads predict its own text. The command prints,
    for every position, the share of held-out tokens that the heads guess right. It needs accelerate:
    pip install 'lookahead-decoding\[train]'.

    For example:

      lookahead train medusa -m ./my-model --data prompts.jsonl -o heads
      lookahead train medusa -m ./my-model --data prompts.jsonl -o heads --resume

    Exit status: 0 the heads are written; 2 an argument is wrong; 130 interrupted, and --resume continues.
    """
    locate_model(options.model)
    if options.quantize is not None:
        raise ConfigError(f"heads are trained for a model that is not quantized, got --quantize {options.quantize}")
    from lookahead.plugins.heads.training.train_inputs import Settings, check_trainer, read_records

    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    check_trainer()
    if options.data.is_file() or not options.data.exists():  # a pipe is read only once
        read_records(options.data)
    loaded = load(options, measures_costs=False)
    from lookahead.plugins.heads.training.train_heads import train_heads

    tell = partial(show_line, sys.stderr)
    try:
        metrics = train_heads(loaded, options.data, options.output, settings, resume=options.resume, say=tell)
    except KeyboardInterrupt as error:
        say("interrupted", "--resume continues")
        raise typer.Exit(status_of(error)) from error
    if options.as_json:
        print(json.dumps({"heads": str(options.output), **metrics}))
        return
    rows = [
        {"tokens ahead": str(place), "guessed right": f"{metrics[f'eval_accuracy_{place}']:.1%}"}
        for place in range(1, options.heads + 1)
    ]
    console(sys.stdout).print(table(rows))
    tell(f"written to {options.output}")
