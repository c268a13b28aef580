"""The command that trains heads: arguments in, a folder and a table out. The work is done by `training.heads`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from lookahead.cli.terminal import console, load, say, table, usage_errors
from lookahead.models.locating import DEFAULT_MODEL, locate_model

Kind = Annotated[str, typer.Argument(metavar="KIND", help="medusa, eagle, eagle3 or mtp.")]
Data = Annotated[
    Path,
    typer.Option(
        metavar="FILE", help="Text, or JSON lines with 'text', with 'prompt' and 'output', or with 'prompt' alone."
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the heads.")]
Model = Annotated[str, typer.Option(help="Folder of a saved model, a GGUF file, a name on the Hub, or smollm2.")]
Heads = Annotated[int, typer.Option(help="Tokens guessed beyond the next: heads, or steps of EAGLE.")]
Joint = Annotated[bool, typer.Option("--joint", help="medusa, mtp: train the model too; it is written to DIR/model.")]
DraftVocab = Annotated[int, typer.Option(help="eagle3: tokens it can propose, the most frequent ones.")]
Steps = Annotated[int | None, typer.Option(help="Batches to train on. (default: the data once)")]
BatchSize = Annotated[int, typer.Option(help="Examples of a batch.")]
Rate = Annotated[float, typer.Option("--learning-rate", help="Of the heads, at its highest.")]
MaxLength = Annotated[int, typer.Option(help="Most tokens of an example.")]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", "--max-tokens", help="Most tokens of an answer, where the model answers a prompt itself."
    ),
]
HoldOut = Annotated[int, typer.Option("--hold-out-every", help="One example in so many is kept for measuring.")]
Seed = Annotated[int, typer.Option(help="Of the first weights and the order of the examples.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from what an earlier start left in DIR.")]
Dtype = Annotated[str, typer.Option(help="Of the model: fp32, bf16, or auto: the checkpoint's own on a GPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. (default: as PyTorch chooses)")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def train(
    kind: Kind,
    data: Data,
    output: Output,
    model: Model = DEFAULT_MODEL,
    heads: Heads = 4,
    joint: Joint = False,
    draft_vocab: DraftVocab = 32_000,
    steps: Steps = None,
    batch_size: BatchSize = 8,
    learning_rate: Rate = 1e-3,
    max_length: MaxLength = 1024,
    max_new_tokens: MaxNewTokens = 256,
    hold_out_every: HoldOut = 20,
    seed: Seed = 0,
    resume: Resume = False,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    r"""Train heads that guess several tokens at once, to draft with.

    A prompt without an output is first answered by the model itself: what it writes
    is what its heads will have to guess. Prints for every place how many held-out
    tokens are guessed right, at once and by one of five guesses. Needs accelerate:
    pip install 'lookahead-decoding\[train]'.

    For example:

      lookahead train medusa --model ./my-model --data prompts.jsonl -o heads
      lookahead train medusa --model ./my-model --data prompts.jsonl -o heads --resume

    Exit status: 0 the heads are written; 2 an argument is wrong; 130 interrupted:
    pass --resume to go on.
    """
    with usage_errors():
        locate_model(model)
        from lookahead.training.train_heads import Settings, check_trainer, train_heads

        settings = Settings(
            kind=kind,
            heads=heads,
            is_joint=joint,
            draft_vocab=draft_vocab,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            max_length=max_length,
            max_new_tokens=max_new_tokens,
            hold_out_every=hold_out_every,
            seed=seed,
        )
        check_trainer()
        loaded = load(model, dtype, device, threads, measures_costs=False)
        stderr = console(sys.stderr)

        def tell(line: str) -> None:
            stderr.print(line, soft_wrap=True)

        try:
            metrics = train_heads(loaded, data, output, settings, resume=resume, say=tell)
        except KeyboardInterrupt as error:
            say("interrupted", "pass --resume to go on")
            raise typer.Exit(130) from error
        if as_json:
            print(json.dumps({"heads": str(output), **metrics}))
            return
        rows = [
            (str(place), f"{metrics[f'eval_accuracy_{place}']:.1%}", f"{metrics[f'eval_top_5_{place}']:.1%}")
            for place in range(1, heads + 1)
        ]
        console(sys.stdout).print(table(("tokens ahead", "guessed right", "one of five"), rows))
        stderr.print(f"written to {output}", soft_wrap=True)
