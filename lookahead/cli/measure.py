"""The commands that measure and explain: arguments in, tables out. The work is done by `costs` and `explain`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lookahead.cli.options import (
    Device,
    Dtype,
    MaxNewTokens,
    Model,
    Raw,
    Threads,
    Truncate,
    Window,
    read_window,
    truncation_named,
)
from lookahead.cli.terminal import console, load, usage_errors
from lookahead.config import LookaheadConfig
from lookahead.models.locating import DEFAULT_MODEL, locate_model

Contexts = Annotated[
    list[int] | None,
    typer.Option("--context", min=1, help="Tokens in the cache, 256 by default; may be repeated."),
]
Folder = Annotated[Path | None, typer.Option("--cache", help="Folder of the cost files. (default: the platform's)")]
Compile = Annotated[bool, typer.Option("--compile", help="Measure steps as --compile takes them elsewhere.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
PromptFile = Annotated[str, typer.Argument(metavar="FILE", help="A text file with the prompt, or - for stdin.")]
Page = Annotated[Path | None, typer.Option("--html", metavar="PAGE", help="Write the trace as an HTML page too.")]


def calibrate(
    model: Model = DEFAULT_MODEL,
    context: Contexts = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    cache: Folder = None,
    compile: Compile = False,
    as_json: AsJson = False,
) -> None:
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
    with usage_errors():
        loaded = load(model, dtype, device, threads, measures_costs=False)
        from lookahead.cli.trace_console import draw_calibration
        from lookahead.generation.step_costs import calibrate_costs, save_costs
        from lookahead.models.calibration import CONTEXTS

        with console(sys.stderr).status("measuring"):
            calibration = calibrate_costs(loaded.model, context or CONTEXTS, compile=compile)
        path = save_costs(loaded.model, cache, compile=compile)
        if as_json:
            print(json.dumps({**calibration.to_dict(), "file": str(path)}))
        else:
            draw_calibration(calibration, console(sys.stdout))
        console(sys.stderr).print(f"written to {path}", soft_wrap=True)


def explain(
    prompt: PromptFile,
    model: Model = DEFAULT_MODEL,
    max_new_tokens: MaxNewTokens = 128,
    raw: Raw = False,
    truncate: Truncate = None,
    window: Window = None,
    html: Page = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
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

    with usage_errors():
        check_max_new_tokens(max_new_tokens)
        locate_model(model)
        config = LookaheadConfig(window=read_window(window)) if window is not None else None
        from lookahead.reporting.trace_file import check_page, read_prompt_file, write_page

        text = read_prompt_file(prompt)
        check_page(html)
        loaded = load(model, dtype, device, threads)
        from lookahead.cli.trace_console import draw_trace
        from lookahead.generation.api import generate
        from lookahead.generation.prompts import as_chat
        from lookahead.reporting.trace import trace
        from lookahead.reporting.trace_wording import model_line

        asked = text if raw else as_chat(loaded.tokenizer, text)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        options["truncate"] = truncate.value if truncate is not None else None
        with truncation_named():
            traced = trace(*loaded, asked, config=config, **options)
        plain = generate(*loaded, asked, config=LookaheadConfig(proposers=()), **options).stats
        traced = replace(traced, model=model_line(model, loaded.model), plain=plain)
        draw_trace(traced, console(sys.stdout))
        if html is not None:
            write_page(traced, html)
