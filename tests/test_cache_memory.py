"""The memory of keys and values: it is taken as slots are written, and a cache that grows copies what was written."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lookahead.model.cache import TreeCache
from lookahead.model.slots import SlotBlock, SlotForm, zeros

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="it reads the pages of this process from /proc")
MIB = 1 << 20


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def fill(cache: TreeCache, tokens: int) -> None:
    """Write keys and values of a text into row 0 of four layers, 1 KiB for each token and layer."""
    kv = torch.ones(2, tokens, 64)
    cache.copy_prefix_from(0, ((kv, 2 * kv) for _ in range(4)), tokens)


@LINUX
def test_slots_take_memory_only_once_they_are_written():
    before = resident()
    cache = TreeCache(rows=2, capacity=1 << 17)  # 1 GiB
    fill(cache, 4000)
    assert resident() - before < 64 * MIB
    cache.resize(rows=4, capacity=1 << 18)
    cache.wipe(0, 100)
    assert resident() - before < 64 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_slots_are_zeros_that_may_be_written(dtype):
    made = zeros(torch.ones(1, dtype=dtype), (2, 3, 5, 1, 2))
    assert made.dtype == dtype and made.shape == (2, 3, 5, 1, 2) and made.is_contiguous() and not made.any()
    made[0, 1] = 7
    assert made.sum() == 7 * 10
    assert zeros(torch.ones(1), (2, 0, 4)).shape == (2, 0, 4)


def test_a_block_that_grows_keeps_every_slot_that_was_reached_and_no_other():
    form = SlotForm(torch.device("cpu"), torch.float32, 1, 2, None)
    block = SlotBlock(form, torch.ones(2, 3, 8, 1, 2))
    block.fit(4, 12, used=2, reached=5)
    assert block.whole.shape == (2, 4, 12, 1, 2)
    assert block.whole[:, :2, :5].all() and block.whole.sum() == 2 * 2 * 5 * 2
    block.fit(1, 3, used=4, reached=12)
    assert block.whole.all() and block.whole.shape == (2, 1, 3, 1, 2)


def test_a_copied_beginning_outlives_growth_and_a_wiped_end_is_zero():
    cache = TreeCache(rows=1, capacity=16)
    fill(cache, 12)
    cache.reserve(100)
    keys, values = cache.extract_row(0).kv[3]
    assert torch.equal(keys, torch.ones(2, 12, 64)) and torch.equal(values, torch.full((2, 12, 64), 2.0))
    cache.wipe(0, 5)
    assert all(layer.keys[0, :5].all() and not layer.keys[0, 5:].any() for layer in cache.layers)
    assert np.array_equal(cache.slots.lengths, [5])
