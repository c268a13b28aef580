"""Drafts for beam search change nothing that is found, whatever they hold."""

from __future__ import annotations

import copy
from functools import cache
from threading import RLock
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.generation import beams
from lookahead.generation.beams import has_bits_of_beams
from lookahead.models import beam_tree
from lookahead.models.beam_tree import BeamTree
from lookahead.models.product_bits import keeps_bits_beside_others
from lookahead.proposers.beam_drafter import BeamDrafter, BeamState
from tests.support.beam_search import ONE, OPTIONS, RAGGED, assert_same, found
from tests.support.families import FAMILIES, Family, build, cases

TREES = [family for family in FAMILIES.values() if family.decoded == "trees"]
ALWAYS = LookaheadConfig(draft="fixed")


class Scripted:
    """Drafts made from the steps of a search without drafts; `make` adds the nodes."""

    def __init__(self, make: Any, steps: list[Any], done: list[Any]) -> None:
        self.make, self.steps, self.done = make, steps, done

    def draft(self, tree: BeamTree, scores: Any, steps: int, left: int) -> bool:
        self.make(tree, self.steps[len(self.done) : len(self.done) + left])
        return False

    def learn(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing was read")


def perfect(tree: BeamTree, coming: list[Any]) -> None:
    """All that the next three steps choose."""
    tips = tree.tips
    for chosen, tokens in coming[:3]:
        tips = [tree.add(tips[beam], token) for beam, token in zip(chosen, tokens, strict=True)]


def partial(tree: BeamTree, coming: list[Any]) -> None:
    """What the next steps choose, but for the last beam."""
    tips: list[int | None] = list(tree.tips)
    for chosen, tokens in coming[:3]:
        steps = [(tips[beam], token) for beam, token in zip(chosen[:-1], tokens, strict=False)]
        tips = [*[None if at is None else tree.add(at, token) for at, token in steps], None]


def wrong(tree: BeamTree, coming: list[Any]) -> None:
    """Two levels that no step chooses."""
    chosen = {token for _, tokens in coming for token in tokens}
    for tip in tree.tips:
        tree.add(tree.add(tip, next(token for token in range(3, 200) if token not in chosen)), 7)


def beyond_an_end(tree: BeamTree, coming: list[Any]) -> None:
    """What the next step chooses, and behind every beam both end tokens and more tokens."""
    perfect(tree, coming[:1])
    for tip in dict.fromkeys(tree.tips):
        for end in (5, 9):
            if tree.child(tip, end) is None:
                tree.add(tree.add(tree.add(tip, end), 5), 31)


def in_disorder(tree: BeamTree, coming: list[Any]) -> None:
    """Random nodes behind random tips, and behind one another, with what the next two steps choose among them."""
    rng = np.random.default_rng(len(coming))
    for _ in range(20):
        parent, token = int(rng.choice([*tree.tips, len(tree) - 1])), int(rng.integers(3, 90))
        if tree.child(parent, token) is None:
            tree.add(parent, token)
    tips = tree.tips
    for chosen, tokens in coming[:2]:
        places = [(tips[beam], token) for beam, token in zip(chosen, tokens, strict=True)]
        tips = [tree.child(*place) or tree.add(*place) for place in places]


ADVERSARIES = [lambda tree, coming: None, perfect, partial, wrong, beyond_an_end, in_disorder]
NAMES = ["empty", "perfect", "partial", "wrong", "beyond an end", "in disorder"]
MORE_OPTIONS = {**OPTIONS, "length": {"max_new_tokens": 2}, "plain without ends": {"eos_token_id": None}}


def undrafted_steps(model: PreTrainedModel, **options: Any) -> list[Any]:
    """The steps of a search without drafts."""
    done, own = [], BeamTree.advance
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BeamTree, "advance", lambda tree, *step: (done.append(step), own(tree, *step))[1])
        found(model, **options, custom_generate=lookahead.decode, lookahead_config=LookaheadConfig(proposers=()))
    return done


def search_with(
    make: Any, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, known: Any = (None, None), **options: Any
) -> tuple[list[int], int, Any]:
    """Search as transformers does and with such drafts; the steps of each pass, all steps, and what was found.

    What transformers finds, and the steps without drafts, need not be found anew where they are known.
    """
    expected, steps = known
    steps = steps or undrafted_steps(model, **options)
    done: list[Any] = []
    searches: list[Any] = []
    own, score = BeamTree.advance, beam_tree.BeamModel._score
    monkeypatch.setattr(BeamTree, "advance", lambda tree, *step: (done.append(step), own(tree, *step))[1])

    def scored(search: beam_tree.BeamModel, left: int) -> None:
        searches[:] = [search]
        score(search, left)

    monkeypatch.setattr(beam_tree.BeamModel, "_score", scored)
    monkeypatch.setattr(beams, "drafter_for", lambda *_: Scripted(make, steps, done))
    got = assert_same(model, expected=expected, **options)
    assert done == steps
    assert searches[0].served and sum(searches[0].served) == len(steps)
    return searches[0].served, len(steps), got


