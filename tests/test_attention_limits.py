"""Attention of nodes within windows, with soft caps and sinks: every node as it attends over its own path alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lookahead.backend.cpu.exact_attention import PerNodeAttention, has_bits_of_sdpa
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import row_attention
from lookahead.kernels.attention_rows import MAX_SHARING
from lookahead.kernels.jobs import run
from lookahead.kernels.row_attention import BLOCK, AttentionLimits
from tests.test_row_attention import tensors_of, tree_of

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the kernel is for x86"
)


def path_slots(tree: TokenTree, node: int, start: int, window: int) -> list[int]:
    """The slots that a node sees."""
    path = [node]
    while path[0]:
        path.insert(0, int(tree.parents[path[0]]))
    slots = [*range(start), *(start + at for at in path)]
    return slots[-window:] if window else slots


def expected(
    query: Tensor, keys: Tensor, values: Tensor, tree: TokenTree, start: int, limits: AttentionLimits
) -> Tensor:
    """The attention of every node in float64."""
    heads, kv_heads, dim = query.shape[1], keys.shape[1], query.shape[2]
    out = torch.empty(len(tree), heads, dim, dtype=torch.float64)
    for node in range(len(tree)):
        slots = path_slots(tree, node, start, limits.window)
        for head in range(heads):
            of_head = head * kv_heads // heads
            scores = keys[slots, of_head].double() @ query[node, head].double() * dim**-0.5
            if limits.softcap:
                scores = torch.tanh(scores / limits.softcap) * limits.softcap
            if limits.sinks is not None:
                scores = torch.cat([scores, limits.sinks[head : head + 1].double()])
            weights = torch.softmax(scores, 0)[: len(slots)]
            out[node, head] = weights @ values[slots, of_head].double()
    return out


def attended(tensors: tuple[Tensor, ...], tree: TokenTree, start: int, limits: AttentionLimits) -> Tensor:
    rows = (tensor[None] for tensor in tensors)
    per_node = PerNodeAttention([tree], [start], [0])
    scale = tensors[0].shape[2] ** -0.5
    return row_attention.row_attention(*rows, **per_node.tensors, scale=scale, limits=limits)[0]


@pytest.mark.parametrize("start", [0, 3, 40, BLOCK - 5, BLOCK + 60])
@pytest.mark.parametrize("window", [0, 2, 5, 37, BLOCK - 1, BLOCK, BLOCK + 9])
def test_a_node_sees_the_window_of_its_own_path(start, window):
    tree, sinks = tree_of(20, start), torch.linspace(-2, 3, 8)
    tensors = tuple(tensor.float() for tensor in tensors_of(start + 20, 20, 8, 2, 32))
    for limits in (AttentionLimits(window), AttentionLimits(window, 2.0), AttentionLimits(window, 0.0, sinks)):
        torch.testing.assert_close(
            attended(tensors, tree, start, limits).double(), expected(*tensors, tree, start, limits),
            rtol=2e-4, atol=2e-5,
        )  # fmt: skip


@pytest.mark.parametrize("start", [3, 40, BLOCK + 60])
@pytest.mark.parametrize("window", [5, 37, BLOCK - 1, BLOCK + 9])
def test_behind_a_window_bfloat16_has_the_bits_of_its_keys_alone(start, window):
    if not has_bits_of_sdpa(64, 3):
        pytest.skip("torch adds in another order on this CPU")
    tree, tensors = tree_of(20, start), tensors_of(start + 20, 20, 6, 2, 64)  # heads that fill no tile
    got = attended(tensors, tree, start, AttentionLimits(window))
    query, keys, values = tensors
    for node in range(len(tree)):
        slots = path_slots(tree, node, start, window)
        seen = (tensor[None, slots].transpose(1, 2) for tensor in (keys, values))
        alone = scaled_dot_product_attention(query[node, None, :, None], *seen, enable_gqa=True)
        assert torch.equal(got[node], alone[0, :, 0])


@pytest.mark.parametrize("window", [0, 20, 70, 200])
def test_rows_that_share_keys_share_none_behind_a_window(window):
    start, shared, tree = 96, 64, tree_of(6, 1)
    query, keys, values = (tensor.float() for tensor in tensors_of(start + 6, 6, 4, 2, 32))
    others = [keys.clone(), values.clone()]
    for tensor in others:
        tensor[shared:] = torch.randn(tensor[shared:].shape, generator=torch.Generator().manual_seed(2))
    both_keys, both_values = torch.stack([keys, others[0]]), torch.stack([values, others[1]])
    queries, limits = torch.stack([query, query]).contiguous(), AttentionLimits(window)
    out, per_node = torch.zeros_like(queries), PerNodeAttention([tree, tree], [start, start], [0, 0])
    trees = torch.cat([per_node.tensors["trees"], torch.tensor([[0], [6]])], 1)
    groups = torch.zeros(2, 2 + MAX_SHARING, dtype=torch.int64)
    groups[0, :4] = torch.tensor([shared, 2, 0, 1])
    job = row_attention.attention(
        queries, both_keys, both_values, out, nodes=per_node.tensors["nodes"], trees=trees, groups=groups,
        threads=torch.ones(1, dtype=torch.int64), scale=32**-0.5, limits=limits,
    )  # fmt: skip
    run(job)
    for row in range(2):
        own = expected(query, both_keys[row], both_values[row], tree, start, limits)
        torch.testing.assert_close(out[row].double(), own, rtol=2e-4, atol=2e-5)
