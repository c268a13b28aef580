"""Outputs follow a grammar token for token as in transformers' own loop, and what it forces is drafted."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import StopStringCriteria

import lookahead
from lookahead import LookaheadConfig
from lookahead.drafting.proposal import Proposal
from lookahead.plugins.grammar.grammar import constrain
from tests.support.adversarial_proposers import Scripted, chain
from tests.support.grammars import (
    END,
    GRAMMARS,
    ONE,
    OTHER_END,
    PAD,
    allowed_by,
    both,
    json_model,
    json_tokenizer,
    prompts,
)
from tests.support.token_prompts import DRAFTING


@pytest.fixture
def tokenizer() -> Any:
    return json_tokenizer()


@pytest.fixture
def model() -> Any:
    return json_model()


def text_of(tokenizer: Any, tokens: Any) -> tuple[str, bool]:
    """A text, and whether it ended."""
    ids = tokens.tolist()
    return tokenizer.decode(ids, skip_special_tokens=True), END in ids or OTHER_END in ids


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_tokens_are_those_of_transformers_own_loop_with_the_same_grammar(model, tokenizer, kind, do_sample, rows):
    grammar = lookahead.Grammar(tokenizer, **GRAMMARS[kind])
    expected, ours = both(model, prompts(tokenizer, rows), grammar, do_sample=do_sample)
    assert torch.equal(ours, expected)
    for row in ours:
        text, has_ended = text_of(tokenizer, row)
        if has_ended and "json_schema" in GRAMMARS[kind]:
            assert isinstance(json.loads(text), dict)
        if has_ended and "regex" in GRAMMARS[kind]:
            assert re.fullmatch(GRAMMARS[kind]["regex"], text)
    assert kind in ("white space", "open") or any(text_of(tokenizer, row)[1] for row in ours)


def test_a_text_that_a_grammar_forces_takes_one_pass_a_draft(model, tokenizer):
    grammar = lookahead.Grammar(tokenizer, regex=ONE)
    inputs = prompts(tokenizer, 3)
    done = lookahead.generate(
        model, tokenizer, inputs, config=DRAFTING, max_new_tokens=90, do_sample=False, logits_processor=[grammar]
    )
    assert done.texts == [ONE] * 3 and done.finish_reasons == ["stop"] * 3
    tokens = len(done.token_ids[0])
    assert tokens > 10
    for stats in done.row_stats:
        assert stats.target_forwards == 1
        # The first token comes from the prompt's pass, and the last one, the end, from the pass of all others.
        assert stats.accepted_by_source["grammar"] == stats.drafted_by_source["grammar"] == tokens - 2


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 11, 12, 13, 14, 40])
def test_a_limit_inside_of_a_forced_text_ends_it_there(model, tokenizer, limit):
    grammar = lookahead.Grammar(tokenizer, regex=ONE)
    expected, ours = both(model, prompts(tokenizer, 1), grammar, max_new_tokens=limit)
    assert torch.equal(ours, expected) and ours.shape[1] <= limit


def test_forced_tokens_are_drafted_behind_those_of_other_sources(model, tokenizer):
    """One draft holds a guessed value, and the key that must follow it."""
    grammar = lookahead.Grammar(tokenizer, **GRAMMARS["nested"])
    inputs = prompts(tokenizer, 1)
    (answer,), _ = both(model, inputs, grammar)
    text = [*inputs["input_ids"][0].tolist(), *answer.tolist()]

    def knowing_one(row: int, ids: list[int], max_nodes: int) -> Proposal | None:
        return chain(text[len(ids) - 1 : len(ids) + 1]) if len(ids) < len(text) else None

    config = LookaheadConfig(proposers=(lambda call: Scripted(knowing_one),), draft="fixed")
    done = lookahead.generate(
        model, tokenizer, inputs, config=config, max_new_tokens=90, do_sample=False, logits_processor=[grammar]
    )
    assert done.token_ids[0] == answer.tolist()
    stats = done.stats
    assert stats.accepted_by_source["scripted"] > 0 and stats.accepted_by_source["grammar"] > 0
    # A step emits the guessed token, what is forced behind it, and one more.
    assert max(stats.acceptance_histogram) > 4


@pytest.mark.covering(1)
@pytest.mark.parametrize("draft", ["fixed", "auto"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_drafts_that_are_always_wrong_change_no_token(model, tokenizer, draft, do_sample):
    rng = np.random.default_rng(0)

    def wrong(row: int, ids: list[int], max_nodes: int) -> Proposal:
        size = int(rng.integers(2, 9))
        parents = np.array([0, *(rng.integers(0, i) for i in range(1, size))], np.int32)
        tokens = np.array([ids[-1], *rng.permutation(len(tokenizer))[: size - 1]], np.int32)
        return Proposal(tokens, parents, rng.uniform(0, 1, size).astype(np.float32))

    config = LookaheadConfig(proposers=("prompt", lambda call: Scripted(wrong)), draft=draft, min_probability=0.0)
    for given in GRAMMARS.values():
        grammar = lookahead.Grammar(tokenizer, **given)
        expected, ours = both(model, prompts(tokenizer, 3), grammar, config, do_sample=do_sample, max_new_tokens=40)
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_walk_along_drafts_leaves_a_grammar_where_it_was(tokenizer, kind):
    """Behind random outputs: what is cut is what is forbidden there, what is forced is allowed alone."""
    grammar, rng, size = lookahead.Grammar(tokenizer, **GRAMMARS[kind]), np.random.default_rng(7), len(tokenizer)

    def fresh(ids: list[int]) -> list[int]:
        (processor,) = grammar.objects(1)
        tokens = [allowed_by(processor, ids[:n], size) for n in range(1, len(ids) + 1)]
        return tokens[-1]

    def offered(ids: list[int]) -> Proposal:
        """Mostly what is allowed, so that the walk goes deep."""
        tokens, parents, behind = [ids[-1]], [0], [ids]
        for node in range(1, 12):
            parent = int(rng.integers(max(0, node - 3), node))
            after = fresh(behind[parent]) if rng.random() < 0.8 else []
            token = int(rng.choice(after or size))
            if token not in [tokens[i] for i in range(1, node) if parents[i] == parent]:
                tokens.append(token)
                parents.append(parent)
                behind.append([*behind[parent], token] if after and token != END else ids)
            else:
                break
        return Proposal(np.array(tokens, np.int32), np.array(parents, np.int32), np.full(len(tokens), 0.9, np.float32))

    (walked,), ids = grammar.objects(1), [9]
    while END not in ids and len(ids) < 12:
        allowed = allowed_by(walked, ids, size)
        assert allowed == fresh(ids)
        offer = offered(ids)
        (cut,), forced = walked.constrain(torch.tensor(ids), [offer], 64, 0.0)
        for node in range(1, len(offer.tokens)):
            token = int(offer.tokens[node])
            if offer.parents[node] == 0:  # an end is chosen by the scores before it, and needs no node
                assert (cut.probabilities[node] > 0) == (token in allowed and token != END)
        behind = [ids]
        nodes = [] if forced is None else list(zip(*(each.tolist() for each in forced[:4]), strict=True))[1:]
        for token, parent, chance, source in nodes:
            behind.append([*behind[parent], token])
            if source and chance == 1.0:
                assert fresh(behind[parent]) == [token]
        ids.append(int(rng.choice(allowed)))
    assert allowed_by(walked, ids, size) == fresh(ids)


def test_an_end_is_allowed_exactly_where_the_grammar_can_end(tokenizer):
    """All prefixes of up to three tokens, against the regular expression itself; both ends where there are two."""
    pattern = "a{1,2}(bc?)?"
    grammar = lookahead.Grammar(tokenizer, regex=pattern, eos_token_id=[END, OTHER_END])
    open_texts, ended = [[9]], 0
    while open_texts:
        ids = open_texts.pop()
        (processor,) = grammar.objects(1)
        for n in range(1, len(ids) + 1):
            allowed = allowed_by(processor, ids[:n], len(tokenizer) + 3)
        can_end = re.fullmatch(pattern, tokenizer.decode(ids[1:])) is not None
        assert (END in allowed) == (OTHER_END in allowed) == can_end
        ended += can_end
        open_texts += [[*ids, token] for token in allowed if token not in (END, OTHER_END)]
    assert ended >= 6


def test_one_object_serves_many_calls_each_from_the_start(model, tokenizer):
    grammar = lookahead.Grammar(tokenizer, **GRAMMARS["words"])
    inputs = prompts(tokenizer, 1)
    first = both(model, inputs, grammar)
    assert all(torch.equal(again, first[0]) for again in both(model, inputs, grammar))
    texts = ["a person: ", "cats and dogs, ", "x", "yy", "zzz"]
    options = {"config": DRAFTING, "max_new_tokens": 30, "do_sample": False, "logits_processor": [grammar]}
    alone = [lookahead.generate(model, tokenizer, text, **options).token_ids[0] for text in texts]
    many = lookahead.stream_many(model, tokenizer, texts, rows=2, **options)
    assert {each.index: each.token_ids for each in many} == dict(enumerate(alone))
    with lookahead.enable(model, config=DRAFTING):
        enabled = model.generate(**inputs, max_new_tokens=90, do_sample=False, logits_processor=[grammar])
    assert torch.equal(enabled[:, inputs["input_ids"].shape[1] :], first[0])


def test_rows_of_one_stream_join_each_other_under_a_grammar(model, tokenizer):
    grammar = lookahead.Grammar(tokenizer, regex=ONE)
    options = {"config": DRAFTING, "max_new_tokens": 60, "do_sample": False, "logits_processor": [grammar]}
    done = list(lookahead.stream_many(model, tokenizer, ["a", "bc", "d"], **options))
    assert [each.text for each in done] == [ONE] * 3
    assert all(each.stats.accepted_by_source["grammar"] > 5 for each in done)


def test_a_token_that_the_grammar_forbids_is_an_error_if_it_is_chosen_all_the_same(model, tokenizer):
    def meddling(ids: Any, scores: Any) -> Any:
        return torch.where(torch.arange(scores.shape[1]) == 40, 1e9, scores)

    given = [lookahead.Grammar(tokenizer, regex="[0-9]+"), meddling]
    with pytest.raises(lookahead.LookaheadError, match="does not allow token 40"):
        lookahead.generate(model, tokenizer, "a", max_new_tokens=9, do_sample=False, logits_processor=given)


def test_a_grammar_that_other_processors_leave_no_token_is_an_error(model, tokenizer):
    """Greedy decoding would take token 0, which is special, for an end."""

    def forty_alone(ids: Any, scores: Any) -> Any:
        return torch.where(torch.arange(scores.shape[1]) == 40, scores, -torch.inf)

    given = [forty_alone, lookahead.Grammar(tokenizer, regex="[0-9]+")]
    options = {**prompts(tokenizer, 1), "max_new_tokens": 9, "do_sample": False, "logits_processor": given}
    for ours in ({}, {"custom_generate": lookahead.decode}):
        with pytest.raises(lookahead.LookaheadError, match="other processors forbid all that the grammar allows"):
            model.generate(**options, **ours)


def test_a_token_of_text_may_be_the_end(model, tokenizer):
    end, pattern = tokenizer.convert_tokens_to_ids("z"), "([0-9][a-e]|[a-p]{4}|[q-y]{7})"
    grammar = lookahead.Grammar(tokenizer, regex=pattern, eos_token_id=end)
    expected, ours = both(model, prompts(tokenizer, 3), grammar, eos_token_id=end)
    assert torch.equal(ours, expected)
    for row in ours:
        assert re.fullmatch(pattern + "z", tokenizer.decode(row, skip_special_tokens=True))
    assert (ours[:, -1] == PAD).any()  # of a row that ended sooner


def test_rows_that_something_else_ends_are_padded_as_in_transformers_own_loop(model, tokenizer):
    stopping = [StopStringCriteria(tokenizer, ["bd", "ca"])]
    given = {"logits_processor": [lookahead.Grammar(tokenizer, **GRAMMARS["words"])], "stopping_criteria": stopping}
    options = {**prompts(tokenizer, 3), **given, "max_new_tokens": 30, "do_sample": False}
    expected = model.generate(**options)
    ours = model.generate(**options, custom_generate=lookahead.decode, lookahead_config=DRAFTING)
    assert torch.equal(ours, expected) and (ours[:, -1] == PAD).any()


def test_a_proposal_is_cut_and_extended_in_place_of_its_nodes():
    """A constraint in which letters follow each other, and z is forbidden."""

    class Alphabet:
        def __init__(self) -> None:
            self.place = [0]

        def push(self, token: int) -> bool:
            is_allowed = token == 5 or token == self.place[-1] + 1
            self.place += [token] * is_allowed
            return is_allowed

        def pop(self, count: int) -> None:
            del self.place[len(self.place) - count :]

        def forced(self) -> list[int]:
            return [6, 7] if self.place[-1] == 5 else []

        def likely(self) -> list[int]:
            return []

    alphabet = Alphabet()
    offer = Proposal(
        np.array([0, 1, 9, 5, 6, 8, 2], np.int32),
        np.array([0, 0, 0, 1, 3, 3, 1], np.int32),
        np.full(7, 0.5, np.float32),
    )
    (nothing, cut), forced = constrain(0, [None, offer], alphabet, 64)
    assert nothing is None and alphabet.place == [0]
    assert cut.probabilities.tolist() == [0.5, 0.5, 0.0, 0.5, 0.5, 0.0, 0.5]
    assert offer.probabilities.tolist() == [0.5] * 7
    assert forced.tokens.tolist() == [0, 1, 5, 6, 7] and forced.parents.tolist() == [0, 0, 1, 2, 3]
    assert forced.probabilities.tolist() == [1.0, 0.5, 0.5, 1.0, 1.0] and forced.sources.tolist() == [0, 0, 0, 1, 1]
