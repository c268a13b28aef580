"""Compiled passes: the tokens of `model.generate`, few compilations, and the plain model where there can be none."""

from __future__ import annotations

import copy
import logging
import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import lookahead
from lookahead import LookaheadConfig
from lookahead.cli.app import app
from lookahead.config import PASSES
from lookahead.drafting.budget import EnableRule
from lookahead.drafting.controller import Controller, StepRecord
from lookahead.drafting.cost_model import StepCost, padded_nodes
from lookahead.drafting.tree import TokenTree
from lookahead.errors import ConfigError
from lookahead.models import compiled
from lookahead.models.cache import TreeSlots
from lookahead.models.cuda_graphs import Watch
from lookahead.models.model_state import state_of
from lookahead.models.target import Target
from lookahead.models.tree_pass import AttentionSpan, FixedShapePass, TreePass, padded_rows
from tests.support import kernel_reference as reference
from tests.support.families import FAMILIES, HAS_GROUPED_PRODUCTS, build
from tests.support.random_trees import ancestor_mask

CPU = torch.device("cpu")
CONFIG = LookaheadConfig(compile=True, draft="fixed", max_nodes=3, min_probability=0.0, memory="request")
GREEDY: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Dynamo trace as ever, and leaves Inductor out, whose C++ compiler takes seconds a shape."""
    monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")


def fresh(name: str) -> PreTrainedModel:
    """A model nothing was compiled for yet."""
    model = build(FAMILIES[name])
    model.generation_config.eos_token_id = None
    return model


def decode(model: PreTrainedModel, config: LookaheadConfig = CONFIG, **options: Any) -> Tensor:
    return model.generate(**options, custom_generate=lookahead.decode, lookahead_config=config)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def text(seed: int, length: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(10, 100, (1, length)))


def random_tree(seed: int, nodes: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(max(0, i - 3), max(1, i))) for i in range(nodes)]
    return TokenTree.from_parents(rng.permutation(100)[:nodes], parents)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("lookahead")]


def one_layer(hidden_size: int = 32, layers: int = 1) -> LlamaForCausalLM:
    """The smallest model there is: its C++ is compiled for real."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=101, num_key_value_heads=1, initializer_range=0.4, eos_token_id=None, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float().eval()


def test_compiled_passes_give_the_tokens_of_generate_and_another_process_finds_them_on_disk() -> None:
    model, ids = one_layer(), text(0, 12)
    expected = model.generate(ids, **GREEDY)
    config = LookaheadConfig(compile=True, proposers=())
    before = graphs()
    for _ in range(2):  # what one call compiled serves the next
        assert torch.equal(decode(model, config, input_ids=ids, **GREEDY), expected)
    assert graphs() - before == 1
    before = counters["inductor"]["fxgraph_cache_hit"]
    torch._dynamo.reset()  # what a process forgets when it ends
    assert torch.equal(decode(copy.deepcopy(model), config, input_ids=ids, **GREEDY), expected)
    assert counters["inductor"]["fxgraph_cache_hit"] - before == 1


