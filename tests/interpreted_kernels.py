"""The kernels, interpreted on the CPU, against their references; tests/test_kernels.py runs this file.

Triton decides on import whether it interprets, so this file needs a process of its own:

    TRITON_INTERPRET=1 python -m pytest tests/interpreted_kernels.py
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from lookahead.kernels import self_test
from lookahead.kernels.dispatch import KernelVariant
from lookahead.kernels.self_test import attention_error, compaction_error, gains_of
from tests.support import kernel_reference as reference
from tests.support.random_trees import CASES, random_trees, relative_error

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 to run the kernels without a GPU", allow_module_level=True)

from lookahead.kernels.compaction import SlotBuffers, compact
from lookahead.kernels.tree_attention import tree_attention

# The interpreter cuts bfloat16 off where a GPU rounds, which doubles the error.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}
FULL = torch.float32
# Queries of rows past the last node are divided by a sum of nothing, and not stored.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


# Every option, type and block shape once; all cases with both splits are exhaustive.
MERGED = {"plain decoding, grouped", "three heads a group", "two words of ancestors", "sinks", "everything at once"}
IN_ONE = {
    "small tree",
    "values smaller than keys",
    "softcap",
    "window",
    "chunks that end inside the tree",
    "own scaling",
}


def _splits(name: str, split: int) -> Any:
    runs = name in (MERGED if split == 64 else IN_ONE)
    return pytest.param(
        name,
        split,
        id=f"{name}-{'merged' if split == 64 else 'in one'}",
        marks=() if runs else pytest.mark.exhaustive,
    )


@pytest.mark.parametrize(("name", "split"), [_splits(name, split) for name in CASES for split in (64, 512)])
def test_the_kernel_agrees_with_the_reference_and_sees_no_unused_slot(name, split):
    width, groups, dim, value_dim, dtype, options = CASES[name]
    sizes = {"rows": 2, "slots": max(150, width + 37), "width": width, "kv_heads": 1, "groups": groups, "dim": dim}
    inputs = random_trees(**sizes, value_dim=value_dim, dtype=dtype, seed=1)
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-2, 2, groups)
    got = tree_attention(**inputs, **options, split=split)
    want = reference.tree_attention(**inputs, **options)
    assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous()
    assert relative_error(got, want) < TOLERANCE[dtype]  # NaN, which stands in every unused slot, is never below


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.exhaustive), {"window": 200}, {"sinks": True}],
    ids=["plain", "window", "sinks"],
)
def test_more_splits_than_are_merged_at_once_give_the_same(options):
    inputs = random_trees(rows=2, slots=1130, width=2, kv_heads=1, groups=1, dim=16, value_dim=16, dtype=FULL, seed=7)
    inputs["keys"][:, 1030:] *= 4  # the highest scores come last, so that what was summed before must shrink
    if "sinks" in options:
        options = {"sinks": torch.ones(1)}
    got = tree_attention(**inputs, **options, split=64)
    assert relative_error(got, reference.tree_attention(**inputs, **options)) < TOLERANCE[FULL]


def test_several_kv_heads_and_strided_queries_are_read_where_they_stand():
    inputs = random_trees(rows=2, slots=90, width=5, kv_heads=3, groups=2, dim=64, value_dim=64, dtype=FULL, seed=2)
    assert not inputs["query"].is_contiguous()
    inputs["keys"], inputs["values"] = (
        torch.stack([inputs[name], torch.full_like(inputs[name], torch.nan)], 2)[:, :, 0] for name in ("keys", "values")
    )
    assert relative_error(tree_attention(**inputs, split=64), reference.tree_attention(**inputs)) < TOLERANCE[FULL]


def test_a_row_without_nodes_gets_zeros():
    inputs = random_trees(rows=2, slots=90, width=3, kv_heads=1, groups=2, dim=64, value_dim=64, dtype=FULL, seed=3)
    inputs["nodes"][1] = 0
    for split in (64, 128):
        assert not tree_attention(**inputs, split=split)[1].any()


@pytest.mark.parametrize(
    ("split", "options"),
    [(64, {}), (128, {}), (128, {"window": 21}), (64, {"softcap": 3.0})],
    ids=["a split further", "a block further", "window", "softcap"],
)
@pytest.mark.parametrize("width", [4, pytest.param(9, marks=pytest.mark.exhaustive)])
def test_a_chain_gets_the_same_bits_however_many_nodes_are_scored_at_once(split, options, width):
    length = 65 - width  # from here a chain crosses the border of a block
    inputs = random_trees(
        rows=1, slots=130, width=width, kv_heads=1, groups=2, dim=64, value_dim=64, dtype=FULL, seed=4, chain=True
    )
    inputs["lengths"][:] = length
    # NumPy's products depend on the place of a row in its block. Let them be exact: whole numbers for the scores, and
    # values of which each column of a block holds one, so that the order of blocks and splits is all that is left.
    inputs["query"], inputs["keys"] = inputs["query"].mul(2).round(), inputs["keys"].round()
    inputs["values"][0, :, 0] *= torch.eye(64).repeat(3, 1)[:130]
    together = tree_attention(**inputs, **options, scaling=0.1, split=split)
    for node in range(width):
        alone = {**inputs, "query": inputs["query"][:, :, node : node + 1], "lengths": inputs["lengths"] + node}
        one = torch.ones(1, 1, dtype=torch.int32)
        alone |= {"nodes": one[0], "depths": one - 1, "words": one[:, :, None].long()}
        assert torch.equal(tree_attention(**alone, **options, scaling=0.1, split=split)[:, 0], together[:, node])


@pytest.mark.parametrize(("counts", "seed"), [([33, 1, 12], 5), ([3, 9, 2], 6), ([60, 61, 7], 7)], ids=str)
def test_compaction_moves_overlapping_paths_of_all_buffers_and_nothing_else(counts, seed):
    rng = np.random.default_rng(seed)
    buffers = [torch.randn(4, 90, 2, 8), torch.randn(4, 90, 1, 24).bfloat16(), torch.randn(4, 90, 72, 2).half()]
    paths = torch.zeros(3, max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        nodes = np.r_[0, 1 + np.sort(rng.permutation(60)[: count - 1])]
        paths[row, :count] = torch.from_numpy(nodes)
    plan = {"rows": [2, 0, 3], "starts": [29, 5, 0], "counts": counts}
    arguments = {name: torch.tensor(values, dtype=torch.int32) for name, values in plan.items()} | {"paths": paths}
    wanted = [buffer.clone() for buffer in buffers]
    for buffer in wanted:
        reference.compact(buffer, **arguments)
    compact(SlotBuffers(buffers), **arguments)
    for buffer, want in zip(buffers, wanted, strict=True):
        assert torch.equal(buffer, want)


@pytest.mark.parametrize(
    "options",
    [pytest.param(frozenset(), marks=pytest.mark.exhaustive), frozenset({"window", "softcap", "sinks"})],
    ids=["plain", "options"],
)
def test_they_pass_the_self_test_that_lets_them_serve_on_a_gpu(options, monkeypatch):
    # As many as the interpreter has time for.
    for name, size in {"_CALLS": 1, "_WIDTH": 9, "_SLOTS": {30: None, 100: 64}, "_TIMED_KV_HEADS": 1}.items():
        monkeypatch.setattr(self_test, name, size)
    part = KernelVariant(torch.device("cpu"), FULL, 64, 64, 1, options)
    assert attention_error(part, tree_attention) < 2e-5
    ((*size, gain),) = gains_of(part, ((60, 2),))
    assert size == [60, 2] and gain > 0
    assert compaction_error(part.device, compact, SlotBuffers) == 0
