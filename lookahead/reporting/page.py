"""A report as one HTML page that needs nothing else."""

from __future__ import annotations

from lookahead.reporting.aggregate import Failures, Tally
from lookahead.reporting.formatting import shown
from lookahead.reporting.plots import Card, all_plots
from lookahead.reporting.read_results import Reading
from lookahead.reporting.tables import document_list, document_lists, failures_table, headline, totals_table

MARK = '<meta name="generator" content="lookahead report">'

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #5d5d58; --page: #fdfdfb; --card: #ffffff; --line: #deded8;
  --ours: #2f6fab; --other: #d9761a; --rest: #ecece6; --warn: #a4262c; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e8e6e1; --soft: #a5a39d; --page: #17181a;
  --card: #1f2023; --line: #3a3b3e; --ours: #6fb0ea; --other: #eda35c; --rest: #303136; --warn: #ff8a80; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 66rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .8rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
h4 { font-size: .95rem; margin: 0; overflow-wrap: anywhere; }
.caption { color: var(--soft); font-size: .85rem; margin: .4rem 0 0; }
.warn { color: var(--warn); overflow-wrap: anywhere; }
.headline { display: flex; flex-wrap: wrap; gap: .6rem 2.4rem; margin: 1.2rem 0; padding: 0; list-style: none; }
.headline strong { display: block; font-size: 1.9rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.headline li { color: var(--soft); font-size: .9rem; }
.headline strong { color: var(--ink); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1rem; min-width: 0;
  break-inside: avoid; overflow-x: auto; }
.card > svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .x { text-anchor: middle; }
svg .y { text-anchor: end; }
.grid { stroke: var(--line); fill: none; }
.axis { stroke: var(--soft); fill: none; }
.bar { fill: var(--ours); }
.rest { fill: var(--rest); }
.point { fill: var(--ours); fill-opacity: .65; }
.median { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 5 3; }
.plain { stroke: var(--other); stroke-width: 2; }
.mark { stroke: var(--ink); stroke-width: 2; vector-effect: non-scaling-stroke; }
.ours, .plain-line { fill: none; stroke: var(--ours); stroke-width: 2; stroke-linejoin: round; }
.plain-line { stroke: var(--other); }
.shade-1 { fill: var(--ours); fill-opacity: .2; } .shade-2 { fill: var(--ours); fill-opacity: .4; }
.shade-3 { fill: var(--ours); fill-opacity: .6; } .shade-4 { fill: var(--ours); fill-opacity: .8; }
.shade-5 { fill: var(--ours); } [class^=shade] { shape-rendering: crispEdges; }
.share { display: block; width: 100%; min-width: 2.5rem; height: .8rem; }
.key { display: inline-block; width: 1.3em; border-top: 2px solid var(--ours); vertical-align: .3em;
  margin-right: .35em; }
.key.median { border-top: 2px dashed var(--ink); }
.key.plain, .key.plain-line { border-color: var(--other); } .key.mark { border-color: var(--ink); }
.card table { width: 100%; } .card table.totals { width: auto; } .card > p:only-child { margin: 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th { font-weight: normal; color: var(--soft); }
th, td { border-bottom: 1px solid var(--line); padding: .3em .6em; text-align: right; }
th:first-child, .words, .totals td { text-align: left; overflow-wrap: break-word; }
.words, .totals td { overflow-wrap: anywhere; } .figures { white-space: nowrap; }
.wide { width: 30%; } .failures .wide { width: 16%; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 0; }
article { margin: 0 0 1.1rem; break-inside: avoid; } article:last-child { margin: 0; }
.lists { display: grid; gap: 1rem; }
.lists .card { break-inside: auto; }
@media (max-width: 34rem) { body { margin: 1rem auto; } svg text { font-size: 15px; } .card { padding: .7rem; }
  .headline strong { font-size: 1.5rem; } th, td { padding: .3em .35em; } }
@media print { body { font-size: 10pt; max-width: none; margin: 0; }
  th, td { padding: .2em .35em; } .cards { grid-template-columns: 1fr 1fr; }
  .card { border-color: #999; } .bar, .rest, .key { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def render_page(
    tally: Tally, failures: Failures | None, *, name: str, rejects_name: str, readings: dict[str, Reading]
) -> str:
    """One self-contained page.

    Args:
        tally: The results, added up.
        failures: The failures, or `None` where no file tells of them.
        name: Of the file of results.
        rejects_name: Of the file where failures stand or would stand.
        readings: How reading went, by name of the file.
    """
    figures = "".join(
        f"<li><strong>{shown(figure)}</strong>{shown(what)}</li>"
        for figure, what in headline(tally, failures or Failures())
    )
    notes = "".join(_note(each, reading) for each, reading in readings.items())
    cards = "\n".join(_card(card) for card in all_plots(tally))
    lists = "\n".join(
        f'<section class="card"><h3>{shown(title)}</h3>{document_list(lines)}</section>'
        for title, lines in document_lists(tally)
    )
    documents = f'<h2>Documents</h2>\n<div class="lists">\n{lists}\n</div>' if lists else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{MARK}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{shown(name)}: lookahead report</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{shown(name)}</h1>
<ul class="headline">{figures}</ul>
{notes}
<div class="cards">
{cards}
</div>
<h2>Failures</h2>
<section class="card">{failures_table(failures, rejects_name)}</section>
<h2>Totals</h2>
<section class="card">{totals_table(tally, failures)}</section>
{documents}
</body>
</html>
"""


def _card(card: Card) -> str:
    """A plot with its title and its words."""
    words = f'<p class="caption">{card.caption}</p>'
    return f'<section class="card"><h3>{shown(card.title)}</h3>{card.picture}{words}</section>'


def _note(name: str, reading: Reading) -> str:
    """What could not be read of a file, if anything."""
    problem = reading.describe()
    return f'<p class="warn">{shown(name)}: {shown(problem)}</p>' if problem else ""
