"""Drafting with trained heads: whatever they guess, the tokens are those of `model.generate`."""

from __future__ import annotations

import copy
import itertools
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import lookahead
from lookahead import Heads, LookaheadConfig
from lookahead.backend.cpu.product_bits import FEWEST_WEIGHTS
from lookahead.drafting.budget import Ema, PassTimes
from lookahead.errors import HeadsError
from lookahead.loading.loading import LoadedModel, load
from lookahead.loading.quantized import QuantizedLinear
from lookahead.model.facts import CACHE
from lookahead.model.model_state import state_of
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.plugins.heads import guess_tree
from lookahead.plugins.heads.eagle import EagleHead
from lookahead.plugins.heads.guess_tree import GuessTree
from lookahead.plugins.heads.head_files import drafter_of, fresh_rates, open_heads, write_heads
from lookahead.plugins.heads.medusa import MedusaHeads, independent_heads_tree
from lookahead.plugins.heads.training.train_heads import train_heads
from lookahead.plugins.heads.training.train_inputs import Settings
from tests.support.answered_prompts import write_answered
from tests.support.token_prompts import both

KINDS = ["medusa", "eagle3"]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "processed": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "warm": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "hot": {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9},
}


def drafting(*proposers: Any, **options: Any) -> LookaheadConfig:
    return LookaheadConfig(proposers=proposers, draft="fixed", min_probability=0.0, max_nodes=24, **options)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def data(looping_llama, tiny_tokenizer, tmp_path_factory):
    """Forty prompts with what the model answers."""
    prompts = ["".join(chr(97 + (i * j) % 23) for j in range(1, 6)) for i in range(40)]
    file = tmp_path_factory.mktemp("answers") / "data.jsonl"
    return write_answered(file, looping_llama, tiny_tokenizer, prompts, max_new_tokens=40)


@pytest.fixture(scope="module")
def trained(kind, data, looping_llama, tiny_tokenizer, tmp_path_factory):
    """A folder with heads that were shown how the model counts."""
    folder = tmp_path_factory.mktemp(kind)
    settings = Settings(kind=kind, heads=3, steps=20, batch_size=8, learning_rate=2e-2, draft_vocab=60)
    train_heads(LoadedModel(looping_llama, tiny_tokenizer), data, folder / "heads", settings)
    return folder / "heads"


@pytest.fixture
def prompt(tiny_tokenizer):
    return torch.tensor([tiny_tokenizer("efgzq")["input_ids"]])


