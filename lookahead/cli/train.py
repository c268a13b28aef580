"""The command that trains draft heads."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import typer

from lookahead.cli.terminal import console, load, say, table
from lookahead.jobs.job_options import ModelOptions, new_tokens_option, option
from lookahead.models.loading import locate_model


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    """Options of `lookahead train`."""

    kind: str = option(help="medusa, eagle, eagle3 or mtp.", argument=True, metavar="KIND")
    data: Path = option(
        help="Text, or JSON lines with 'text', with 'prompt' and 'output', or with 'prompt' alone.", metavar="FILE"
    )
    output: Path = option(MISSING, "Folder for the heads.", "--output", "-o", metavar="DIR")
    heads: int = option(4, "Tokens drafted beyond the next one: heads, or steps of EAGLE.")
    is_joint: bool = option(False, "medusa, mtp: train the model too; it is written to DIR/model.", "--joint")
    draft_vocab: int = option(32_000, "eagle3: size of the draft vocabulary, the most frequent tokens.")
    steps: int | None = option(None, "Batches to train on. (default: the data once)")
    batch_size: int = option(8, "Examples in a batch.")
    learning_rate: float = option(1e-3, "Peak learning rate of the heads.")
    max_length: int = option(1024, "Most tokens of an example.")
    max_new_tokens: int = new_tokens_option(256, "Most tokens of an answer, if the model answers a prompt itself.")
    hold_out_every: int = option(20, "One example in N is held out for evaluation.")
    seed: int = option(0, "Seed of the initial weights and the order of the examples.")
    resume: bool = option(False, "Continue from the last checkpoint in DIR.")
    as_json: bool = option(False, "Print one JSON object.", "--json")


def train(options: TrainOptions) -> None:
    r"""Train heads that draft several tokens at once.

    A prompt without an output is first answered by the model itself, since its
    heads predict what it writes. Prints for every position how many held-out tokens
    the first guess and one of five guesses predict. Needs accelerate:
    pip install 'lookahead-decoding\[train]'.

    For example:

      lookahead train medusa --model ./my-model --data prompts.jsonl -o heads
      lookahead train medusa --model ./my-model --data prompts.jsonl -o heads --resume

    Exit status: 0 the heads are written; 2 an argument is wrong; 130 interrupted:
    pass --resume to go on.
    """
    locate_model(options.model)
    from lookahead.training.train_heads import Settings, check_trainer, train_heads

    settings = Settings(**{each.name: getattr(options, each.name) for each in fields(Settings)})
    check_trainer()
    loaded = load(options, measures_costs=False)
    stderr = console(sys.stderr)

    def tell(line: str) -> None:
        stderr.print(line, soft_wrap=True)

    try:
        metrics = train_heads(loaded, options.data, options.output, settings, resume=options.resume, say=tell)
    except KeyboardInterrupt as error:
        say("interrupted", "pass --resume to go on")
        raise typer.Exit(130) from error
    if options.as_json:
        print(json.dumps({"heads": str(options.output), **metrics}))
        return
    rows = [
        (str(place), f"{metrics[f'eval_accuracy_{place}']:.1%}", f"{metrics[f'eval_top_5_{place}']:.1%}")
        for place in range(1, options.heads + 1)
    ]
    console(sys.stdout).print(table(("tokens ahead", "guessed right", "one of five"), rows))
    stderr.print(f"written to {options.output}", soft_wrap=True)
