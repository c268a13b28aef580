"""What keeps a CUDA graph from doing harm: passes are watched before, replays are checked, failures clean up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.backend.gpu import cuda_graphs as graphs
from lookahead.backend.gpu.cuda_graphs import CAPTURE_AT, CudaGraphs, Watch, graphs_unsupported_reason
from lookahead.backend.gpu.gpu_backend import GpuBackend
from lookahead.drafting.tree import TokenTree
from tests.support.families import FAMILIES, build
from tests.support.pass_recorder import Recording

CPU, META = torch.device("cpu"), torch.device("meta")
NUMBERS = torch.arange(6.0)


def scores(model: PreTrainedModel, steps: int, *, captures: bool) -> tuple[list[Tensor], list[bool]]:
    """The logits of some plain steps, and which of them were cold."""
    target = GpuBackend(model, rows=1, capacity=80, captures=captures)
    logits, cold = [], []
    with target.serving():
        target.read([np.arange(3, 24, dtype=np.int32)])
        for step in range(steps):
            logits.append(target.score([TokenTree.root(5 + step)]))
            cold.append(target.is_cold)
            target.cache.commit(0, np.zeros(1, np.int32))
    return logits, cold


def test_the_first_replay_is_checked_and_what_is_timed_is_replays_alone(recordings: list[Recording]) -> None:
    model = build(FAMILIES["Llama"])
    got, cold = scores(model, CAPTURE_AT + 4, captures=True)
    want, _ = scores(model, CAPTURE_AT + 4, captures=False)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(recordings) == 1
    assert cold == [True] * (CAPTURE_AT + 1) + [False] * 3


@contextmanager
def counting(model: Any) -> Iterator[None]:
    """A model that counts its passes in Python, and adds something by the count: a recording freezes it."""
    count = 0

    def add(module: Any, args: Any, output: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return output + 0.05 * count * torch.arange(output.shape[-1])

    handle = model.lm_head.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def test_a_replay_that_differs_from_its_pass_does_not_serve_and_the_log_says_so_once(
    recordings: list[Recording], caplog: pytest.LogCaptureFixture
) -> None:
    model = build(FAMILIES["Llama"])
    with counting(model), caplog.at_level(logging.WARNING, "lookahead"):
        got, cold = scores(model, CAPTURE_AT + 4, captures=True)
    (record,) = caplog.records
    assert "is decoded without CUDA graphs: a replay differs by" in record.getMessage()
    assert len(recordings) == 1
    assert not any(cold[CAPTURE_AT + 1 :])
    plain, _ = scores(model, CAPTURE_AT + 4, captures=False)
    added = [(each - other)[0, 0, -1] / (0.05 * (each.shape[-1] - 1)) for each, other in zip(got, plain, strict=True)]
    # Prefill, the step's own pass, the two of a recording, and the check of the next: never a count of before.
    assert [round(float(each)) for each in added] == [2, 3, 4, 7, 8, 9, 10]


def test_a_replay_that_is_not_a_number_where_its_pass_is_one_does_not_serve(
    recordings: list[Recording], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replay, room, rooms = Recording.replay, graphs.KeptGraphs.room, list[Tensor]()

    def spoilt(self: Recording) -> tuple[Tensor, ...]:
        outputs = replay(self)
        rooms[-1][0, 0, 7] = torch.nan
        return outputs

    monkeypatch.setattr(graphs.KeptGraphs, "room", lambda *args: rooms.append(room(*args)) or rooms[-1])
    monkeypatch.setattr(Recording, "replay", spoilt)
    with caplog.at_level(logging.WARNING, "lookahead"):
        got, _ = scores(build(FAMILIES["Llama"]), CAPTURE_AT + 2, captures=True)
    assert "a replay differs by nan" in caplog.text
    assert not any(each.isnan().any() for each in got)


WAITING: dict[str, Callable[[Tensor], object]] = {
    "a number is read": lambda x: x.sum().item(),
    "a condition": lambda x: bool((x > 2).any()),
    "what is not zero": lambda x: x.nonzero(),
    "an index by a mask": lambda x: x[x > 2],
    "a value put by a mask": lambda x: x.clone().index_put_([x > 2], torch.zeros(())),
    "different values": lambda x: x.unique(),
    "a tensor of a number": lambda x: x + torch.tensor(2.0),
}
GOING_ON: dict[str, Callable[[Tensor], object]] = {
    "arithmetic with numbers": lambda x: torch.where(x > 2, x, -1.0) * 0.5 + x.new_zeros(6),
    "another type": lambda x: x.to(torch.bfloat16).float(),
    "an index by numbers": lambda x: x[torch.arange(3)],
    "a slice": lambda x: x[1:4].fill_(2.0),
    "sorting": lambda x: x.topk(2),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_watched_pass_that_waits_for_the_device_is_refused_by_name(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"^aten\.\w+ waits for the device$"), Watch(CPU):
        WAITING[name](NUMBERS)


@pytest.mark.parametrize("name", GOING_ON)
def test_a_watched_pass_that_does_not_wait_goes_on(name: str) -> None:
    with torch.inference_mode(), Watch(CPU):
        GOING_ON[name](NUMBERS.clone())


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.to(META),
        lambda x: torch.empty(6, device=META).copy_(x),
        lambda x: torch.empty(6, device=META)[x.long()],
    ],
    ids=["moved", "copied", "an index of the host"],
)
def test_a_watched_pass_that_copies_between_host_and_device_is_refused(copy: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="waits for the device"), Watch(META):
        copy(NUMBERS)


def test_what_waits_for_the_host_alone_is_no_business_of_the_watch() -> None:
    with Watch(META):
        assert NUMBERS.sum().item() == 15.0
        assert len(NUMBERS[NUMBERS > 2]) == 3


def test_a_model_that_is_not_on_one_gpu_is_not_recorded() -> None:
    model = torch.nn.Linear(2, 2, device=META)
    assert graphs_unsupported_reason(model, CPU) == "it is on cpu"
    gpu = torch.device("cuda", 0)
    assert graphs_unsupported_reason(model, gpu) == "its weights are on meta, and a recording is of one GPU"

    class OnTheGpu(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            yield type("Weight", (), {"device": gpu})

    assert graphs_unsupported_reason(OnTheGpu(), gpu) is None
    assert "on cuda:0, and" in str(graphs_unsupported_reason(OnTheGpu(), torch.device("cuda", 1)))


class FakeCuda:
    """The streams and graphs of a GPU, as torch hands them out: what is done where, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = self.Stream()
        self.default, self.pools, self.done = self.current, 0, []
        self.fails = False
        for name in ("current_stream", "stream", "graph", "graph_pool_handle", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        side = self.Stream()
        monkeypatch.setattr(graphs, "_side_stream", lambda _: side)

    class Stream:
        def wait_stream(self, other: Any) -> None:
            assert other is not self

    class CUDAGraph:
        def replay(self) -> None:
            pass

    def current_stream(self) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def graph(self, graph: Any, *, pool: int, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        before, self.current = self.current, stream
        self.done.append(f"pool {pool}")
        yield
        if self.fails:
            raise RuntimeError("capture failed")  # and as in torch, the stream stays
        self.current = before


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_pass_runs_once_on_the_recording_stream_and_the_callers_comes_back(
    fake_cuda: FakeCuda,
) -> None:
    streams: list[Any] = []

    def run() -> tuple[Tensor, ...]:
        streams.append(fake_cuda.current)
        return (NUMBERS,)

    assert CudaGraphs(CPU)(run).replay() == (NUMBERS,)
    assert len(streams) == 2 and streams[0] is streams[1] is not fake_cuda.default
    assert fake_cuda.current is fake_cuda.default


def test_a_pass_that_waits_is_refused_before_anything_is_recorded(fake_cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match="waits for the device"):
        CudaGraphs(CPU)(lambda: (torch.full((1,), NUMBERS.sum().item()),))
    assert not fake_cuda.done
    assert fake_cuda.current is fake_cuda.default


def test_a_recording_that_fails_leaves_the_stream_of_the_caller_current(fake_cuda: FakeCuda) -> None:
    fake_cuda.fails = True
    with pytest.raises(RuntimeError, match="capture failed"):
        CudaGraphs(CPU)(lambda: (NUMBERS,))
    assert fake_cuda.current is fake_cuda.default
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: graphs._recording.acquire(timeout=5) and not graphs._recording.release()).result()


def test_graphs_share_a_pool_while_one_of_them_lives_and_take_a_new_one_then(fake_cuda: FakeCuda) -> None:
    capture = CudaGraphs(CPU)
    first = capture(lambda: (NUMBERS,))
    second = capture(lambda: (NUMBERS,))
    del first
    third = capture(lambda: (NUMBERS,))
    assert fake_cuda.done == ["pool 1"] * 3
    del second, third
    capture(lambda: (NUMBERS,))
    assert fake_cuda.done[-1] == "pool 2"