@pytest.mark.usefixtures("traced_only")
def test_a_ragged_batch_whose_rows_end_one_by_one_gives_the_tokens_of_generate(looping_llama: PreTrainedModel) -> None:
    model = copy.deepcopy(looping_llama)
    del model.model.layers[1:]  # a layer less to trace for every shape
    model.config.num_hidden_layers = 1
    ids = torch.tensor([[0] * 8 + [5, 9, 31, 5], [5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])
    config = LookaheadConfig(compile=True, draft="fixed", max_nodes=1, min_probability=0.0, memory="request")
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
        options = {"attention_mask": (ids != 0).long(), "eos_token_id": [7, 8, 9], "pad_token_id": 0, **sampling}
        options["max_new_tokens"] = 40
        torch.manual_seed(1)
        expected = model.generate(ids, **options)
        torch.manual_seed(1)
        assert torch.equal(decode(model, config, input_ids=ids, **options), expected)


@pytest.mark.usefixtures("traced_only")
def test_one_code_serves_all_layers_texts_lengths_rows_and_numbers_of_nodes() -> None:
    model = one_layer(layers=3)
    before = graphs()
    for length, rows, config in [
        (9, 1, LookaheadConfig(compile=True, proposers=())),
        (300, 1, CONFIG),
        (20, 3, CONFIG),
    ]:
        ids = torch.cat([text(length + row, length) for row in range(rows)])
        expected = model.generate(ids, **GREEDY)
        assert torch.equal(decode(model, config, input_ids=ids, **GREEDY), expected)
    target = Target(model, rows=1, capacity=30, compiles=True)  # more slots than it begins with
    with target.serving():
        target.prefill([np.arange(3, 24, dtype=np.int32)])
        for nodes in (1, 2, 33, 64, 100):
            assert target.score([random_tree(nodes, nodes)]).shape == (1, nodes, 101)
            assert target.is_cold is False
    assert graphs() - before == 1


@pytest.mark.usefixtures("traced_only")
def test_layers_have_their_own_code_again_after_a_call() -> None:
    model = one_layer()
    layer = model.model.layers[0]
    target = Target(model, rows=1, capacity=30, compiles=True)
    with target.serving():
        assert "forward" in layer.__dict__
        before = graphs()
        assert torch.equal(model(text(0, 9)).logits, copy.deepcopy(model)(text(0, 9)).logits)  # a pass that is not ours
        assert graphs() == before
    assert "forward" not in layer.__dict__


def test_compiled_code_that_differs_from_its_layer_does_not_serve_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(graph: Any, examples: Any) -> Any:
        return lambda *inputs: tuple(each * 1.1 for each in graph(*inputs))

    monkeypatch.setattr(compiled, "_BACKEND", wrong)
    model, ids = one_layer(), text(3, 20)
    expected = model.generate(ids, **GREEDY)
    with caplog.at_level(logging.WARNING, "lookahead"):
        for _ in range(2):
            assert torch.equal(decode(model, input_ids=ids, **GREEDY), expected)
    (complaint,) = complaints(caplog)
    assert re.match("LlamaForCausalLM is decoded without torch.compile: a compiled layer differs by 0.1", complaint)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("captures", [False, True], ids=["compiled", "compiled and watched"])
def test_in_bfloat16_compiled_layers_have_the_bits_of_the_layers_themselves(captures: bool) -> None:
    model = one_layer(layers=2).bfloat16()
    targets = [Target(model, rows=2, capacity=40, compiles=compiles, packs=False) for compiles in (True, False)]
    logits = []
    for target in targets:
        with target.serving():
            target.prefill([np.arange(3, 24, dtype=np.int32), np.arange(30, 43, dtype=np.int32)])
            trees = [random_tree(1, 5), random_tree(2, 5)]
            target.score(trees)
            with Watch(torch.device("meta")) if captures else nullcontext():  # as before a recording
                logits.append(target.score(trees))
    assert torch.equal(*logits)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "GptOss", marks=pytest.mark.skipif(not HAS_GROUPED_PRODUCTS, reason="its experts need torch 2.10")
        ),
        "GPTJ",
        "GPTNeoX",
    ],
)
def test_layers_of_families_are_compiled(name: str, caplog: pytest.LogCaptureFixture) -> None:
    # Windows and sinks, prepared masks, and as many KV heads as heads.
    model = fresh(name)
    prompts = [np.arange(3, 24, dtype=np.int32), np.arange(30, 43, dtype=np.int32)]
    fast, plain = (Target(model, rows=2, capacity=80, compiles=compiles) for compiles in (True, False))
    with fast.serving(), caplog.at_level(logging.WARNING, "lookahead"):
        fast.prefill(prompts)
        plain.prefill(prompts)
        for step in range(2):
            trees = [random_tree(step, 7), random_tree(step + 9, 5)]
            got, want = fast.score(trees), plain.score(trees)
            for row, tree in enumerate(trees):
                torch.testing.assert_close(got[row, : len(tree)], want[row, : len(tree)], rtol=1e-4, atol=1e-4)
                for target in (fast, plain):
                    target.commit(row, np.flatnonzero(ancestor_mask(tree)[-1]).astype(np.int32))
    assert complaints(caplog) == []


@pytest.mark.usefixtures("traced_only")
def test_a_model_that_cannot_be_compiled_is_run_as_it_is_and_the_log_says_why_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, ids = fresh("Dbrx"), text(3, 20)  # how many tokens an expert gets is a number that Python reads
    expected = model.generate(ids, **GREEDY)
    with caplog.at_level(logging.WARNING, "lookahead"):
        for _ in range(2):
            assert torch.equal(decode(model, input_ids=ids, **GREEDY), expected)
    (complaint,) = complaints(caplog)
    assert re.match("DbrxForCausalLM is decoded without torch.compile: (UserError|Unsupported): .", complaint)


