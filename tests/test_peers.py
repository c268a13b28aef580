"""The rules of others that we compare with find what their definitions say."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import vllm_replay
from bench.ablation import config_of, decode, decode_all
from bench.baselines import Datastore, Retrieval, SuffixTrees, TokenRecycling, longest_suffix
from bench.llm_figures import Prompt
from lookahead import LookaheadConfig
from lookahead.drafting.proposal import Feedback, Top
from lookahead.drafting.tree import TokenTree


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 4),
)
def test_the_longest_suffix_rule_drafts_what_followed_the_first_of_the_longest_matches(text, shortest, more):
    tokens, longest = np.array(text, np.int32), shortest + more
    best = shortest - 1
    expected: list[int] = []
    for end in range(1, len(text)):
        length = 0
        while length < min(longest, end) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length > best:
            best, expected = length, text[end : end + 10]
    assert longest_suffix(shortest, longest)(tokens).tolist() == expected


def test_proposers_for_vllm_are_replayed_on_recorded_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 500, 60).tolist()
    pairs = [
        {"category": kind, "prompt": rng.integers(0, 500, 20).tolist(), "output": shared[: 50 + i] * copies}
        for kind, copies in (("once", 1), ("loops", 3))
        for i in range(4)
    ]
    path, output = tmp_path / "outputs.json", tmp_path / "figures.json"
    path.write_text(json.dumps({"model": "one", "outputs": pairs}), encoding="utf-8")
    vllm_replay.main(["--outputs", str(path), "--batch", "1,3", "-o", str(output)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads(output.read_text(encoding="utf-8")) and result["outputs"] == 8
    assert result["model"] == "one"
    for methods in result["batches"].values():
        ours, ngram = methods["lookahead"], methods["n-gram"]
        assert ours["tokens_per_step"] > ngram["tokens_per_step"] > 1
        assert ours["by_category"]["once"] == ours["without_loops"] > 1
        assert 1 < ours["gain"] <= ours["tokens_per_step"]
        assert ours["drafted_per_step"] <= vllm_replay.LONGEST_DRAFT


def test_an_ablation_starts_every_prompt_from_what_its_memory_file_holds(tiny_llama, tmp_path: Path):
    prompt = Prompt("", torch.randint(0, 100, (1, 30), generator=torch.Generator().manual_seed(0)))
    passes = {
        str(memory): [
            len(output.steps)
            for output in decode_all(tiny_llama, [prompt] * 2, Namespace(max_new_tokens=48, temperature=0.0), config)
        ]
        for memory in ("shared", tmp_path / "none.lkm")
        for config in [config_of("prompt+outputs+recycled", 7, str(memory))]
    }
    (_, again), (first, anew) = passes.values()
    assert again < first / 2 < anew


has_suffix_trees = pytest.mark.skipif(find_spec("arctic_inference") is None, reason="arctic-inference is not installed")
RULE_NAMES = ("prompt lookup", "longest suffix", "first occurrence", "token recycling", "retrieval")


@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*RULE_NAMES, pytest.param("suffix tree", marks=has_suffix_trees)])
def test_rules_of_others_draft_for_a_model_within_the_nodes_and_change_no_token(tiny_llama, name, temperature):
    ids = torch.randint(0, 100, (1, 300), generator=torch.Generator().manual_seed(0))
    prompt, options = Prompt("", ids), Namespace(max_new_tokens=24, temperature=temperature)
    plain = decode(tiny_llama, prompt, options, LookaheadConfig(proposers=()))
    store = Datastore(torch.randint(0, 100, (9, 300), generator=torch.Generator().manual_seed(1)).tolist())
    for memory in ("request", "shared"):
        config = config_of(name, 7, memory, store)
        for _ in range(2):
            drafted = decode(tiny_llama, prompt, options, config)
            assert drafted.tokens == plain.tokens
            assert 0 < drafted.drafted <= 7 * (len(drafted.steps) - 1)


def test_token_recycling_offers_the_newest_successors_of_every_token_on_its_static_tree():
    rule, root = TokenRecycling(vocab_size=20, nodes=3), np.zeros(1, np.int32)
    rule.start(0, np.array([4], np.int32))
    assert rule.propose(0, 3).tokens.tolist() == [4]
    tree = TokenTree.from_parents([4, 5], [0, 0])
    top = np.array([[5, 6, 7, 8, 9, 10, 11, 12], [4, 1, 2, 3, 0, 13, 14, 15]], np.int32)
    rule.observe(0, Feedback(np.array([4], np.int32), root, root, Top(tree, top, np.zeros((2, 8), np.float32))), root)
    offer = rule.propose(0, 3)
    assert offer.tokens.tolist() == [4, 5, 4, 6] and offer.parents.tolist() == [0, 0, 1, 0]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=3), st.integers(1, 12))
def test_retrieval_drafts_the_most_frequent_continuations_of_the_longest_match_in_its_texts(texts, nodes):
    rule, store = Retrieval(Datastore(texts)), Datastore
    text = [2, 0, 1, 1, 0]
    rule.start(0, np.array(text, np.int32))
    found = []
    for length in range(len(text), store.SHORTEST - 1, -1):
        if not found:
            ends = [(each, at + length) for each in texts for at in range(len(each) - length + 1)]
            found = [each[end : end + store.LENGTH] for each, end in ends if each[end - length : end] == text[-length:]]
    frequencies = Counter(tuple(each[:depth]) for each in found for depth in range(1, len(each) + 1))
    offer = rule.propose(0, nodes)
    assert offer.tokens[0] == text[-1]
    paths = [()]
    for token, parent in zip(offer.tokens[1:].tolist(), offer.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths) == 1 + min(nodes, len(frequencies))
    kept = sorted((frequencies[path] for path in paths[1:]), reverse=True)
    assert kept == sorted(frequencies.values(), reverse=True)[:nodes]


@has_suffix_trees
def test_suffix_trees_know_the_request_and_the_outputs_before_it():
    rule, nothing = SuffixTrees(), np.zeros(0, np.int32)
    rule.start(0, np.array([1, 2, 3, 1, 2], np.int32))
    offer = rule.propose(0, 3)
    assert offer.tokens.tolist() == [2, 3, 1, 2] and offer.parents.tolist() == [0, 0, 1, 2]
    rule.observe(0, Feedback(np.array([7, 8, 9], np.int32), nothing, nothing), nothing)
    rule.finish(0)
    rule.start(0, np.array([4, 7, 8], np.int32))
    assert rule.propose(0, 3).tokens.tolist() == [8, 9]
