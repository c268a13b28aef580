"""Beam search finds what transformers' own finds: sequences, scores, beams, whatever the model and the options."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import prune
from transformers import DynamicCache, LogitsProcessor, MaxTimeCriteria, PreTrainedModel, StoppingCriteriaList
from typer.testing import CliRunner

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.cpu import linears
from lookahead.cli.app import app
from lookahead.errors import ConfigError, PromptError, UnsupportedModelError
from lookahead.model.facts import CACHE, MARKS_CACHES, cache_in
from lookahead.model.model_state import recognise
from lookahead.plugins.beams import beam_search, beam_tree
from lookahead.plugins.beams.beam_search import has_bits_of_beams
from lookahead.summarization.summarizer import Summarizer
from tests.support.beam_search import ONE, OPTIONS, RAGGED, assert_same, found
from tests.support.families import ENCODER_DECODERS, FAMILIES, Family, build, cases
from tests.support.stateful import Grammar

TREES = [family for family in FAMILIES.values() if family.decoded == "trees"]

TRUSTING = LookaheadConfig(trust_user_code=True)  # for the hooks that count here


@pytest.mark.covering(1)
@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("family", cases([*TREES, *ENCODER_DECODERS.values()], by_feature=True))
def test_every_family_finds_the_sequences_of_transformers(family: Family, inputs: dict[str, Any]) -> None:
    assert_same(build(family), **inputs)


@pytest.mark.covering(2)
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "T5"])
def test_the_options_of_beam_search_are_heeded(
    name: str, inputs: dict[str, Any], options: dict[str, Any], count: int
) -> None:
    assert_same(build({**FAMILIES, **ENCODER_DECODERS}[name]), **inputs, **options, num_beams=count)


@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
def test_trees_that_lose_dead_nodes_often_go_on_as_before(
    inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tiny_llama: PreTrainedModel
) -> None:
    dropped = []
    drop = beam_tree.BeamTree.drop_dead
    monkeypatch.setattr(beam_tree, "DEAD_NODES", 2)
    monkeypatch.setattr(beam_tree.BeamTree, "drop_dead", lambda self: dropped.append(drop(self)) or dropped[-1])
    assert_same(tiny_llama, **inputs, max_new_tokens=60, eos_token_id=None, do_sample=True)
    assert sum(len(kept) - live for kept, live in dropped) > 20, "nothing was ever shared by all beams"


@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
def test_the_slots_of_a_search_are_little_more_than_its_trees_hold(
    inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tiny_llama: PreTrainedModel
) -> None:
    sizes: list[tuple[int, int]] = []
    score = beam_tree.BeamModel._score

    def scored(search: beam_tree.BeamModel) -> None:
        score(search)
        slots = search._cache.slots
        sizes.append((slots.capacity, max(slots.lengths + [len(tree) for tree in search._trees])))

    monkeypatch.setattr(beam_tree.BeamModel, "_score", scored)
    assert_same(tiny_llama, **inputs, num_beams=8, max_new_tokens=60, eos_token_id=None)
    begun = inputs["input_ids"].shape[1] + 60 + beam_tree.DEAD_NODES
    assert sizes[-1][0] > begun, "the slots never grew"
    assert all(
        needed <= capacity < max(begun + 1, most + beam_tree.DEAD_NODES + 1)
        for (capacity, needed), most in zip(sizes, np.maximum.accumulate([needed for _, needed in sizes]), strict=True)
    )


def test_a_stateful_processor_sees_the_calls_of_transformers(tiny_llama: PreTrainedModel) -> None:
    class Recording(LogitsProcessor):
        def __init__(self) -> None:
            self.seen: list[list[list[int]]] = []

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            self.seen.append(input_ids.tolist())
            return scores - 0.1 * len(self.seen) * (torch.arange(scores.shape[1]) % 3)

    seen = []
    for extra in ({}, {"custom_generate": lookahead.decode}):
        processor = Recording()
        tiny_llama.generate(
            **RAGGED, num_beams=3, max_new_tokens=9, do_sample=False, logits_processor=[processor], **extra
        )
        seen.append(processor.seen)
    assert seen[0] == seen[1]
    assert_same(tiny_llama, **RAGGED, logits_processor=[Grammar()])


def test_more_sequences_than_beams_are_refused_as_transformers_refuses_them(tiny_llama: PreTrainedModel) -> None:
    said = []
    for extra in ({}, {"custom_generate": lookahead.decode}):
        with pytest.raises(ValueError, match="num_return_sequences") as caught:
            found(tiny_llama, **ONE, num_beams=2, num_return_sequences=3, **extra)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_one_allowed_token_gives_beams_that_are_alike(tiny_llama: PreTrainedModel) -> None:
    steps = [31, 9, 77, 5]
    model = copy.deepcopy(tiny_llama).to(torch.bfloat16)
    for each in (tiny_llama, model):
        allowed = {"prefix_allowed_tokens_fn": lambda _, ids: [steps[len(ids) % 4]] if len(ids) < 15 else range(3, 90)}
        assert_same(each, **ONE, **allowed, eos_token_id=None, max_new_tokens=9)


def test_beams_that_outnumber_the_first_tokens_are_searched(tiny_llama: PreTrainedModel) -> None:
    assert_same(tiny_llama, **ONE, num_beams=90, max_new_tokens=3)


def test_a_prompt_in_bf16_has_the_bits_of_transformers_where_single_sequences_do() -> None:
    model = build(FAMILIES["Llama"]).to(torch.bfloat16)
    if not has_bits_of_beams(model, 3):
        pytest.skip("on this processor the bits of transformers cannot be had")
    expected, got = (
        found(model, **ONE, max_new_tokens=40, eos_token_id=None, output_logits=True, **extra)
        for extra in ({}, {"custom_generate": lookahead.decode})
    )
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert all(torch.equal(*pair) for pair in zip(got.logits, expected.logits, strict=True))


@pytest.mark.parametrize("is_pruned", [True, False], ids=["pruned", "strided"])
def test_a_weight_in_bf16_that_is_computed_or_lies_transposed_is_searched_with(is_pruned: bool) -> None:
    model = build(FAMILIES["Llama"]).to(torch.bfloat16)
    layer: Any = model.model.layers[0].mlp.up_proj
    if is_pruned:
        prune.random_unstructured(layer, "weight", 0.5)
    else:
        layer.weight.data = layer.weight.data.T.contiguous().T
    got = found(model, **ONE, max_new_tokens=8, custom_generate=lookahead.decode)
    assert got.sequences.tolist() == found(model, **ONE, max_new_tokens=8).sequences.tolist()


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_long_prompt_in_bf16_is_read_once_where_its_products_allow_it(
    is_alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(FAMILIES["Llama"]).to(torch.bfloat16)
    ids = torch.randint(3, 101, (1, beam_search.LONG_PROMPT + 9), generator=torch.Generator().manual_seed(0))
    read: list[torch.Size] = []
    model.register_forward_pre_hook(lambda _, args, inputs: read.append(inputs["input_ids"].shape), with_kwargs=True)
    recognise(model, trusted=True)
    if not has_bits_of_beams(model, 3) or not beam_search.has_bits_of_copies(model, ids.shape[1], 3):
        pytest.skip("on this processor the bits of transformers cannot be had")
    if not is_alike:
        monkeypatch.setattr(beam_search, "has_bits_of_copies", lambda *_: False)
    options: dict[str, Any] = {"input_ids": ids, "max_new_tokens": 20, "eos_token_id": None, "output_logits": True}
    expected = found(model, **options)
    read.clear()
    pasts, copy = list[Any](), beam_search.copy_prefix_from

    def seen(past: Any, *rest: Any, **more: Any) -> None:
        pasts.append(past)
        copy(past, *rest, **more)

    monkeypatch.setattr(beam_search, "copy_prefix_from", seen)
    got = found(model, **options, custom_generate=lookahead.decode, lookahead_config=TRUSTING)
    assert [layer.keys.numel() for past in pasts for layer in past.layers] == [0, 0]  # not held twice
    assert [each[0] for each in read if each[1] == ids.shape[1]] == [1 if is_alike else 3]
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert all(torch.equal(*pair) for pair in zip(got.logits, expected.logits, strict=True))


def test_products_in_half_precision_run_over_the_rows_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other rows change few bits: that no token differs does not show that they are right.
    model: Any = build(FAMILIES["Llama"]).to(torch.bfloat16)
    ids = torch.arange(beam_search.LONG_PROMPT + 9)[None] + 3
    monkeypatch.setattr(beam_search, "has_bits_of_beams", lambda *_: True)
    monkeypatch.setattr(beam_search, "has_bits_of_copies", lambda *_: True)
    options: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": None, "custom_generate": lookahead.decode}
    options["lookahead_config"] = TRUSTING
    heads: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0][..., 0].numel()))
    found(model, input_ids=ids, **options)  # the first call probes the model
    rows: list[int] = []
    own = linears.by_torch
    monkeypatch.setattr(linears, "by_torch", lambda x, *rest: rows.append(x[..., 0].numel()) or own(x, *rest))
    found(model, input_ids=ids, **options)
    assert heads[-5:] == [3] * 5
    assert set(rows) == {3, ids.shape[1]}


def test_threads_that_share_a_model_search_as_they_do_alone(tiny_llama: PreTrainedModel) -> None:
    calls: list[dict[str, Any]] = [{**ONE}, {**RAGGED}, {**ONE, "num_beams": 5}, {**ONE, "length_penalty": 2.0}]
    expected = [found(tiny_llama, **call, max_new_tokens=30).sequences.tolist() for call in calls]

    def search(call: dict[str, Any]) -> Any:
        options = {"max_new_tokens": 30, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": [5, 9]}
        return tiny_llama.generate(**{**options, **call}, custom_generate=lookahead.decode).tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(search, calls)) == expected


@pytest.mark.parametrize("inputs", [ONE, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.parametrize("tokens", [1, 12])
def test_what_comes_back_may_be_changed_in_place_and_holds_the_cache_of_the_beams(
    name: str, inputs: dict[str, Any], tokens: int
) -> None:
    model = build(FAMILIES[name])
    expected = found(model, **inputs, max_new_tokens=tokens)
    out = found(model, **inputs, max_new_tokens=tokens, custom_generate=lookahead.decode)
    padding = (inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) == 0).sum(1).repeat_interleave(3)
    for mine, theirs in zip(out[CACHE].layers, expected[CACHE].layers, strict=True):
        assert mine.keys.shape == theirs.keys.shape
        for row, pad in enumerate(padding.tolist()):
            pad = max(0, pad - (out[CACHE].get_seq_length() - mine.keys.shape[2]))
            for ours, other in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                torch.testing.assert_close(ours[row, :, pad:], other[row, :, pad:], rtol=1e-3, atol=1e-4)
    out.sequences[0, 0] = 1
    out[CACHE].layers[0].keys.add_(1)


def test_under_the_switch_beams_are_searched_without_a_warning(
    tiny_llama: PreTrainedModel, recwarn: pytest.WarningsRecorder
) -> None:
    expected = found(tiny_llama, **RAGGED)
    with lookahead.enable(tiny_llama):
        got = found(tiny_llama, **RAGGED)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert not [each for each in recwarn if "lookahead" in str(each.message) or "alone" in str(each.message)]


@pytest.mark.parametrize("name", ["Bloom", "Mamba"])
def test_a_model_whose_beams_are_no_tree_is_searched_by_transformers_with_a_warning(name: str) -> None:
    model = build(FAMILIES[name])
    expected = outcome(model)
    with pytest.warns(UserWarning, match="as transformers does"):
        assert outcome(model, custom_generate=lookahead.decode) == expected
    with pytest.raises(UnsupportedModelError, match="leave out window=7"):
        found(model, **ONE, custom_generate=lookahead.decode, lookahead_config=LookaheadConfig(window=7))


def outcome(model: PreTrainedModel, **extra: Any) -> Any:
    """The sequences, or the class of the error."""
    try:
        return found(model, **ONE, **extra).sequences.tolist()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        pytest.param({CACHE: DynamicCache()}, CACHE, marks=pytest.mark.skipif(not MARKS_CACHES, reason="is filled")),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"position_ids": torch.arange(12)[None] + 3}, "position_ids"),
    ],
)
def test_options_that_beams_do_not_serve_are_named_and_left_to_transformers(
    tiny_llama: PreTrainedModel, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        found(tiny_llama, **ONE, **options, custom_generate=lookahead.decode)
    expected = found(tiny_llama, **ONE, **options).sequences
    with lookahead.enable(tiny_llama), pytest.warns(UserWarning, match="transformers alone"):
        assert torch.equal(found(tiny_llama, **ONE, **options).sequences, expected)


@pytest.mark.skipif(MARKS_CACHES, reason="is refused by name")
def test_an_empty_cache_not_marked_as_the_callers_is_filled_as_by_transformers(
    tiny_llama: PreTrainedModel,
) -> None:
    theirs, ours = DynamicCache(), DynamicCache()
    expected = found(tiny_llama, **ONE, **{CACHE: theirs}).sequences
    got = found(tiny_llama, **ONE, **{CACHE: ours}, custom_generate=lookahead.decode).sequences
    assert torch.equal(got, expected)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-4)


def test_an_encoder_reads_once_and_the_keys_of_its_output_are_kept_once() -> None:
    model: Any = build(ENCODER_DECODERS["Bart"])
    reads: list[int] = []
    model.get_encoder().register_forward_hook(lambda *_: reads.append(1))
    kept: list[torch.Tensor] = []

    def look(_module: Any, _inputs: Any, options: dict[str, Any], _output: Any) -> None:
        kept.append(cache_in(options).cross_attention_cache.layers[0].keys)

    model.get_decoder().register_forward_hook(look, with_kwargs=True)
    found(model, **ONE, custom_generate=lookahead.decode, lookahead_config=TRUSTING)
    assert len(reads) == 1
    assert len(kept[-1]) == 3 and kept[-1].untyped_storage().nbytes() == kept[-1][0].nbytes


def test_the_api_returns_texts_reasons_and_counters(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    prompts = [[5, 9, 31, 77, 5, 9], [44, 17, 44]]
    options = {"num_beams": 3, "max_new_tokens": 10, "do_sample": False, "eos_token_id": [5, 9]}
    mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    ids = torch.tensor([prompts[0], [0] * 3 + prompts[1]])
    expected = tiny_llama.generate(ids, attention_mask=mask, pad_token_id=0, **options)[:, 6:].tolist()
    got = lookahead.generate(tiny_llama, tiny_tokenizer, prompts, pad_token_id=0, **options)
    for said, whole, reason in zip(got.token_ids, expected, got.finish_reasons, strict=True):
        assert said == whole[: len(said)] and not any(whole[len(said) :])
        assert reason == ("stop" if said[-1] in (5, 9) else "length")
    assert [stats.emitted_tokens for stats in got.row_stats] == [len(said) for said in got.token_ids]
    assert got.stats.prompt_tokens == 9
    for stats in got.row_stats:
        assert stats.target_forwards == stats.acceptance_histogram[1] == stats.emitted_tokens - 1
        assert stats.drafted_tokens == stats.accepted_tokens == 0
    stream = lookahead.stream(tiny_llama, tiny_tokenizer, prompts[0], **options)
    alone = lookahead.generate(tiny_llama, tiny_tokenizer, prompts[0], **options)
    assert "".join(stream) == alone.texts[0] and stream.token_ids == alone.token_ids[0]
    several = lookahead.generate(tiny_llama, tiny_tokenizer, prompts[0], num_return_sequences=2, **options)
    assert several.token_ids[0] == alone.token_ids[0] and len(several.texts) == len(several.row_stats) == 2


def test_a_search_that_time_ends_says_so(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    ended = StoppingCriteriaList([MaxTimeCriteria(0.0)])
    got = lookahead.generate(tiny_llama, tiny_tokenizer, [5, 9], num_beams=2, max_new_tokens=9, stopping_criteria=ended)
    assert got.finish_reasons == ["criteria"] and len(got.token_ids[0]) == 1


def test_a_batch_with_no_room_for_its_longest_prompt_is_refused(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    limit = tiny_llama.config.max_position_embeddings
    prompts = [[5] * (limit - 3), [5, 9]]
    with pytest.raises(PromptError, match="max_new_tokens must be at most 4 with beams"):
        lookahead.generate(tiny_llama, tiny_tokenizer, prompts, num_beams=2, max_new_tokens=9)
    alone = lookahead.generate(tiny_llama, tiny_tokenizer, prompts[0], num_beams=2, max_new_tokens=9, eos_token_id=None)
    assert len(alone.token_ids[0]) == 4 and alone.finish_reasons == ["length"]
    with pytest.raises(ConfigError, match="num_beams must be a whole number of at least 1, got 0"):
        lookahead.generate(tiny_llama, tiny_tokenizer, prompts[1], num_beams=0)


def test_summaries_take_the_beams_of_the_model_or_of_the_call(tiny_tokenizer: Any) -> None:
    model: Any = build(ENCODER_DECODERS["Bart"])
    model.generation_config.update(num_beams=4, no_repeat_ngram_size=2, length_penalty=2.0, eos_token_id=2)
    text = "The zebra ran. The horse ran after it. Both came home."
    ids = tiny_tokenizer(text, return_tensors="pt").input_ids
    summaries = []
    for count in (None, 2, 1):
        summary = Summarizer(model, tiny_tokenizer, max_new_tokens=12, num_beams=count, compare=True).summarize(text)
        own = {} if count is None else {"num_beams": count}
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, **own)
        assert summary.text == tiny_tokenizer.decode(expected[0], skip_special_tokens=True).strip()
        assert summary.plain is not None and summary.plain.identical
        summaries.append(summary.text)
    assert len(set(summaries)) > 1, "beams change nothing here"
    with pytest.raises(ConfigError, match="num_beams must be at least 1, got 0"):
        Summarizer(model, tiny_tokenizer, num_beams=0)


def test_the_commands_search_with_beams(
    model_folder: Path, tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    expected = lookahead.generate(tiny_llama, tiny_tokenizer, "abc", num_beams=3, max_new_tokens=8).texts[0]
    shared = ["--model", str(model_folder), "--max-new-tokens", "8", "--num-beams", "3"]
    run = CliRunner().invoke(app, ["generate", "abc", "--raw", *shared])
    assert run.exit_code == 0 and run.stdout.strip() == expected.strip(), run.output
    (tmp_path / "a.txt").write_text("The zebra ran. The horse ran.")
    line = ["summarize", str(tmp_path / "a.txt"), *shared, "-o", str(tmp_path / "out.jsonl"), "--compare"]
    run = CliRunner().invoke(app, line)
    assert run.exit_code == 0, run.output
    assert json.loads((tmp_path / "out.jsonl").read_text())["identical"] is True
