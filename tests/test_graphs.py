"""Recorded passes: doing the same operations on the same memory again gives the exact tokens, whatever happened since.

A recording stands in for a CUDA graph; tests/test_graphs_gpu.py captures real ones.
"""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.gpu import cuda_graphs
from lookahead.backend.gpu.gpu_backend import GpuBackend
from lookahead.backend.tree_pass import AttentionSpan, FixedShapePass, TreePass, padded_rows
from lookahead.drafting.tree import TokenTree
from lookahead.kernels import dispatch as choice
from lookahead.kernels.topk import read_scores
from lookahead.model.cache import TreeCache, TreeSlots
from lookahead.model.model_state import ModelState, state_of
from tests.support import kernel_reference as reference
from tests.support.engines import engine_of
from tests.support.families import FAMILIES, HAS_GROUPED_PRODUCTS, build
from tests.support.pass_recorder import Recording
from tests.support.random_trees import ancestor_mask

CPU = torch.device("cpu")
CONFIG = LookaheadConfig(draft="fixed", max_nodes=7, min_probability=0.0, memory="request")
EXPERTS = pytest.mark.skipif(not HAS_GROUPED_PRODUCTS, reason="experts are recorded from torch 2.10 on")


def random_tree(seed: int, nodes: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(max(0, i - 3), max(1, i))) for i in range(nodes)]
    return TokenTree.from_parents(rng.permutation(100)[:nodes], parents)


def decode(model: PreTrainedModel, config: LookaheadConfig = CONFIG, **options: Any) -> torch.Tensor:
    return model.generate(**options, custom_generate=lookahead.decode, lookahead_config=config)


def recorded_cache(model: PreTrainedModel) -> TreeCache:
    """That of the newest call."""
    return cuda_graphs.state_of(model).graphs.cache


def ragged(seed: int, *lengths: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    longest = max(lengths)
    rows = [[0] * (longest - n) + rng.integers(10, 100, n).tolist() for n in lengths]
    mask = [[0] * (longest - n) + [1] * n for n in lengths]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"]
)
def test_a_ragged_batch_whose_rows_end_one_by_one_gives_the_tokens_of_generate(
    looping_llama: PreTrainedModel, recordings: list[Recording], sampling: dict[str, Any]
) -> None:
    options = {**ragged(0, 4, 9, 12, 30), **sampling, "eos_token_id": [7, 8, 9], "pad_token_id": 0}
    options["max_new_tokens"] = 60
    torch.manual_seed(3)
    expected = looping_llama.generate(**options)
    torch.manual_seed(3)
    assert torch.equal(decode(looping_llama, **options), expected)
    assert len(recordings) >= 2


def test_a_cache_that_outgrows_its_slots_is_recorded_anew(
    tiny_llama: PreTrainedModel, recordings: list[Recording]
) -> None:
    ids = ragged(1, 230)["input_ids"]
    options = {"max_new_tokens": 70, "do_sample": False}
    expected = tiny_llama.generate(ids, **options)
    engine = engine_of(tiny_llama, ids, **options, lookahead_config=CONFIG)
    engine._backend.cache.slots.capacity = 256  # as if the output had turned out long
    tokens = [token for step in engine.run() for token in step[0].tokens.tolist()]
    assert tokens == expected[0, 230:].tolist()
    assert engine._backend.cache.slots.capacity == 384, "half as many more, as without graphs"
    assert len(recordings) > 1


def test_a_later_call_replays_what_an_earlier_one_recorded(
    tiny_llama: PreTrainedModel, recordings: list[Recording]
) -> None:
    options, made = {"max_new_tokens": 12, "do_sample": False}, []
    config = LookaheadConfig(proposers=())  # passes of one size
    for seed, length in enumerate((20, 35, 7)):
        ids = ragged(seed, length)["input_ids"]
        assert torch.equal(decode(tiny_llama, config, input_ids=ids, **options), tiny_llama.generate(ids, **options))
        made.append(len(recordings))
        cache = recorded_cache(tiny_llama)
        for buffer in cache.buffers():
            with torch.inference_mode():
                buffer[:, : cache.slots.reached] = torch.nan  # as if the tokens of the last call had no numbers
    assert made == [1, 1, 1]


