"""Rejection sampling keeps the target's distribution: every fall of the dice is followed, none is left to chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lookahead
from lookahead import ConfigError, DraftModel, LookaheadConfig
from lookahead.drafting.proposal import Proposal
from lookahead.drafting.select import merge
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.ngram.prune import Limits
from lookahead.plugins.draft_models.draft_tree import LEVELS, DraftTree, DraftTreeBatch
from lookahead.verification.acceptance import Rejection, Target, coin, draw, draw_several
from tests.support.engines import engine_of

Prefix = tuple[int, ...]
Law = Callable[[Prefix], torch.Tensor]  # the distribution after a prefix, float64 `[vocab]`


class Dice:
    """Throws that follow a script, and then fall on the first side; `weight` is the chance of all that fell so."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.thrown: list[tuple[int, int]] = []  # which side, and of how many
        self.weight = 1.0

    def throw(self, weights: Sequence[float]) -> int:
        sides = [side for side, weight in enumerate(weights) if weight > 0.0]
        which = self.script[len(self.thrown)] if len(self.thrown) < len(self.script) else 0
        self.thrown.append((which, len(sides)))
        self.weight *= weights[sides[which]] / sum(weights)
        return sides[which]

    def coin(self, chance: float) -> bool:
        return self.throw([chance, 1.0 - chance]) == 0

    def draw(self, weights: torch.Tensor) -> int:
        return self.throw(weights.double().tolist())

    def draw_several(self, weights: torch.Tensor, count: int) -> torch.Tensor:
        drawn = []
        for left in weights.double().tolist():
            drawn.append([])
            for _ in range(count):
                drawn[-1].append(self.throw(left) if sum(left) > 0.0 else -1)
                if drawn[-1][-1] >= 0:
                    left[drawn[-1][-1]] = 0.0
        return torch.tensor(drawn)


def every_fall(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Prefix]) -> Iterator[tuple[float, Prefix]]:
    """The chance of every way the dice can fall, and what `run` makes of it."""
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        dice = Dice(script)
        monkeypatch.setattr("lookahead.verification.acceptance.coin", dice.coin)
        monkeypatch.setattr("lookahead.verification.acceptance.draw", dice.draw)
        monkeypatch.setattr("lookahead.plugins.draft_models.draft_tree.draw_several", dice.draw_several)
        outcome = run()
        yield dice.weight, outcome
        for at in range(len(script), len(dice.thrown)):
            before = [which for which, _ in dice.thrown[:at]]
            scripts += [[*before, which] for which in range(1, dice.thrown[at][1])]


def law_of(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Prefix]) -> dict[Prefix, float]:
    """The chance of every outcome of `run`."""
    law: dict[Prefix, float] = {}
    for chance, outcome in every_fall(monkeypatch, run):
        law[outcome] = law.get(outcome, 0.0) + chance
    return law


def made_up(seed: int, vocab: int, zeros: float = 0.0) -> Law:
    """A language model of random numbers; a share of its tokens is impossible in each place."""

    def law(prefix: Prefix) -> torch.Tensor:
        rng = np.random.default_rng([seed, *prefix])
        weights = rng.exponential(size=vocab) * (rng.random(vocab) >= zeros)
        weights[rng.integers(vocab)] += 0.1
        return torch.from_numpy(weights / weights.sum())

    return law


def first_tokens(emitted: dict[Prefix, float], target: Law, count: int) -> dict[Prefix, float]:
    """The law of the first tokens, those a step did not emit drawn from the target."""
    law = dict.fromkeys(product(range(len(target(()))), repeat=count), 0.0)
    for tokens, chance in emitted.items():
        for rest in product(range(len(target(()))), repeat=max(0, count - len(tokens))):
            whole, weight = tokens + rest, chance
            for at in range(len(tokens), count):
                weight *= float(target(whole[:at])[whole[at]])
            law[whole[:count]] += weight
    return law


def of_target(target: Law, count: int) -> dict[Prefix, float]:
    return first_tokens({(): 1.0}, target, count)


