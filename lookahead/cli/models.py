"""The command `lookahead models`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from rich.filesize import decimal

from lookahead.cli.options import option
from lookahead.cli.terminal import console, harmless

_BREAKS = dict.fromkeys(map(ord, "\t\n\u2028\u2029"), "\ufffd")


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    as_json: bool = option(False, "Print one JSON object a line.", "--json")


def models(options: ModelsOptions) -> None:
    """List the models on this machine, one a line: names for --model, sizes, types and places.

    The list has the default model, the models in the cache of the Hugging Face Hub, and converted GGUF files. To use
    another folder or file, pass its path.

    For example:

      lookahead models
      lookahead models --json
    """
    from lookahead.loading.local_models import local_models

    for model in local_models():
        if options.as_json:
            print(json.dumps(asdict(model)))
            continue
        where = "" if model.path == model.name else model.path
        row = model.name, decimal(model.bytes), model.dtype or "", where
        # A line for each, however long: a program reads lines, and a terminal breaks them.
        line = "  ".join(text for text in row if text)
        console(sys.stdout).print(harmless(line).translate(_BREAKS), soft_wrap=True)
