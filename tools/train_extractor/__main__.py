"""Train a small extractive summarizer: `python -m tools.train_extractor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerFast

from lookahead.errors import TrainingError
from tools.train_extractor.architecture import build, llama_config
from tools.train_extractor.export import check_writable, export
from tools.train_extractor.probe import Probe
from tools.train_extractor.rows import RowMaker
from tools.train_extractor.stream import inverse_document_frequency
from tools.train_extractor.trainer import Report, Trainer, append_log
from tools.train_extractor.workspace import Settings, Workspace

_EPILOG = """\
example:
  python -m tools.train_extractor --text corpus/ --work run/ --output model/
  python -m tools.train_extractor --text corpus/ --work run/ --output model/ --resume

The text may be .txt files, .jsonl files with a "document" or "text" field, either of them
compressed as .xz, or .tar.xz archives. Everything a run needs to go on is kept in --work.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="python -m tools.train_extractor",
        description="Train a small extractive summarizer from plain text on a CPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--text", type=Path, nargs="+", required=True, metavar="PATH", help="files and folders of text"
    )
    options.add_argument("--work", type=Path, required=True, metavar="DIR", help="working folder of the run")
    options.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the model goes")
    options.add_argument(
        "--tokens", type=int, default=30_000_000, metavar="N", help="training tokens (default: 30 million)"
    )
    options.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    options.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="default: 4096")
    options.add_argument("--layers", type=int, default=4, metavar="N", help="default: 4")
    options.add_argument("--hidden-size", type=int, default=256, metavar="N", help="default: 256")
    options.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads (default: 1)")
    options.add_argument(
        "--probe-tokens",
        type=int,
        default=1_000_000,
        metavar="N",
        help="tokens between measurements on held-out text (default: 1 million)",
    )
    options.add_argument("--resume", action="store_true", help="go on from the checkpoint in --work")
    options.add_argument(
        "--export-only", action="store_true", help="write the model of the checkpoint in --work and stop"
    )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        _run(options, console)
    except TrainingError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; continue with --resume")
        return 130
    return 0


def _run(options: argparse.Namespace, console: Console) -> None:
    """Prepare, train, export."""
    settings = Settings(
        tokens=options.tokens,
        seed=options.seed,
        vocab_size=options.vocab_size,
        layers=options.layers,
        hidden_size=options.hidden_size,
    )
    torch.set_num_threads(options.threads)
    check_writable(options.work)
    check_writable(options.output)
    workspace = Workspace(options.work)
    going_on = options.resume or options.export_only
    if workspace.checkpoint.exists() and not going_on:
        raise TrainingError(f"{options.work} already holds a run: pass --resume or another --work folder")
    if options.export_only and not workspace.checkpoint.exists():
        raise TrainingError(f"{options.work} holds no checkpoint to export")
    tokenizer, stream, held_out = workspace.prepare(options.text, settings, console.print)
    vocab_size = len(tokenizer)
    config = llama_config(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        layers=settings.layers,
        positions=settings.positions,
    )
    maker = RowMaker(stream, inverse_document_frequency(stream, vocab_size))
    trainer = Trainer(
        build(config, seed=settings.seed),
        maker,
        budget=settings.tokens,
        seed=settings.seed,
        checkpoint=workspace.checkpoint,
    )
    if going_on and workspace.checkpoint.exists():
        trainer.resume()
        console.print(f"resumed at {trainer.progress.tokens:,} of {settings.tokens:,} tokens")
    if not options.export_only:
        probe = Probe.draw(RowMaker(held_out, maker.idf))
        _train(trainer, tokenizer, probe, workspace, options.probe_tokens, console)
    export(trainer.model, tokenizer, options.output)
    console.print(f"model written to {options.output}")


def _train(
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerFast,
    probe: Probe,
    workspace: Workspace,
    probe_tokens: int,
    console: Console,
) -> None:
    """Train with a progress bar, logging every report and, now and then, a probe."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=trainer.budget, completed=trainer.progress.tokens)
        probed = trainer.progress.tokens

        def on_report(report: Report) -> None:
            nonlocal probed
            entry: dict[str, object] = {
                "step": report.step,
                "tokens": report.tokens,
                "phase": report.phase,
                "loss": round(report.loss, 4),
                "tokens_per_s": round(report.tokens_per_s),
            }
            if report.tokens - probed >= probe_tokens or report.tokens >= trainer.budget:
                probed = report.tokens
                entry |= probe.measure(trainer.model, tokenizer)
            append_log(workspace.log, entry)
            bar.update(task, completed=report.tokens, description=f"{report.phase} loss {report.loss:.3f}")

        trainer.run(on_report)


if __name__ == "__main__":
    sys.exit(main())
