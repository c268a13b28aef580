"""A kernel serves on a device only where it was found to be right: with references in its place, a CPU can tell."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from lookahead.backend.gpu import kernel_trial
from lookahead.backend.gpu.gpu_backend import GpuBackend
from lookahead.backend.gpu.kernel_trial import run_tests, try_kernels
from lookahead.kernels import dispatch as choice
from lookahead.kernels import self_test
from lookahead.kernels.dispatch import KernelVariant, Verdict
from lookahead.kernels.self_test import attention_error, compaction_error, gains_of
from lookahead.model import attention
from tests.support import kernel_reference as reference
from tests.test_kernel_seam import SIZES, build, random_tree
from tests.test_kernels import interpreter_gap

CPU = torch.device("cpu")
OPTIONS = [frozenset(), frozenset({"window"}), frozenset({"chunk", "sinks"}), frozenset({"softcap"})]
SLOTS = self_test._SLOTS


@pytest.fixture(autouse=True)
def nothing_tested_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No verdict is kept from before, and the long text is short: the reference takes a second for it."""
    for name in ("verdicts", "wanted"):
        monkeypatch.setattr(choice, name, {})
    monkeypatch.setattr(kernel_trial, "user_cache_path", lambda *_, **__: tmp_path)
    monkeypatch.setattr(self_test, "_SLOTS", {100: None, 600: 64})


def part(dtype: torch.dtype = torch.float32, options: frozenset[str] = frozenset(), groups: int = 3) -> KernelVariant:
    return KernelVariant(CPU, dtype, 64, 48, groups, options)


def right(query: Tensor, keys: Tensor, values: Tensor, split: int | None = None, **arguments: Any) -> Tensor:
    return reference.tree_attention(query, keys, values, **arguments, dtype=torch.float32).to(query.dtype)


def is_right(variant: KernelVariant, kernel: Any) -> bool:
    return attention_error(variant, kernel) <= self_test._TOLERANCE[variant.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(sorted(options)) or "plain")
def test_a_kernel_that_is_right_serves(dtype: torch.dtype, options: frozenset[str]) -> None:
    assert is_right(part(dtype, options), right)


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


@pytest.mark.parametrize("kernel", [one_slot_short, without_the_last_word, all_see_all, reading_what_is_unused])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_that_is_wrong_anywhere_does_not_serve(dtype: torch.dtype, kernel: Any) -> None:
    assert not is_right(part(dtype), kernel)


def test_a_kernel_that_is_wrong_after_long_texts_only_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_last_slots(query: Tensor, keys: Tensor, values: Tensor, **arguments: Any) -> Tensor:
        return right(query, keys[:, :8192], values[:, :8192], **arguments)

    assert is_right(part(), without_the_last_slots)
    monkeypatch.setattr(self_test, "_SLOTS", SLOTS)
    assert not is_right(part(groups=1), without_the_last_slots)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda options: "+".join(sorted(options)))
def test_a_kernel_that_is_deaf_to_an_option_serves_without_it_only(options: frozenset[str]) -> None:
    assert is_right(part(), without_options)
    assert not is_right(part(options=options), without_options)


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

    assert compaction_error(CPU, right, list) == 0
    assert compaction_error(CPU, in_the_wrong_order, list) > 0


def test_the_default_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    attention_error(part(), right)
    assert torch.equal(torch.get_rng_state(), before)


FAKE = """
import json, os, sys, time
for number, variant in enumerate(json.loads(sys.argv[1])):
    if variant[2] == 16:
        os.abort()
    if variant[2] == 32:
        time.sleep(60)
    if variant[2] == 48:
        sys.exit("no GPU for this process")
    problem = "" if variant[2] == 64 else "it differs by 0.5 from the reference"
    print("something else that was printed")
    print(json.dumps([problem, [[512, 1, 2.0]], True]), flush=True)
"""


