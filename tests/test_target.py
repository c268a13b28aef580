"""One pass over token trees scores every node as token-by-token decoding would."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPTJConfig, GPTJForCausalLM, PreTrainedModel

from lookahead.backend.choice import backend_for
from lookahead.backend.torch_backend import TorchBackend
from lookahead.drafting.tree import TokenTree
from tests.support.families import FAMILIES, build
from tests.support.random_trees import ancestor_mask

PROMPTS = [np.arange(3, 3 + n, dtype=np.int32) for n in (1, 9, 23)]


@pytest.fixture(scope="module")
def tiny_gptj() -> PreTrainedModel:
    """A model that does not take registered attention functions, so that it is served prepared masks."""
    config = GPTJConfig(vocab_size=101, n_embd=32, n_layer=2, n_head=2, rotary_dim=8, n_positions=512)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPTJForCausalLM(config).eval()


@pytest.fixture(params=["registered attention", "prepared masks"])
def model(request: pytest.FixtureRequest, tiny_llama: PreTrainedModel, tiny_gptj: PreTrainedModel) -> PreTrainedModel:
    return tiny_llama if request.param == "registered attention" else tiny_gptj


def random_tree(seed: int, nodes: int, root: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    parents = [0] + [int(rng.integers(max(0, i - 3), i)) for i in range(1, nodes)]
    tokens = np.array([root, *rng.permutation(100)[: nodes - 1]])
    return TokenTree.from_parents(tokens, parents)


def tokens_to(tree: TokenTree, node: int) -> list[int]:
    path = [int(tree.tokens[node])]
    while node != 0:
        node = int(tree.parents[node])
        path.append(int(tree.tokens[node]))
    return path[::-1]


def expected_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0, -1]


def check(model: PreTrainedModel, target: TorchBackend, trees: list[TokenTree], texts: list[list[int]]) -> None:
    """Every node's logits are those of its path behind the row's committed tokens."""
    logits = target.score(trees)
    assert logits.shape[:2] == (len(trees), max(map(len, trees)))
    with model_as_it_was(model):
        for row, tree in enumerate(trees):
            for node in range(len(tree)):
                expected = expected_logits(model, texts[row] + tokens_to(tree, node))
                torch.testing.assert_close(logits[row, node], expected, rtol=1e-4, atol=1e-4)


class model_as_it_was:
    """Let the reference run with the model's own attention in the middle of serving."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.during = model, model.config._attn_implementation

    def __enter__(self) -> None:
        self.model.set_attn_implementation("eager")

    def __exit__(self, *exc: object) -> None:
        self.model.set_attn_implementation(self.during)


def test_rows_of_any_length_score_and_commit_trees_of_any_shape(model: PreTrainedModel) -> None:
    target = backend_for(model, rows=3, capacity=24)  # too small on purpose: it has to grow
    texts = [prompt[:-1].tolist() for prompt in PROMPTS]
    with torch.inference_mode(), target.serving():
        target.read(PROMPTS)
        for step in range(3):
            trees = [random_tree(10 * step + row, nodes, root=7) for row, nodes in enumerate((1, 12, 70))]
            check(model, target, trees, texts)
            for row, tree in enumerate(trees):
                leaf = len(tree) - 1
                path = np.flatnonzero(ancestor_mask(tree)[leaf]).astype(np.int32)
                target.cache.commit(row, path)
                texts[row] += tokens_to(tree, leaf)


def first_nodes(tree: TokenTree, count: int) -> TokenTree:
    return TokenTree.from_parents(tree.tokens[:count], tree.parents[:count])