def grow(law: Law, *, passes: int, width: int, children: int, room: int = 64) -> Proposal:
    """What a draft model with such distributions draws after nothing; its root holds token 0."""
    batch = DraftTreeBatch(
        [DraftTree(np.zeros(1, np.int32))],
        AcceptanceTable(LEVELS),
        max_nodes=room,
        width=width,
        children=children,
        vocabulary=len(law(())),
        warp=None,
        by_rejection=True,
    )
    batch.add(law(()).log()[None, None])
    for _ in range(passes - 1):
        before = int(batch.choose()[0])
        if not batch.trees[0].chosen.size:
            break
        tree, prefixes = batch.trees[0].scored_tree(), [()]
        for node in range(1, len(tree)):
            prefixes.append((*prefixes[tree.parents[node]], int(tree.tokens[node])))
        batch.add(torch.stack([law(prefix).log() for prefix in prefixes[before:]])[None])
    return batch.proposals()[0]


def step(target: Law, drafts: Sequence[Law], max_depth: int = 9, **shape: int) -> Prefix:
    """What one step emits after nothing, its draft drawn by several models."""
    offers = [grow(draft, **shape) for draft in drafts]
    draft = merge(0, offers, Limits(256, max_depth), sources=[1] * len(offers))
    emitted: list[int] = []

    def emit(token: int) -> bool:
        emitted.append(token)
        return False

    Rejection().accept(draft, Target(NotImplemented, lambda node: target(tuple(emitted)), NotImplemented, emit))
    return tuple(emitted)


SHAPES = {
    "a chain of one": {"passes": 1, "width": 1, "children": 1},
    "a chain of two": {"passes": 2, "width": 1, "children": 1},
    "two children": {"passes": 1, "width": 1, "children": 2},
    "as many children as tokens": {"passes": 1, "width": 1, "children": 3},
    "more children than tokens": {"passes": 1, "width": 1, "children": 5},
    "the likelier child has children": {"passes": 2, "width": 1, "children": 2},
    "both children have a child and a half": {"passes": 2, "width": 2, "children": 2, "room": 5},
    "a chain of three": {"passes": 3, "width": 1, "children": 1},
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("zeros", [0.0, 0.4], ids=["all possible", "some impossible"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_first_two_tokens_are_distributed_as_the_targets(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, int], zeros: float, seed: int
) -> None:
    target, draft = made_up(seed, 3, zeros), made_up(seed + 10, 3, zeros)
    emitted = law_of(monkeypatch, lambda: step(target, [draft], **shape))
    assert first_tokens(emitted, target, 2) == pytest.approx(of_target(target, 2), abs=1e-6)
    assert any(len(tokens) > 1 for tokens in emitted)


PAIRS = {name: SHAPES[name] for name in ("a chain of one", "a chain of two", "two children")}


@pytest.mark.parametrize("shape", PAIRS.values(), ids=PAIRS.keys())
@pytest.mark.parametrize("seed", [3, 4])
def test_two_draft_models_in_one_tree_keep_the_distribution(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, int], seed: int
) -> None:
    target, drafts = made_up(seed, 3), [made_up(seed + 10, 3, 0.3), made_up(seed + 20, 3)]
    emitted = law_of(monkeypatch, lambda: step(target, drafts, **shape))
    assert first_tokens(emitted, target, 2) == pytest.approx(of_target(target, 2), abs=1e-6)


def test_a_second_draft_model_is_tried_where_the_first_was_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def target(prefix: Prefix) -> torch.Tensor:
        return torch.tensor([0.5, 0.3, 0.2, 0.0]).double()

    def impossible(prefix: Prefix) -> torch.Tensor:
        return torch.tensor([0.0, 0.0, 0.0, 1.0]).double()

    emitted = law_of(monkeypatch, lambda: step(target, [impossible, target], passes=1, width=1, children=1))
    assert sum(chance for tokens, chance in emitted.items() if len(tokens) == 2) == pytest.approx(1.0, abs=1e-6)
    assert first_tokens(emitted, target, 2) == pytest.approx(of_target(target, 2), abs=1e-6)


def test_four_tokens_and_three_of_them_ahead_keep_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = made_up(5, 4, 0.2), made_up(15, 4, 0.2)
    emitted = law_of(monkeypatch, lambda: step(target, [draft], passes=2, width=1, children=2))
    assert first_tokens(emitted, target, 3) == pytest.approx(of_target(target, 3), abs=1e-6)


@pytest.mark.parametrize("max_depth", [0, 1, 2])
def test_a_draft_cut_where_the_output_ends_keeps_the_distribution(
    monkeypatch: pytest.MonkeyPatch, max_depth: int
) -> None:
    target, draft = made_up(6, 3), made_up(16, 3)
    emitted = law_of(monkeypatch, lambda: step(target, [draft], max_depth, passes=2, width=1, children=2))
    assert max(map(len, emitted)) == max_depth + 1
    assert first_tokens(emitted, target, 2) == pytest.approx(of_target(target, 2), abs=1e-6)


def test_a_draft_model_that_is_the_target_is_accepted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    target = made_up(7, 3)
    emitted = law_of(monkeypatch, lambda: step(target, [target], passes=2, width=1, children=1))
    assert sum(chance for tokens, chance in emitted.items() if len(tokens) == 3) == pytest.approx(1.0, abs=1e-6)


def test_a_draft_of_impossible_tokens_is_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def target(prefix: Prefix) -> torch.Tensor:
        return torch.tensor([0.5, 0.5, 0.0]).double()

    def draft(prefix: Prefix) -> torch.Tensor:
        return torch.tensor([0.0, 0.0, 1.0]).double()

    emitted = law_of(monkeypatch, lambda: step(target, [draft], passes=2, width=1, children=2))
    assert emitted == pytest.approx({(0,): 0.5, (1,): 0.5})


def test_more_draws_are_accepted_than_by_matching_the_targets_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = made_up(8, 3), made_up(18, 3)
    emitted = law_of(monkeypatch, lambda: step(target, [draft], passes=1, width=1, children=1))
    by_rejection = sum(chance for tokens, chance in emitted.items() if len(tokens) == 2)
    p, q = target(()), draft(())
    assert by_rejection == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-6)
    assert by_rejection > float((p * q).sum())


