"""Choosing a draft model: each is measured on the same prompts, and none has to be taken."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

from lookahead import DecodingStats, DraftModel, LookaheadConfig
from lookahead.backend.calibration import pass_seconds
from lookahead.cli.app import app
from lookahead.decoding.comparison import PROMPTS, Score, compare
from lookahead.decoding.draft_selection import NAMES, PLAIN, pick_draft
from lookahead.decoding.head_costs import KINDS, HeadCost, head_cost, random_heads, untrained_cost
from lookahead.errors import HeadsError, UnsupportedModelError
from lookahead.model.model_state import state_of
from lookahead.plugins.heads.head_files import write_heads
from lookahead.plugins.heads.independent_heads import MedusaHeads, MtpHeads
from lookahead.plugins.heads.induction_init import fresh_fused
from tests.support.families import FAMILIES, Family, build, cases

TINY: dict[str, Any] = {"vocab_size": 101, "num_hidden_layers": 2, "decoder_start_token_id": 0}


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, looping_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> dict[str, Path]:
    """A target, a draft model, and one of another vocabulary."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = looping_llama.config
    models = {
        "target": looping_llama,
        "draft": LlamaForCausalLM(type(config)(**{**config.to_dict(), "num_hidden_layers": 1})),
        "stranger": LlamaForCausalLM(type(config)(**{**config.to_dict(), "vocab_size": 300, "num_hidden_layers": 1})),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    other = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer, unk_token="<unk>")
    other.add_tokens(["<new>"])
    other.save_pretrained(root / "stranger")
    return {name: root / name for name in models}


def test_every_way_decodes_every_prompt_and_learns_for_itself_alone(
    looping_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    before = state_of(looping_llama).learned
    configs = {
        "plain": LookaheadConfig(proposers=()),
        "first": LookaheadConfig(proposers=("outputs",), draft="fixed"),
        "second": LookaheadConfig(proposers=("outputs",), draft="fixed"),
    }
    scores = compare(
        looping_llama,
        tiny_tokenizer,
        ["abcab", "xyz"],
        configs,
        max_new_tokens=20,
        do_sample=True,
    )
    assert state_of(looping_llama).learned is before
    assert {(score.prompts, score.identical) for score in scores.values()} == {(2, 2)}
    assert scores["plain"].stats.mean_acceptance_length == 1.0
    assert scores["first"].stats.drafted_tokens == scores["second"].stats.drafted_tokens > 0


def test_a_score_adds_up() -> None:
    score = Score()
    assert (score.drafted_per_step, score.stats.tokens_per_s) == (0.0, 0.0)
    assert score.to_dict()["draft_acceptance_rate"] == 0.0
    passes = {"target_forwards": 5, "drafted_tokens": 20}
    first = DecodingStats(accepted_tokens=5, acceptance_histogram=Counter({2: 5}), decode_s=2.0, **passes)
    score.add(first, is_identical=True, is_loop=False)
    second = DecodingStats(accepted_tokens=10, acceptance_histogram=Counter({3: 5}), decode_s=3.0, **passes)
    score.add(second, is_identical=False, is_loop=True)
    assert score.stats_without_loops == first
    assert score.to_dict() == {
        "mean_acceptance_length": 2.5,
        "tokens_per_s": 5.0,
        "drafted_per_step": 4.0,
        "draft_acceptance_rate": 0.375,
        "identical": 1,
        "loops": 1,
        "prompts": 2,
    }


def picked(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], model: Any, tokenizer: Any) -> Any:
    """What is picked where decoding takes so many seconds."""

    def told(*arguments: Any, **options: Any) -> dict[str, Score]:
        return {
            name: Score(stats=DecodingStats(acceptance_histogram=Counter({1: 100}), decode_s=seconds[name]))
            for name in arguments[3]
        }

    monkeypatch.setattr("lookahead.decoding.draft_selection.compare", told)
    return pick_draft(model, tokenizer, {"a": DraftModel(model), "b": DraftModel(model)})


