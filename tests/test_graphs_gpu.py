"""CUDA graphs on the GPU they are for: `pytest -m gpu`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.gpu import cuda_graphs
from lookahead.backend.gpu.cuda_graphs import CudaGraphs
from lookahead.backend.gpu.gpu_backend import GpuBackend
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import dispatch as choice
from tests.support.engines import engine_of
from tests.support.random_trees import ancestor_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES: dict[str, Any] = {
    **{"vocab_size": 101, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
    **{"initializer_range": 0.1, "bos_token_id": 1, "pad_token_id": 0},
}


@pytest.fixture(params=["masks", "kernel"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernels, and with none."""
    if request.param == "masks":
        monkeypatch.setattr(choice, "runs_on", lambda _: False)
    return str(request.param)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are captured."""
    graphs: list[Any] = []
    capture = CudaGraphs.__call__

    def counting(self: CudaGraphs, run: Any) -> Any:
        graphs.append(capture(self, run))
        return graphs[-1]

    monkeypatch.setattr(CudaGraphs, "__call__", counting)
    return graphs


def build(kind: str = "Llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    if kind == "Mistral":
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=50))
    model.generation_config.eos_token_id = None
    return model.to(dtype).cuda().eval()


def random_tree(seed: int, nodes: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(max(0, i - 3), max(1, i))) for i in range(nodes)]
    return TokenTree.from_parents(rng.permutation(100)[:nodes], parents)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """No TF32: tokens are compared with those of another engine."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_a_ragged_batch_gives_the_tokens_of_generate(
    kind: str, attention: str, captured: list[Any], foretell: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(kind)
    ids = torch.randint(10, 101, (3, 240), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :100] = 0
    # The slots are outgrown on the way, and rows end one by one.
    options = {"attention_mask": mask, "max_new_tokens": 300, "do_sample": False, "eos_token_id": [7, 8]}
    expected = model.generate(ids, **options)
    foretell(expected, mask)
    config = LookaheadConfig(draft="fixed", max_nodes=7)
    with caplog.at_level(logging.WARNING, "lookahead"):
        got = model.generate(ids, **options, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(got, expected)
    assert captured
    assert "is decoded without" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replayed_pass_gives_the_logits_of_the_same_pass_run_by_hand(
    dtype: torch.dtype, attention: str, captured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(dtype=dtype)
    replayed, by_hand = (GpuBackend(model, rows=2, capacity=300, captures=True) for _ in range(2))
    prompts = [np.arange(3, 90, dtype=np.int32), np.arange(30, 43, dtype=np.int32)]
    monkeypatch.setattr(by_hand._graphs, "_capture", lambda run: _ByHand(run))
    with replayed.serving():
        for target in (replayed, by_hand):
            target.read(prompts)
        for step in range(12):
            trees = [random_tree(2 * step + row, 5 + step % 4) for row in range(2)]
            got, want = replayed.score(trees), by_hand.score(trees)
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            for row, tree in enumerate(trees):
                torch.testing.assert_close(
                    got[row, : len(tree)], want[row, : len(tree)], rtol=tolerance, atol=tolerance
                )
            for row, tree in enumerate(trees):
                for target in (replayed, by_hand):
                    target.cache.commit(row, np.flatnonzero(ancestor_mask(tree)[-1]).astype(np.int32))
            if step == 6:  # other passes between replays
                for target in (replayed, by_hand):
                    target.score([TokenTree.from_parents([9, 8], [0, 0])] * 2, scored=np.ones(2, np.int64))
    assert len(captured) == 1


class _ByHand:
    def __init__(self, run: Any) -> None:
        self.replay = run


def test_graphs_of_two_models_and_of_several_sizes_share_no_memory_they_need(captured: list[Any]) -> None:
    models = [build("Llama"), build("Mistral")]
    ids = torch.randint(10, 101, (1, 100), device="cuda")
    config = LookaheadConfig(draft="fixed", max_nodes=15, min_probability=0.0)
    options = {"max_new_tokens": 80, "do_sample": False}
    expected = [model.generate(ids, **options)[0, 100:].tolist() for model in models]
    engines = [engine_of(model, ids, **options, lookahead_config=config).run() for model in models]
    outputs: list[list[int]] = [[], []]
    for _ in range(80):
        for output, engine in zip(outputs, engines, strict=True):
            for step_output in next(engine, []):
                output += step_output.tokens.tolist()
    assert outputs == expected
    assert len(captured) >= 2


@pytest.mark.parametrize(
    "wait", [lambda *args: torch.cuda.synchronize(), lambda *args: args[2].sum().item() and None], ids=["sync", "item"]
)
def test_a_pass_that_waits_for_the_device_is_not_recorded_and_decoded_all_the_same(
    wait: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = torch.cuda.current_stream()
    model = build()
    ids = torch.randint(10, 101, (1, 20), device="cuda")
    expected = model.generate(ids, max_new_tokens=40, do_sample=False)
    monkeypatch.setattr(cuda_graphs, "CAPTURE_AT", 1)
    hook = model.model.layers[1].register_forward_hook(wait)
    try:
        config = LookaheadConfig()
        options = {"max_new_tokens": 40, "do_sample": False, "custom_generate": lookahead.decode}
        with caplog.at_level(logging.WARNING, "lookahead"):
            got = model.generate(ids, **options, lookahead_config=config)
    finally:
        hook.remove()
    assert torch.equal(got, expected)
    assert caplog.text.count("is decoded without CUDA graphs") == 1
    assert torch.cuda.current_stream() == stream