def test_what_was_recorded_is_not_replayed_for_other_weights_settings_or_sizes(recordings: list[Recording]) -> None:
    model, options = build(FAMILIES["Llama"]), {"max_new_tokens": 40, "do_sample": False}
    ids = ragged(1, 20)["input_ids"]
    decode(model, input_ids=ids, **options)
    made = [len(recordings)]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    assert torch.equal(decode(model, input_ids=ids, **options), model.generate(ids, **options))
    made.append(len(recordings))
    model.model.norm.variance_epsilon = 0.5
    assert torch.equal(decode(model, input_ids=ids, **options), model.generate(ids, **options))
    made.append(len(recordings))
    assert made[2] > made[1] > made[0]
    kept = recorded_cache(model)
    for rows, capacity in ((2, 80), (1, 2 * kept.slots.capacity)):
        kind = {"rows": rows, "capacity": capacity, "captures": True, "most_nodes": 8}
        assert GpuBackend(model, **kind).cache is not kept


def test_the_first_replay_of_every_call_is_checked(
    recordings: list[Recording], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelState, "stamp_number", 0)  # as if no change were noticed
    model, options = build(FAMILIES["Llama"]), {"max_new_tokens": 12, "do_sample": False}
    config, ids = LookaheadConfig(proposers=()), ragged(1, 20)["input_ids"]
    decode(model, config, input_ids=ids, **options)
    assert len(recordings) == 1
    rope = model.model.rotary_emb
    rope.inv_freq = rope.inv_freq * 3  # the recording reads the tensor that stood there
    with caplog.at_level(logging.WARNING, "lookahead"):
        assert torch.equal(decode(model, config, input_ids=ids, **options), model.generate(ids, **options))
    assert "a replay differs by" in caplog.text


