"""The figures of a trace and of a calibration as rows of text, and the HTML page about a trace."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lookahead.documents.byte_sources import opened
from lookahead.errors import ConfigError, PromptError
from lookahead.models.calibration import Calibration, Sweep
from lookahead.reporting.render import render
from lookahead.reporting.trace import Step, Trace
from lookahead.utils.atomic import write_atomically

STEP_HEADINGS = ("step", "drafted", "expected", "accepted", "ms")
SOURCE_HEADINGS = ("source", "passes", "drafted", "expected", "accepted", "calibration error")
SWEEP_HEADINGS = (
    "nodes",
    "ms\nmeasured",
    "ms at\nbest",
    "FLOP\nper byte",
    "tokens to\nbreak even",
    "accepted\nto break even",
)
_COLOURS = (("#bfe3c4", "#1f5a2b"), ("#ffd9a8", "#6e4310"), ("#c9d8ff", "#2a3f80"), ("#f5c6e4", "#6b2456"))


def step_cells(number: int, step: Step) -> tuple[str, ...]:
    """One row under `STEP_HEADINGS`."""
    return (str(number), str(step.drafted), f"{step.expected:.2f}", str(step.accepted), f"{1e3 * step.seconds:.2f}")


def source_rows(trace: Trace) -> list[tuple[str, ...]]:
    """`SOURCE_HEADINGS`, one row for each proposer that drafted, and the sums."""
    stats = trace.stats
    rows: list[tuple[str, ...]] = [SOURCE_HEADINGS]
    for name, error in stats.calibration_error_by_source.items():
        if stats.drafted_by_source[name]:
            nodes = stats.drafted_by_source[name], stats.expected_by_source[name], stats.accepted_by_source[name]
            rows.append(_source_row(name, stats.forwards_by_source[name], *nodes, error))
    sums = stats.drafted_tokens, stats.expected_tokens, stats.accepted_tokens
    rows.append(_source_row("all", stats.target_forwards, *sums, stats.calibration_error))
    return rows


def _source_row(name: str, passes: int, drafted: int, expected: float, accepted: int, error: float) -> tuple[str, ...]:
    return name, str(passes), str(drafted), f"{expected:.1f}", str(accepted), f"{error:+.3f}"


def total_line(trace: Trace) -> str:
    """The totals in one line."""
    stats, plain = trace.stats, trace.plain
    compared = ""
    if plain is not None and plain.tokens_per_s > 0.0:
        factor = stats.tokens_per_s / plain.tokens_per_s
        compared = f" ({factor:.2f}x of {plain.tokens_per_s:.1f} tokens/s without drafts)"
    return (
        f"{stats.emitted_tokens} tokens from {stats.target_forwards} passes and the prefill, "
        f"{stats.mean_acceptance_length:.2f} tokens per pass, {stats.tokens_per_s:.1f} tokens/s{compared}; "
        f"{stats.drafted_tokens} drafted, {stats.expected_tokens:.1f} expected and {stats.accepted_tokens} accepted"
    )


def model_line(name: str, model: nn.Module) -> str:
    """A model's name, type, size and dtype in one line."""
    parameters = sum(each.numel() for each in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return f"{name} ({type(model).__name__}, {parameters:,} parameters, {dtype})"


def machine_line(calibration: Calibration) -> str:
    """The measured peaks of the machine in one line."""
    machine = calibration.machine
    ridge = machine.flops / machine.bytes_per_s
    return (
        f"at best {machine.flops / 1e9:.1f} GFLOP/s and {machine.bytes_per_s / 1e9:.1f} GB/s, "
        f"so a step is bound by memory below {ridge:.1f} FLOP per byte"
    )


def sweep_rows(sweep: Sweep) -> list[tuple[str, ...]]:
    """One row under `SWEEP_HEADINGS` for each number of nodes."""
    return [
        (
            str(point.nodes),
            f"{1e3 * point.seconds:.3f}",
            f"{1e3 * point.bound_s:.3f}",
            f"{point.intensity:.2f}",
            f"{point.break_even:.2f}",
            f"{point.acceptance_needed:.0%}" if point.nodes > 1 else "-",
        )
        for point in sweep.points
    ]


def render_trace(trace: Trace) -> str:
    """One self-contained page: the text coloured by the source of each token, every step, and the totals."""
    headings, *rows = source_rows(trace)
    return render(
        "trace.html.j2",
        trace=trace,
        colours=[_COLOURS[i % len(_COLOURS)] for i in range(len(trace.sources))],
        total=total_line(trace),
        source_headings=headings,
        source_rows=rows,
        step_headings=STEP_HEADINGS,
        steps=[(step, step_cells(number, step)) for number, step in enumerate(trace.steps)],
    )


def read_prompt_file(name: str) -> str:
    """The prompt in a file, or on standard input where the name is `-`.

    Raises:
        DocumentError: A pipe sends nothing in time, or a URL cannot be read.
        PromptError: It is empty or no UTF-8.
        OSError: The file cannot be read.
    """
    with opened(name) as file:
        content = file.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is no UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise PromptError(f"{name} holds no prompt: it is empty")
    return text


def check_page(path: Path | None) -> None:
    """Refuse a page before the work that could not be written after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"html must be a file in a folder that exists, got {str(path)!r}")


def write_page(trace: Trace, path: Path) -> None:
    """Write a trace as an HTML page. The write is atomic.

    Raises:
        OSError: It cannot be written.
    """
    write_atomically(path, render_trace(trace))
