"""Tree attention on a CPU against its reference in float64, and where it takes over from torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import lookahead
from lookahead.kernels import cpu_attention
from lookahead.kernels import dispatch as choice
from lookahead.kernels.cpu_attention import BLOCK, tree_attention
from lookahead.kernels.microkernel import COLUMNS, LANES
from tests.support import kernel_reference as reference
from tests.support.random_trees import CASES, random_trees, relative_error

FULL = torch.float32
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-3}
DTYPES = list(TOLERANCE)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [90, BLOCK, 3 * BLOCK + 1])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_agrees_with_the_reference_and_sees_no_unused_slot(name, slots, dtype):
    width, groups, dim, value_dim, _, options = CASES[name]
    slots = max(slots, width + 1)
    inputs = random_trees(
        rows=3, slots=slots, width=width, kv_heads=2, groups=groups, dim=dim, value_dim=value_dim, dtype=dtype, seed=1
    )
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-2, 2, 2 * groups)
    got, want = tree_attention(**inputs, **options), reference.tree_attention(**inputs, **options)
    assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous()
    assert relative_error(got, want) < TOLERANCE[dtype]  # NaN, which stands in every unused slot, is never below


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("width", [COLUMNS - 1, COLUMNS, COLUMNS + 1, 200])
def test_more_queries_than_are_worked_on_at_once_are_served_in_turn(width, groups):
    inputs = random_trees(
        rows=2, slots=300, width=width, kv_heads=1, groups=groups, dim=16, value_dim=16, dtype=FULL, seed=2
    )
    for options in ({}, {"window": 70}):
        assert relative_error(tree_attention(**inputs, **options), reference.tree_attention(**inputs, **options)) < 1e-6


@pytest.mark.parametrize("length", [0, 3, BLOCK + 1])
@pytest.mark.parametrize("window", [None, 50])
def test_a_prompt_is_a_chain_and_no_token_reads_a_slot_behind_it(length, window):
    width, groups = 3 * COLUMNS // 2, 2
    inputs = random_trees(
        rows=2, slots=length + width, width=width, kv_heads=2, groups=groups, dim=64, value_dim=64, dtype=FULL, seed=9,
        chain=True,
    )  # fmt: skip
    inputs["lengths"][:], inputs["nodes"][:] = length, width
    inputs["depths"][:] = torch.arange(width)
    sees = torch.ones(width, width, dtype=torch.bool).tril()
    bits = torch.nn.functional.pad(sees, (0, -width % 64)).view(width, -1, 64).long() << torch.arange(64)
    inputs["words"] = bits.sum(-1).expand(2, -1, -1).contiguous()
    inputs["keys"][:], inputs["values"][:] = torch.randn(2, *inputs["keys"].shape)
    want = reference.tree_attention(**inputs, window=window)
    assert relative_error(tree_attention(**inputs, window=window), want) < 1e-6
    tiles = COLUMNS // groups
    inputs["keys"][:, length + tiles :] = inputs["values"][:, length + tiles :] = torch.nan
    assert relative_error(tree_attention(**inputs, window=window)[:, :tiles], want[:, :tiles]) < 1e-6


def test_slots_that_are_a_part_of_a_larger_cache_are_read_where_they_stand():
    inputs = random_trees(rows=2, slots=90, width=9, kv_heads=3, groups=2, dim=64, value_dim=32, dtype=FULL, seed=3)
    want = reference.tree_attention(**inputs)
    for name in ("keys", "values"):
        larger = torch.full((4, 133, *inputs[name].shape[2:]), torch.nan)
        larger[:2, :90] = inputs[name]
        inputs[name] = larger[:2, :90]
    assert relative_error(tree_attention(**inputs), want) < 1e-6


def test_a_row_without_nodes_gets_zeros():
    inputs = random_trees(rows=2, slots=90, width=3, kv_heads=1, groups=2, dim=64, value_dim=64, dtype=FULL, seed=4)
    inputs["nodes"][1] = 0
    assert not tree_attention(**inputs)[1].any()


@pytest.mark.parametrize("options", [{}, {"window": 21}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("length", [3, BLOCK - 5, 2 * BLOCK])
def test_a_chain_gets_the_same_bits_however_many_nodes_are_scored_at_once(length, options):
    width = 40
    inputs = random_trees(
        rows=1, slots=length + width, width=width, kv_heads=1, groups=2, dim=64, value_dim=64, dtype=FULL,
        seed=5, chain=True,
    )  # fmt: skip
    together = tree_attention(**inputs, **options)
    for node in range(width):
        alone = {**inputs, "query": inputs["query"][:, :, node : node + 1], "lengths": inputs["lengths"] + node}
        one = torch.ones(1, 1, dtype=torch.int32)
        alone |= {"nodes": one[0], "depths": one - 1, "words": one[:, :, None].long()}
        assert torch.equal(tree_attention(**alone, **options)[:, 0], together[:, node])


@pytest.mark.parametrize("context", [60, 700])
@pytest.mark.parametrize("groups", [2, 4])
def test_half_precision_is_no_less_accurate_than_torchs(context, groups):
    width, kv_heads, dim = 33, 2, 64
    inputs = random_trees(
        rows=1, slots=context + width, width=width, kv_heads=kv_heads, groups=groups, dim=dim, value_dim=dim,
        dtype=torch.bfloat16, seed=6,
    )  # fmt: skip
    tree = {name: inputs[name] for name in ("lengths", "nodes", "depths", "words")}
    sees = reference.tree_mask(context + width, **tree, window=None, chunk=None)
    mask = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[:, None].bfloat16()
    keys, values = (inputs[name].transpose(1, 2) for name in ("keys", "values"))
    torchs = scaled_dot_product_attention(inputs["query"], keys, values, attn_mask=mask, enable_gqa=True)
    want = reference.tree_attention(**inputs)
    # Where torch sums in float32 too, both round equally often.
    assert relative_error(tree_attention(**inputs), want) <= 1.001 * relative_error(torchs.transpose(1, 2), want)


@pytest.mark.parametrize("broken", ["query", "keys", "values"])
def test_what_is_not_a_number_is_not_lost(broken):
    inputs = random_trees(rows=1, slots=90, width=9, kv_heads=1, groups=2, dim=64, value_dim=64, dtype=FULL, seed=7)
    first = (0, 0, 0, 5)  # of the root's first query, or of a slot that every node sees
    inputs[broken][first] = torch.nan
    got = tree_attention(**inputs)
    assert got[0, 0, 0].isnan().any()
    assert got[0, 1, 1].isnan().any() == (broken != "query")


def fits(**changes: Any) -> bool:
    """Whether the kernel is chosen for tensors that differ from those it is made for by `changes`."""
    sizes = {"rows": 2, "slots": 60, "width": 8, "kv_heads": 2, "groups": 2, "dim": 64, "value_dim": 64, "seed": 8}
    inputs = random_trees(**{**sizes, "dtype": torch.float32, **changes})
    tensors = (inputs["query"], inputs["keys"], inputs["values"])
    return choice.attention_for(*tensors, {}) is not None


needs_wide_registers = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this CPU has no registers of 512 bits"
)


@needs_wide_registers
def test_the_kernel_is_chosen_where_it_pays_and_torchs_attention_elsewhere():
    assert fits() and fits(dtype=torch.bfloat16) and fits(width=1, groups=16)
    assert not fits(width=LANES // 2 - 1), "fewer queries than a register has lanes"
    assert not fits(dtype=torch.float16) and not fits(dtype=torch.float64)
    assert not fits(dim=34) and not fits(value_dim=34)
    inputs = random_trees(rows=2, slots=60, width=8, kv_heads=2, groups=2, dim=64, value_dim=64, dtype=FULL, seed=8)
    expanded = inputs["keys"][:, :, :1].expand_as(inputs["keys"])
    assert choice.attention_for(inputs["query"], expanded, inputs["values"], {}) is None
    torch.set_num_threads(2)  # every test begins with one
    assert not fits(), "it uses one thread"


@needs_wide_registers
def test_a_model_decodes_through_it_to_the_tokens_of_generate(tiny_llama, monkeypatch):
    served = []

    def counted(*tensors: Any, **arguments: Any) -> Any:
        served.append(tensors[0].shape[2])
        return tree_attention(*tensors, **arguments)

    monkeypatch.setattr(cpu_attention, "tree_attention", counted)
    ids = torch.tensor([[0, 0, 0, 5, 9, 31, 5, 9], [7, 8, 5, 9, 31, 77, 5, 9]])
    mask = (ids != 0).long()
    expected = tiny_llama.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    got = tiny_llama.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=40,
        do_sample=False,
        custom_generate=lookahead.decode,
        lookahead_config=lookahead.LookaheadConfig(draft="fixed"),
    )
    assert torch.equal(got, expected)
    assert len(served) > 4