def tiny(noise: float = 0.0) -> PreTrainedModel:
    """A model of 11 tokens, and one that is like it but for some noise."""
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).eval()
        for weights in model.parameters():
            weights.data += noise * torch.randn_like(weights)
    return model


@pytest.mark.parametrize("shape", [{"depth": 2, "children": 1, "width": 1}, {"depth": 1, "children": 2, "width": 1}])
def test_models_in_the_engine_keep_the_distribution_of_generate(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, int]
) -> None:
    target, draft = tiny(), tiny(0.1)
    prompt = torch.tensor([[3, 4, 5]])
    options = {"max_new_tokens": 4, "do_sample": True, "temperature": 1.5, "top_k": 2}
    config = LookaheadConfig(
        proposers=(DraftModel(draft, **shape),), acceptance="rejection", draft="fixed", min_probability=0.0
    )
    accepted = 0

    def run() -> Prefix:
        nonlocal accepted
        engine = engine_of(target, prompt, **options, lookahead_config=config, pad_token_id=0, eos_token_id=None)
        tokens = [token for step_outputs in engine.run() for token in step_outputs[0].tokens.tolist()]
        accepted += engine.stats[0].accepted_tokens
        return tuple(tokens)

    law = law_of(monkeypatch, run)
    expected: dict[Prefix, float] = {(): 1.0}
    for _ in range(4):
        longer: dict[Prefix, float] = {}
        for tokens, chance in expected.items():
            with torch.inference_mode():
                scores = target(torch.tensor([prompt[0].tolist() + list(tokens)])).logits[0, -1]
            top = (scores / 1.5).topk(2)
            for token, share in zip(top.indices.tolist(), torch.softmax(top.values, -1).tolist(), strict=True):
                longer[(*tokens, token)] = chance * share
        expected = longer
    assert law == pytest.approx(expected, abs=1e-5)
    assert accepted > 0


def test_several_draws_come_in_the_order_of_draws_one_after_the_other() -> None:
    torch.manual_seed(0)
    weights = torch.tensor([0.5, 0.3, 0.2, 0.0])
    drawn = draw_several(weights.expand(200_000, -1), 3)
    assert (drawn.sort(1).values == torch.arange(3)).all()
    for first, second in product(range(3), repeat=2):
        if first != second:
            expected = float(weights[first] * weights[second] / (1 - weights[first]))
            share = float(((drawn[:, 0] == first) & (drawn[:, 1] == second)).double().mean())
            assert share == pytest.approx(expected, abs=0.006)


