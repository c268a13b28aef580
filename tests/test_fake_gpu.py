"""Whole generations on a device that only says it is a GPU: its backend, graphs, fixed shapes, copies and kernels.

What the device refuses and counts is in tests/support/fake_gpu.py. Nothing here says how fast a GPU is.
"""

from __future__ import annotations

import copy
import gc
import logging
import operator
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.gpu import kernel_trial
from lookahead.backend.gpu.gpu_backend import GpuBackend
from lookahead.backend.protocol import PathReport
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import dispatch
from lookahead.kernels.dispatch import Verdict
from tests.support import fake_gpu as fake
from tests.support.adversarial_proposers import among_decoys, drafting_by
from tests.support.engines import engine_of
from tests.support.extended import ROOT
from tests.support.fake_gpu import FakeGpu, fake_gpu, move
from tests.support.families import FAMILIES, build
from tests.test_kernels import interpreter_gap

pytestmark = pytest.mark.skipif(fake.missing() is not None, reason=str(fake.missing()))

CONFIG = LookaheadConfig(draft="fixed", max_nodes=7, min_probability=0.0, memory="request")
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20}
WAYS = {"greedy": {"do_sample": False}, "sampled": SAMPLED}
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[FakeGpu]:
    """One device; the test's number of them, if it is parametrised."""
    with fake_gpu(getattr(request, "param", 1)) as device:
        yield device


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    rng, longest = np.random.default_rng(0), max(lengths)
    rows = [[0] * (longest - n) + np.resize(rng.integers(10, 26, 9), n).tolist() for n in lengths]
    mask = [[0] * (longest - n) + [1] * n for n in lengths]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def split_in_two(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose last layer and head are on a second device, with the hooks of accelerate."""
    last = len(model.model.layers) - 1
    second = (f"model.layers.{last}", "model.norm", "lm_head")
    move(model, lambda name: int(name.startswith(second)))
    for name in second:
        hook = AlignDevicesHook(execution_device=torch.device("cuda", 1))
        add_hook_to_module(model.get_submodule(name), hook)
    add_hook_to_module(model, AlignDevicesHook(execution_device=torch.device("cuda", 0), io_same_device=True))
    return model


def llama_with_heads_of(size: int, layers: int = 2) -> PreTrainedModel:
    sizes = {"vocab_size": 101, "hidden_size": 4 * size, "intermediate_size": 32, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=None, pad_token_id=0))
    return model.eval()


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value.to("cuda:0") if isinstance(value, torch.Tensor) else value for key, value in options.items()}


def outputs(model: PreTrainedModel, moved: PreTrainedModel, options: dict[str, Any], config: Any = CONFIG) -> Any:
    """The tokens of transformers on the CPU, and ours on the device."""
    torch.manual_seed(3)
    expected = model.generate(**options)
    torch.manual_seed(3)
    ours = {"custom_generate": lookahead.decode, "lookahead_config": config}
    return expected.tolist(), moved.generate(**on_gpu(options), **ours).tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [(40,), (4, 9, 30)], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("gpu", [1, 2], indirect=True, ids=["one device", "two devices"])
def test_a_generation_on_devices_gives_the_tokens_of_the_cpu(
    gpu: FakeGpu, looping_llama: PreTrainedModel, lengths: tuple[int, ...], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**prompts(*lengths), **WAYS[way], "max_new_tokens": 50, "eos_token_id": [7, 8], "pad_token_id": 0}
    moved = (move if gpu.devices == 1 else split_in_two)(copy.deepcopy(looping_llama))
    with caplog.at_level(logging.WARNING, "lookahead"):
        expected, got = outputs(looping_llama, moved, options)
    assert got == expected
    assert (gpu.counts["replays"] > 0) == (gpu.devices == 1)
    assert not [record for record in caplog.records if "compiling" not in record.message]


@pytest.mark.parametrize(
    "name",
    [
        *("Gemma3", "Mistral", "GPTJ"),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("Gemma2", "Llama4", "Qwen2-windows")),
    ],
)
def test_families_with_windows_caps_and_prepared_masks_give_the_tokens_of_the_cpu(gpu: FakeGpu, name: str) -> None:
    model = build(FAMILIES[name])
    options = {**prompts(40), "max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    expected, got = outputs(model, move(copy.deepcopy(model)), options)
    assert got == expected
    assert gpu.counts["replays"] > 0


def steady(gpu: FakeGpu, model: PreTrainedModel, options: dict[str, Any]) -> Counter[str]:
    """The most of each count in the last ten of thirty steps."""
    torch.manual_seed(3)
    steps, engine = list[Counter[str]](), engine_of(model, **on_gpu(options), lookahead_config=CONFIG)
    for _ in zip(range(30), engine.run(), strict=False):
        steps.append(gpu.counts.copy())
    assert len(steps) == 30
    spent = [after - before for before, after in zip(steps[-11:], steps[-10:], strict=False)]
    most: Counter[str] = Counter()
    for step in spent:
        most |= step
    return most


# Of two layers: copies to the device, to the host and between devices, waits of the host, launches beside a replay.
# The tree is one copy, the tokens are another: the recording finds them. A path that leaves a chain takes a copy.
LIMITS = {
    "one row": ("greedy", (40,), 1, (1, 1, 0, 1, 2)),
    "ragged rows": ("greedy", (4, 9, 30), 1, (2, 1, 0, 1, 5)),
    "sampled": ("sampled", (40,), 1, (6, 1, 0, 11, 78)),
    "two devices": ("greedy", (40,), 2, (1, 1, 9, 1, 168)),
}
COUNTED = "copies to the device", "copies to the host", "copies between devices", "waits", "launches"


@pytest.mark.parametrize(("way", "lengths", "gpu", "limits"), LIMITS.values(), indirect=["gpu"], ids=LIMITS)
def test_a_step_copies_waits_and_launches_no_more_than_it_did(
    gpu: FakeGpu, looping_llama: PreTrainedModel, way: str, lengths: tuple[int, ...], limits: tuple[int, ...]
) -> None:
    moved = (move if gpu.devices == 1 else split_in_two)(copy.deepcopy(looping_llama))
    most = steady(gpu, moved, {**prompts(*lengths), **WAYS[way], "max_new_tokens": 300})
    assert most["replays"] == (gpu.devices == 1) and not most["captures"]
    spent = [most[name] for name in COUNTED]
    assert all(map(operator.le, spent, limits)), dict(zip(COUNTED, spent, strict=True))


@pytest.mark.parametrize(("layers", "blocks"), [(2, 1), (8, 1), (10, 2)])
def test_a_path_that_leaves_a_chain_is_moved_in_eight_layers_at_once(gpu: FakeGpu, layers: int, blocks: int) -> None:
    model, tree = move(llama_with_heads_of(8, layers)), TokenTree.from_parents([5, 6, 7, 8], [0, 0, 0, 2])
    target, plain = (GpuBackend(model, rows=2, capacity=80) for _ in range(2))
    with target.serving():
        for each in (target, plain):
            each.read([np.arange(3, 24, dtype=np.int32), np.arange(5, 14, dtype=np.int32)])
        target.score([tree, tree])
        before = gpu.counts.copy()
        for row in (1, 0):
            target.cache.commit(row, np.array([0, 2, 3], np.int32))
        assert gpu.counts - before == {"copies to the device": 2, "launches": 2 * (1 + 2 * blocks)}
        plain.score([TokenTree.from_parents([5, 7, 8], [0, 0, 1])] * 2)
        for ours, want in zip(target.cache.buffers(), plain.cache.buffers(), strict=True):
            for row, length in enumerate((20, 8)):
                torch.testing.assert_close(
                    ours[row, : length + 3].cpu(), want[row, : length + 3].cpu(), rtol=1e-3, atol=1e-3
                )


def test_tensors_of_two_devices_and_of_the_host_are_refused(gpu: FakeGpu) -> None:
    here, there, host = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"), torch.ones(3)
    for other in (there, host):
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            here + other
    assert (here + 1).tolist() == (here + torch.ones(())).tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="same device"):
        here[torch.zeros(2, dtype=torch.int64, device="cuda:1")]
    with pytest.raises(RuntimeError, match="device of the indexed tensor"):
        host[torch.zeros(2, dtype=torch.int64, device="cuda:0")]


WAITING = {
    "a copy from the host": lambda x, host: x + host.to(x.device, non_blocking=True),
    "a copy into a tensor": lambda x, host: x.clone().copy_(host),
    "a copy to the host": lambda x, host: x.cpu(),
    "an index of the host": lambda x, host: x[host.long()],
    "a mask": lambda x, host: x[x > 0],
    "a number that is read": lambda x, host: x.sum().item(),
    "synchronize": lambda x, host: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_the_host_waits_for_is_refused_during_capture(gpu: FakeGpu, name: str) -> None:
    x, host = torch.ones(3, device="cuda"), torch.ones(3)
    WAITING[name](x, host)
    refused = pytest.raises(RuntimeError, match="not permitted when stream is capturing")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        WAITING[name](x, host)
    assert gpu.capturing is None


def test_a_replay_reads_and_writes_the_memory_of_its_capture(gpu: FakeGpu) -> None:
    x, buffer, graph = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = x * 2
        buffer[1:] = doubled[:2]
    x.fill_(5)
    graph.replay()
    assert doubled.tolist() == [10, 10, 10] and buffer.tolist() == [0, 10, 10]


def test_a_model_that_reads_a_number_in_its_pass_is_decoded_without_graphs(
    gpu: FakeGpu, looping_llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    moved = move(copy.deepcopy(looping_llama))
    moved.model.layers[1].register_forward_hook(lambda *args: args[2].sum().item() and None)
    options = {**prompts(40), "max_new_tokens": 30, "do_sample": False}
    config = LookaheadConfig(draft="fixed", max_nodes=7, trust_user_code=True)
    with caplog.at_level(logging.WARNING, "lookahead"):
        expected, got = outputs(looping_llama, moved, options, config)
    assert got == expected
    assert caplog.text.count("is decoded without CUDA graphs") == 1 and "waits for the device" in caplog.text
    assert not gpu.counts["captures"]


REFUSED = {
    "no NVIDIA GPU": (8, {}, (9, 0), "they are for NVIDIA GPUs; torch's attention serves on ROCm"),
    "no Triton": (16, {"triton": None}, (9, 0), "Triton cannot be imported; torch's attention serves"),
    "an old GPU": (16, {}, (7, 5), "compute capability 7.5 is below 8.0; torch's attention serves"),
    "an odd head size": (8, {}, (9, 0), "head size 8, 2 heads a KV head of this form is not supported"),
    "wrong": (16, {}, (9, 0), "2 heads a KV head: it differs"),
    "slower": (16, {}, (9, 0), "2 heads a KV head: torch's attention was faster for 8 nodes and 1024 slots"),
}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("case", REFUSED)
def test_the_report_says_why_no_kernel_served(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, modules, capability, reason = REFUSED[case]
    verdict = Verdict("it differs" if case == "wrong" else "", ((512, 8, 0.5),), is_lasting=False)
    monkeypatch.setattr(kernel_trial, "run_tests", lambda variants: [verdict for _ in variants])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with fake_gpu(1, capability) as gpu:
        if case != "no NVIDIA GPU":
            monkeypatch.setattr(torch.version, "cuda", "13.0")
        model = move(llama_with_heads_of(size))
        tree = TokenTree.from_parents([5, 6, 7, 8, 9, 10, 11, 12], [0, 0, 1, 1, 0, 4, 5, 6])
        target = GpuBackend(model, rows=1, capacity=80, captures=True)
        paths = {path.path: path for path in target.report().paths}
        assert not paths["kernels for trees"].serves
        with target.serving():
            target.read([np.arange(3, 24, dtype=np.int32)])
            for _ in range(5):
                target.score([tree])
        assert gpu.counts["replays"]
        path = {path.path: path for path in target.report().paths}["kernels for trees"]
        assert not path.serves and reason in path.reason
        assert not dispatch.served


@pytest.mark.parametrize("gpu", [2], indirect=True, ids=["two devices"])
def test_a_model_on_two_devices_is_reported_alike_every_time_and_without_a_warning(gpu: FakeGpu) -> None:
    model = split_in_two(llama_with_heads_of(8))
    reason = "its weights are on cuda:0, cuda:1, and a recording is of one GPU"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            report = lookahead.backend_report(model)
            assert PathReport("CUDA graphs", False, reason) in report.paths
            target = GpuBackend(model, rows=1, capacity=80, captures=True)
            assert PathReport("CUDA graphs", False, reason) in target.report().paths


def test_an_attention_of_the_users_choice_that_ours_replaces_is_named(gpu: FakeGpu) -> None:
    model = llama_with_heads_of(8)
    model.set_attn_implementation("flex_attention")
    target = GpuBackend(move(model), rows=1, capacity=80)
    assert PathReport("tree attention", True, "in place of flex_attention") in target.report().paths


def test_a_shape_that_finds_no_memory_is_not_recorded_and_others_are(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    model, trees = move(llama_with_heads_of(8)), [TokenTree.root(5), TokenTree.from_parents([5, 6, 7], [0, 0, 1])]
    target = GpuBackend(model, rows=1, capacity=80, captures=True)
    with target.serving(), caplog.at_level(logging.WARNING, "lookahead"):
        target.read([np.arange(3, 24, dtype=np.int32)])
        gpu.out_of_memory = True
        for tree in trees[:1] * 6:
            target.score([tree])
        assert not target.is_cold, "passes that stay as they are can be timed"
        gpu.out_of_memory = False
        for tree in trees * 6:
            target.score([tree])
    assert gpu.counts["captures"] == 1 and gpu.counts["replays"] == 3
    assert caplog.text.count("has no memory left to record passes of 1 rows and 1 nodes") == 1


def test_a_kept_cache_four_times_too_large_is_let_go(gpu: FakeGpu) -> None:
    model = move(llama_with_heads_of(8))
    capacities = []
    for needed in (4000, 1100, 900, 80):
        target = GpuBackend(model, rows=1, capacity=needed, captures=True)
        capacities.append(target.cache.slots.capacity)
        del target
        gc.collect()
    assert capacities == [4096, 4096, 1024, 1024]


@pytest.mark.skipif(not INTERPRETS, reason="for a process in which Triton interprets")
def test_interpreted_kernels_serve_recorded_passes_and_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_trial, "run_tests", lambda variants: [Verdict(is_lasting=False) for _ in variants])
    model = llama_with_heads_of(16)
    options = {**prompts(4, 13), "max_new_tokens": 16, "do_sample": False}
    answers = [
        row[mask.tolist().index(1) :]
        for row, mask in zip(model.generate(**options).tolist(), options["attention_mask"], strict=True)
    ]
    with fake_gpu(kernels=True) as gpu, drafting_by(among_decoys(answers, 101)):
        moved = move(copy.deepcopy(model))
        expected, got = outputs(model, moved, options)
        assert got == expected
        assert gpu.counts["replays"] and {variant.kernel for variant in dispatch.served} == {"tree attention"}
        assert gpu.kernels["_compact"] and gpu.kernels["attend"]


@pytest.mark.skipif(interpreter_gap() is not None, reason=str(interpreter_gap()))
@pytest.mark.skipif(INTERPRETS, reason="this is that process")
def test_the_kernels_serve_a_generation_where_triton_interprets() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_fake_gpu.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command += ["-k", "interpreted_kernels"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout + run.stderr
