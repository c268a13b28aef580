"""The command `lookahead models`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from lookahead.cli.options import option
from lookahead.cli.terminal import console, harmless

if TYPE_CHECKING:
    from lookahead.loading.local_models import LocalModel

_HEADINGS = "name", "size", "type", "where"
_BREAKS = dict.fromkeys(map(ord, "\t\n\u2028\u2029"), "\ufffd")
_PADDING = 3  # characters around a cell
_LEAST_PLACE = 24  # characters of a column of places


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    as_json: bool = option(False, "Print one JSON object a line.", "--json")


def models(options: ModelsOptions) -> None:
    """List the models on this machine: names for --model, sizes, types and places.

    The list has the default model, the models in the cache of the Hugging Face Hub, and converted GGUF files. To use
    another folder or file, pass its path.

    For example:

      lookahead models
      lookahead models --json
    """
    from lookahead.loading.local_models import local_models

    found = local_models()
    if options.as_json:
        for model in found:
            print(json.dumps(asdict(model)))
        return
    rows = [_row(model) for model in found]
    out = console(sys.stdout)
    needed = [max(map(cell_len, column)) + _PADDING for column in zip(_HEADINGS, *rows, strict=True)]
    if not out.is_terminal:  # a row stays a line, however long
        whole = Console(file=sys.stdout, width=sum(needed) + _PADDING, highlight=False, markup=False, emoji=False)
        whole.print(_table(rows))
    elif sum(needed[:3]) + _LEAST_PLACE <= out.width:
        out.print(_table(rows))
    else:  # the terminal breaks a name that is longer than a line
        for name, size, dtype, where in rows:
            for line in (name, f"  {size} {dtype}".rstrip(), f"  {where}".rstrip()):
                if line:
                    out.print(line, soft_wrap=True)


def _row(model: LocalModel) -> tuple[str, str, str, str]:
    where = "" if model.path == model.name else model.path
    name, place = (harmless(text).translate(_BREAKS) for text in (model.name, where))
    return name, decimal(model.bytes), model.dtype or "", place


def _table(rows: Sequence[tuple[str, ...]]) -> Table:
    """A table of models in which only the places are broken."""
    drawn = Table(box=SIMPLE)
    for heading in _HEADINGS:
        justify: Any = "right" if heading == "size" else "left"
        drawn.add_column(heading, no_wrap=heading != "where", overflow="fold", justify=justify)
    for row in rows:
        drawn.add_row(*row)
    return drawn
