"""Backends: each gives the logits of the model, and says which path serves and why not a faster one."""

from __future__ import annotations

import logging
from copy import deepcopy
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.choice import backend_for, records_graphs
from lookahead.backend.cpu.cpu_backend import CpuBackend
from lookahead.backend.gpu.gpu_backend import GpuBackend
from lookahead.backend.protocol import Backend, BackendReport, BitPolicy, PathReport
from lookahead.backend.torch_backend import TorchBackend
from lookahead.decoding.plan import RequestPlan, plan_request
from lookahead.drafting.tree import TokenTree
from lookahead.model import model_state
from lookahead.model.calls import ResolvedCall
from lookahead.model.families import FAMILIES as DECLARED
from lookahead.model.model_state import state_of
from lookahead.stats import DecodingStats, total
from tests.support.families import FAMILIES, build
from tests.support.products import kept_choice
from tests.support.small_layers import SINGLE, made

PROMPT = np.array([5, 9, 31, 77, 5, 9], np.int32)
TREE = TokenTree.from_parents([9, 31, 5, 77, 2], [0, 0, 1, 0, 3])
PATHS = [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4]]
IDS = torch.tensor([[5, 9, 31, 77] * 4])


def logits_of(backend: Backend) -> torch.Tensor:
    """The logits after all nodes of a tree, `[nodes, vocab]`."""
    with backend.serving():
        backend.read([PROMPT])
        return backend.score([TREE], BitPolicy.ROUNDED)[0]


@pytest.mark.parametrize("kind", [TorchBackend, CpuBackend, GpuBackend])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Gemma2"])
def test_every_backend_gives_the_logits_of_the_model_after_every_node(kind: Any, name: str) -> None:
    model = build(FAMILIES[name])
    got = logits_of(kind(model, rows=1, capacity=64))
    for node, path in enumerate(PATHS):
        ids = torch.from_numpy(np.concatenate([PROMPT[:-1], TREE.tokens[path]]).astype(np.int64))[None]
        ids[0, len(PROMPT) - 1] = int(TREE.tokens[0])
        with torch.inference_mode():
            expected = model(ids).logits[0, -1]
        torch.testing.assert_close(got[node], expected, rtol=1e-3, atol=1e-4)


