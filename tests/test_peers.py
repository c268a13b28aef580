"""The rules of others that we compare with find what their definitions say."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import chain, takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.ablation import RULES, config_of, decode, decode_all
from bench.llm_figures import Prompt
from bench.rules import SamRecycling
from lookahead import LookaheadConfig
from lookahead.drafting.proposal import Feedback, Proposal, Top
from lookahead.drafting.tree import TokenTree

Path_ = tuple[int, ...]
ROOT = np.zeros(1, np.int32)


def paths_of(offer: Proposal) -> list[Path_]:
    """The tokens from the root to every node of a proposal, in their order, without the root's."""
    paths: list[Path_] = [()]
    for token, parent in zip(offer.tokens[1:].tolist(), offer.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths


def first_nodes(paths: Iterable[Sequence[int]], nodes: int) -> list[Path_]:
    """The first nodes of a tree that paths are added to in turn, the root's first."""
    grown = [(), *(tuple(path[:depth]) for path in paths for depth in range(1, len(path) + 1))]
    return list(dict.fromkeys(grown))[: nodes + 1]


def tell(rule, tokens: Sequence[int], successors: dict[int, list[int]] | None = None, **states) -> None:
    """Let a rule observe tokens, and the likeliest successors of others."""
    top = None
    if successors:
        tree = TokenTree.from_parents(list(successors), [max(0, node - 1) for node in range(len(successors))])
        top = Top(tree, np.array([*successors.values()], np.int32), np.zeros((len(successors), 8), np.float32))
    rule.observe(0, Feedback(np.array(tokens, np.int32), ROOT, ROOT, top, **states), ROOT)


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


@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", RULES)
def test_rules_of_others_draft_for_a_model_within_the_nodes_and_change_no_token(tiny_llama, name, temperature):
    ids = torch.randint(0, 100, (1, 300), generator=torch.Generator().manual_seed(0))
    prompt, options = Prompt("", ids), Namespace(max_new_tokens=24, temperature=temperature)
    plain = decode(tiny_llama, prompt, options, LookaheadConfig(proposers=()))
    for memory in ("request", "shared"):
        config = config_of(name, 7, memory)
        first, second = (decode(tiny_llama, prompt, options, config) for _ in range(2))
        for drafted in (first, second):
            assert drafted.tokens == plain.tokens
            assert 0 < drafted.drafted <= 7 * (len(drafted.steps) - 1)
        # With a shared memory, too, the successors after the tokens of the same prompt are those of its prefill again.
        if memory == "request":
            assert second.steps == first.steps


def test_recycled_tokens_are_the_newest_successors_on_a_static_tree():
    rule = SamRecycling(vocab_size=20, nodes=3)
    rule.start(0, np.array([4], np.int32))
    assert rule.propose(0, 3).tokens.tolist() == [4]
    tell(rule, [4], {4: [5, 6, 7, 8, 9, 10, 11, 12], 5: [4, 1, 2, 3, 0, 13, 14, 15]})
    offer = rule.propose(0, 3)
    assert offer.tokens.tolist() == [4, 5, 4, 6] and offer.parents.tolist() == [0, 0, 1, 0]


BLOCKS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=2, max_size=3)


@given(BLOCKS, st.data())
def test_sam_drafts_the_first_longest_match_and_recycled_tokens_after_short_ones(blocks, data):
    orders = st.lists(st.sampled_from(blocks), min_size=1, max_size=9)
    text = [0, *chain(*data.draw(orders))]
    matches = [(same_end(text[:end], text), text[end:]) for end in range(1, len(text))]
    nodes, longest = data.draw(st.integers(1, 24)), max(length for length, _ in matches)
    rule = SamRecycling(9, nodes)
    rule.start(0, np.array(text[:1], np.int32))
    successors = {token: [(token + rank) % 9 for rank in range(1, 9)] for token in range(9)}
    tell(rule, text[1:], successors)
    paths = paths_of(rule.propose(0, nodes))
    if longest < 5:
        assert len(paths) == nodes + 1
        assert all(path[-1] in successors[(text[-1], *path)[-2]] for path in paths[1:])
    else:
        whole = [match for match in matches if match[0] and len(match[1]) >= nodes]
        _, after = max(whole or [(1, after) for length, after in matches if length], key=lambda match: match[0])
        assert paths == first_nodes([after[:nodes]], nodes)


def same_end(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two texts have in common at their ends."""
    pairs = zip(reversed(left), reversed(right), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_rules_that_recycle_the_prompt_know_the_likeliest_successors_of_its_tokens(tiny_llama):
    ids = torch.tensor([[7, 3, 9, 3, 20, 7, 41]])
    rule = SamRecycling(101, 8, model=tiny_llama)
    config = LookaheadConfig(draft="fixed", proposers=(lambda call: rule,), max_nodes=8)
    decode(tiny_llama, Prompt("", ids), Namespace(max_new_tokens=2, temperature=0.0), config)
    expected = dict(zip(ids[0].tolist(), tiny_llama(ids).logits[0].topk(8).indices.tolist(), strict=True))
    for token, successors in expected.items():
        assert rule.successors[token].tolist() == successors
