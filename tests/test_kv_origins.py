"""Rows whose first keys and values are copies of one text, and attention that reads these once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lookahead.kernels import row_attention
from lookahead.kernels.attention_rows import MAX_SHARING
from lookahead.kernels.jobs import run
from lookahead.model.slots import new_origin, shared_tokens, sharing_groups
from tests.support.small_layers import attends


def test_a_row_shares_with_another_what_both_copied_of_one_text() -> None:
    text = new_origin()
    some, others = new_origin(text, 30), new_origin(text, 20)
    assert shared_tokens(some, others) == 20
    assert shared_tokens(some, new_origin()) == 0
    # What was computed behind the copies is not the same, however alike the texts are.
    assert shared_tokens(new_origin(some, 50), new_origin(others, 50)) == 20
    assert shared_tokens(new_origin(some, 50), new_origin(some, 40)) == 40
    assert shared_tokens(new_origin(some, 10), new_origin(others, 50)) == 10


def test_nothing_is_shared_of_a_text_that_was_cut_to_nothing() -> None:
    text = new_origin()
    assert shared_tokens(new_origin(text, 0), new_origin(text, 40)) == 0


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_every_row_is_in_one_group_and_groups_share_committed_slots_alone(rows: int) -> None:
    source = np.random.default_rng(rows)
    texts = [new_origin() for _ in range(2)]
    for _ in range(50):
        origins = [
            new_origin(texts[source.integers(2)], int(source.integers(1, 99)))
            if source.random() < 0.8
            else new_origin()
            for _ in range(rows)
        ]
        starts = source.integers(1, 120, rows).tolist()
        found = sharing_groups(origins, starts, most=4, step=16)
        members = [group[2 : 2 + group[1]].tolist() for group in found]
        assert sorted(itertools.chain(*members)) == list(range(rows))
        for (shared, _, *_), group in zip(found.tolist(), members, strict=True):
            assert shared % 16 == 0
            assert all(shared <= starts[row] for row in group)
            assert all(shared <= shared_tokens(origins[a], origins[b]) for a, b in itertools.combinations(group, 2))


def test_a_row_that_shares_little_does_not_end_what_others_share() -> None:
    text = new_origin()
    origins = [new_origin(text, 1000), new_origin(text, 1000), new_origin(text, 40)]
    groups = sharing_groups(origins, [1000] * 3, most=4, step=16)
    assert [(shared, {*rows[:size]}) for shared, size, *rows in groups.tolist()[:2]] == [(992, {0, 1}), (0, {2})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 80])
@pytest.mark.parametrize("shared", [512, 528, 1024], ids="shared-{}".format)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_that_read_shared_keys_once_attend_as_each_alone(
    dtype: torch.dtype, dim: int, shared: int, threads: int, three_threads: None
) -> None:
    """In bfloat16 with the same bits, whatever the other rows of the group are."""
    step = row_attention.sharing_step(dtype)
    if shared % step or not attends(torch.float32):
        pytest.skip("no such group, or no kernel for this CPU")
    torch.manual_seed(dim)
    rows, heads, kv_heads, nodes, slots = 6, 6, 2, (1, 3, 7, 2, 1, 4), shared + 90
    starts = [shared + extra for extra in (0, 1, 17, 40, 61, 30)]
    keys, values = (torch.randn(rows, slots, kv_heads, dim).to(dtype) for _ in range(2))
    for each in (keys, values):
        each[[0, 2, 3, 5], :shared] = each[0, :shared].clone()
        each[4, :shared] = each[1, :shared]
    width = sum(nodes)
    query, out = torch.randn(1, width, heads, dim).to(dtype), torch.full((1, width, heads, dim), torch.nan, dtype=dtype)
    trees, of_nodes = torch.zeros(rows, 4, dtype=torch.int64), torch.zeros(rows, 2, max(nodes), dtype=torch.int64)
    first = 0
    for row, count in enumerate(nodes):
        trees[row] = torch.tensor([starts[row], count, 0, first])
        of_nodes[row, 0, 1:count] = torch.arange(count - 1) // 2  # a binary tree
        for node in range(1, count):
            of_nodes[row, 1, node] = of_nodes[row, 1, of_nodes[row, 0, node]] + 1
        first += count
    groups = torch.zeros(rows, 2 + MAX_SHARING, dtype=torch.int64)
    groups[:2, :6] = torch.tensor([[shared, 4, 5, 0, 2, 3], [shared, 2, 1, 4, 0, 0]])
    own = keys.clone(), values.clone()
    for row in (0, 2, 3, 4):  # of each group the first row is read
        keys[row, :shared] = values[row, :shared] = torch.nan
    passed = {"nodes": of_nodes, "trees": trees, "groups": groups, "threads": torch.tensor([threads])}
    run(row_attention.attention(query, keys, values, out, **passed, scale=dim**-0.5))
    for row, count in enumerate(nodes):
        start, _, _, first = trees[row].tolist()
        alone = row_attention.row_attention(
            query[:, first : first + count],
            own[0][row : row + 1],
            own[1][row : row + 1],
            nodes=of_nodes[row : row + 1],
            trees=torch.tensor([[start, count, 0]]),
            scale=dim**-0.5,
        )
        if dtype == torch.bfloat16:
            assert torch.equal(out[:, first : first + count], alone), row
        else:
            torch.testing.assert_close(out[:, first : first + count], alone)