@pytest.fixture
def ragged():
    rows = [[0, 0, 0, 7, 8], [3, 4, 5, 3, 4], [0, 9, 9, 9, 9]]
    mask = [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_prompt_gives_the_tokens_of_generate(looping_llama, trained, prompt, accepted, options):
    expected, got = both(looping_llama, drafting(Heads(trained)), input_ids=prompt, **options)
    assert torch.equal(got, expected)
    assert accepted[0] > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_ragged_batch_gives_the_tokens_of_generate(looping_llama, trained, ragged, accepted, options):
    heads = Heads(trained)
    for _ in range(2):  # the second call begins with what was learned in the first
        expected, got = both(looping_llama, drafting(heads), **ragged, **options)
        assert torch.equal(got, expected)
    assert accepted[0] > 0


def test_rows_that_end_at_different_steps_do_not_disturb_each_other(looping_llama, trained, ragged):
    expected, got = both(looping_llama, drafting(Heads(trained)), **ragged, do_sample=False, eos_token_id=[12, 30, 77])
    assert torch.equal(got, expected)


def test_heads_and_other_sources_make_one_tree(looping_llama, kind, trained, prompt, tiny_tokenizer):
    config = drafting("prompt", "recycled", Heads(trained))
    expected, got = both(looping_llama, config, input_ids=prompt, do_sample=False)
    assert torch.equal(got, expected)
    result = lookahead.generate(looping_llama, tiny_tokenizer, "efgzq", config=config, max_new_tokens=40)
    assert {kind.rstrip("3"), "prompt"} <= set(result.stats.drafted_by_source)


def test_a_conversation_from_a_filled_cache_gives_the_tokens_of_generate(looping_llama, trained, prompt):
    """The heads then see the end of the text alone."""
    config = drafting(Heads(trained))
    answers = []
    for extras in ({}, {"custom_generate": lookahead.decode, "lookahead_config": config}):
        cache, ids = DynamicCache(config=looping_llama.config), prompt
        for turn in ([9, 10, 11], [30], []):
            ids = looping_llama.generate(ids, **{CACHE: cache}, max_new_tokens=15, do_sample=False, **extras)
            ids = torch.cat((ids, torch.tensor([turn], dtype=torch.int64)), 1)
        answers.append(ids)
    assert torch.equal(*answers)


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
def test_drafting_that_turns_itself_off_and_on_loses_no_token(looping_llama, trained, ragged, is_sampled):
    config = LookaheadConfig(proposers=(Heads(trained),))
    expected, got = both(looping_llama, config, **ragged, do_sample=is_sampled, max_new_tokens=80)
    assert torch.equal(got, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [OPTIONS["greedy"], OPTIONS["warm"]], ids=["greedy", "warm"])
@pytest.mark.parametrize("how", ["random", "infinite"])
def test_heads_that_know_nothing_change_no_token(looping_llama, trained, ragged, tmp_path, how, options):
    spoiled = tmp_path / how
    shutil.copytree(trained, spoiled)
    (file,) = spoiled.glob("*.safetensors")
    tensors = load_file(file)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.normal_(std=3.0) if how == "random" else tensor.fill_(float("inf"))
    save_file(tensors, file)
    expected, got = both(looping_llama, drafting(Heads(spoiled)), **ragged, **options)
    assert torch.equal(got, expected)


def test_untrained_heads_change_no_token(looping_llama, ragged, tmp_path):
    write_heads(MedusaHeads.fresh(looping_llama, heads=5), tmp_path / "medusa", looping_llama)
    write_heads(EagleHead.fresh(looping_llama, range(0, 101, 3)), tmp_path / "eagle3", looping_llama)
    options = {**ragged, "max_new_tokens": 24, "pad_token_id": 0, "do_sample": False}
    expected = looping_llama.generate(**options)
    for folder in tmp_path.iterdir():
        config = drafting(Heads(folder))
        got = looping_llama.generate(**options, custom_generate=lookahead.decode, lookahead_config=config)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_larger_layers_of_heads_have_8_bits_on_a_cpu_and_guess_almost_as_in_full(kind, dtype, tmp_path):
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).eval()
    heads = MedusaHeads.fresh(model, heads=3) if kind == "medusa" else EagleHead.fresh(model, range(512))
    write_heads(heads, tmp_path, model)
    sources = Heads(tmp_path)
    # A prompt that begins with the padding token is a padded one, whose drafts round otherwise in half precision.
    expected, got = both(model, drafting(sources), input_ids=torch.arange(1, 10)[None], do_sample=False)
    assert torch.equal(got, expected)

    rounded = state_of(model).learned.of(sources, lambda: pytest.fail("the heads were not kept"))[1]
    sizes = {layer.in_features * layer.out_features for layer in rounded.modules() if isinstance(layer, nn.Linear)}
    assert any(isinstance(layer, QuantizedLinear) for layer in rounded.modules())
    assert max(sizes, default=0) < FEWEST_WEIGHTS
    guesses = []
    with torch.inference_mode():
        for heads in (rounded, open_heads(tmp_path, model)[1]):
            drafter = drafter_of(heads)(heads, model, fresh_rates(heads))
            states = [model.get_input_embeddings()(torch.arange(9))] * len(drafter.hidden_layers)
            drafter.read([0], [torch.arange(1, 10)], [torch.cat(states, -1)])
            tree = drafter.draft([0], 8)[0]
            first = tree.parents[1:] == 0
            guesses.append(dict(zip(tree.tokens[1:][first].tolist(), tree.draft_probs[1:][first], strict=True)))
    shared = guesses[0].keys() & guesses[1].keys()
    assert len(shared) >= len(guesses[1]) / 2
    assert all(guesses[0][token] == pytest.approx(guesses[1][token], rel=0.2) for token in shared)


@pytest.mark.parametrize(
    ("target_s", "draft_s", "levels"), [(1.0, 1e-3, 6), (1e-3, 1.0, 1), (0.0, 0.0, 1), (None, None, 6)]
)
def test_heads_run_again_only_where_the_tokens_gained_are_worth_the_time(
    looping_llama, kind, trained, target_s, draft_s, levels
):
    heads, times = open_heads(trained, looping_llama)[1], None
    if target_s is not None:
        times = PassTimes(Ema(0.0, value=draft_s, count=1), Ema(0.0, value=target_s, count=1))
    drafter = drafter_of(heads)(heads, looping_llama, fresh_rates(heads), times=times)
    states = [looping_llama.get_input_embeddings()(torch.arange(9))] * len(drafter.hidden_layers)
    with torch.inference_mode():
        drafter.read([0], [torch.arange(1, 10)], [torch.cat(states, -1)])
        drafter._guess = lambda logits, most: (torch.full((*logits.shape[:-1], 2), 0.5), logits.topk(2).indices)
        depths = drafter.draft([0], 24)[0].kinds[1:, 0]
    assert depths.max() + 1 == (levels if kind == "eagle3" else 3)


