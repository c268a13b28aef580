"""The command `lookahead models`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from rich.box import SIMPLE
from rich.filesize import decimal
from rich.table import Table

from lookahead.cli.options import option
from lookahead.cli.terminal import console, harmless


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
    from lookahead.hf.local_models import local_models

    found = local_models()
    if options.as_json:
        for model in found:
            print(json.dumps(asdict(model)))
        return
    shown = Table(box=SIMPLE)
    for heading in ("name", "size", "type", "where"):
        is_short = heading in ("size", "type")
        shown.add_column(heading, no_wrap=is_short, overflow="fold", justify="right" if heading == "size" else "left")
    for model in found:
        where = "" if model.path == model.name else model.path
        shown.add_row(harmless(model.name), decimal(model.bytes), model.dtype or "", harmless(where))
    console(sys.stdout).print(shown)
