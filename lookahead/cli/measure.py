"""The commands that measure step costs and trace a decoding."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lookahead.cli.options import PromptOptions, truncation_named
from lookahead.cli.terminal import console, load, table
from lookahead.config import LookaheadConfig
from lookahead.jobs.job_options import DraftingOptions, ModelOptions, new_tokens_option, option
from lookahead.models.loading import locate_model

if TYPE_CHECKING:
    from lookahead.reporting.trace import Trace

_STYLES = ("black on green", "black on yellow", "white on blue", "white on magenta")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(ModelOptions):
    """Options of `lookahead calibrate`."""

    context: list[int] | None = option(None, "Tokens in the cache, 256 by default; may be repeated.", min=1)
    cache: Path | None = option(None, "Folder of the cost files. (default: the platform's)")
    compile: bool = option(False, "Measure the steps of a compiled model, as other commands run with --compile.")
    as_json: bool = option(False, "Print one JSON object.", "--json")


def calibrate(options: CalibrateOptions) -> None:
    """Measure what drafts cost with a model on this machine, and keep it for later.

    A step of every number of nodes is timed, and set beside what the machine would
    need at its best. "Tokens to break even" is how many tokens a step of that size
    must emit, the one plain decoding would give included, to be no slower.
    The costs are written to a file that later commands read; `load_costs` reads it
    in Python. Without it a command measures a few sizes, quickly, and keeps them.

    For example:

      lookahead calibrate --model ./my-model --dtype bf16
      lookahead calibrate --context 256 --context 4096 --json
    """
    loaded = load(options, measures_costs=False)
    from lookahead.generation.step_costs import calibrate_costs, save_costs
    from lookahead.models.calibration import CONTEXTS
    from lookahead.reporting.trace_page import SWEEP_HEADINGS, machine_line, sweep_rows

    with console(sys.stderr).status("measuring"):
        calibration = calibrate_costs(loaded.model, options.context or CONTEXTS, compile=options.compile)
    path = save_costs(loaded.model, options.cache, compile=options.compile)
    if options.as_json:
        print(json.dumps({**calibration.to_dict(), "file": str(path)}))
    else:
        out = console(sys.stdout)
        for sweep in calibration.sweeps:
            out.print(f"context of {sweep.context} tokens")
            out.print(table(SWEEP_HEADINGS, sweep_rows(sweep)))
        out.print(machine_line(calibration))
    console(sys.stderr).print(f"written to {path}", soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(PromptOptions, DraftingOptions, ModelOptions):
    """Options of `lookahead explain`."""

    prompt: str = option(help="A text file with the prompt, or - for stdin.", argument=True, metavar="FILE")
    max_new_tokens: int = new_tokens_option(128)
    html: Path | None = option(None, "Write the trace as an HTML page too.", metavar="PAGE")


def explain(options: ExplainOptions) -> None:
    """Answer a prompt and show, step by step, what was drafted and accepted.

    Where the tokenizer has a chat template, the prompt is a user's message to the
    model; with --raw, and for other models, it is text to continue.

    The text is coloured by the source of each token; what the model gave itself is
    plain. For every step: the nodes drafted, how many of them were expected to be
    accepted, how many were, and the time. For every source: in how many passes it
    drafted, and the same figures. The prompt is decoded once more without drafts,
    to compare the speeds.

    For example:

      lookahead explain prompt.txt --model ./my-model
      lookahead explain prompt.txt --max-new-tokens 200 --html page.html
      lookahead explain prompt.txt --raw --window auto
    """
    from lookahead.summarization.prompt_fitter import check_max_new_tokens

    check_max_new_tokens(options.max_new_tokens)
    locate_model(options.model)
    config = options.config()
    from lookahead.reporting.trace_page import check_page, read_prompt_file, write_page

    text = read_prompt_file(options.prompt)
    check_page(options.html)
    loaded = load(options)
    from lookahead.generation.api import generate
    from lookahead.generation.prompts import as_chat
    from lookahead.reporting.trace import trace
    from lookahead.reporting.trace_page import model_line

    prompt = text if options.raw else as_chat(loaded.tokenizer, text)
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    settings["truncate"] = options.truncation
    with truncation_named():
        traced = trace(*loaded, prompt, config=config, **settings)
    plain = generate(*loaded, prompt, config=LookaheadConfig(proposers=()), **settings).stats
    traced = replace(traced, model=model_line(options.model, loaded.model), plain=plain)
    _print_trace(traced, console(sys.stdout))
    if options.html is not None:
        write_page(traced, options.html)


def _print_trace(trace: Trace, out: Console) -> None:
    """Print the text coloured by the source of each token, a legend, every step, and the totals."""
    from lookahead.reporting.trace_page import STEP_HEADINGS, source_rows, step_cells, total_line

    styles = {name: _STYLES[i % len(_STYLES)] for i, name in enumerate(trace.sources)}
    text, legend = Text(), Text("from: ")
    for step in trace.steps:
        for piece in step.pieces:
            text.append(piece.visible, styles[piece.sources[0]] if piece.sources else "")
    for name, style in styles.items():
        legend.append(name, style)
        legend.append(", ")
    legend.append("plain: the model itself")
    if trace.model:
        out.print(f"model: {trace.model}", soft_wrap=True)
        out.print()
    out.print(text)
    out.print()
    out.print(legend)
    out.print(table(STEP_HEADINGS, [step_cells(number, step) for number, step in enumerate(trace.steps)]))
    headings, *rows, total = source_rows(trace)
    out.print(table(headings, rows, total))
    out.print(total_line(trace))