@cache
def model_of(name: str) -> PreTrainedModel:
    """A family's model, which several tests search with."""
    return build(FAMILIES[name])


@cache
def found_of(name: str, kind: str) -> tuple[Any, Any]:
    """What transformers finds with it under some options, and the steps without drafts."""
    options = {**ONE, **MORE_OPTIONS[kind]}
    return found(model_of(name), **options), undrafted_steps(model_of(name), **options)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", MORE_OPTIONS)
@pytest.mark.parametrize("make", ADVERSARIES, ids=NAMES)
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_no_draft_changes_what_is_found(name: str, make: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    search_with(make, monkeypatch, model_of(name), found_of(name, kind), **ONE, **MORE_OPTIONS[kind])


def test_a_pass_serves_as_many_steps_as_its_draft_has_right(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: PreTrainedModel
) -> None:
    options: dict[str, Any] = {**ONE, "eos_token_id": None, "max_new_tokens": 15}
    known = found(tiny_llama, **options), undrafted_steps(tiny_llama, **options)
    for make, served in ((perfect, [4, 4, 4, 2]), (wrong, [1] * 14), (partial, [1] * 14)):
        with monkeypatch.context() as patch:
            assert search_with(make, patch, tiny_llama, known, **options)[:2] == (served, 14)


@pytest.mark.parametrize("make", ADVERSARIES, ids=NAMES)
def test_drafts_outlive_the_dead_nodes_that_are_dropped(
    make: Any, monkeypatch: pytest.MonkeyPatch, tiny_llama: PreTrainedModel
) -> None:
    monkeypatch.setattr(beam_tree, "DEAD_NODES", 2)
    served, *_ = search_with(make, monkeypatch, tiny_llama, **ONE, max_new_tokens=24, eos_token_id=None)
    assert make is not perfect or served == [4] * 5 + [3]


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_nothing_is_drafted_that_no_step_could_choose(tokens: int, tiny_llama: PreTrainedModel) -> None:
    limit = tiny_llama.config.max_position_embeddings
    ids, read = (torch.arange(limit - tokens) % 7 + 60)[None], []
    model = copy.deepcopy(tiny_llama)
    assert_same(model, ALWAYS, input_ids=ids, max_new_tokens=tokens, eos_token_id=None)
    model.register_forward_pre_hook(
        lambda _, args, inputs: read.append(int(inputs["position_ids"].max())), with_kwargs=True
    )
    call = {"custom_generate": lookahead.decode, "lookahead_config": ALWAYS}
    found(model, input_ids=ids, max_new_tokens=tokens, eos_token_id=None, **call)
    assert max(read) == limit - 2
    assert len(read) < tokens or tokens < 9, "nothing was drafted"


@pytest.mark.parametrize("family", cases(TREES, by_feature=True))
def test_every_family_finds_the_sequences_of_transformers_with_drafts(family: Family) -> None:
    # In float64 rounding hides nothing: a wrong position or mask moves logits by 0.1 and more. Some layers compute in
    # float32 all the same, and those that transformers cannot run in float64, such as experts, stay in it.
    options: dict[str, Any] = {**ONE, "max_new_tokens": 12, "eos_token_id": None, "output_logits": True}
    model, limit = build(family).to(torch.float64), 1e-4
    try:
        expected = found(model, **options)
    except RuntimeError:
        model, limit = build(family), 1e-3
        expected = found(model, **options)
    got = found(model, **options, custom_generate=lookahead.decode, lookahead_config=ALWAYS)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert got.beam_indices.tolist() == expected.beam_indices.tolist()
    for mine, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=limit)


@pytest.mark.covering(2)
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
def test_the_options_of_beam_search_are_heeded_with_drafts(
    inputs: dict[str, Any], options: dict[str, Any], count: int, tiny_llama: PreTrainedModel
) -> None:
    assert_same(tiny_llama, ALWAYS, **inputs, **options, num_beams=count, max_new_tokens=24)