def test_the_fastest_is_picked_and_none_unless_one_is_faster_than_none(
    tiny_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def best(plain: float, names: float, a: float, b: float) -> str:
        seconds = {PLAIN: plain, NAMES: names, "a": a, "b": b}
        return picked(monkeypatch, seconds, tiny_llama, tiny_tokenizer).best

    assert best(4.0, 3.0, 2.0, 1.0) == "b"
    assert best(4.0, 3.0, 1.0, 2.0) == "a"
    assert best(4.0, 3.0, 2.99, 5.0) == NAMES
    assert best(1.0, 3.0, 2.0, 5.0) == PLAIN


def test_a_pass_takes_time(tiny_llama: PreTrainedModel) -> None:
    assert pass_seconds(tiny_llama) > 0.0


def test_the_command_measures_and_recommends(folders: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcab\n\nxyz\n")
    options = ["--model", str(folders["target"]), "--candidates", str(folders["draft"]), "--prompts", str(prompts)]
    run = CliRunner().invoke(app, ["pick-draft", *options, "--max-new-tokens", "12", "--threads", "1", "--json"])
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    assert set(told["candidates"]) == {PLAIN, NAMES, str(folders["draft"])}
    assert told["best"] in told["candidates"] and told["target_pass_ms"] > 0
    for name, candidate in told["candidates"].items():
        assert candidate["identical"] == candidate["prompts"] == 2
        assert (candidate["parameters"] > 0) == (candidate["cost"] > 0) == (name == str(folders["draft"]))
    rate = max(told["candidates"][name]["tokens_per_s"] for name in (PLAIN, NAMES))
    assert {kind: each["levels"] for kind, each in told["heads"].items()} == {"eagle3": 6, "medusa": 4}
    for each in told["heads"].values():
        took = [each["first_level_ms"] + level * each["level_ms"] for level in range(each["levels"])]
        assert each["tokens_to_pay"] == pytest.approx([1e-3 * ms * rate for ms in took], rel=0.01, abs=1e-3)
    run = CliRunner().invoke(app, ["pick-draft", *options, "--max-new-tokens", "12", "--temperature", "0.8"])
    assert run.exit_code == 0, run.output
    assert "fastest: " in run.stdout and "2/2" in run.stdout
    for label in KINDS.values():
        assert re.search(rf"{label} heads: a level takes [\d.]+ ms .* they pay if they add [\d.]+ tokens", run.stdout)


def test_heads_are_candidates_beside_draft_models_or_alone_and_there_need_be_none(
    folders: dict[str, Path], tmp_path: Path, looping_llama: PreTrainedModel
) -> None:
    write_heads(MedusaHeads.fresh(looping_llama, heads=3), tmp_path / "medusa", looping_llama)
    write_heads(random_heads("eagle3", looping_llama), tmp_path / "eagle3", looping_llama)
    heads = [str(tmp_path / "medusa"), str(tmp_path / "eagle3")]
    (tmp_path / "prompts.txt").write_text("abcab\n")
    options = ["--model", str(folders["target"]), "--prompts", str(tmp_path / "prompts.txt"), "--threads", "1"]
    for names in (heads, [heads[0], str(folders["draft"])], []):
        given = ["--candidates", ",".join(names)] if names else []
        run = CliRunner().invoke(app, ["pick-draft", *options, *given, "--max-new-tokens", "12", "--json"])
        assert run.exit_code == 0, run.output
        told = json.loads(run.stdout)["candidates"]
        assert list(told) == [PLAIN, NAMES, *names]
        for name in names:
            assert told[name]["identical"] == 1 and told[name]["parameters"] > 0 < told[name]["cost"]


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "mtp"])
def test_heads_take_the_time_of_their_passes_and_projections(kind: str, looping_llama: PreTrainedModel) -> None:
    """By a clock that goes on by 1 in a pass of a layer and by 8 in a projection to the vocabulary."""
    model, clock = copy.deepcopy(looping_llama), [0.0]
    heads: Any = MtpHeads.fresh(model, heads=2) if kind == "mtp" else random_heads(kind, model)
    layers = {"medusa": [], "eagle3": [getattr(heads, "midlayer", None)], "mtp": list(getattr(heads, "heads", []))}
    projection = {"medusa": lambda: heads[0][-1], "eagle3": lambda: heads.lm_head, "mtp": lambda: model.lm_head}
    for module, seconds in [(projection[kind](), 8.0), *((each, 1.0) for each in layers[kind])]:
        module.register_forward_hook(lambda *_, seconds=seconds: clock.__setitem__(0, clock[0] + seconds))

    def timer(work: Callable[[], object]) -> float:
        begin = clock[0]
        work()
        return clock[0] - begin

    cost = head_cost(heads, model, levels=4 if kind == "medusa" else None, timer=timer)
    # EAGLE-3 reads by a pass of its layer; both MTP heads run at once, and are projected together.
    assert cost == {"medusa": HeadCost(8, 8, 4), "eagle3": HeadCost(9, 9, 6), "mtp": HeadCost(5, 5, 2)}[kind]


