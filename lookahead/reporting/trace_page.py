"""A trace as one HTML page that needs nothing else."""

from __future__ import annotations

from html import escape

from lookahead.reporting.trace import Step, Trace, TracePiece
from lookahead.reporting.trace_wording import STEP_HEADINGS, source_rows, step_cells, total_line

_COLOURS = (("#bfe3c4", "#1f5a2b"), ("#ffd9a8", "#6e4310"), ("#c9d8ff", "#2a3f80"), ("#f5c6e4", "#6b2456"))

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --page: #fdfdfb; --line: #d6d6d0; %(light)s }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e6e1; --page: #17181a; --line: #3a3b3e; %(dark)s } }
body { font: 16px/1.6 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; }
.text span, .legend span { border-radius: 3px; }
.legend span { padding: 0 .5em; margin-right: 1em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .15em .8em; text-align: right; }
td:last-child, th:last-child { text-align: left; white-space: pre-wrap; overflow-wrap: anywhere; }
details { opacity: .8; }
"""


def render_page(trace: Trace) -> str:
    """One self-contained page: the text coloured by the source of each token, its steps, and the totals."""
    shades = [_COLOURS[i % len(_COLOURS)] for i in range(len(trace.sources))]
    light = " ".join(f"--source-{i}: {shade[0]};" for i, shade in enumerate(shades))
    dark = " ".join(f"--source-{i}: {shade[1]};" for i, shade in enumerate(shades))
    classes = "\n".join(f".source-{i} {{ background: var(--source-{i}); }}" for i in range(len(shades)))
    legend = "".join(f'<span class="source-{i}">{escape(name)}</span>' for i, name in enumerate(trace.sources))
    text = "".join(
        _token(piece, trace.sources, f"step {number}")
        for number, step in enumerate(trace.steps)
        for piece in step.pieces
    )
    rows = "\n".join(_row(number, step, trace.sources) for number, step in enumerate(trace.steps))
    headings = "".join(f"<th>{escape(heading)}</th>" for heading in (*STEP_HEADINGS, "text"))
    sources = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in source_rows(trace)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lookahead explain</title>
<style>{_STYLE % {"light": light, "dark": dark}}{classes}
</style>
</head>
<body>
<h1>Where each token came from</h1>
<p>{escape(trace.model)}</p>
<p class="legend">{legend}<span>the model itself</span></p>
<details><summary>prompt</summary><p class="text">{escape(trace.prompt)}</p></details>
<p class="text">{text}</p>
<p>{escape(total_line(trace))}</p>
<table>
{sources}
</table>
<h2>Steps</h2>
<table>
<tr>{headings}</tr>
{rows}
</table>
</body>
</html>
"""


def _token(piece: TracePiece, names: list[str], title: str) -> str:
    """One token, marked where a proposer drafted it."""
    if not piece.sources:
        return escape(piece.visible)
    title = f"{title}: {', '.join(piece.sources)}"
    return (
        f'<span class="source-{names.index(piece.sources[0])}" title="{escape(title)}">{escape(piece.visible)}</span>'
    )


def _row(number: int, step: Step, names: list[str]) -> str:
    """One step of the table."""
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in step_cells(number, step))
    return f"<tr>{cells}<td>{_pieces(number, step, names)}</td></tr>"


def _pieces(number: int, step: Step, names: list[str]) -> str:
    """The text of a step."""
    return "".join(_token(piece, names, f"step {number}") for piece in step.pieces)
