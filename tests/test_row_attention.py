"""Attention of the nodes of a tree on a CPU: right, and with the bits of torch for one query where that is promised."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lookahead.backend.cpu import exact_attention
from lookahead.backend.cpu.attention_inputs import few_weights, many_weights
from lookahead.backend.cpu.exact_attention import PerNodeAttention, attend_per_node, has_bits_of_sdpa, takes_rows
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import row_attention, team
from lookahead.kernels.microkernel import LANES
from lookahead.kernels.row_attention import BLOCK

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the kernel is for x86"
)


def tree_of(nodes: int, seed: int, reach: int = 4) -> TokenTree:
    """A random tree; every node hangs from one of the last `reach` before it."""
    source = np.random.default_rng(seed)
    parents = [int(source.integers(max(0, node - reach), node)) for node in range(1, nodes)]
    return TokenTree.from_parents(np.arange(nodes), np.array([0, *parents]))


def tensors_of(slots: int, width: int, heads: int, kv_heads: int, dim: int, size: float = 1.5) -> tuple[Tensor, ...]:
    torch.manual_seed(slots + width)
    query = torch.randn(width, heads, dim).bfloat16()
    keys = (torch.randn(slots, kv_heads, dim) * size).bfloat16()
    return query, keys, torch.randn(slots, kv_heads, dim).bfloat16()


def one_by_one(query: Tensor, keys: Tensor, values: Tensor, tree: TokenTree, start: int, scored: int) -> Tensor:
    """Every node by SDPA over its own path, in the precision of the tensors."""
    out = []
    for node in range(scored, len(tree)):
        path = [node]
        while path[0]:
            path.insert(0, int(tree.parents[path[0]]))
        slots = [*range(start), *(start + each for each in path)]
        seen = (each[None, slots].transpose(1, 2) for each in (keys, values))
        out.append(scaled_dot_product_attention(query[node - scored, None, :, None], *seen, enable_gqa=True))
    return torch.cat(out)[:, :, 0]


def by_rows(
    query: Tensor, keys: Tensor, values: Tensor, tree: TokenTree, start: int, limits: Any = row_attention.NO_LIMITS
) -> Tensor:
    per_node = PerNodeAttention([tree], [start], [len(tree) - len(query)])
    tensors = (each[None] for each in (query, keys, values))
    return row_attention.row_attention(*tensors, **per_node.tensors, scale=query.shape[2] ** -0.5, limits=limits)[0]


@pytest.mark.parametrize("start", [0, 1, 15, 16, 100, BLOCK - 7, BLOCK, BLOCK + 1, 2 * BLOCK - 4])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 128), (2, 2, 16)])
def test_every_node_attends_over_its_own_path_alone(start, heads, kv_heads, dim):
    tree = tree_of(20, start)
    tensors = tensors_of(start + 20, 20, heads, kv_heads, dim)
    got = by_rows(*tensors, tree, start)
    exact = one_by_one(*(each.double() for each in tensors), tree, start, 0)
    assert (got - exact).abs().max() < 0.01 * exact.abs().max()
    if has_bits_of_sdpa(64, 1):
        assert torch.equal(got, one_by_one(*tensors, tree, start, 0))


@pytest.mark.parametrize("nodes", [1, 2, 5, 33, 64])
@pytest.mark.parametrize("start", [3, 37, BLOCK + 16, 2 * BLOCK - 1, 3 * BLOCK + 47])
def test_any_number_of_nodes_behind_several_blocks_keeps_the_bits_of_each(start, nodes):
    tree, tensors = tree_of(nodes, start), tensors_of(start + nodes, nodes, 6, 2, 64)
    got = by_rows(*tensors, tree, start)
    for last in {0, nodes - 1}:
        assert torch.equal(by_rows(tensors[0][last:], *tensors[1:], tree, start), got[last:])
    if has_bits_of_sdpa(64, 1):
        assert torch.equal(got, one_by_one(*tensors, tree, start, 0))


@pytest.mark.parametrize("nodes", [1, 4, 7])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 20])
def test_threads_that_share_the_nodes_of_a_row_change_no_bit(window, kv_heads, nodes, three_threads):
    start, limits = BLOCK + 50, row_attention.AttentionLimits(window)
    tree, tensors = tree_of(nodes, 2), tensors_of(start + nodes, nodes, 4, kv_heads, 32)
    together = by_rows(*tensors, tree, start, limits)
    torch.set_num_threads(1)
    alone = by_rows(*tensors, tree, start, limits)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("nodes", [1, 2, 8, 16, 33])
@pytest.mark.parametrize("start", [1, 2 * BLOCK - 9, 2 * BLOCK + 130])
def test_threads_that_cannot_share_key_heads_evenly_change_no_bit(start, nodes, threads, three_threads):
    tree, tensors = tree_of(nodes, start), tensors_of(start + nodes, nodes, 9, 3, 64)
    torch.set_num_threads(threads)
    together = by_rows(*tensors, tree, start)
    torch.set_num_threads(1)
    assert torch.equal(together, by_rows(*tensors, tree, start))


@pytest.mark.parametrize("start", [0, 5, 40, BLOCK - 7, 2 * BLOCK + 3])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (2, 1, 16)])
def test_float32_is_as_close_as_torch(start, heads, kv_heads, dim):
    tree = tree_of(20, start)
    halves = tensors_of(start + 20, 20, heads, kv_heads, dim)
    tensors = [each.float() + 1e-4 * torch.randn(each.shape) for each in halves]
    exact = one_by_one(*(each.double() for each in tensors), tree, start, 0)
    own, by_torch = by_rows(*tensors, tree, start), one_by_one(*tensors, tree, start, 0)
    assert (own - exact).abs().max() <= 2 * (by_torch - exact).abs().max() + 1e-6
    assert torch.equal(by_rows(tensors[0][7:], *tensors[1:], tree, start), own[7:])


@pytest.mark.parametrize("reach", [1, 3, 12])
@pytest.mark.parametrize("scored", [0, 1, 5, 11])
def test_nodes_that_an_earlier_pass_scored_change_no_bit(scored, reach):
    tree = tree_of(12, 3, reach)
    query, keys, values = tensors_of(BLOCK + 8, 12, 4, 2, 32)
    start = BLOCK - 4
    whole = by_rows(query, keys, values, tree, start)
    got = by_rows(query[scored:], keys, values, tree, start)
    assert torch.equal(got, whole[scored:])


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3)])
def test_rows_of_any_length_and_tree_have_the_bits_that_each_has_alone(heads, kv_heads, has_kernel, monkeypatch):
    if not has_kernel:
        monkeypatch.setattr(exact_attention, "has_bits_of_sdpa", lambda *shape: False)
    trees, starts = [tree_of(nodes, nodes) for nodes in (7, 1, 12, 3)], [BLOCK + 5, 30, 0, 100]
    width, slots = max(map(len, trees)), BLOCK + 40
    query, keys, values = tensors_of(4 * slots, 4 * width, heads, kv_heads, 32)
    query = query.view(4, width, heads, 32).transpose(1, 2)
    capacity = keys.view(4, slots, kv_heads, 32), values.view(4, slots, kv_heads, 32)
    key, value = (each[:, : BLOCK + 20].transpose(1, 2) for each in capacity)  # as the cache shows its first slots
    shared: dict[str, Any] = {"window": None, "crops": False, "own": sdpa_attention_forward}
    per_node = PerNodeAttention(trees, starts, [0] * 4)
    together = attend_per_node(Layer(), query, key, value, per_node, **shared, options={})
    for row, (tree, start) in enumerate(zip(trees, starts, strict=True)):
        one, nodes = slice(row, row + 1), len(tree)
        per_node = PerNodeAttention([tree], [start], [0])
        alone = attend_per_node(Layer(), query[one, :, :nodes], key[one], value[one], per_node, **shared, options={})
        assert torch.equal(together[row, :nodes], alone[0])
        assert not together[row, nodes:].any()


def test_slots_behind_the_tree_and_other_paths_are_not_read():
    tree = tree_of(12, 5)
    query, keys, values = tensors_of(60, 12, 4, 2, 32)
    expected = by_rows(query, keys, values, tree, 40)
    keys[52:], values[52:] = float("nan"), float("nan")
    leaf = int(next(node for node in range(1, 12) if node not in tree.parents))
    keys[40 + leaf], values[40 + leaf] = float("nan"), float("nan")
    got = by_rows(query, keys, values, tree, 40)
    assert got[leaf].isnan().all()
    assert torch.equal(got[[n for n in range(12) if n != leaf]], expected[[n for n in range(12) if n != leaf]])


@pytest.mark.parametrize("has_threads", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_several_threads_share_the_work_and_change_no_bit(kv_heads, has_threads, three_threads, monkeypatch):
    if not has_threads:
        monkeypatch.setattr(team, "_team", lambda: None)
    tree, tensors = tree_of(9, 4), tensors_of(700, 9, 8, kv_heads, 64)
    several = [by_rows(*tensors, tree, 691) for _ in range(8)]
    torch.set_num_threads(1)
    alone = by_rows(*tensors, tree, 691)
    assert all(torch.equal(each, alone) for each in several)


def test_calls_from_several_threads_at_once_are_apart(three_threads):
    tree = tree_of(9, 4)
    tensors = [tensors_of(300 + i, 9, 8, 4, 64) for i in range(4)]
    expected = [by_rows(*each, tree, 291 + i) for i, each in enumerate(tensors)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(8):
            got = pool.map(lambda i: by_rows(*tensors[i], tree, 291 + i), range(4))
            assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize("size", [0.0, 30.0, 3e4])
def test_scores_that_are_equal_or_far_apart_keep_their_bits(size):
    tree, tensors = tree_of(9, 1), tensors_of(200, 9, 4, 2, 64, size)
    got = by_rows(*tensors, tree, 191)
    assert got.isfinite().all()
    if has_bits_of_sdpa(64, 1):
        assert torch.equal(got, one_by_one(*tensors, tree, 191, 0))


class Layer(torch.nn.Module):
    """What SDPA's function of transformers reads of a layer."""

    num_key_value_groups = 2
    is_causal = True