def test_a_machine_without_a_compiler_is_told_what_to_install(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = one_layer(hidden_size=40), text(3, 20)  # for this size there is nothing on disk
    expected = model.generate(ids, **GREEDY)
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        caplog.at_level(logging.WARNING, "lookahead"),
    ):
        assert torch.equal(
            decode(model, LookaheadConfig(compile=True, proposers=()), input_ids=ids, **GREEDY), expected
        )
    assert complaints(caplog) == [
        "LlamaForCausalLM is decoded without torch.compile: there is no C++ compiler; install g++ or clang++, or name "
        "one in the environment variable CXX"
    ]


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
    with slots.fixed(4, 128, static.index):
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


@pytest.mark.parametrize(
    ("nodes", "most", "padded"), [(1, 64, 1), (3, 64, 4), (33, 64, 64), (64, 64, 64), (17, 21, 21), (30, 21, 30)]
)
def test_nodes_are_padded_to_a_power_of_two_or_the_most_there_are(nodes: int, most: int, padded: int) -> None:
    assert padded_nodes(nodes, most) == padded


def test_rows_are_padded_to_powers_of_two() -> None:
    assert [padded_rows(active, 6) for active in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]


def test_the_cost_of_padded_steps_is_a_staircase_and_compiling_is_no_part_of_it() -> None:
    cost = StepCost()
    controller = Controller(cost, EnableRule(), node_budget=63, is_padded=True)

    def step(nodes: int, tokens: int, seconds: float, *, is_cold: bool = False) -> None:
        root = TokenTree.root(5), np.zeros(1, np.int32)
        plan = controller.plan([50], 100)
        controller.record(plan, StepRecord([root], [tokens], nodes, 0.0, seconds, is_cold))

    for nodes, seconds in [(1, 0.001), (4, 0.002), (16, 0.004), (1, 0.001), (1, 0.001)] * 8:
        step(nodes, nodes, seconds)
    step(8, 1, 30.0, is_cold=True)
    plan = controller.plan([50], 100)
    assert plan.drafts
    stairs = plan.costs.tolist()
    assert stairs[3] == stairs[4] < stairs[5] == stairs[8] < stairs[9] == stairs[16] < stairs[17] == stairs[32]
    assert stairs[8] < 0.004
    for _ in range(50):
        step(13, 1, 0.006)  # was padded to 16, and counts as such
    assert cost.curve(1, 16, 100)[16] == pytest.approx(0.006, rel=0.1)


@pytest.mark.usefixtures("traced_only")
def test_costs_of_compiled_steps_are_kept_apart(tmp_path: Any) -> None:
    model = one_layer()
    decode(model, LookaheadConfig(compile=True, max_nodes=1), input_ids=text(0, 20), **GREEDY)
    costs = state_of(model).learned.costs
    assert costs["compiled"].knows(1, 30)
    assert not costs["plain"].knows(1, 30)
    path = lookahead.save_costs(model, tmp_path, compile=True)
    costs.clear()
    assert lookahead.load_costs(model, tmp_path)
    assert costs["compiled"].knows(1, 30) and not costs["plain"].knows(1, 30)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("traced_only")
def test_the_command_line_and_calibration_compile_where_they_are_told_to(
    tiny_tokenizer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = one_layer()
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    command = ["generate", "The cat", "--model", str(tmp_path), "--max-new-tokens", "9", "--proposers", "none"]
    before = graphs()
    plain = CliRunner().invoke(app, command)
    assert graphs() == before
    compiled_too = CliRunner().invoke(app, [*command, "--compile"])
    assert (compiled_too.exit_code, compiled_too.stdout) == (0, plain.stdout)
    assert graphs() == before + 1
    monkeypatch.setattr("lookahead.models.calibration.NODES", (1, 2))
    (sweep,) = lookahead.calibrate_costs(model, [20], compile=True).sweeps
    assert [point.nodes for point in sweep.points] == [1, 2]
    assert graphs() == before + 2
    assert state_of(model).learned.costs["compiled"].knows(1, 20)


@pytest.mark.parametrize("name", ["compile", "cuda_graphs"])
def test_what_is_neither_true_nor_false_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be True or False, got 'yes'"):
        LookaheadConfig(**{name: "yes"})


def test_a_configuration_says_how_the_model_is_run() -> None:
    both = {"compile": True, "cuda_graphs": True}
    options: list[dict[str, Any]] = [{}, {"compile": True}, {"cuda_graphs": True}, both, {"exactness": "fast"}]
    assert tuple(LookaheadConfig(**each).passes for each in options) == PASSES
    assert [LookaheadConfig(**each).node_budget for each in options] == [64, 64, 63, 63, 64]
