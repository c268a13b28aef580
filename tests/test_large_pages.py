"""Memory in large pages: zeros of any shape that share nothing, and are given back with the last tensor of a chunk."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
import torch

from lookahead.kernels import large_pages


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_CHUNK", 1 << 16)
    monkeypatch.setattr(large_pages, "_newest", None)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float32, torch.bfloat16])
def test_tensors_are_zeros_of_their_own(dtype: torch.dtype) -> None:
    sizes = [(3, 5, 7), (1,), (1 << 17,), (2, 4096), (40, 100)]
    made = [large_pages.zeros(*size, dtype=dtype) for size in sizes]
    for number, (tensor, size) in enumerate(zip(made, sizes, strict=True), 1):
        assert tensor.shape == size and tensor.dtype == dtype and tensor.is_contiguous() and not tensor.any()
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(made, 1))


def test_a_chunk_is_given_back_with_its_last_tensor() -> None:
    first, second = (large_pages.zeros(64, dtype=torch.float32) for _ in range(2))
    assert large_pages._newest is not None
    chunk = large_pages._newest[0]
    del first
    gc.collect()
    assert chunk() is not None
    second.fill_(2)
    assert not large_pages.zeros(64, dtype=torch.float32).any()
    del second
    gc.collect()
    assert chunk() is None
    assert not large_pages.zeros(64, dtype=torch.float32).any()


def test_threads_get_memory_of_their_own() -> None:
    made: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: made.extend(large_pages.zeros(100, dtype=torch.float32) for _ in range(50)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = sorted(tensor.data_ptr() for tensor in made)
    assert len(places) == 200 and all(after - before >= 400 for before, after in itertools.pairwise(places))
