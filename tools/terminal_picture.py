"""A terminal picture of a command, as an SVG file: what it prints, colours included.

    python -m tools.terminal_picture docs/compare.svg -- lookahead summarize article.txt --compare --format text
    python -m tools.terminal_picture docs/explain.svg --lines 40 -- lookahead explain prompt.txt

The picture shows what the command wrote to the standard output; progress goes to the standard error, which is shown
where the command fails.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

_SHOWN = "lookahead"


def draw(printed: str, title: str, *, width: int, lines: int | None = None) -> str:
    """An SVG of a terminal of `width` columns; of more lines than `lines` the rest is left out, with a mark."""
    console = Console(record=True, file=StringIO(), width=width, force_terminal=True, color_system="truecolor")
    kept = printed.rstrip().splitlines()
    if lines is not None and len(kept) > lines:
        kept = [*kept[:lines], "…"]
    console.print(Text.from_ansi("\n".join(kept)))
    return console.export_svg(title=title, unique_id="lookahead")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and draw what it printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--width", type=int, default=100, help="columns")
    parser.add_argument("--lines", type=int, help="lines that are shown at most")
    parser.add_argument("--title", help="above the picture; the command when left out")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    arguments = parser.parse_args(argv)
    command = list(arguments.command)
    if command[0] == _SHOWN:
        command = [sys.executable, "-c", "from lookahead.cli.app import main; main()", *command[1:]]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(arguments.width)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.stderr.write(done.stderr)
        return done.returncode
    title = arguments.title or shlex.join(arguments.command)
    picture = draw(done.stdout, title, width=arguments.width, lines=arguments.lines)
    arguments.output.write_text(picture, encoding="utf-8")
    print(f"wrote {arguments.output}, {len(picture) / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
