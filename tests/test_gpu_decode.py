"""The benchmark of decoding on a GPU: without one it says so, and a tiny model on the CPU shows that all of it runs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from bench import gpu_decode
from bench.targets import GPU_DECODE, KERNEL, print_goals
from lookahead.backend.gpu import cuda_graphs
from tests.support.pass_recorder import Recording

CPU = torch.device("cpu")
TINY = ["--shape", "tiny", "--device", "cpu", "--dtype", "fp32", "--context", "60", "--trials", "2", "--rounds", "1"]


def test_a_tiny_model_on_the_cpu_takes_the_benchmark_from_its_gate_to_its_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu_decode.main([*TINY, "--max-new-tokens", "16"]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert set(result["figures"]) == {goal.key for goal in GPU_DECODE}
    assert [step["nodes"] for step in result["steps"]] == [1, 16, 64]
    assert result["plain"]["same_tokens"] == 16 and result["plain"]["host_us"]["median"] > 0
    assert "target:" not in printed, "targets are of a GPU"
    assert cuda_graphs.graphs_unsupported_reason(gpu_decode.make_model("tiny", "fp32", CPU, 0), CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_that_it_needs_one() -> None:
    with pytest.raises(SystemExit, match=r"^bench\.gpu_decode needs a CUDA GPU, and torch finds none$"):
        gpu_decode.main([])


def test_figures_that_fall_short_of_their_goals_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {goal.key: goal.bound for goal in KERNEL} | {"compaction_us": 7.5}
    print_goals(KERNEL, figures, has_targets=True)
    *others, compaction = capsys.readouterr().out.splitlines()
    assert compaction == "compaction of 5 tokens in all layers, us: 7.500  FALLS SHORT  (target: at most 5)"
    assert not [line for line in others if "FALLS SHORT" in line]
    print_goals(GPU_DECODE, {"plain_speedup": 2.25}, has_targets=True)
    assert "2.250  FALLS SHORT  (target: at least 3)" in capsys.readouterr().out


def test_recorded_passes_that_give_other_tokens_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = gpu_decode.decode

    def wrong(*arguments: Any) -> Any:
        tokens, steps = decode(*arguments)
        return [*tokens[:-1], -1], steps

    monkeypatch.setattr(gpu_decode, "decode", wrong)
    with pytest.raises(SystemExit, match=r"not lossless: plain passes part from model.generate after 47 tokens"):
        gpu_decode.main(TINY)


def test_passes_that_are_not_replayed_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_difference_of", lambda *_: "0.5")
    with pytest.raises(SystemExit, match="a step was not replayed from a graph"):
        gpu_decode.main(TINY)


class FakeEvent:
    """An event of a device that has done everything as soon as it is asked to."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


def test_replays_of_graphs_are_timed_and_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    # What happens on a GPU, with stand-ins for its events and its graphs.
    replayed = []

    class Counted(Recording):
        def replay(self) -> tuple[torch.Tensor, ...]:
            replayed.append(self)
            time.sleep(0.001)
            return super().replay()

    def capture(run: Any) -> Counted:
        run()  # as CUDA's capture does
        return Counted(run)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(cuda_graphs, "CudaGraphs", lambda device: capture)
    monkeypatch.setattr(cuda_graphs, "graphs_unsupported_reason", lambda *_: None)
    model = gpu_decode.make_model("tiny", "fp32", CPU, 0)
    ids = torch.arange(40, 70)[None]
    with gpu_decode.timed_graphs(torch.device("cuda")) as watch:
        tokens, steps = gpu_decode.decode(model, ids, gpu_decode.PLAIN, 12, watch)
    assert tokens == model.generate(ids, max_new_tokens=12, do_sample=False)[0, 30:].tolist()
    assert len(replayed) == 8 and len(steps) == 7, "the first replay is checked, and is not timed"
    assert all(seconds > graph_s > 0.001 for seconds, graph_s in steps)
