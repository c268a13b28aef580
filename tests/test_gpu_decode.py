"""The benchmark of decoding on a GPU: without one it says so, and a tiny model on the CPU shows that all of it runs."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_decode, gpu_model, targets
from bench.command import make_engine
from bench.decoding_rates import PLAIN, Output, Trace, dictating, run
from bench.gpu_steps import BACK_TO_BACK
from bench.targets import GPU_DECODE, KERNEL
from lookahead import LookaheadConfig
from lookahead.backend.gpu import cuda_graphs
from tests.support.pass_recorder import Recording

SUMMARIZER = Path(__file__).resolve().parent / "models" / "summarizer"
CPU = torch.device("cpu")
TEXT = "The old house stood on the hill above the town. Nobody had lived in it for many years. "
TINY = ["--shape", "tiny", "--device", "cpu", "--dtype", "fp32", "--context", "60", "--trials", "2", "--rounds", "1"]


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are recorded on a CPU, where they are run by hand."""
    monkeypatch.setattr(cuda_graphs, "graphs_unsupported_reason", lambda *_: None)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    entries = [{"prompt": TEXT * 2, "output": TEXT}, {"prompt": TEXT, "output": "No."}]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def test_a_tiny_model_on_the_cpu_takes_the_benchmark_from_its_gate_to_its_figures(
    pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = ["--pairs", str(pairs), "--tokenizer", str(SUMMARIZER), "--max-new-tokens", "16"]
    assert gpu_decode.main([*TINY, *recorded]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert set(result["figures"]) == {goal.key for goal in GPU_DECODE}
    assert [step["nodes"] for step in result["steps"]] == [1, 16, 64]
    assert result["traces"] == 1  # the other is too short
    assert result["dictated"]["mean_acceptance_length"] > 1
    assert "not this model" in printed
    assert not result["has_targets"] and "target:" not in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_that_it_needs_one() -> None:
    with pytest.raises(SystemExit, match=r"^bench\.gpu_decode needs a CUDA GPU, and torch finds none$"):
        gpu_decode.main([])


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], Any]:
    """Milliseconds per token by way and drafts, of every GPU, batch and context."""
    output = tmp_path_factory.mktemp("model") / "gpu_model.json"
    gpu_model.main(["--gpu", "RTX 4090", "H100", "--output", str(output)])
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["is_measured"] is False
    return {(each["gpu"], each["rows"], each["context"]): each for each in report["results"]}


def test_the_model_of_gpus_says_that_more_nodes_cost_more(modelled: dict[tuple[str, int, int], Any]) -> None:
    recorded = json.loads(gpu_model.ACCEPTANCE.read_text(encoding="utf-8"))["methods"]
    for each in modelled.values():
        for way in gpu_model.GAP_US:
            steps = [each[way]["plain"]]
            steps += [
                each[way][f"{nodes}_nodes"] * recorded[f"ours@{nodes}"]["tokens_per_step"] for nodes in (16, 32, 64)
            ]
            assert all(more > less - 0.02 for less, more in itertools.pairwise(steps)), "rounded to 0.01 ms"
    many = modelled["RTX 4090", 8, 1024]["graphs"]
    assert many["64_nodes"] > many["32_nodes"] > many["16_nodes"], "products take the time, and few nodes are accepted"


def test_the_model_of_gpus_says_that_a_faster_memory_makes_a_plain_step_faster(
    modelled: dict[tuple[str, int, int], Any],
) -> None:
    plain = {key: each["graphs"]["plain"] for key, each in modelled.items()}
    assert plain["RTX 4090", 1, 1024] > plain["H100", 1, 1024] > 15.0 / 3.35
    assert plain["H100", 8, 32768] > plain["H100", 1, 32768] > plain["H100", 1, 1024]


def test_the_model_of_gpus_never_says_that_graphs_are_slower_than_eager(
    modelled: dict[tuple[str, int, int], Any],
) -> None:
    for each in modelled.values():
        for drafts, eager in each["eager"].items():
            assert eager >= each["graphs"][drafts]


def test_a_model_that_does_not_fit_the_memory_of_a_gpu_is_left_out(modelled: dict[tuple[str, int, int], Any]) -> None:
    assert ("RTX 4090", 1, 32768) in modelled and ("H100", 8, 32768) in modelled
    assert ("RTX 4090", 8, 8192) not in modelled and ("RTX 4090", 8, 32768) not in modelled