def test_a_target_with_an_encoder_is_refused_before_anything_is_measured(tiny_tokenizer: Any) -> None:
    model = T5ForConditionalGeneration(T5Config(**TINY, d_model=16, d_kv=8, d_ff=16, num_heads=2))
    with pytest.raises(UnsupportedModelError, match="has an encoder, so it takes no heads"):
        pick_draft(model, tiny_tokenizer, {})


def test_heads_that_add_the_tokens_to_pay_are_as_fast_as_none() -> None:
    cost, tokens, pass_s = HeadCost(0.003, 0.002, 6), 2.5, 0.05
    for levels in range(1, 7):
        gain = cost.tokens_to_pay(levels, tokens / pass_s)
        assert (tokens + gain) / (pass_s + cost.seconds(levels)) == pytest.approx(tokens / pass_s)


@pytest.mark.parametrize("draft_vocab", [40, 32_000])
def test_random_heads_are_as_large_as_those_to_be_trained_and_draw_no_random_number(
    looping_llama: PreTrainedModel, draft_vocab: int
) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    made = {kind: random_heads(kind, looping_llama, draft_vocab) for kind in KINDS}
    assert torch.equal(torch.get_rng_state(), before)
    trained = {
        "eagle3": fresh_fused(looping_llama, range(min(draft_vocab, 101))),
        "medusa": MedusaHeads.fresh(looping_llama, heads=1),
    }
    for kind, heads in made.items():
        shapes = {name: each.shape for name, each in heads.state_dict().items()}
        assert shapes == {name: each.shape for name, each in trained[kind].state_dict().items()}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: T5ForConditionalGeneration(T5Config(**TINY, d_model=16, d_kv=8, d_ff=16, num_heads=2)),
            {"eagle3": "T5ForConditionalGeneration has an encoder", "medusa": "has an encoder"},
        ),
        (
            lambda: MambaForCausalLM(MambaConfig(**TINY, hidden_size=16)),
            {"eagle3": "MambaForCausalLM has no attention, so it takes heads of Medusa alone"},
        ),
        (
            lambda: OPTForCausalLM(OPTConfig(**TINY, hidden_size=16, word_embed_proj_dim=8, num_attention_heads=2)),
            {"eagle3": "OPTForCausalLM reads 8 numbers, and its layers have 16", "medusa": "reads 8 numbers"},
        ),
    ],
    ids=["encoder", "no attention", "narrow head"],
)
def test_a_model_that_takes_no_heads_of_a_kind_is_told_why(
    make: Callable[[], PreTrainedModel], said: dict[str, str]
) -> None:
    model = make().eval()
    for kind in KINDS:
        if kind not in said:
            assert untrained_cost(kind, model).level_s > 0
            continue
        with pytest.raises(HeadsError, match=said[kind]):
            untrained_cost(kind, model)


