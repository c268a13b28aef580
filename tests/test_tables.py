"""Tables of the command line at terminals of any width."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest

from lookahead.cli.terminal import console, table

ROWS: list[Any] = [
    {"file": "reports/of/the/year/lost_in_translation_1.txt", "tokens": "1,234", "speedup": "2.31x"},
    {"file": "reports/of/the/year/lost_in_translation_2.txt", "tokens": "12", "speedup": "1.10x"},
    {"file": "short.txt", "tokens": "2", "speedup": "0.99x"},
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: Any, stream: io.StringIO, columns: int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", stream)
    console(sys.stdout).print(table(ROWS))
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("columns", [46, 50, 60])
def test_names_are_cut_in_the_middle_so_that_a_row_stays_a_line(columns, monkeypatch):
    lines = shown(monkeypatch, Terminal(), columns)
    named = [line.strip() for line in lines if "…" in line or "short.txt" in line]
    assert len(named) == 3 and all(line.endswith("x") for line in named)
    assert named[0].split()[0] != named[1].split()[0]  # the ends of names tell files of one folder apart
    assert named[0].startswith("rep") and named[0].split()[0].endswith(".txt")
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize(("stream", "columns"), [(Terminal(), 100), (io.StringIO(), 100)], ids=["wide", "a file"])
def test_names_are_whole_where_there_is_room_for_them(stream, columns, monkeypatch):
    lines = shown(monkeypatch, stream, columns)
    assert all(any(row["file"] in line for line in lines) for row in ROWS)


@pytest.mark.parametrize("columns", [20, 24, 30])
def test_on_a_narrow_terminal_each_figure_has_a_line_with_its_heading(columns, monkeypatch):
    lines = shown(monkeypatch, Terminal(), columns)
    figures = [line.split() for line in lines if line and not line.startswith((" ", "file"))]
    assert figures == [[name, row[name]] for row in ROWS for name in ("tokens", "speedup")]
    assert max(map(len, lines)) <= columns
