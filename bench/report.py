"""How a benchmark hands over its figures: one JSON object on the last line, and in a file where one is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def publish(report: Mapping[str, Any], output: Path | None) -> None:
    """Print the figures as the last line, and write them to `output` too."""
    if output:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))
