"""The way of a call is short enough to be read: `python -m tests.support.path` prints it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support.products import kept_choice

ROOT = Path(__file__).resolve().parent.parent
# A process of its own: other tests teach the library what their models cost.
COUNT = """
import json, torch
from tests.support.path import trace_paths
torch.set_num_threads(1)

def counts(trace):
    sizes = {name: len(getattr(trace, name)) for name in ("functions", "files", "climbs")}
    return {**sizes, "calls": trace.calls, "path": str(trace)}

dtypes = "float32", "bfloat16"
print(json.dumps({dtype: [*map(counts, trace_paths(getattr(torch, dtype)))] for dtype in dtypes}))
"""

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")


@cache
def _counts() -> dict[str, list[dict[str, Any]]]:
    """What was counted of the way to the first token, and of a step, by dtype."""
    command = [sys.executable, "-c", COUNT]
    with TemporaryDirectory() as folder, kept_choice(Path(folder), "packed"):  # whatever is faster on this machine
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    counts: dict[str, list[dict[str, Any]]] = json.loads(run.stdout.splitlines()[-1])
    return counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_way_to_the_first_token_is_short(dtype: str) -> None:
    way, _ = _counts()[dtype]
    assert way["functions"] <= 142, f"\n{way['path']}"
    assert way["files"] <= 39, f"\n{way['path']}"
    assert way["calls"] <= 1600, f"\n{way['path']}"
    assert way["climbs"] <= 1, f"\n{way['path']}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_is_short(dtype: str) -> None:
    _, step = _counts()[dtype]
    assert step["functions"] <= 48, f"\n{step['path']}"  # with a draft of which a part is rejected
    assert step["climbs"] <= 2, f"\n{step['path']}"