def test_no_more_is_drawn_than_can_be() -> None:
    drawn = draw_several(torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]), 5)
    assert drawn.shape == (2, 5)
    assert drawn[0].tolist() == [1, -1, -1, -1, -1]
    assert sorted(drawn[1, :2].tolist()) == [0, 1] and drawn[1, 2:].tolist() == [-1] * 3


def test_coins_and_draws_fall_as_weighted() -> None:
    torch.manual_seed(0)
    assert not any(coin(0.0) for _ in range(100)) and all(coin(1.0) for _ in range(100))
    assert sum(coin(0.3) for _ in range(20_000)) / 20_000 == pytest.approx(0.3, abs=0.015)
    counts = np.bincount([draw(torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]).double()) for _ in range(20_000)], minlength=5)
    assert (counts / 20_000).tolist() == pytest.approx([0.0, 0.25, 0.0, 0.75, 0.0], abs=0.015)


def test_a_draw_is_a_token_of_some_weight_whatever_the_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.tensor([0.0, 5e-324, 0.3, 0.0, 1e-12, 0.0]).double()
    ends = weights.cumsum(0) / weights.sum()
    for at in (0.0, *ends[1:5].tolist(), 1.0 - 2.0**-53):
        at = min(at, 1.0 - 2.0**-53)
        monkeypatch.setattr(torch, "rand", lambda *_, **options: torch.tensor(at, dtype=options["dtype"]))  # noqa: B023
        assert float(weights[draw(weights)]) > 0.0


def test_where_nothing_is_sampled_the_output_is_that_of_generate() -> None:
    target, prompt = tiny(), torch.tensor([[3, 4, 5], [7, 7, 8]])
    config = LookaheadConfig(proposers=(DraftModel(tiny(0.1)),), acceptance="rejection", draft="fixed")
    options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    got = target.generate(prompt, **options, custom_generate=lookahead.decode, lookahead_config=config)
    assert torch.equal(got, target.generate(prompt, **options))


def test_a_draft_model_without_learning_draws_the_same_tokens_from_the_same_seed() -> None:
    target, prompt = tiny(), torch.tensor([[3, 4, 5], [7, 7, 8]])
    outputs = []
    for _ in range(2):
        config = LookaheadConfig(proposers=(DraftModel(tiny(0.1)),), acceptance="rejection", draft="fixed")
        options = {"custom_generate": lookahead.decode, "lookahead_config": config, "pad_token_id": 0}
        torch.manual_seed(3)
        outputs.append(target.generate(prompt, do_sample=True, max_new_tokens=20, **options))
    assert torch.equal(*outputs)


def test_processors_of_every_kind_apply_and_scores_are_kept() -> None:
    target, prompt = tiny(), torch.tensor([[3, 4, 5]])
    config = LookaheadConfig(proposers=(DraftModel(tiny(0.1)),), acceptance="rejection", draft="fixed")
    torch.manual_seed(0)
    got = target.generate(
        prompt,
        do_sample=True,
        max_new_tokens=30,
        pad_token_id=0,
        bad_words_ids=[[4]],
        repetition_penalty=1.2,
        output_scores=True,
        return_dict_in_generate=True,
        custom_generate=lookahead.decode,
        lookahead_config=config,
    )
    assert len(got.scores) == 30 and 4 not in got.sequences[0, 3:].tolist()
    for step, scores in enumerate(got.scores):
        assert scores[0, got.sequences[0, 3 + step]] > -torch.inf


def test_names_draw_nothing_and_are_refused_beside_rejection() -> None:
    with pytest.raises(ConfigError, match="'prompt' does not: leave it out"):
        LookaheadConfig(acceptance="rejection")
    with pytest.raises(ConfigError, match="'corpus' does not"):
        LookaheadConfig(acceptance="rejection", proposers=(DraftModel(tiny()),), pool="some.lkp")
    with pytest.raises(ConfigError, match="acceptance must be exact or rejection or typical, got 'any'"):
        LookaheadConfig(acceptance="any")