@pytest.mark.parametrize("family", cases(FAMILIES[name] for name in ("Gemma3n", "Gemma4", "Gemma4-MoE")))
def test_where_layers_differ_in_size_heads_are_those_of_the_first(family: Family) -> None:
    model = build(family)
    first = model.model.layers[0]
    made = random_heads("eagle3", model).state_dict()
    for name, own in (
        ("k_proj", first.self_attn.k_proj),
        ("o_proj", first.self_attn.o_proj),
        ("up_proj", first.mlp.up_proj),
    ):
        (shape,) = (each.shape for key, each in made.items() if key.endswith(f"{name}.weight"))
        assert shape[0] == own.weight.shape[0]
    assert untrained_cost("eagle3", model).level_s > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--candidates", "OTHER"], "heads of another model"),
        (["--candidates", "PICKLE"], "a pickle, which could run any code and is not opened"),
        (["--candidates", "native"], "has no MTP layers that transformers loads"),
        (["--candidates", " , "], "candidates must be models, each named once"),
        (["--candidates", "a,b,a"], "each named once, got 'a,b,a'"),
        (["--candidates", "./nowhere"], "does not exist"),
        (["--candidates", "~no-such-user/heads"], "does not exist"),
        (["--candidates", "DRAFT", "--prompts", "./nowhere.txt"], "nowhere.txt"),
        (["--candidates", "DRAFT", "--prompts", "EMPTY"], "holds no prompt"),
        (["--candidates", "STRANGER"], "stranger' gives other ids than the target's"),
    ],
)
def test_the_command_says_what_is_wrong(
    folders: dict[str, Path], tmp_path: Path, tiny_llama: PreTrainedModel, options: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    places = {"DRAFT": folders["draft"], "STRANGER": folders["stranger"], "EMPTY": tmp_path / "empty.txt"}
    places |= {"OTHER": tmp_path / "other", "PICKLE": tmp_path / "pickle"}
    write_heads(random_heads("eagle3", tiny_llama), places["OTHER"], tiny_llama)
    places["PICKLE"].mkdir()
    (places["PICKLE"] / "config.json").write_text('{"medusa_num_heads": 3}')
    (places["PICKLE"] / "medusa_lm_head.pt").write_bytes(b"")
    arguments = [str(places.get(option, option)) for option in options]
    run = CliRunner().invoke(app, ["pick-draft", "--model", str(folders["target"]), *arguments])
    assert run.exit_code == 2
    assert message in " ".join(run.stderr.split())


def test_a_prompt_that_is_too_long_names_no_option_that_the_command_lacks(
    folders: dict[str, Path], tmp_path: Path, looping_llama: PreTrainedModel
) -> None:
    (tmp_path / "long.txt").write_text("abc " * looping_llama.config.max_position_embeddings)
    options = ["--model", str(folders["target"]), "--candidates", str(folders["draft"])]
    run = CliRunner().invoke(app, ["pick-draft", *options, "--prompts", str(tmp_path / "long.txt")])
    assert run.exit_code == 2
    assert " ".join(run.stderr.split()).endswith("; shorten it")


def test_generate_drafts_with_the_model_that_is_named(folders: dict[str, Path]) -> None:
    options = ["generate", "abcab", "--model", str(folders["target"]), "--max-new-tokens", "20", "--threads", "1"]
    draft = ["--draft-model", str(folders["draft"]), "--stats"]
    plain, drafted, alone = (
        CliRunner().invoke(app, [*options, *more]) for more in ([], draft, [*draft, "--proposers", "none"])
    )
    assert plain.exit_code == drafted.exit_code == alone.exit_code == 0, drafted.output
    assert plain.stdout == drafted.stdout == alone.stdout
    refused = CliRunner().invoke(app, [*options, "--draft-model", str(folders["stranger"])])
    assert refused.exit_code == 2 and "gives other ids than the target's" in " ".join(refused.stderr.split())


@pytest.mark.filterwarnings("default")
def test_a_draft_model_larger_than_its_target_is_told_of_in_one_line(folders: dict[str, Path]) -> None:
    options = ["generate", "abcab", "--model", str(folders["draft"]), "--max-new-tokens", "4", "--threads", "1"]
    run = CliRunner().invoke(app, [*options, "--draft-model", str(folders["target"])])
    assert run.exit_code == 0, run.output
    told = [line for line in run.stderr.splitlines() if "hardly pay" in line]
    assert len(told) == 1 and told[0].startswith("warning: the draft model has ") and " ms, " in told[0]
    assert ".py:" not in told[0]


def test_there_are_prompts_for_those_who_bring_none() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) > 3
