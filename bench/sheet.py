"""What a table of the results page is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        what: What it is.
        path: Where it stands in the file, as `a/b/c`; a `*` is every place of a list.
        target: What was to be reached; empty where nothing was set.
        each: What such a place is called, with its own fields in braces.
        is_optional: Whether a file may well be without it, so that it was not measured yet.
    """

    what: str
    path: str
    target: str = ""
    each: str = ""
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Sheet:
    """One result file.

    Attributes:
        file: Its name in `bench/results`.
        title: What it is about.
        command: What makes it.
        rows: The figures shown; none shows those at the top of the file.
        model: The model of its command, where the file does not say.
        dtype: Likewise.
        device: Likewise.
        note: What a reader has to know.
        plot: What its plot shows, where it has one.
    """

    file: str
    title: str
    command: str
    rows: tuple[Row, ...] = ()
    model: str = ""
    dtype: str = ""
    device: str = ""
    note: str = ""
    plot: str = ""
