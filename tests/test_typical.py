"""Typical acceptance changes the distribution, says by how much, and changes nothing where it was not asked for."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import lookahead
from lookahead import ConfigError, LookaheadConfig
from lookahead.drafting.proposal import Proposal
from lookahead.drafting.tree import TokenTree
from lookahead.verification.acceptance import DELTA, EPSILON, longest_typical, threshold
from tests.support.adversarial_proposers import Scripted, chain

TYPICAL = LookaheadConfig(acceptance="typical", draft="fixed", memory="request")
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 40}


def random_tree(rng: np.random.Generator, nodes: int, vocab: int) -> TokenTree:
    """A tree whose siblings hold different tokens."""
    parents, tokens, taken = [0], [0], set()
    while len(parents) < nodes:
        parent, token = int(rng.integers(len(parents))), int(rng.integers(vocab))
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    arrays = [np.array(each, np.int32) for each in (tokens, parents, depths, [1] * nodes)]
    return TokenTree(*arrays)


def test_a_token_is_typical_above_a_floor_that_falls_where_the_target_is_uncertain() -> None:
    certain, even = torch.tensor([1.0, 0.0]), torch.full((100,), 0.01)
    assert threshold(certain) == EPSILON
    assert threshold(even) == pytest.approx(DELTA / 100)
    assert threshold(torch.tensor([0.5, 0.5])) == pytest.approx(min(EPSILON, DELTA * math.exp(-math.log(2))))


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_typical_path_wins_and_of_several_the_likeliest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 14, 4)
    laws = torch.from_numpy(rng.dirichlet(np.full(4, 0.5), size=len(tree)))
    walk = longest_typical(tree, lambda path: laws[path[-1]])
    whole = []
    for node in range(len(tree)):
        path, reach = [node], 1.0
        while path[0]:
            path.insert(0, int(tree.parents[path[0]]))
        for before, after in pairwise(path):
            chance = float(laws[before][tree.tokens[after]])
            reach = reach * chance if chance > threshold(laws[before]) else 0.0
        if reach:
            whole.append((len(path) - 1, reach))
    assert (len(walk), math.prod(chance for _, chance in walk.values())) == pytest.approx(max(whole))


def test_where_nothing_is_sampled_it_is_exact(looping_llama: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6]])
    options = {"do_sample": False, "max_new_tokens": 40}
    expected = looping_llama.generate(ids, **options)
    output = looping_llama.generate(ids, **options, custom_generate=lookahead.decode, lookahead_config=TYPICAL)
    assert output.tolist() == expected.tolist()


def test_where_nothing_is_drafted_it_draws_the_tokens_of_the_same_seed(looping_llama: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 6, 7]])
    config = LookaheadConfig(proposers=(), acceptance="typical")
    torch.manual_seed(4)
    expected = looping_llama.generate(ids, **SAMPLED)
    torch.manual_seed(4)
    output = looping_llama.generate(ids, **SAMPLED, custom_generate=lookahead.decode, lookahead_config=config)
    assert output.tolist() == expected.tolist()


@pytest.fixture
def likeliest_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are what the target likes to write: it counts, and starts again after 16 tokens."""

    def offer(row: int, text: list[int], room: int) -> Proposal:
        tokens = text[-1:]
        for _ in range(3):
            tokens.append(tokens[-1] + 1 - 16 * (tokens[-1] % 16 == 15))
        return chain([token % 101 for token in tokens])

    monkeypatch.setattr("lookahead.decoding.assembly.make_proposers", lambda *_: [Scripted(offer)])


@pytest.mark.usefixtures("likeliest_drafted")
def test_it_accepts_more_and_says_how_far_from_the_distribution_that_is(
    looping_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    exact = LookaheadConfig(draft="fixed", memory="request")
    options = {**SAMPLED, "temperature": 2.0, "max_new_tokens": 150}
    by_config = [
        lookahead.generate(looping_llama, tiny_tokenizer, "abcdabc", config=config, seed=3, **options).stats
        for config in (exact, TYPICAL)
    ]
    assert by_config[0].divergence == 0.0 < by_config[1].divergence < 1.0
    assert by_config[1].mean_acceptance_length > by_config[0].mean_acceptance_length + 0.2
    assert by_config[1].to_dict()["divergence"] > 0.0


@pytest.mark.usefixtures("likeliest_drafted")
def test_the_divergence_is_that_of_the_tokens_it_takes(
    looping_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """What is taken is taken for certain, 1 - p from the distribution; which tokens were drawn is not known here."""
    ids = tiny_tokenizer("abcab", return_tensors="pt").input_ids
    options = {**SAMPLED, "max_new_tokens": 30}
    result = lookahead.generate(looping_llama, tiny_tokenizer, "abcab", config=TYPICAL, seed=1, **options)
    text = torch.cat((ids[0], torch.tensor(result.token_ids[0])))
    with torch.no_grad():
        chances = looping_llama(text[None]).logits[0].softmax(-1)[len(ids[0]) - 1 : -1]
    away = 1 - chances.gather(1, text[len(ids[0]) :, None])[:, 0]
    stats = result.stats
    assert stats.accepted_tokens > 10
    drawn = stats.emitted_tokens - stats.accepted_tokens
    assert float(away.sort().values[: len(away) - drawn].sum()) - 1e-3 <= stats.total_variation
    assert stats.total_variation <= float(away.sort(descending=True).values[: len(away) - drawn].sum()) + 1e-3


def test_every_sequence_of_two_tokens_is_as_likely_as_the_rule_has_it() -> None:
    """By enumeration: a draft of one token turns the law into certainty where it is typical, and nothing else."""
    law = torch.tensor([0.6, 0.05, 0.35], dtype=torch.float64)
    for drafted in range(3):
        tree = TokenTree(*(np.array(each, np.int32) for each in ([0, drafted], [0, 0], [0, 1], [0, 1])))
        walk = longest_typical(tree, lambda path: law)
        is_typical = float(law[drafted]) > threshold(law)
        first = [float(token == drafted) for token in range(3)] if is_typical else law.tolist()
        assert bool(walk) == is_typical
        joint = {pair: first[pair[0]] * float(law[pair[1]]) for pair in product(range(3), repeat=2)}
        away = 0.5 * sum(abs(chance - float(law[a] * law[b])) for (a, b), chance in joint.items())
        assert away == pytest.approx(1 - walk[0][1] if walk else 0.0)


def test_an_unknown_rule_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="exact or rejection or typical, got 'greedy'"):
        LookaheadConfig(acceptance="greedy")