def test_kept_recordings_go_with_their_model(recordings: list[Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "state_of", state_of)
    model = build(FAMILIES["Llama"])
    decode(model, input_ids=ragged(1, 20)["input_ids"], max_new_tokens=40, do_sample=False)
    cache = weakref.ref(state_of(model).graphs.cache)
    assert cache() is not None
    recordings.clear()
    del model
    gc.collect()
    assert cache() is None


def test_two_models_that_take_turns_do_not_meet(
    tiny_llama: PreTrainedModel, looping_llama: PreTrainedModel, recordings: list[Recording]
) -> None:
    ids = ragged(2, 20)["input_ids"]
    models = [tiny_llama, looping_llama, tiny_llama]
    options = {"max_new_tokens": 40, "do_sample": False}
    expected = [model.generate(ids, **options)[0, 20:].tolist() for model in models]
    engines = [engine_of(model, ids, **options, lookahead_config=CONFIG) for model in models]
    outputs: list[list[int]] = [[], [], []]
    running = {i: engine.run() for i, engine in enumerate(engines)}
    while running:
        for i, steps in list(running.items()):
            step_outputs = next(steps, None)
            if step_outputs is None:
                del running[i]
            else:
                outputs[i] += step_outputs[0].tokens.tolist()
    assert outputs == expected
    assert len(recordings) >= 3


@pytest.mark.parametrize("with_kernel", [False, True], ids=["masks", "kernel"])
@pytest.mark.parametrize(
    "name",
    [
        *("Llama", "Mistral", "Gemma2", "Gemma3", "Llama4", "Qwen2-windows", "GPTJ"),
        pytest.param("GptOss", marks=EXPERTS),
        pytest.param("DeepseekV3", marks=EXPERTS),
    ],
)
def test_replayed_trees_are_scored_as_trees_are(
    name: str, with_kernel: bool, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Windows, softcaps, sinks, chunks, prepared masks; a prefill in between; padding rows and nodes.
    model = build(FAMILIES[name])
    if with_kernel:

        def attention_for(*tensors: Any) -> Any:
            options = {name: option for name, option in tensors[3].items() if name != "sinks"}
            return partial(reference.tree_attention, dtype=torch.float32, **options)

        monkeypatch.setattr(choice, "attention_for", attention_for)
    prompts = [np.arange(3, 24, dtype=np.int32), np.arange(30, 43, dtype=np.int32), np.arange(50, 57, dtype=np.int32)]
    fast, plain = (GpuBackend(model, rows=5, capacity=80, captures=captures) for captures in (True, False))
    with fast.serving():
        for target in (fast, plain):
            target.retire(4)
            target.retire(3)
            target.read(prompts)
        for step in range(7):
            trees = [random_tree(3 * step + row, 5 + (step + row) % 4) for row in range(3)]
            if step == 4:  # other passes use the model meanwhile
                for target in (fast, plain):
                    grown = target.score([TokenTree.from_parents([9, 8], [0, 0])] * 3, scored=np.ones(3, np.int64))
                assert grown.shape[1] == 1
            got, want = fast.score(trees), plain.score(trees)
            for row, tree in enumerate(trees):
                torch.testing.assert_close(got[row, : len(tree)], want[row, : len(tree)], rtol=1e-4, atol=1e-4)
                for target in (fast, plain):
                    target.cache.commit(row, np.flatnonzero(ancestor_mask(tree)[-1]).astype(np.int32))
    assert len(recordings) == 1 and not fast._graphs.problem, "and its replays serve"


def test_a_kernel_whose_test_is_over_serves_the_passes_that_are_recorded(
    tiny_llama: PreTrainedModel, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, scored = [0], [0]

    def attention_for(*arguments: Any) -> Any:
        def kernel(*tensors: torch.Tensor, sinks: None, **tree: torch.Tensor) -> torch.Tensor:
            served[0] += 1
            return reference.tree_attention(*tensors, **tree, dtype=torch.float32)

        return kernel if scored[0] else None

    monkeypatch.setattr(choice, "attention_for", attention_for)
    target = GpuBackend(tiny_llama, rows=1, capacity=80, captures=True)
    with target.serving():
        target.read([np.arange(3, 24, dtype=np.int32)])
        for step in range(3):
            target.score([TokenTree.root(step)])
            scored[0] += 1
    assert recordings and served[0] > 0


def test_what_a_pass_returned_stays_when_the_next_is_replayed(
    tiny_llama: PreTrainedModel, recordings: list[Recording]
) -> None:
    target = GpuBackend(tiny_llama, rows=1, capacity=80, captures=True)
    with target.serving():
        target.read([np.arange(3, 24, dtype=np.int32)])
        logits = [target.score([TokenTree.root(token)]) for token in range(8)]
        kept = [each.clone() for each in logits]
        target.score([TokenTree.root(50)])
    assert recordings
    assert all(map(torch.equal, logits, kept))


def test_recordings_of_all_shapes_share_the_memory_of_their_logits(
    tiny_llama: PreTrainedModel, recordings: list[Recording]
) -> None:
    target = GpuBackend(tiny_llama, rows=1, capacity=80, captures=True)
    target.keeps_logits, target.reads_top = False, 5
    plain = GpuBackend(tiny_llama, rows=1, capacity=80)
    with target.serving():
        for each in (target, plain):
            each.read([np.arange(3, 24, dtype=np.int32)])
        for nodes in (16, 8, 4, 2):
            for _ in range(4):
                logits = target.score([random_tree(nodes, nodes)])
            scores, wanted = (
                read_scores(logits, 5, target.ranks),
                read_scores(plain.score([random_tree(nodes, nodes)]), 5),
            )
            assert logits.shape == (1, nodes, 0)
            assert (scores.argmax == wanted.argmax).all() and (scores.top == wanted.top).all()
            np.testing.assert_allclose(scores.probabilities, wanted.probabilities, rtol=1e-4, atol=1e-6)
    assert [recording._outputs[0].shape[-1] for recording in recordings] == [11] * 4, "and no logits"
    assert len({runner.logits.data_ptr() for runner in target._graphs._kept.runners.values()}) == 1


def test_passes_look_as_far_as_the_text_is_long_however_large_the_cache_is(
    tiny_llama: PreTrainedModel, recordings: list[Recording]
) -> None:
    fast, plain = (GpuBackend(tiny_llama, rows=1, capacity=3000, captures=captures) for captures in (True, False))
    with fast.serving():
        for target in (fast, plain):
            target.read([np.resize(np.arange(3, 90, dtype=np.int32), 1000)])
        for step in range(12):
            tree = random_tree(step, 6)
            torch.testing.assert_close(fast.score([tree]), plain.score([tree]), rtol=1e-4, atol=1e-4)
            for target in (fast, plain):
                target.cache.commit(0, np.flatnonzero(ancestor_mask(tree)[-1]).astype(np.int32))
    assert fast.cache.slots.capacity == 4096 and len(recordings) == 2
    assert [shape[2] for shape in fast._graphs._kept.runners] == [1024, 2048]


def test_the_shape_that_was_not_used_for_longest_is_let_go(
    tiny_llama: PreTrainedModel, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_MOST_SHAPES", 2)
    target = GpuBackend(tiny_llama, rows=1, capacity=80, captures=True)
    with target.serving():
        target.read([np.arange(3, 24, dtype=np.int32)])
        for nodes in (1, 2, 1, 4, 1):
            target.score([random_tree(nodes, nodes)])
    assert [shape[1] for shape in target._graphs._kept.runners] == [4, 1]


def test_where_recording_fails_the_log_says_so_once_and_the_tokens_are_the_same(
    recordings: list[Recording], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(FAMILIES["Llama"])
    ids = ragged(4, 20)["input_ids"]

    def refuse(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Recording, "__init__", refuse)
    expected = model.generate(ids, max_new_tokens=30, do_sample=False)
    with caplog.at_level(logging.WARNING, "lookahead"):
        for _ in range(2):
            assert torch.equal(decode(model, input_ids=ids, max_new_tokens=30, do_sample=False), expected)
    assert [record.message for record in caplog.records] == [
        f"{type(model).__name__} is decoded without CUDA graphs: "
        "RuntimeError: operation not permitted when stream is capturing"
    ]


def test_a_default_draft_and_its_root_fill_a_recorded_pass(
    tiny_llama: PreTrainedModel, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ragged(1, 20)["input_ids"]
    for config, nodes in [
        (LookaheadConfig(), 63),
        (LookaheadConfig(window=7), 63 + 55),
        (LookaheadConfig(max_nodes=64), 64),
        (LookaheadConfig(proposers=("jacobi",), window=(7, 5, 0)), 27),
        (LookaheadConfig(proposers=()), 0),
    ]:
        assert engine_of(tiny_llama, ids, max_new_tokens=9, lookahead_config=config)._call.max_nodes == nodes
    monkeypatch.undo()
    assert engine_of(tiny_llama, ids, max_new_tokens=9)._call.max_nodes == 64


def test_on_a_cpu_no_pass_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    model = build(FAMILIES["Llama"])
    ids = ragged(4, 20)["input_ids"]
    expected = model.generate(ids, max_new_tokens=10, do_sample=False)
    with caplog.at_level(logging.WARNING, "lookahead"):
        assert torch.equal(decode(model, input_ids=ids, max_new_tokens=10, do_sample=False), expected)
    assert not caplog.text and state_of(model).graphs is None


def test_hidden_states_are_recorded_too(recordings: list[Recording]) -> None:
    model = build(FAMILIES["Llama"])
    options = {"rows": 1, "capacity": 80, "hidden_layers": (0, -1)}
    fast, plain = (GpuBackend(model, **options, captures=captures) for captures in (True, False))
    with fast.serving():
        for target in (fast, plain):
            target.read([np.arange(3, 24, dtype=np.int32)])
        for step in range(5):
            tree = random_tree(step, 6)
            fast.score([tree])
            plain.score([tree])
            for layer in (0, -1):
                torch.testing.assert_close(fast.hidden[layer], plain.hidden[layer], rtol=1e-4, atol=1e-4)
    assert recordings


@pytest.mark.parametrize(
    "span",
    [AttentionSpan(), AttentionSpan(window=3), AttentionSpan(window=20), AttentionSpan(chunk=7), AttentionSpan(30, 16)],
    ids=str,
)
def test_a_static_pass_says_what_the_trees_say_and_padding_copies_the_root(span: AttentionSpan) -> None:
    slots = TreeSlots(rows=4, capacity=256)
    slots.lengths[:3] = (0, 17, 40)
    trees = [random_tree(1, 70), random_tree(2, 1), random_tree(3, 33)]
    slots.active = 3
    static = FixedShapePass(slots, 4, 128, CPU)
    for seed in (8, 0):  # what one step leaves must not show in the next
        filled = [random_tree(seed + 1, 70), random_tree(seed + 2, 1 + 9 * seed), random_tree(seed + 3, 33)]
        static.fill(trees if seed == 0 else filled)
    slots.begin(70)
    expected = TreePass(slots, CPU, trees).mask(1, span, torch.float32, CPU)[:, 0] == 0
    kv_length = slots.kv_length
    with static.running(256):
        got = static.mask(1, span, torch.float32, CPU)[:, 0] == 0
    for row, tree in enumerate(trees):
        assert torch.equal(got[row, : len(tree), :kv_length], expected[row, : len(tree)])
        assert static.index.view(4, 128)[row].tolist() == list(
            range(row * 256 + slots.lengths[row], row * 256 + 128 + slots.lengths[row])
        )
        assert static.positions[row, : len(tree)].tolist() == (slots.lengths[row] + tree.depths).tolist()
        assert static.tokens[row].tolist() == [*tree.tokens.tolist(), *[tree.tokens[0]] * (128 - len(tree))]
        assert (got[row, len(tree) :] == got[row, 0]).all()
    assert (got[3].sum(-1) == 1).all() and got[3, :, 0].all(), "a padding row looks at its root"
    assert not got[:, :, kv_length + 128 :].any()
    sees = reference.tree_mask(256, *static.tensors(CPU), *span)
    for row, tree in enumerate(trees):
        assert torch.equal(sees[row, : len(tree)], got[row, : len(tree)])
    assert sees[3].sum() == 1, "and for a kernel it has no other node"


def test_rows_are_padded_to_powers_of_two() -> None:
    assert [padded_rows(active, 6) for active in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]
