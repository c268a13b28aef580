"""The figures of a trace and of a calibration as words and rows, for whoever draws them."""

from __future__ import annotations

from torch import nn

from lookahead.models.calibration import Calibration, Sweep
from lookahead.reporting.trace import Step, Trace

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


def step_cells(number: int, step: Step) -> tuple[str, ...]:
    """One row under `STEP_HEADINGS`."""
    return (str(number), str(step.drafted), f"{step.expected:.2f}", str(step.accepted), f"{1e3 * step.seconds:.2f}")


def source_rows(trace: Trace) -> list[tuple[str, ...]]:
    """One row under `SOURCE_HEADINGS` for each proposer that drafted, the headings first and the sums last."""
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
    """One row under `SOURCE_HEADINGS`."""
    return name, str(passes), str(drafted), f"{expected:.1f}", str(accepted), f"{error:+.3f}"


def total_line(trace: Trace) -> str:
    """The totals in a line."""
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
    """A model in a line: its name, its type, its size, and its dtype."""
    parameters = sum(each.numel() for each in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return f"{name} ({type(model).__name__}, {parameters:,} parameters, {dtype})"


def machine_line(calibration: Calibration) -> str:
    """What the machine was measured to do, in a line."""
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
