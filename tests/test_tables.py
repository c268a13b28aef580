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


@pytest.mark.parametrize("columns", [30, 46, 60])
def test_no_name_and_no_figure_is_cut_at_a_narrow_terminal(columns, monkeypatch):
    lines = shown(monkeypatch, Terminal(), columns)
    written = "".join("".join(lines).split())
    assert max(map(len, lines)) <= columns and "…" not in written
    assert all(row["speedup"] in written for row in ROWS)


@pytest.mark.parametrize(("stream", "columns"), [(Terminal(), 100), (io.StringIO(), 100)], ids=["wide", "a file"])
def test_names_are_whole_where_there_is_room_for_them(stream, columns, monkeypatch):
    lines = shown(monkeypatch, stream, columns)
    assert all(any(row["file"] in line for line in lines) for row in ROWS)