def test_what_repeats_takes_fewer_passes_than_tokens(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    options = {"num_beams": 3, "max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    plain, drafted = (
        lookahead.generate(tiny_llama, tiny_tokenizer, [5, 9, 31] * 9, config=config, **options)
        for config in (LookaheadConfig(proposers=()), ALWAYS)
    )
    assert drafted.token_ids == plain.token_ids
    assert plain.stats.target_forwards == 59 and plain.stats.drafted_tokens == 0
    assert drafted.stats.target_forwards < 59 and drafted.stats.decoded_tokens == 59
    assert drafted.stats.accepted_tokens == 59 - drafted.stats.target_forwards < drafted.stats.drafted_tokens


@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
def test_the_slots_of_a_search_are_little_more_than_its_trees_hold(
    inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tiny_llama: PreTrainedModel
) -> None:
    sizes: list[tuple[int, int]] = []
    score = beam_tree.BeamModel._score

    def scored(search: beam_tree.BeamModel, left: int) -> None:
        score(search, left)
        slots = search._target.cache.slots
        sizes.append((slots.capacity, max(slots.lengths + [len(tree) for tree in search._trees])))

    monkeypatch.setattr(beam_tree.BeamModel, "_score", scored)
    assert_same(tiny_llama, ALWAYS, **inputs, num_beams=8, max_new_tokens=60, eos_token_id=None)
    begun = inputs["input_ids"].shape[1] + 60 + beam_tree.DEAD_NODES
    assert sizes[-1][0] > begun, "the slots never grew"
    assert all(
        needed <= capacity < max(begun + 1, most + beam_tree.DEAD_NODES + 1)
        for (capacity, needed), most in zip(sizes, np.maximum.accumulate([needed for _, needed in sizes]), strict=True)
    )


def test_sampled_beams_batches_and_products_of_changing_bits_are_not_drafted(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: PreTrainedModel
) -> None:
    drafted: list[int] = []
    monkeypatch.setattr(beams, "drafter_for", lambda *_: drafted.append(1))
    exact = {"custom_generate": lookahead.decode}
    found(tiny_llama, **ONE, do_sample=True, **exact)
    found(tiny_llama, **RAGGED, **exact)
    half = copy.deepcopy(tiny_llama).to(torch.bfloat16)
    monkeypatch.setattr(beams, "keeps_bits_beside_others", lambda model: False)
    if has_bits_of_beams(half, 3):
        found(half, **ONE, **exact)
    assert not drafted
    found(half, **ONE, **exact, lookahead_config=LookaheadConfig(exactness="fast"))
    assert drafted


def by_turns(tree: BeamTree, coming: list[Any]) -> None:
    """What the next step chooses, but for the last beam; after that nothing, so that the last tip alone is new."""
    if len(coming) % 2:
        partial(tree, coming[:1])


@pytest.fixture(scope="module")
def half() -> tuple[PreTrainedModel, list[int], list[tuple[dict[str, Any], Any]]]:
    """A model in bfloat16, the rows of its newest passes, and what is found with it."""
    torch.manual_seed(5)
    sizes = {"vocab_size": 101, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval().to(torch.bfloat16)  # torch sums small products anew
    if not (has_bits_of_beams(model, 3) and keeps_bits_beside_others(model)):
        pytest.skip("products of this CPU have other bits")
    calls = [
        {**ONE, "max_new_tokens": 24, "output_logits": True, **options}
        for options in ({}, OPTIONS["early stopping"], {"eos_token_id": None, "num_beams": 2})
    ]
    rows: list[int] = []  # of every pass; a hook of each test's own would have the model probed anew
    model.lm_head.register_forward_pre_hook(lambda _, x: rows.append(x[0][..., 0].numel()))
    for call in calls:
        found(model, **call, custom_generate=lookahead.decode)  # probes the model, by steps of its own
    return model, rows, [(call, (found(model, **call), undrafted_steps(model, **call))) for call in calls]


@pytest.mark.parametrize("make", [*ADVERSARIES, by_turns, None], ids=[*NAMES, "by turns", "real"])
def test_in_half_precision_drafts_change_no_bit(make: Any, half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, calls = half
    for call, (expected, steps) in calls:
        rows.clear()
        if make is None:
            got = assert_same(model, ALWAYS, expected, **call)
        else:
            with monkeypatch.context() as patch:
                *_, got = search_with(make, patch, model, (expected, steps), **call)
        assert min(rows) >= 2 and max(rows) <= 32  # one row may have other bits on another CPU
        assert torch.equal(got.sequences, expected.sequences)
        assert torch.equal(got.sequences_scores, expected.sequences_scores)
        assert all(map(torch.equal, got.logits, expected.logits))


def test_drafts_that_always_lose_time_lose_little_of_it_and_are_tried_again_later() -> None:
    state = BeamState()
    for nodes in (1, 2, 4, 8, 16, 32):
        state.costs.observe(nodes, 1.0)
    prompt = np.arange(5, dtype=np.int32)
    tree = BeamTree(prompt, torch.zeros(9), 2)
    drafter = BeamDrafter(prompt, 2, (), LookaheadConfig(), state, RLock())
    read, lost = [], 0.0
    for _ in range(300):
        tree.advance([0, 1], [6, 7])
        reads = drafter.draft(tree, [-1.0, -2.0], 1, 9)
        logits = torch.zeros(1, len(tree) - tree.scored, 9)
        seconds = 3.0 if logits.shape[1] > 2 else 1.0  # a plain pass takes 1
        lost += seconds - 1.0
        if reads:
            drafter.learn(tree, logits, seconds, is_cold=False)
        else:
            tree.learn(logits[0])
        read.append(reads)
    assert all(read[:3]) and not all(read)
    assert 2.0 < lost <= 2.0 + 0.01 * 300 + 2.0, "the start, a share of all passes, and one loss beyond an empty budget"
