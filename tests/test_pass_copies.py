"""What a pass copies to its device: one transfer a pass, which no device may still read when its source is freed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lookahead.backend.tree_pass import TreePass, _pack, _unpack, may_return_early, on_device
from lookahead.drafting.tree import TokenTree
from lookahead.model.cache import TreeSlots

ELSEWHERE = torch.device("meta")


class Copies(TorchDispatchMode):
    """Records the arguments of copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[dict[str, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            self.made.append(kwargs)
        return function(*args, **(kwargs or {}))


def slots_of(*lengths: int) -> TreeSlots:
    slots = TreeSlots(len(lengths), 64)
    slots.lengths[:] = lengths
    return slots


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 7, 2), (4, 8, 16), (0, 5, 1)])
def test_packed_arrays_come_back_whole_at_aligned_addresses(sizes: tuple[int, ...]) -> None:
    drawn = np.random.default_rng(0)
    arrays = [drawn.integers(-99, 99, size).astype(kind) for size in sizes for kind in (np.int32, np.int64)]
    arrays.append(drawn.integers(-99, 99, (3, 5, 2)).astype(np.int64))
    whole = torch.from_numpy(_pack(arrays))
    for array, part in zip(arrays, _unpack(whole, arrays), strict=True):
        assert part.shape == array.shape and np.array_equal(part.numpy(), array)
        assert (part.data_ptr() - whole.data_ptr()) % 16 == 0
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_pass_over_trees_is_one_transfer() -> None:
    tree = TokenTree.from_parents([5, 6, 7], [0, 0, 1])
    slots = slots_of(4, 9)
    slots.begin(3)
    with Copies() as copies:
        tree_pass = TreePass(slots, ELSEWHERE, [tree, tree])
        tree_pass.tensors(ELSEWHERE)
    assert len(copies.made) == 1
    assert tree_pass.tokens.shape == (2, 3) and tree_pass.tokens.device == ELSEWHERE


def test_a_prompt_is_one_transfer_beside_its_chains() -> None:
    slots = slots_of(0, 0)
    slots.begin(6)
    with Copies() as copies:
        tree_pass = TreePass(slots, ELSEWHERE, prompt=(np.zeros((2, 6), np.int64), np.array([5])))
    assert len(copies.made) == 1 and tree_pass.keep.shape == (1,)
    with copies:
        tree_pass.tensors(ELSEWHERE)
    assert len(copies.made) == 2


def test_only_cuda_is_asked_to_return_before_it_has_read() -> None:
    assert may_return_early(torch.device("cuda", 1))
    with Copies() as copies:
        on_device([np.arange(3, dtype=np.int32)], ELSEWHERE)
    assert not any(options.get("non_blocking") for options in copies.made)
    assert not any(may_return_early(torch.device(name)) for name in ("mps", "xpu", "cpu"))


def test_the_slots_of_uneven_rows_are_copied_once_to_a_device() -> None:
    slots = slots_of(4, 9)
    for _ in range(2):
        slots.begin(1)
        slots.index = torch.tensor([4, 73])
        with Copies() as copies:
            moved = [slots.index_on(ELSEWHERE) for _ in range(3)]
        assert len(copies.made) == 1 and all(each is moved[0] for each in moved)
        assert slots.index_on(torch.device("cpu")) is slots.index
