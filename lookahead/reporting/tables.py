"""The tables of a report: totals, failures, and single documents with their summaries."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.reporting.aggregate import MOST_SHOWN, Failures, Tally
from lookahead.reporting.axes import duration, exact
from lookahead.reporting.charts import bar
from lookahead.reporting.formatting import shown
from lookahead.reporting.record import Line

MOST_ROWS = 12  # of the failures


def headline(tally: Tally, failures: Failures) -> list[tuple[str, str]]:
    """The figures to see first, and what they are."""
    figures = [(exact(tally.documents), _plural(tally.documents, "document summarized", "documents summarized"))]
    if failures.total:
        figures.append((exact(failures.total), "failed"))
    speed, length = tally.ratio("decoded", "decode_s"), tally.ratio("decoded", "forwards")
    if speed is not None:
        # Only with --compare is it one document after the other; else each one's seconds were spent on others too.
        beside = "" if tally.speedup is not None else " of a document beside others"
        figures.append((exact(round(speed, 1)), f"tokens per second{beside}, prefill excluded"))
    if length is not None:
        figures.append((exact(length), "tokens per pass"))
    if tally.speedup is not None:
        figures.append((f"{exact(tally.speedup)}×", "the speed of plain decoding, prefill excluded"))
    return figures


def totals_table(tally: Tally, failures: Failures | None) -> str:
    """What the job comes to; a dash stands where the results do not say."""
    acceptance = tally.ratio("accepted", "drafted")
    rows = [
        ("documents summarized", exact(tally.documents)),
        ("of them with the summary of an equal document", exact(tally.copies) if tally.copies else ""),
        ("documents that failed", exact(failures.total) if failures else "0"),
        ("summaries cut at the token limit", f"{tally.cut:,} of {tally.known_ends:,}" if tally.known_ends else ""),
        ("tokens of the documents", exact(tally.sum("document_tokens"))),
        ("tokens of the summaries", exact(tally.sum("summary_tokens"))),
        ("passes of the model", exact(tally.sum("forwards"))),
        ("tokens per pass", exact(tally.ratio("decoded", "forwards"))),
        ("draft tokens verified", exact(tally.sum("drafted"))),
        ("of them accepted", "–" if acceptance is None else f"{exact(tally.sum('accepted'))} ({acceptance:.1%})"),
        ("prefill, all documents added up", duration(tally.sum("prefill_s"))),
        ("decoding, all documents added up", duration(tally.sum("decode_s"))),
        ("tokens per second of decoding", exact(tally.ratio("decoded", "decode_s"))),
    ]
    if tally.speedup is not None:
        rows += [
            ("tokens per second of plain decoding", exact(tally.ratio("plain_decoded", "plain_decode_s"))),
            ("speedup", f"{exact(tally.speedup)}×"),
        ]
    if tally.compared:
        rows.append(("identical to plain decoding", f"{tally.compared - tally.different:,} of {tally.compared:,}"))
    rows += [("model", f"{name} ({_documents(lines)})") for name, lines in tally.models.most_common(MOST_SHOWN)]
    body = "".join(f"<tr><th>{shown(name)}</th><td>{shown(figure)}</td></tr>" for name, figure in rows if figure)
    note = ""
    if tally.different:
        names = ", ".join(shown(name) for name in tally.names_of_different)
        more = ", …" if tally.different > len(tally.names_of_different) else ""
        note = f'<p class="warn">Plain decoding wrote other tokens for {names}{more}.</p>'
    return f"{note}<table class='totals'>{body}</table>"


def failures_table(failures: Failures | None, file_name: str) -> str:
    """Why documents failed, the commonest reason first."""
    if failures is None:
        return f"<p>No failures: there is no {shown(file_name)}, where they would stand.</p>"
    if not failures.total:
        return f"<p>No failures: {shown(file_name)} is empty.</p>"
    shares = failures.count.most_common(MOST_ROWS)
    rows = []
    for reason, count in shares:
        names = ", ".join(shown(name) for name in failures.examples[reason])
        more = ", …" if count > len(failures.examples[reason]) else ""
        rows.append(
            f"<tr><td>{count:,}</td><td class='wide'>{bar(count / failures.total)}</td>"
            f"<td class='words' dir='auto'>{shown(failures.first[reason])}</td>"
            f"<td class='words'>{names}{more}</td></tr>"
        )
    rest = failures.total - sum(count for _, count in shares)
    if rest:
        rows.append(
            f"<tr><td>{rest:,}</td><td class='wide'>{bar(rest / failures.total)}</td><td>others</td><td></td></tr>"
        )
    heading = "<tr><th></th><th></th><th class='words'>reason</th><th class='words'>documents</th></tr>"
    return (
        f"<table class='failures'>{heading}{''.join(rows)}</table>"
        "<p class='caption'>Reasons that differ only in places, numbers and ids are one; the first is shown.</p>"
    )


def document_lists(tally: Tally) -> list[tuple[str, list[Line]]]:
    """Documents worth a look, with a heading for each list."""
    if tally.most_speedup.lines:
        most, least, what = tally.most_speedup.lines, tally.least_speedup.lines, "speedup"
    else:
        most, least, what = tally.most_accepted.lines, tally.least_accepted.lines, "tokens per pass"
    # Of few documents each stands in one list.
    half = MOST_SHOWN if len(most) == MOST_SHOWN and tally.documents >= 2 * MOST_SHOWN else (len(most) + 1) // 2
    best = most[:half]
    worst = [line for line in least if not any(line is each for each in best)][:half]
    lists = [
        ("Took longest", tally.longest.lines),
        (f"Gained most, by {what}", best),
        (f"Gained least, by {what}", worst),
    ]
    return [(title, lines) for title, lines in lists if lines]


def document_list(lines: Sequence[Line]) -> str:
    """Documents with their figures and summaries."""
    return "".join(
        f"<article><h4 dir='auto'>{shown(line.name)}</h4><p class='caption'>{_figures(line)}</p>"
        f"<p class='text' dir='auto'>{shown(line.text) or '<em>an empty summary</em>'}</p></article>"
        for line in lines
    )


def _figures(line: Line) -> str:
    """What is known of one document, in a line."""
    parts = []
    if line.document_tokens is not None and line.summary_tokens is not None:
        parts.append(f"{exact(line.document_tokens)} tokens in {exact(line.summary_tokens)}")
    if line.is_cut:
        parts.append("cut at the token limit")
    if line.seconds is not None:
        parts.append(duration(line.seconds))
    if line.tokens_per_s is not None:
        parts.append(f"{exact(round(line.tokens_per_s, 1))} tokens/s")
    if line.acceptance_length is not None:
        parts.append(f"{exact(line.acceptance_length)} tokens per pass")
    if line.speedup is not None:
        parts.append(f"{exact(line.speedup)}×")
    return " · ".join(parts)


def _documents(count: int) -> str:
    """`1 document`, `2 documents`."""
    return f"{count:,} {_plural(count, 'document', 'documents')}"


def _plural(count: int, one: str, many: str) -> str:
    """The word that goes with a number."""
    return one if count == 1 else many
