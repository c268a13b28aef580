"""A kernel serves on a device only where it was heard to be right: with references in its place, a CPU can tell."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from lookahead.kernels import reference, self_test
from lookahead.kernels.self_test import KernelVariant, attention_is_right, compaction_is_right

CPU = torch.device("cpu")
OPTIONS = [frozenset(), frozenset({"window"}), frozenset({"chunk", "sinks"}), frozenset({"softcap"})]


SLOTS = self_test._SLOTS


@pytest.fixture(autouse=True)
def nothing_tested_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """No outcome is kept from before, and the long text is short: the reference takes a second for it."""
    monkeypatch.setattr(self_test, "_outcomes", {})
    monkeypatch.setattr(self_test, "_SLOTS", {100: None, 600: 64})


def part(dtype: torch.dtype = torch.float32, options: frozenset[str] = frozenset(), groups: int = 3) -> KernelVariant:
    return KernelVariant(CPU, dtype, 64, 48, groups, options)


def right(query: Tensor, keys: Tensor, values: Tensor, split: int | None = None, **arguments: Any) -> Tensor:
    return reference.tree_attention(query, keys, values, **arguments, dtype=torch.float32).to(query.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(sorted(options)) or "plain")
def test_a_kernel_that_is_right_serves(dtype: torch.dtype, options: frozenset[str]) -> None:
    assert attention_is_right(part(dtype, options), right)


def one_slot_short(query: Tensor, keys: Tensor, values: Tensor, *, lengths: Tensor, **arguments: Any) -> Tensor:
    keys = keys.clone()
    keys[:, 0] = -100 * query[:, 0, :1].sum(1, keepdim=True).sign()  # hardly seen
    return right(query, keys, values, lengths=lengths, **arguments)


def without_the_last_word(query: Tensor, keys: Tensor, values: Tensor, *, words: Tensor, **arguments: Any) -> Tensor:
    words = words.clone()
    words[:, :, 1] = 0
    return right(query, keys, values, words=words, **arguments)


def all_see_all(query: Tensor, keys: Tensor, values: Tensor, *, words: Tensor, **arguments: Any) -> Tensor:
    return right(query, keys, values, words=words | words[:, -1:], **arguments)


def without_options(query: Tensor, keys: Tensor, values: Tensor, **arguments: Any) -> Tensor:
    for name in ("window", "chunk", "softcap", "sinks"):
        arguments.pop(name, None)
    return right(query, keys, values, **arguments)


def reading_what_is_unused(query: Tensor, keys: Tensor, values: Tensor, **arguments: Any) -> Tensor:
    return right(query, keys, values, **arguments) + 0 * values.sum()


def that_does_not_compile(*tensors: Tensor, **arguments: Any) -> Tensor:
    raise RuntimeError("out of resources: shared memory")


@pytest.mark.parametrize(
    "kernel", [one_slot_short, without_the_last_word, all_see_all, reading_what_is_unused, that_does_not_compile]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_that_is_wrong_anywhere_does_not_serve_and_the_log_says_so_once(
    dtype: torch.dtype, kernel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="lookahead.kernels.self_test"):
        assert not attention_is_right(part(dtype), kernel)
        assert not attention_is_right(part(dtype), kernel)
    (record,) = caplog.records
    assert f"{dtype}, head size 64 and 48, 3 heads a KV head on cpu is not used" in record.getMessage()


def test_a_kernel_that_is_wrong_after_long_texts_only_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_last_slots(query: Tensor, keys: Tensor, values: Tensor, **arguments: Any) -> Tensor:
        return right(query, keys[:, :8192], values[:, :8192], **arguments)

    assert attention_is_right(part(), without_the_last_slots)
    monkeypatch.setattr(self_test, "_SLOTS", SLOTS)
    assert not attention_is_right(part(groups=1), without_the_last_slots)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda options: "+".join(sorted(options)))
def test_a_kernel_that_is_deaf_to_an_option_serves_without_it_only(options: frozenset[str]) -> None:
    assert attention_is_right(part(), without_options)
    assert not attention_is_right(part(options=options), without_options)


def test_a_kernel_is_heard_once_for_every_type_size_and_option_and_not_while_a_graph_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def counting(query: Tensor, *tensors: Tensor, **arguments: Any) -> Tensor:
        calls.append(query.shape[1])
        return right(query, *tensors, **arguments)

    monkeypatch.setattr(self_test, "_is_recording", lambda _: True)
    assert not attention_is_right(part(), counting)
    assert not calls
    monkeypatch.setattr(self_test, "_is_recording", lambda _: False)
    for _ in range(3):
        assert attention_is_right(part(), counting) and attention_is_right(part(groups=1), counting)
    assert calls == [6, 6, 2, 2]
    monkeypatch.setattr(self_test, "_is_recording", lambda _: True)
    assert attention_is_right(part(), counting), "what was heard before serves while a graph is recorded"


def test_compaction_serves_where_it_leaves_the_right_bytes() -> None:
    def right(buffers: list[Tensor], **plan: Tensor) -> None:
        for buffer in buffers:
            reference.compact(buffer, **plan)

    def in_the_wrong_order(
        buffers: list[Tensor], *, rows: Tensor, starts: Tensor, counts: Tensor, paths: Tensor
    ) -> None:
        for buffer in buffers:
            for row, start, count, path in zip(rows.tolist(), starts.tolist(), counts.tolist(), paths, strict=True):
                for node in reversed(range(count)):
                    buffer[row, start + node] = buffer[row, start + int(path[node])]

    assert compaction_is_right(CPU, right, list)
    assert not compaction_is_right(CPU, in_the_wrong_order, list)


def test_the_default_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    attention_is_right(part(), right)
    assert torch.equal(torch.get_rng_state(), before)