def test_the_log_tells_once_which_paths_serve_and_why_not_a_faster_one(
    tiny_llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lookahead")
    model = deepcopy(tiny_llama)
    for _ in range(2):
        model.generate(IDS, max_new_tokens=8, custom_generate=lookahead.decode)
    told = [each for each in caplog.messages if "is served by" in each]
    assert len(told) == 1
    assert told[0].startswith("LlamaForCausalLM is served by CpuBackend")
    assert "fused layers: yes, 2 of 2 layers" in told[0]
    assert told[0].endswith("bits: equal up to the rounding of sums")


def reasons_of(model: Any, **options: Any) -> dict[str, tuple[bool, str]]:
    """What a report says, by its paths."""
    backend = backend_for(model, rows=1, capacity=64, **options)
    logits_of(backend)
    return {each.path: (each.serves, each.reason) for each in backend.report().paths}


def test_a_report_says_why_a_path_does_not_serve(tiny_llama: Any, own_cache_folder: Path) -> None:
    assert reasons_of(build(FAMILIES["GPTJ"]))["fused layers"] == (
        False,
        f"0 of 0 layers; they are for {', '.join(sorted(family.name for family in DECLARED))}",
    )
    wide = made(dtype=SINGLE, hidden_size=512, intermediate_size=512, num_attention_heads=8)
    with kept_choice(own_cache_folder, "packed"):
        assert reasons_of(wide)["packed weights"][0]
        assert reasons_of(wide, packs=False)["packed weights"] == (False, "an option turns it off")
    assert reasons_of(tiny_llama, has_kernels=False)["passes as one call"] == (
        False,
        "its kernels compute differently from the model's own code",
    )
    told = "a user's hooks or code surround its layers"
    handle = tiny_llama.model.register_forward_hook(lambda *_: None)
    try:
        assert reasons_of(tiny_llama)["passes as one call"] == (False, told)
    finally:
        handle.remove()


def test_passes_are_recorded_on_one_gpu_until_a_recording_fails(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not records_graphs(tiny_llama)
    assert isinstance(backend_for(tiny_llama, rows=1, capacity=64, captures=False), CpuBackend)
    monkeypatch.setattr(model_state.plan_of(tiny_llama), "device", torch.device("cuda"))
    assert not records_graphs(tiny_llama), "its weights are elsewhere"
    monkeypatch.setattr(tiny_llama, "parameters", lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    assert records_graphs(tiny_llama)
    monkeypatch.setattr(state_of(tiny_llama), "has_failed_capture", True)
    assert not records_graphs(tiny_llama)


def plan_of(model: Any, config: LookaheadConfig | None = None, **options: Any) -> RequestPlan:
    """The plan of a call."""
    return plan_request(ResolvedCall.resolve(model, IDS, **options), config)


def test_a_plan_tells_what_is_verified_and_generates_nothing(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tiny_llama, max_new_tokens=8)
    assert (plan.shape, plan.reason, plan.is_sampled, plan.cache.is_returned) == ("trees", "", False, False)
    assert plan.stopping.max_length == IDS.shape[1] + 8 and plan.lengths.tolist() == [IDS.shape[1]]
    assert plan_of(tiny_llama, max_new_tokens=8, do_sample=True).is_sampled
    assert plan_of(tiny_llama, max_new_tokens=8, return_dict_in_generate=True).cache.is_returned


def test_a_plan_for_a_single_token_is_the_loop_of_transformers_but_may_join_others(tiny_llama: Any) -> None:
    plan = plan_of(tiny_llama, max_new_tokens=1)
    assert (plan.shape, plan.reason, plan.can_join) == ("none", "", True)
    assert not plan_of(tiny_llama, max_new_tokens=1, do_sample=True).can_join


def test_a_plan_says_why_transformers_serves_and_whether_that_is_an_error() -> None:
    model = build(FAMILIES["RecurrentGemma"])
    plan = plan_of(model, max_new_tokens=8)
    assert plan.shape == "none" and "cannot be decoded speculatively: its state is sequential" in plan.reason
    assert not plan.is_refused and not plan.can_join
    with pytest.warns(UserWarning, match="its state is sequential"):
        plan.begin()
    asked = plan_of(model, LookaheadConfig(window=7), max_new_tokens=8)
    with pytest.raises(lookahead.UnsupportedModelError, match="leave out window=7 to decode it plainly"):
        asked.begin()


def test_the_report_of_a_model_needs_no_call_of_it(tiny_llama: Any) -> None:
    report = lookahead.backend_report(tiny_llama)
    assert report.backend == "CpuBackend" and report.paths[0].path == "tree attention"
    assert "passes as one call" in [each.path for each in report.paths]
    none = lookahead.backend_report(build(FAMILIES["RecurrentGemma"]))
    assert str(none).startswith(
        "RecurrentGemmaForCausalLM is served by transformers' own loop\n  drafts: no, RecurrentGemmaForCausalLM cannot"
    )
    with pytest.raises(lookahead.ConfigError, match="model must be a PreTrainedModel"):
        lookahead.backend_report("a name")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("serving", "summary"), [("", "Some"), ("a", "Some: a"), ("abc", "Some: c"), ("b", "Some: b"), ("ac", "Some: c")]
)
def test_a_report_in_short_names_the_fastest_path_that_serves(serving: str, summary: str) -> None:
    paths = tuple(PathReport(name, name in serving, "why") for name in "abc")
    assert BackendReport("Some", "Model", paths).summary == summary


@pytest.mark.filterwarnings("ignore:the tokenizer '' may belong to another model")
def test_stats_name_what_scored_the_tokens(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    options: Any = {"max_new_tokens": 6, "do_sample": False}
    expected = lookahead.backend_report(tiny_llama).summary
    together = lookahead.generate(tiny_llama, tiny_tokenizer, ["abc", "The cat"], **options)
    assert expected.startswith("CpuBackend: ")
    assert [each.backend for each in (*together.row_stats, together.stats)] == [expected] * 3
    assert together.stats.to_dict()["backend"] == expected
    done = lookahead.stream_many(tiny_llama, tiny_tokenizer, ["abc", "The cat"], **options)
    assert [each.stats.backend for each in done] == [expected] * 2
    assert together.stats.fallback_reason == "" and "fallback_reason" not in together.stats.to_dict()


@pytest.mark.filterwarnings("ignore:the tokenizer '' may belong to another model")
@pytest.mark.parametrize("beams", [1, 2])
def test_stats_say_why_transformers_decoded(tiny_tokenizer: Any, beams: int) -> None:
    options: Any = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    model, told = build(FAMILIES["RecurrentGemma"]), "its state is sequential"
    with pytest.warns(UserWarning, match=told) as warned:
        plain = lookahead.generate(model, tiny_tokenizer, ["abc", "The cat"], **options)
    (reason,) = {str(each.message) for each in warned if told in str(each.message)}
    shown = [*plain.row_stats, plain.stats]
    assert [each.backend for each in shown] == ["transformers" if beams == 1 else ""] * 3
    assert {each.fallback_reason for each in shown} == {reason} == {shown[0].to_dict()["fallback_reason"]}


@pytest.mark.parametrize(
    ("backends", "together"),
    [([], ""), ([""], ""), (["", "A"], "A"), (["A", "A", ""], "A"), (["A", "", "B"], "several"), ("AABA", "several")],
)
def test_rows_that_were_not_served_alike_add_up_to_several_in_any_order(backends: Any, together: str) -> None:
    for ordered in permutations(DecodingStats(backend=name) for name in backends):
        assert total(ordered).backend == together
        for at in range(len(ordered)):
            assert total([total(ordered[:at]), total(ordered[at:])]).backend == together
