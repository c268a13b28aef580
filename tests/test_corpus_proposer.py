"""Drafts from a pool: whose pool it may be, what is offered, and that no token changes."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

import lookahead
from lookahead import LookaheadConfig
from lookahead.drafting.proposal import Feedback
from lookahead.errors import ConfigError, LookaheadError, PoolError
from lookahead.ngram.chains import SEPARATOR
from lookahead.ngram.hit_rates import HitRates
from lookahead.ngram.pool_file import Pool, write_pool
from lookahead.proposers.ngram import NgramProposer
from lookahead.proposers.pool_files import open_pool
from lookahead.utils.fingerprints import tokenizer_fingerprint

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_k": 30, "max_new_tokens": 60}
NOTHING = np.zeros(0, np.int32)


def corpus_proposer(pool: Pool, *, rates: HitRates | None = None, **options: int) -> NgramProposer:
    return NgramProposer(("corpus",), rates=rates, pool=pool, **options)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.fixture
def prompt() -> torch.Tensor:
    """A prompt that repeats nothing, so that there is nothing to draft from but the pool."""
    return torch.tensor([[41, 9, 31, 77, 60, 15]])


@pytest.fixture
def pool_of_outputs(tmp_path, tiny_llama, tiny_tokenizer, prompt) -> str:
    """A pool that holds, between strangers, what `tiny_llama` says after the prompt."""
    output = tiny_llama.generate(prompt, **GREEDY)[0].numpy().astype(np.int32)
    strangers = np.random.default_rng(0).integers(6, 101, 500).astype(np.int32)
    tokens = np.concatenate((strangers, ids(SEPARATOR), output, ids(SEPARATOR), strangers[::-1]))
    write_pool(tmp_path / "pool.lkp", tokens, tokenizer_fingerprint(tiny_tokenizer))
    return str(tmp_path / "pool.lkp")


# The proposer


@pytest.fixture
def small_pool(tmp_path: Path) -> Pool:
    write_pool(tmp_path / "small.lkp", ids(3, 4, 5, 6, SEPARATOR, 3, 4, 7, SEPARATOR, 9, 4, 8), 1)
    return Pool.open(tmp_path / "small.lkp")


def test_it_offers_what_follows_the_last_tokens_in_the_pool(small_pool):
    proposer = corpus_proposer(small_pool)
    proposer.start(0, ids(1, 9, 4))
    assert proposer.propose(0, 1).tokens.tolist() == [4, 8]
    proposer.start(1, ids(2, 3, 4))
    children = proposer.propose(1, 20)
    assert set(children.tokens[1:][children.parents[1:] == 0].tolist()) == {5, 7, 8}


def test_what_was_emitted_is_looked_up_with_what_stood_before_it(small_pool):
    proposer = corpus_proposer(small_pool)
    proposer.start(0, ids(3))
    proposer.observe(0, Feedback(ids(4), ids(0), NOTHING), NOTHING)
    offer = proposer.propose(0, 20)
    chances = dict(zip(offer.tokens[offer.parents == 0].tolist(), offer.probabilities[offer.parents == 0], strict=True))
    assert min(chances[5], chances[7]) > chances[8], "5 and 7 follow 3 4, and 8 follows 4 alone"
    proposer.observe(0, Feedback(ids(100), ids(0), NOTHING), NOTHING)
    # Nothing in the pool follows 100; what was emitted before is offered as a frequent token may be.
    assert not {5, 6, 7, 8} & set(proposer.propose(0, 4).tokens.tolist())


def test_offers_that_never_come_true_become_unlikely(small_pool):
    rates = HitRates()
    proposer = corpus_proposer(small_pool, rates=rates)
    proposer.start(0, ids(3, 4, 5))
    before = proposer.propose(0, 4).probabilities[1]
    for _ in range(100):
        proposer.observe(0, Feedback(ids(99, 3, 4, 5), ids(0), NOTHING), NOTHING)
        offer = proposer.propose(0, 40)
    after = offer.probabilities[(offer.tokens == 6) & (offer.parents == 0)]
    assert after.max(initial=0.0) < 0.5 * before


# Outputs


@pytest.mark.covering(1)
@pytest.mark.parametrize("proposers", [(), ("corpus",), ("prompt",), ("prompt", "jacobi", "corpus")], ids=str)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_tokens_are_those_of_generate_whatever_the_pool_offers(
    tiny_llama, prompt, pool_of_outputs, proposers, options
):
    config = LookaheadConfig(proposers=proposers, pool=pool_of_outputs)
    batch = {"input_ids": prompt.repeat(2, 1), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    batch["attention_mask"][1, :3] = 0
    for inputs in ({"input_ids": prompt}, batch):
        torch.manual_seed(3)
        expected = tiny_llama.generate(**inputs, **options)
        torch.manual_seed(3)
        got = tiny_llama.generate(**inputs, **options, custom_generate=lookahead.decode, lookahead_config=config)
        assert torch.equal(got, expected)


def test_drafts_from_the_pool_are_accepted_and_save_passes(tiny_llama, tiny_tokenizer, prompt, pool_of_outputs):
    text = tiny_tokenizer.decode(prompt[0])
    plain = LookaheadConfig(draft="fixed")
    drafting = LookaheadConfig(draft="fixed", pool=pool_of_outputs)
    without, with_pool = (
        lookahead.generate(tiny_llama, tiny_tokenizer, text, config=config, **GREEDY) for config in (plain, drafting)
    )
    assert with_pool.token_ids == without.token_ids
    assert with_pool.stats.accepted_by_source["corpus"] > 40
    assert with_pool.stats.target_forwards < without.stats.target_forwards / 3


def test_the_switch_and_the_stream_draft_from_a_pool_too(tiny_llama, tiny_tokenizer, prompt, pool_of_outputs):
    config = LookaheadConfig(pool=pool_of_outputs)
    expected = tiny_llama.generate(prompt, **GREEDY)
    with lookahead.enable(tiny_llama, config):
        assert torch.equal(tiny_llama.generate(prompt, **GREEDY), expected)
    text = tiny_tokenizer.decode(prompt[0])
    pieces = lookahead.stream(tiny_llama, tiny_tokenizer, text, config=config, **GREEDY)
    assert "".join(pieces) == tiny_tokenizer.decode(expected[0, 6:], skip_special_tokens=True)


# Whose pool it is


def test_text_is_refused_with_a_pool_of_another_tokenizer(tiny_llama, tiny_tokenizer, tmp_path):
    path = tmp_path / "pool.lkp"
    write_pool(path, ids(1, 2, 3), 5)
    for call in (lookahead.generate, lookahead.stream):
        with pytest.raises(PoolError, match=r"pool\.lkp: made with another tokenizer"):
            call(tiny_llama, tiny_tokenizer, "hello", config=LookaheadConfig(pool=path), max_new_tokens=3)
    with pytest.raises(PoolError, match=r"pool\.lkp: made with another tokenizer"):
        lookahead.summarize("A text.", tiny_llama, tiny_tokenizer, config=LookaheadConfig(pool=path))


def test_without_a_tokenizer_a_pool_with_ids_the_model_does_not_know_is_refused(tiny_llama, tmp_path, prompt):
    write_pool(tmp_path / "pool.lkp", ids(1, 101), 5)
    options = {**GREEDY, "lookahead_config": LookaheadConfig(pool=tmp_path / "pool.lkp")}
    with pytest.raises(PoolError, match="it holds token id 101, and the ids of this model are 0 to 100"):
        tiny_llama.generate(prompt, custom_generate=lookahead.decode, **options)


def test_a_pool_that_is_gone_or_damaged_is_refused_by_name(tiny_llama, prompt, pool_of_outputs):
    options = {**GREEDY, "lookahead_config": LookaheadConfig(pool=pool_of_outputs)}
    Path(pool_of_outputs).write_bytes(Path(pool_of_outputs).read_bytes()[:-1])
    with pytest.raises(PoolError, match=r"pool\.lkp: cut short"):
        tiny_llama.generate(prompt, custom_generate=lookahead.decode, **options)
    os.remove(pool_of_outputs)
    with pytest.raises(LookaheadError, match=r"pool\.lkp: No such file"):
        tiny_llama.generate(prompt, custom_generate=lookahead.decode, **options)


def test_a_pool_is_opened_once_and_again_only_when_its_file_was_replaced(tmp_path):
    path = str(tmp_path / "pool.lkp")
    write_pool(path, ids(1, 2, 3), 5)
    first = open_pool(path, fingerprint=5)
    assert open_pool(path) is first
    write_pool(path, ids(4, 5, 6), 5)
    assert open_pool(path).tokens.tolist() == [SEPARATOR, 4, 5, 6]
    assert first.tokens.tolist() == [SEPARATOR, 1, 2, 3]


def test_a_fingerprint_follows_the_ids_of_a_text_and_nothing_else(tiny_tokenizer):
    expected = tokenizer_fingerprint(tiny_tokenizer)
    other = copy.deepcopy(tiny_tokenizer)
    other(["a", "longer"], padding=True, truncation=True, max_length=3)
    other.padding_side = "left"
    other.chat_template = "{{ messages }}"
    assert tokenizer_fingerprint(other) == expected
    other.add_tokens([AddedToken("hello")])
    assert tokenizer_fingerprint(other) != expected


def test_a_tokenizer_that_was_saved_keeps_its_fingerprint(tmp_path, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(type(tiny_tokenizer).from_pretrained(tmp_path)) == tokenizer_fingerprint(
        tiny_tokenizer
    )


# Options


def test_a_pool_adds_its_proposer_where_that_is_not_named():
    assert LookaheadConfig(pool="a.lkp").proposers == (*LookaheadConfig().proposers, "corpus")
    assert LookaheadConfig(pool=Path("a.lkp"), proposers=("corpus", "prompt")).proposers == ("corpus", "prompt")
    assert LookaheadConfig(pool=Path("a.lkp"), proposers=()).proposers == ("corpus",)
    assert LookaheadConfig(pool="a.lkp", proposers=()).node_budget == 64


@pytest.mark.parametrize("pool", [3, b"a.lkp", "", True, ["a.lkp"]], ids=repr)
def test_a_pool_that_is_no_path_is_refused(pool):
    with pytest.raises(ConfigError, match="pool must be the path of a pool file"):
        LookaheadConfig(pool=pool)


def test_the_proposer_without_a_pool_is_refused():
    with pytest.raises(ConfigError, match="'corpus' needs a pool"):
        LookaheadConfig(proposers=("corpus",))