@pytest.mark.parametrize("levels", [2, 3, 6])
def test_a_level_of_heads_takes_the_time_of_its_pass_and_of_the_projection_behind_it(
    levels, looping_llama, monkeypatch
):
    """By a clock that goes on by 1 in a pass of the layer and by 8 in a projection to the vocabulary."""
    model = copy.deepcopy(looping_llama)
    heads = EagleHead.fresh(model, range(101))
    clock, times = [0.0], PassTimes(target=Ema(0.0, value=1e9, count=1))
    for module, seconds in ((heads.midlayer, 1.0), (heads.lm_head, 8.0)):
        module.register_forward_hook(lambda *_, seconds=seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(guess_tree.time, "perf_counter", lambda: clock[0])
    likeliest = itertools.chain([0.9] * (levels - 1), itertools.repeat(0.0))  # the last level ends it
    drafter = drafter_of(heads)(heads, model, fresh_rates(heads), times=times)
    states = [model.get_input_embeddings()(torch.arange(9))] * len(drafter.hidden_layers)
    with torch.inference_mode():
        drafter.read([0], [torch.arange(1, 10)], [torch.cat(states, -1)])
        drafter._guess = lambda logits, most: (
            torch.full((*logits.shape[:-1], 2), next(likeliest)), logits.topk(2).indices,
        )  # fmt: skip
        assert drafter.draft([0], 24)[0].kinds[1:, 0].max() + 1 == levels
    assert times.draft.value == 9.0 and times.draft.count == levels - 1


def test_medusa_heads_run_once_a_step_on_one_hidden_state_however_long_the_text_is(
    looping_llama, tmp_path, monkeypatch
):
    write_heads(MedusaHeads.fresh(looping_llama, heads=2), tmp_path, looping_llama)
    shapes = []
    forward = MedusaHeads.forward
    monkeypatch.setattr(
        MedusaHeads, "forward", lambda self, hidden: shapes.append(hidden.shape) or forward(self, hidden)
    )
    for length in (5, 200):
        ids = torch.arange(length)[None] % 16 + 3
        both(looping_llama, drafting(Heads(tmp_path)), input_ids=ids, do_sample=False, max_new_tokens=20)
    assert set(shapes) == {(1, 32)}


def test_heads_of_another_model_are_refused_when_it_is_decoded(tiny_llama, trained, prompt):
    with pytest.raises(HeadsError, match="heads of another model"):
        both(tiny_llama, drafting(Heads(trained)), input_ids=prompt, do_sample=False)


def _best(chances: np.ndarray, room: int) -> float:
    """The highest sum of chances of being reached that a tree of so many nodes can have, by trying all paths."""
    heads, width = chances.shape
    reach = [
        float(np.prod([chances[head, rank] for head, rank in enumerate(path)]))
        for depth in range(1, heads + 1)
        for path in itertools.product(range(width), repeat=depth)
    ]
    return sum(sorted(reach)[-room:])


def _falling(values: list[list[float]]) -> np.ndarray:
    return -np.sort(-np.array(values, np.float32), axis=1)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("room", [1, 5, 30])
def test_a_tree_of_guesses_promises_as_much_as_any_of_its_size(seed, room):
    rng = np.random.default_rng(seed)
    promised = _falling(rng.random((3, 5)) ** rng.integers(1, 6))
    tokens = np.stack([rng.permutation(50)[:5] for _ in range(3)]).astype(np.int32)
    tree = independent_heads_tree(tokens, promised, AcceptanceTable(3), room)
    for node in range(1, len(tree.tokens)):
        head, rank = tree.kinds[node]
        assert tree.tokens[node] == tokens[head, rank] and tree.draft_probs[node] == promised[head, rank]
        assert tree.parents[node] < node and (head == 0) == (tree.parents[node] == 0)
    drafted, parents, probabilities = tree.best(7, AcceptanceTable(3), room)
    reach = np.ones(len(drafted))
    for node in range(1, len(reach)):
        reach[node] = reach[parents[node]] * probabilities[node]
    assert len(drafted) == 1 + room and drafted[0] == 7
    assert reach[1:].sum() == pytest.approx(_best(promised.clip(max=0.99), room), rel=1e-5)


def _chain(*promised: float) -> GuessTree:
    """One guess of each head, tokens 3, 4, ..."""
    tokens = np.arange(3, 3 + len(promised), dtype=np.int32)[:, None]
    return independent_heads_tree(
        tokens, _falling([[p] for p in promised]), AcceptanceTable(len(promised)), len(promised)
    )


def _says(rates: AcceptanceTable, *promised: float) -> list[float]:
    """What first guesses of each head are thought to be worth."""
    kinds = np.array([[head, 0] for head in range(len(promised))], np.int32)
    return rates.calibrate(kinds, np.array(promised, np.float32)).tolist()


def _learn(rates: AcceptanceTable, tree: GuessTree, emitted: list[int]) -> None:
    rates.learn(tree.parents, tree.tokens, tree.kinds, tree.draft_probs, np.array(emitted, np.int32))


def test_guesses_without_a_chance_are_no_nodes():
    tree = independent_heads_tree(np.array([[4, 5]], np.int32), _falling([[0.5, 0.0]]), AcceptanceTable(1), 10)
    assert tree.best(1, AcceptanceTable(1), 10)[0].tolist() == [1, 4]


def test_a_guess_of_heads_that_overflow_is_not_drafted_and_spoils_no_rate():
    rates = AcceptanceTable(1)
    tree = independent_heads_tree(np.array([[3]], np.int32), np.array([[np.nan]], np.float32), rates, 10)
    assert tree.best(0, rates, 10)[0].tolist() == [0]
    _learn(rates, tree, [3])
    for probability in (0.005, 0.5, 1.0):
        assert np.isfinite(_says(rates, probability)).all() and _says(rates, probability)[0] > 0


def test_rates_find_out_what_a_guess_is_worth():
    """A head that says 0.5 and is right nine times in ten is believed to be right nine times in ten."""
    rates, rng = AcceptanceTable(2), np.random.default_rng(0)
    assert _says(rates, 0.5, 0.2) == pytest.approx([0.5, 0.2])
    for _ in range(500):
        right = [3 if rng.random() < 0.9 else 9, 4 if rng.random() < 0.05 else 9]
        _learn(rates, _chain(0.5, 0.2), right)
    assert _says(rates, 0.5, 0.2) == [pytest.approx(0.9, abs=0.06), pytest.approx(0.05, abs=0.04)]


def test_rates_follow_a_change_of_text():
    """A head that was never right, and then always is, is soon believed again."""
    rates = AcceptanceTable(1)
    for emitted in [[9]] * 500 + [[3]] * 150:
        _learn(rates, _chain(0.5), emitted)
    assert _says(rates, 0.5)[0] > 0.5


def test_a_guess_whose_parent_was_wrong_is_no_trial():
    rates = AcceptanceTable(2)
    for _ in range(50):
        _learn(rates, _chain(0.5, 0.2), [8, 4])
    assert _says(rates, 0.5, 0.2) == [pytest.approx(0.04, abs=0.02), pytest.approx(0.2)]


def test_trained_heads_draft_for_their_model(summarizer_path):
    model, tokenizer = load(summarizer_path, device="cpu")
    text = "<doc> The old man went down to the river. He had lost his hat, and the wind was cold. Nobody saw him.<sum>"
    ids = tokenizer(text, return_tensors="pt").input_ids
    config = drafting(Heads(summarizer_path / "heads" / "eagle3"))
    expected, got = both(model, config, input_ids=ids, do_sample=False, max_new_tokens=24)
    assert torch.equal(got, expected)
    stats = lookahead.generate(model, tokenizer, text, config=config, max_new_tokens=24).stats
    assert stats.accepted_tokens > 0


def test_a_name_that_no_heads_have_is_refused_with_those_there_are(looping_llama, prompt):
    with pytest.raises(HeadsError, match="hydra: neither a folder of heads nor 'native'"):
        both(looping_llama, drafting(Heads("hydra")), input_ids=prompt, do_sample=False)


def test_heads_of_another_model_are_refused(looping_llama, prompt, summarizer_path):
    with pytest.raises(HeadsError, match="heads of another model"):
        both(looping_llama, drafting(Heads(summarizer_path / "heads" / "eagle3")), input_ids=prompt, do_sample=False)