@pytest.fixture
def fake_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-test that finds a head size of 64 right and 80 wrong; with 16 it crashes, with 32 hangs, with 48 fails."""
    (tmp_path / "fake_self_test.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernel_trial, "SELF_TEST", "fake_self_test")
    monkeypatch.setattr(kernel_trial, "PATIENCE_S", 2)
    monkeypatch.setattr(kernel_trial, "describe_machine", lambda _: {"gpu": "a GPU", "driver": "1"})


def sized(dim: int) -> KernelVariant:
    return KernelVariant(CPU, torch.float16, dim, dim, 4)


@pytest.mark.usefixtures("fake_test")
def test_a_test_that_crashes_hangs_or_fails_refuses_its_own_kernel_alone() -> None:
    right, crash, wrong, failure, hang, last = run_tests([sized(dim) for dim in (64, 16, 80, 48, 32, 64)])
    assert right == last == Verdict("", ((512, 1, 2.0),))
    assert wrong.problem == "it differs by 0.5 from the reference" and wrong.is_lasting
    assert crash.problem.startswith("its test ended with exit code -6") and crash.is_lasting
    assert failure.problem == "its test ended with exit code 1: no GPU for this process" and not failure.is_lasting
    assert hang.problem == "its test took more than 6 s" and not hang.is_lasting


@pytest.mark.usefixtures("fake_test")
def test_a_refused_kernel_is_one_line_and_its_verdict_is_kept_for_processes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variants = [sized(64), sized(80), sized(48)]
    tested: list[list[int]] = []

    def counting(asked: list[KernelVariant]) -> list[Verdict]:
        tested.append([variant.dim for variant in asked])
        return run_tests(asked)

    monkeypatch.setattr(kernel_trial, "run_tests", counting)
    for process in range(3):
        choice.verdicts.clear()
        with caplog.at_level(logging.WARNING, "lookahead"):
            for _ in range(2):
                try_kernels(dict.fromkeys(variants))
        assert [not choice.verdicts[variant].problem for variant in variants] == [True, False, False]
        if process == 1:  # another driver
            monkeypatch.setattr(kernel_trial, "describe_machine", lambda _: {"gpu": "a GPU", "driver": "2"})
    assert tested == [[64, 80, 48], [48], [64, 80, 48]], "what may be otherwise at another time is tested again"
    name = "tree attention of torch.float16, head size 80, 4 heads a KV head"
    line = f"the kernel for {name} is not used on cpu: it differs by 0.5 from the reference"
    assert [record.getMessage() for record in caplog.records].count(line) == 3 and len(caplog.records) == 6
    assert all(json.loads(path.read_text())["gpu"] == "a GPU" for path in tmp_path.glob("kernels/*.json"))


def test_verdicts_are_those_of_a_gpu_its_driver_the_compilers_and_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton")
    (tmp_path / "version").write_text("NVRM version: 580.1\nGCC version: 12\n")
    monkeypatch.setattr(kernel_trial, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    (tmp_path / "self_test.py").write_text("one")
    machine = kernel_trial.describe_machine(CPU)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    assert machine == {"gpu": "a GPU", "driver": "NVRM version: 580.1", **versions, "kernels": machine["kernels"]}
    monkeypatch.setattr(self_test, "__file__", str(tmp_path / "self_test.py"))
    assert kernel_trial.describe_machine(CPU)["kernels"] != machine["kernels"]


@pytest.mark.usefixtures("fake_test")
@pytest.mark.parametrize("text", ["", "[]", '{"verdicts": 3}', '{"verdicts": {"x": [1, [[]], 0]}}', "[" * 100_000])
def test_a_file_of_verdicts_that_holds_something_else_is_written_anew(text: str, tmp_path: Path) -> None:
    try_kernels({sized(64): None})
    (path,) = tmp_path.glob("kernels/*.json")
    path.write_text(text)
    choice.verdicts.clear()
    try_kernels({sized(64): None})
    assert not choice.verdicts[sized(64)].problem
    assert json.loads(path.read_text())["verdicts"] == {sized(64).name: ["", [[512, 1, 2.0]], True]}


@pytest.mark.usefixtures("fake_test")
def test_without_a_folder_to_keep_them_in_verdicts_serve_their_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(kernel_trial, "user_cache_path", lambda *_, **__: tmp_path / "file")
    try_kernels({sized(64): None})
    assert not choice.verdicts[sized(64)].problem


@pytest.mark.skipif(interpreter_gap() is not None, reason=str(interpreter_gap()))
def test_the_self_test_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    odd = KernelVariant(CPU, torch.int32, 16, 16, 1)
    right, refused = run_tests([KernelVariant(CPU, kernel="compaction"), odd])
    assert right == Verdict()
    assert "not implemented for 'Int'" in refused.problem


@pytest.mark.parametrize(
    "variant", [part(options=OPTIONS[2]), KernelVariant(CPU, kernel="compaction")], ids=["tree attention", "compaction"]
)
def test_a_variant_reaches_the_other_process_as_it_is(variant: KernelVariant) -> None:
    assert KernelVariant.from_json(json.loads(json.dumps(variant.to_json()))) == variant


def test_a_kernel_is_timed_against_the_attention_that_would_serve_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    now, results = [0.0], []
    masked = choice.masked_attention

    def timed(attend: Any, seconds: float) -> Any:
        def call(*arguments: Any, **options: Any) -> Tensor:
            now[0] += seconds * (arguments[0].shape[2] if seconds < 1 else 1)
            results.append(attend(*arguments, **options))
            return results[-1]

        return call

    def bind(query: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Any:
        return timed(lambda *layer, **tree: right(*layer, **{**options, **tree}), 0.5)

    monkeypatch.setattr("lookahead.kernels.tree_attention.bind", bind)
    monkeypatch.setattr(choice, "masked_attention", timed(masked, 2.0))
    monkeypatch.setattr(self_test, "_CALLS", 1)
    options = frozenset({"window", "softcap", "sinks"})
    gains = gains_of(part(options=options), ((200, 1), (200, 16)), lambda: now[0])
    assert gains == ((200, 1, 4.0), (200, 16, 0.25))
    for kernel, torchs in ((0, 4), (8, 12)):  # each four times: once to compile, and three to time
        torch.testing.assert_close(results[kernel], results[torchs], rtol=1e-3, atol=1e-3)
    verdict = Verdict("", gains)
    assert verdict.is_faster(9000, 2) and not verdict.is_faster(9000, 40)
    assert Verdict().is_faster(9000, 40), "where nothing was timed, the kernel serves"


def test_eager_and_recorded_passes_take_the_faster_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(choice, "runs_on", lambda _: True)
    meta = torch.device("meta")
    query, slots = torch.empty(1, 4, 32, 16, device=meta), torch.empty(1, 900, 2, 16, device=meta)
    variant = KernelVariant(meta, torch.float32, 16, 16, 2)
    monkeypatch.setattr("lookahead.kernels.tree_attention.bind", lambda *_: right)
    assert choice.attention_for(query, slots, slots, {}) is None
    assert list(choice.wanted) == [variant, KernelVariant(meta, kernel="compaction")]
    choice.verdicts[variant] = Verdict("", ((512, 1, 2.0), (512, 64, 0.9)))
    assert choice.attention_for(query, slots, slots, {}) is None
    assert choice.attention_for(query[:, :, :1], slots, slots, {}) is right
    choice.verdicts[variant] = Verdict("it is wrong")
    assert choice.attention_for(query[:, :, :1], slots, slots, {}) is None


@pytest.mark.parametrize(
    ("error", "is_lasting"),
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."), False),
        (CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (ValueError("out of resource: shared memory, Required: 250000, Hardware limit: 101376"), True),
    ],
)
def test_a_verdict_about_the_kernel_is_kept_and_one_about_the_machine_is_not(
    error: Exception, is_lasting: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(self_test, "verdict_of", Mock(side_effect=error))
    self_test.main(json.dumps([part().to_json()]))
    problem, _, lasts = json.loads(capsys.readouterr().out)
    assert str(error) in problem and lasts is is_lasting


@pytest.fixture
def real_bind() -> Any:
    return pytest.importorskip("lookahead.kernels.tree_attention").bind


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[set[str]]:
    """The meta device stands in for a GPU on which every kernel is right; lists what each self-test was asked."""
    pytest.importorskip("triton")
    asked: list[set[str]] = []

    def run_tests(variants: Sequence[KernelVariant]) -> list[Verdict]:
        asked.append({variant.name for variant in variants})
        return [Verdict()] * len(variants)

    def bind(*arguments: Any) -> Callable[..., Tensor]:
        return lambda query, *others, **arguments: query.transpose(1, 2).contiguous()

    for name in ("verdicts", "wanted"):
        monkeypatch.setattr(choice, name, {})
    monkeypatch.setattr(choice, "served", set())
    monkeypatch.setattr(choice, "runs_on", lambda _: True)
    monkeypatch.setattr("lookahead.kernels.tree_attention.bind", bind)
    monkeypatch.setattr(kernel_trial, "describe_machine", lambda _: {"gpu": "meta"})
    monkeypatch.setattr(kernel_trial, "user_cache_path", lambda *_, **__: tmp_path)
    monkeypatch.setattr(kernel_trial, "run_tests", run_tests)
    return asked


def test_all_kernels_of_a_model_are_tested_at_once_before_a_step_is_timed(pretend_gpu: list[set[str]]) -> None:
    meta = torch.device("meta")
    target = GpuBackend(build("Mistral").to(meta), rows=1, capacity=64)
    cold, serving = [], []
    with target.serving():
        target.read([np.zeros(4, np.int32)])
        for length in (3, 3, 3, 30, 30):
            target.cache.slots.lengths[:] = length
            target.score([random_tree(1, 3)])
            cold.append(target.is_cold)
            serving.append(len(choice.served))
    plain = "tree attention of torch.float32, head size 16, 2 heads a KV head"
    assert pretend_gpu == [{plain, f"{plain} with window", "compaction"}]
    assert serving == [0, 1, 1, 2, 2], "where the window begins to hide something, its kernel is ready"
    assert cold == [True, True, False, True, False], "the first use of a kernel loads it"


def test_a_layer_like_one_before_chooses_nothing_and_allocates_its_output_alone(
    real_bind: Any, pretend_gpu: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: None

    for name in ("attend", "merge"):
        monkeypatch.setattr(f"lookahead.kernels.tree_attention.{name}", Launches())
    monkeypatch.setattr("lookahead.kernels.tree_attention.bind", real_bind)
    calls: list[Counter[str]] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        names: Counter[str] = Counter()
        calls.append(names)
        sys.setprofile(lambda frame, event, _: names.update([frame.f_code.co_name] if event == "call" else []))
        try:
            return attention.tree_attention(*arguments, **options)
        finally:
            sys.setprofile(None)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.ATTENTION_NAME, counted)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 5})
    target = GpuBackend(LlamaForCausalLM(config).to(torch.device("meta")).eval(), rows=1, capacity=2000)
    with target.serving():
        target.read([np.zeros(1000, np.int32)])
        for _ in range(3):
            calls.clear()
            target.score([random_tree(1, 20)])
    first, *others = calls
    assert first["bind"] == 1 and len(others) == 4
    for names in others:
        assert names["bind"] == names["attention_for"] == names["tensors"] == 0
        assert names["new_empty"] == 1, "sums of splits are shared"
        assert sum(names.values()) < 20