def test_the_error_of_the_model_of_gpus_against_measured_passes_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads, tokens = 30 * 2 * 3 * 64 * 4, {"1": 61, "9": 69}
    perfect = {nodes: 2.0 - heads * seen / 1e6 for nodes, seen in tokens.items()}
    report = {"model": "SmolLM2", "dtype": "fp32", "gb_per_s": 1.0, "gflop_per_s": 1e6, "perfect_ms": perfect}
    passes = tmp_path / "passes_of_mine.json"
    passes.write_text(json.dumps(report | {"ms": {"60": {"fast": {"1": 4.0, "9": 2.0}}}}), encoding="utf-8")
    given = ["--gpu", "H100", "--rows", "1", "--contexts", "1024", "--passes", str(passes)]
    gpu_model.main(given)
    printed = capsys.readouterr().out.splitlines()
    assert "passes_of_mine, 60 tokens, fast: error -25% (-50% to +0%)" in printed
    errors = {"lowest_error": -0.5, "median_error": -0.25, "highest_error": 0.0}
    assert json.loads(printed[-1])["errors"] == [{"passes": "passes_of_mine", "context": 60, "way": "fast"} | errors]
    passes.write_text(json.dumps(report | {"model": "another"}), encoding="utf-8")
    with pytest.raises(SystemExit, match="the passes are of another, not of SmolLM2"):
        gpu_model.main(given)


def test_figures_that_fall_short_of_their_goals_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {goal.key: goal.bound for goal in KERNEL} | {"compaction_us": 7.5}
    (tmp_path / "kernel.json").write_text(json.dumps({"figures": figures}))
    targets.main([str(tmp_path)])
    compaction = "falls short: compaction of 5 tokens in all layers, us: 7.5, to be at most 5"
    missing = f"not measured: {tmp_path / 'gpu_decode.json'}"
    assert capsys.readouterr().out.splitlines() == [missing, compaction]
    (tmp_path / "gpu_decode.json").write_text('{"figures": {"plain_speedup": 2.25, "dictated_speedup": 0.5}}')
    targets.main([str(tmp_path)])
    plain = "falls short: plain decoding over transformers' `generate`, tokens/s: 2.25, to be at least 3"
    assert capsys.readouterr().out.splitlines() == [plain, compaction]


@pytest.mark.parametrize("proposers", [(), ("prompt", "recycled")], ids=["plain", "drafts"])
def test_a_dictated_model_writes_the_recorded_text(proposers: tuple[str, ...]) -> None:
    model = gpu_decode.make_model("tiny", "bf16", CPU, 0)
    trace = Trace(list(range(40, 70)) * 2, [*range(40, 60), 9, 8, 7])
    config = LookaheadConfig(proposers=proposers, draft="fixed", memory="request")
    engine = make_engine(model, torch.tensor([trace.prompt]), config, max_new_tokens=len(trace.output))
    with dictating(engine, trace, CPU):
        steps = list(engine.run())
    assert [token for step in steps for token in step[0].tokens.tolist()] == trace.output
    assert (len(steps) < len(trace.output)) == bool(proposers)


def test_recorded_passes_that_give_other_tokens_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_by_hand(*arguments: object, by_hand: bool = False) -> Output:
        output = run(*arguments, by_hand=by_hand)
        return Output([*output.tokens[:-1], -1], output.steps) if by_hand else output

    monkeypatch.setattr("bench.decoding_rates.run", wrong_by_hand)
    with pytest.raises(SystemExit, match=r"not lossless: .* by hand after 47 tokens"):
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


def test_a_graph_is_timed_in_replays_that_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    # What happens on a GPU, with stand-ins for its events and its graphs.
    replayed = []

    class Counted(Recording):
        def replay(self) -> tuple[torch.Tensor, ...]:
            replayed.append(self)
            return super().replay()

    def record(run: Any) -> Counted:
        run()  # as CUDA's capture does
        return Counted(run)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    model = gpu_decode.make_model("tiny", "fp32", CPU, 0)
    ids = torch.arange(40, 70)[None]
    engine = make_engine(model, ids, PLAIN, max_new_tokens=12)
    engine._backend._graphs._capture = record
    output = run(engine, torch.device("cuda"))
    assert output.tokens == model.generate(ids, max_new_tokens=12, do_sample=False)[0, 30:].tolist()
    assert [step.is_replayed for step in output.steps] == [False] * 3 + [True] * 8
    assert [step.is_cold for step in output.steps] == [True] * 4 + [False] * 7, "the first replay is checked by hand"
    assert len(replayed) == 8 + 1 + BACK_TO_BACK
    assert output.graph_s is not None and output.graph_s > 0
