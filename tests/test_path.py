"""The way of a call is short enough to be read: `python -m tests.support.path` prints it."""

from __future__ import annotations

import sys
from functools import cache

import pytest
import torch

from tests.support.path import Trace, trace_paths

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")


@cache
def _traces(dtype: torch.dtype) -> tuple[Trace, Trace]:
    return trace_paths(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_way_to_the_first_token_is_short(dtype: torch.dtype) -> None:
    path, _ = _traces(dtype)
    assert len(path.functions) <= 235, f"\n{path}"
    assert len(path.files) <= 52, f"\n{path}"
    assert path.calls <= 2000, f"\n{path}"
    assert len(path.climbs) <= 2, path.climbs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_short(dtype: torch.dtype) -> None:
    _, step = _traces(dtype)
    assert len(step.functions) <= 59, f"\n{step}"
    assert len(step.climbs) <= 2, step.climbs