@pytest.mark.parametrize("shape", ["trees", "chains"])
def test_trees_that_grow_are_scored_node_by_node_as_if_at_once(model: PreTrainedModel, shape: str) -> None:
    target = backend_for(model, rows=3, capacity=24)
    texts = [prompt.tolist() for prompt in PROMPTS]
    rng = np.random.default_rng(0)
    with torch.inference_mode(), target.serving():
        for _ in range(3):
            target.read([np.array(text, np.int32) for text in texts])
            trees = [random_tree(int(rng.integers(99)), nodes, root=texts[i][-1]) for i, nodes in enumerate((9, 1, 12))]
            if shape == "chains":
                trees = [TokenTree.from_parents(tree.tokens, [0, *range(len(tree) - 1)]) for tree in trees]
            scored = np.ones(3, np.int64)  # the roots, by the prefill
            while any(scored < list(map(len, trees))):
                new = np.minimum(scored + rng.integers(0, 4, 3), list(map(len, trees)))
                if (new == scored).all():
                    continue
                logits = target.score(
                    [first_nodes(tree, int(n)) for tree, n in zip(trees, new, strict=True)], scored=scored
                )
                with model_as_it_was(model):
                    for row, tree in enumerate(trees):
                        for node in range(scored[row], new[row]):
                            expected = expected_logits(model, texts[row][:-1] + tokens_to(tree, node))
                            got = logits[row, node - scored[row]]
                            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
                scored = new
            for row, tree in enumerate(trees):
                leaf = int(rng.integers(len(tree)))
                target.cache.commit(row, np.flatnonzero(ancestor_mask(tree)[leaf]).astype(np.int32))
                texts[row] += [*tokens_to(tree, leaf)[1:], 50, 51][: rng.integers(1, 3) + tree.depths[leaf]]


def test_a_tree_that_grows_by_many_nodes_is_no_chain_to_a_kernel(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    tree = random_tree(3, 24, root=int(PROMPTS[1][-1]))
    target, whole = (backend_for(tiny_llama, rows=1, capacity=64) for _ in range(2))
    with target.serving(), whole.serving():
        target.read(PROMPTS[1:2])
        whole.read(PROMPTS[1:2])
        grown = target.score([tree], scored=np.array([1]))
        torch.testing.assert_close(grown[0], whole.score([tree])[0, 1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3", "GptOss", "Llama4", "Qwen2-windows", "DeepseekV3", "OPT"])
def test_a_tree_that_grows_is_scored_as_the_whole_tree_is(name: str) -> None:
    # Windows, softcaps, sinks, chunks, and prepared masks.
    model = build(FAMILIES[name])
    prompts = [np.arange(3, 24, dtype=np.int32), np.arange(30, 43, dtype=np.int32)]
    trees = [random_tree(row, 14, root=int(prompt[-1])) for row, prompt in enumerate(prompts)]
    target, other = (backend_for(model, rows=2, capacity=80) for _ in range(2))
    with target.serving(), other.serving():
        target.read(prompts)
        other.read(prompts)
        scored, grown = 1, []
        for count in (3, 7, 8, 14):
            grown.append(target.score([first_nodes(tree, count) for tree in trees], scored=np.array([scored, scored])))
            scored = count
        torch.testing.assert_close(torch.cat(grown, 1), other.score(trees)[:, 1:], rtol=1e-4, atol=1e-4)


def test_a_retired_row_leaves_its_place_to_the_last_one(model: PreTrainedModel) -> None:
    target = backend_for(model, rows=3, capacity=64)
    texts = [prompt[:-1].tolist() for prompt in PROMPTS]
    with torch.inference_mode(), target.serving():
        target.read(PROMPTS)
        target.retire(0)
        check(model, target, [random_tree(row, 9, root=7) for row in range(2)], [texts[2], texts[1]])
        target.retire(1)
        check(model, target, [random_tree(3, 9, root=7)], [texts[2]])


def test_a_prompt_longer_than_a_chunk_is_prefilled_in_chunks(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookahead.backend.torch_backend.PREFILL_CHUNK", 5)
    target = backend_for(model, rows=3, capacity=64)
    with torch.inference_mode(), target.serving():
        target.read(PROMPTS)
        trees = [random_tree(row, 6, root=7) for row in range(3)]
        check(model, target, trees, [prompt[:-1].tolist() for prompt in PROMPTS])


def test_serving_leaves_the_model_as_it_was_even_when_it_fails(tiny_llama: PreTrainedModel) -> None:
    target = backend_for(tiny_llama, rows=1, capacity=8)
    layers = [tiny_llama.model, *(layer.self_attn for layer in tiny_llama.model.layers)]
    with pytest.raises(RuntimeError, match="interrupted"), target.serving():
        assert all(layer.config is not tiny_llama.config for layer in layers)
        assert all(layer.config._attn_implementation == "sdpa" for layer in layers), "no pass runs"
        raise RuntimeError("interrupted")
    assert all(layer.config is tiny_llama.config for layer in layers)
