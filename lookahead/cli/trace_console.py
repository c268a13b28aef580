"""Traces and calibrations on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from lookahead.cli.terminal import table
from lookahead.models.calibration import Calibration
from lookahead.reporting.trace import Trace
from lookahead.reporting.trace_page import (
    STEP_HEADINGS,
    SWEEP_HEADINGS,
    machine_line,
    source_rows,
    step_cells,
    sweep_rows,
    total_line,
)

_STYLES = ("black on green", "black on yellow", "white on blue", "white on magenta")


def draw_trace(trace: Trace, out: Console) -> None:
    """Print the text coloured by the source of each token, a legend, every step, and the totals."""
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


def draw_calibration(calibration: Calibration, out: Console) -> None:
    """Print one table for each length of context, and what the machine does at best."""
    for sweep in calibration.sweeps:
        out.print(f"context of {sweep.context} tokens")
        out.print(table(SWEEP_HEADINGS, sweep_rows(sweep)))
    out.print(machine_line(calibration))