def attend(
    tree: TokenTree, scored: int, window: int | None, dtype: torch.dtype, heads: tuple[int, int] = (4, 2)
) -> tuple[Tensor, Tensor]:
    """A layer's attention node by node, and the tensors' own."""
    query, keys, values = (each.to(dtype) for each in tensors_of(40, len(tree) - scored, *heads, 32))
    got = attend_per_node(
        Layer(), query.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
        PerNodeAttention([tree], [40 - len(tree)], [scored]), window=window, crops=False,
        own=sdpa_attention_forward, options={},
    )  # fmt: skip
    return got[0], one_by_one(query, keys, values, tree, 40 - len(tree), scored)


@pytest.mark.parametrize("has_bits", [False, True])
@pytest.mark.parametrize("scored", [0, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nodes_have_the_bits_of_torch_by_the_kernel_and_without_it(dtype, scored, has_bits, monkeypatch):
    if not has_bits:
        monkeypatch.setattr(exact_attention, "has_bits_of_sdpa", lambda *shape: False)
    got, expected = attend(tree_of(12, 2), scored, None, dtype)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("heads", [(8, 2), (9, 3), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nodes_have_the_bits_of_torch_without_flash_attention(dtype, heads):
    """There the order of a product's sums may depend on where the keys lie, and on the heads that share them."""
    with sdpa_kernel(SDPBackend.MATH):
        for seed in range(8):
            got, expected = attend(tree_of(36, seed), 0, None, dtype, heads)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("window", [16, 40, 41, 64])
def test_the_kernel_is_left_where_a_window_needs_a_mask(window, monkeypatch):
    calls = []
    monkeypatch.setattr(row_attention, "is_supported", lambda *tensors: True)  # as on a CPU without AMX
    monkeypatch.setattr(exact_attention, "has_bits_of_sdpa", lambda *shape: calls.append(shape))
    tree = TokenTree.from_parents(np.arange(4), np.array([0, 0, 1, 2]))
    got, expected = attend(tree, 0, window, torch.bfloat16)
    assert bool(calls) is (window > 40)
    if window > 40:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("turned", ["nothing", "keys", "neighbours", "dimensions"])
def test_a_kernel_that_sums_in_another_order_is_found(turned, monkeypatch):
    has_bits_of_sdpa.cache_clear()
    own = row_attention.row_attention

    def sdpa(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        """Attention of a CPU whose order is the kernel's."""
        slots = (each.transpose(1, 2).contiguous() for each in (query, keys, values))
        root = {"nodes": torch.zeros(1, 2, 1, dtype=torch.int64), "trees": torch.tensor([[keys.shape[2] - 1, 1, 0]])}
        return own(*slots, **root, scale=query.shape[3] ** -0.5).transpose(1, 2)

    def other(query: Tensor, keys: Tensor, values: Tensor, **rest: Any) -> Tensor:
        if turned == "keys":
            keys, values = keys.flip(1), values.flip(1)
        elif turned == "dimensions":
            query, keys = query.roll(1, 3), keys.roll(1, 3)
        elif turned == "neighbours":  # of four keys the kernel adds every other one first
            whole = torch.arange(keys.shape[1] // 4 * 4).view(-1, 4)[:, [0, 2, 1, 3]].flatten()
            order = torch.cat([whole, torch.arange(len(whole), keys.shape[1])])
            keys, values = keys[:, order], values[:, order]
        return own(query, keys, values, **rest)

    monkeypatch.setattr(row_attention, "is_supported", lambda *tensors: True)
    monkeypatch.setattr(exact_attention, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(row_attention, "row_attention", other)
    try:
        assert has_bits_of_sdpa(64, 3) is (turned == "nothing")
    finally:
        has_bits_of_sdpa.cache_clear()


@pytest.mark.parametrize("before", [0, 16, 48, BLOCK, BLOCK + 16])
def test_the_sum_of_weights_has_the_last_bit_of_torch(before):
    for one, keys, values in few_weights():
        if not row_attention.is_supported(one, keys, values):
            pytest.skip("the kernel is for CPUs without AMX")
        keys, values = (torch.cat([part.new_zeros(1, 1, before, 64), part], 2) for part in (keys, values))
        keys[:, :, :before, 0] = -200.0
        expected = scaled_dot_product_attention(one, keys, values)[0, :, 0]
        tree = TokenTree.root(0)
        slots = (part[0].transpose(0, 1).contiguous() for part in (one, keys, values))
        assert torch.equal(by_rows(*slots, tree, before + 7)[0], expected)
        assert len(expected.unique()) == 2, "no output is next to the middle of two numbers"


def test_sums_of_many_weights_have_the_last_bit_of_torch():
    near = []
    for one, keys, values in many_weights():
        if not row_attention.is_supported(one, keys, values):
            pytest.skip("the kernel is for CPUs without AMX")
        expected = scaled_dot_product_attention(one, keys, values)[0, :, 0]
        slots = (part[0].transpose(0, 1).contiguous() for part in (one, keys, values))
        assert torch.equal(by_rows(*slots, TokenTree.root(0), keys.shape[2] - 1)[0], expected)
        near += [len(row.unique()) == 2 for row in expected]
    assert np.mean(near) > 0.5, "few outputs are next to the middle of two numbers"


def test_the_device_and_the_type_that_a_user_sets_do_not_change_what_is_compared():
    expected = [torch.cat([part.flatten() for part in parts]) for parts in chain(few_weights(), many_weights())]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            got = [torch.cat([part.flatten() for part in parts]) for parts in chain(few_weights(), many_weights())]
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, got, expected))


def test_a_model_takes_it_for_heads_it_serves(tiny_llama):
    config = tiny_llama.config
    dim = config.hidden_size // config.num_attention_heads
    groups = config.num_attention_heads // config.num_key_value_heads
    assert takes_rows(config) == has_bits_of_sdpa(dim, groups)
    assert not has_bits_of_sdpa(LANES * 9 // 2, 1), "no whole registers"
