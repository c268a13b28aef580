"""Torch's attention without masks of the context: flash attention over what all nodes see, merged with the rest.

On a CPU its counterpart for CPUs stands in for flash attention of GPUs, which returns the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

import lookahead
from lookahead.backend.choice import backend_for
from lookahead.backend.torch_backend import TorchBackend
from lookahead.backend.tree_pass import AttentionSpan, FixedShapePass, TreePass
from lookahead.kernels import dispatch
from lookahead.model.cache import TreeSlots
from tests.support.random_trees import relative_error
from tests.test_kernel_seam import TEXTS, build, random_tree

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3}


def passed(lengths: Sequence[int], nodes: Sequence[int], scored: Any = None) -> TreePass:
    """A pass over random trees, behind so many committed tokens."""
    slots = TreeSlots(rows=len(lengths), capacity=max(lengths) + max(nodes))
    slots.lengths[:] = lengths
    slots.begin(max(nodes) if scored is None else max(nodes) - min(scored), scored)
    return TreePass(slots, CPU, [random_tree(row, each) for row, each in enumerate(nodes)], scored)


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("lengths", "nodes", "scored"),
    [
        ([700], [64], None),
        ([1], [3], None),
        ([129, 129], [1, 9], None),
        ([40, 33, 60], [5, 70, 1], None),
        ([90, 80], [30, 20], np.array([25, 19])),
        ([64, 63], [1, 1], None),
    ],
    ids=["long", "one slot", "two rows", "uneven rows", "gained nodes", "one node each"],
)
def test_a_mask_of_the_last_slots_gives_the_attention_under_a_mask_of_all(
    groups, dtype, lengths, nodes, scored
) -> None:
    tree_pass = passed(lengths, nodes, scored)
    start, source = min(lengths), torch.Generator().manual_seed(1)
    assert tree_pass.prefix == start
    whole, last = (tree_pass.mask(groups, AttentionSpan(), dtype, CPU, each) for each in (0, start))
    assert torch.equal(whole[..., start:], last) and not whole[..., :start].any()
    rows, slots, width = len(lengths), whole.shape[3], whole.shape[2] // groups
    query = torch.randn(rows, width, 2 * groups, 64, generator=source).mul(2).to(dtype).transpose(1, 2)
    key, value = (torch.randn(rows, slots + 7, 2, 64, generator=source).to(dtype) for _ in range(2))
    key, value = (each[:, :slots].transpose(1, 2) for each in (key, value))
    for scaling in (None, 0.3):
        want = dispatch.masked_attention(query.double(), key.double(), value.double(), whole.double(), scaling)
        got = dispatch.masked_attention(query, key, value, last, scaling)
        assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous()
        assert relative_error(got, want) < TOLERANCE[dtype]


def test_a_gpu_is_asked_for_flash_attention_with_shapes_it_returns() -> None:
    query, key = (torch.empty(2, heads, n, 64, device="meta", dtype=torch.half) for heads, n in ((6, 5), (2, 300)))
    mask = torch.empty(2, 1, 15, 10, device="meta", dtype=torch.half)
    out = dispatch.masked_attention(query, key, key, mask)
    assert out.shape == (2, 5, 6, 64) and out.dtype == torch.half


def flash_rules(params: Any) -> bool:
    """What torch asks before flash attention of a GPU: among others, causal queries must be as many as the keys."""
    is_square = params.query.shape[2] == params.key.shape[2]
    is_grouped = params.query.shape[1] != params.key.shape[1]
    return (is_square or not params.is_causal) and is_grouped == params.enable_gqa and params.query.shape[3] <= 256


def test_flash_attention_takes_queries_that_are_fewer_than_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "can_use_flash_attention", flash_rules)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with FakeTensorMode():
        query, key, short, odd = (
            torch.empty(1, *shape, device="cuda", dtype=torch.half)
            for shape in ((8, 16, 64), (2, 2000, 64), (2, 1000, 64), (8, 16, 100))
        )
        assert dispatch.takes_flash(query, key, key)
        assert dispatch.unmasked(query, key, key, 1984) == 1984
        assert dispatch.unmasked(query, key, key, 1800) == 0, "much of it needs a mask"
        assert dispatch.unmasked(query, short, short, 984) == 0, "short"
        assert dispatch.unmasked(odd, key, key, 1984) == 0, "head sizes that torch pads"
        monkeypatch.setattr(torch.version, "cuda", None)
        assert not dispatch.takes_flash(query, key, key), "the GPU of another maker"
    real = torch.empty(1, 2, 2000, 64, dtype=torch.half)
    assert dispatch.unmasked(real, real, real, 1990) == 0, "a CPU keeps its paths"


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """A GPU without kernels: flash attention takes all; counts the masks that are for the last slots only."""
    told: Counter[bool] = Counter()
    make = TreePass.mask

    def mask(self: TreePass, *arguments: Any) -> Tensor:
        told[arguments[4] > 0] += 1
        return make(self, *arguments)

    monkeypatch.setattr(TreePass, "mask", mask)
    monkeypatch.setattr(dispatch, "_LEAST_PREFIX", 3)
    monkeypatch.setattr(dispatch, "_LEAST_SHARE", 0)
    monkeypatch.setattr(dispatch, "takes_flash", lambda *_: True)
    return told


def test_a_ragged_batch_without_kernels_gives_the_tokens_of_generate(
    masks: Counter[bool], foretell: Callable[..., None]
) -> None:
    model = build("Llama")
    expected = model.generate(**TEXTS, max_new_tokens=30, do_sample=False)
    foretell(expected, TEXTS["attention_mask"])
    got = model.generate(**TEXTS, max_new_tokens=30, do_sample=False, custom_generate=lookahead.decode)
    assert torch.equal(got, expected)
    assert masks[True] > 10 and masks[False] == 4, "those of the model's two probes, behind one token"


def scored(target: TorchBackend, trees: Sequence[Any], masks: Counter[bool]) -> Tensor:
    """Logits of two trees behind prompts; counts the masks of that pass alone."""
    with target.serving():
        target.read([np.arange(3, 3 + n, dtype=np.int32) for n in (30, 24)])
        masks.clear()
        return target.score(trees)


@pytest.mark.parametrize(("family", "layers"), [("Mistral", 2), ("GptOss", 2), ("Gemma2", 2), ("Llama4", 1)])
def test_windows_chunks_sinks_and_softcaps_keep_masks_of_all_slots(
    family: str, layers: int, masks: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trees = build(family), [random_tree(1, 5), random_tree(2, 8)]
    logits = []
    for _ in range(2):
        logits.append(scored(backend_for(model, rows=2, capacity=64), trees, masks))
        assert masks[False] == layers and masks[True] == 2 - layers
        monkeypatch.setattr(dispatch, "unmasked", lambda *_: 0)
        layers = 2
    for row, tree in enumerate(trees):
        got, want = (each[row, : len(tree)] for each in logits)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_passes_of_a_fixed_shape_keep_masks_of_all_slots() -> None:
    slots = TreeSlots(rows=2, capacity=64)
    slots.lengths[:] = 40
    static = FixedShapePass(slots, 2, 8, CPU)
    static.fill([random_tree(1, 5), random_tree(2, 8)])
    assert static.prefix == 0, "its lengths are values on the device"


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("width", [1, 7, 64])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("scaling", [None, 0.5])
def test_a_part_of_a_text_attends_to_what_stands_before_and_to_itself_causally(
    scaling: float | None, rows: int, width: int, heads: tuple[int, int]
) -> None:
    source = torch.Generator().manual_seed(width)
    query, key, value = (
        3 * torch.randn(rows, slots, each, 16, generator=source).transpose(1, 2)
        for slots, each in ((width, heads[0]), (90, heads[1]), (90, heads[1]))
    )
    key, value = key[:, :, :80], value[:, :, :80]  # as the cache shows its first slots
    causal = torch.ones(width, 80, dtype=torch.bool).tril(80 - width)
    double = (each.double() for each in (query, key, value))
    expected = scaled_dot_product_attention(*double, attn_mask=causal, scale=scaling, enable_gqa=True).transpose(1, 2)
    got = dispatch.causal_in_parts(query, key, value, scaling)
    assert got.is_contiguous()
    assert relative_error(got, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", [1, 2])
def test_further_parts_of_prompts_of_one_length_need_no_mask_in_float32(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, logits = build("Llama"), []
    prompts = [np.arange(3 + row, 53 + row, dtype=np.int32) for row in range(rows)]
    for size in (64, 16):
        monkeypatch.setattr("lookahead.backend.torch_backend.PREFILL_CHUNK", size)
        target = backend_for(model, rows=rows, capacity=64)
        with target.serving():
            logits.append(target.read(prompts))
        monkeypatch.setattr(TreePass, "mask", None)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
