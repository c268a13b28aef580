"""Every combination of sources under every way to size a draft: the tokens of `model.generate`, and sums that agree."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead import LookaheadConfig
from lookahead.model.model_state import LearnedState, use_learned
from lookahead.ngram.chains import SEPARATOR
from lookahead.ngram.pool_file import write_pool
from lookahead.stats import DecodingStats, total
from lookahead.utils.fingerprints import tokenizer_fingerprint
from tests.support.engines import engine_of
from tests.support.families import FAMILIES, build

NAMES = ("prompt", "outputs", "corpus", "recycled", "jacobi")
COMBINATIONS = [names for count in range(1, 6) for names in combinations(NAMES, count)]
BY_DEFAULT = [names for names in COMBINATIONS if len(names) in (1, 2, 5)]
CHAIN_FAMILIES = [family for family in FAMILIES.values() if family.decoded == "chains"]
ROWS = torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31], [0, 0, 0, 0, 0, 8, 8, 9, 8, 8, 9, 8]])
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20}
CALLS = ((ROWS[:1], {"do_sample": False}), (ROWS, {"do_sample": False}), (ROWS, SAMPLED))
# A window of one column fits into one node.
SIZES: tuple[dict[str, Any], ...] = (
    {"max_nodes": None},
    {"max_nodes": 1, "window": (1, 2, 1)},
    {"max_nodes": 512, "window": (20, 7, 20)},
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory, looping_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> str:
    """The path of a pool of what the model writes."""
    path = tmp_path_factory.mktemp("pool") / "pool.lkp"
    written = looping_llama.generate(ROWS[:1], max_new_tokens=60, do_sample=False)[0].numpy()
    write_pool(path, np.append(written, SEPARATOR).astype(np.int32), tokenizer_fingerprint(tiny_tokenizer))
    return str(path)


@pytest.fixture(scope="module")
def expected(looping_llama: PreTrainedModel) -> list[list[list[int]]]:
    """The new tokens of `generate` for every call."""
    outputs = []
    for rows, mode in CALLS:
        torch.manual_seed(3)
        whole = looping_llama.generate(**inputs_of(rows, mode))
        outputs.append(whole[:, rows.shape[1] :].tolist())
    return outputs


def inputs_of(rows: torch.Tensor, mode: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` for a call."""
    return {"input_ids": rows, "attention_mask": (rows != 0).long(), "max_new_tokens": 24, **mode}


def run(model: PreTrainedModel, inputs: dict[str, Any], config: LookaheadConfig) -> tuple[list[list[int]], Any]:
    """The new tokens of every row, and the stats."""
    torch.manual_seed(3)
    engine: Any = engine_of(model, **inputs, lookahead_config=config)
    outputs: list[list[int]] = [[] for _ in engine.stats]
    for step_outputs in engine.run():
        for step_output in step_outputs:
            outputs[step_output.row].extend(step_output.tokens.tolist())
    return outputs, engine.stats


def check_sums(rows: list[DecodingStats], config: LookaheadConfig) -> None:
    """What the counters promise, of every row and of all together."""
    most = config.max_nodes or max([config.node_budget, 64 + (config.branch_size.nodes if config.branch_size else 0)])
    for stats in (*rows, total(rows)):
        assert stats.decoded_tokens == stats.target_forwards + stats.accepted_tokens
        assert stats.drafted_tokens <= most * stats.target_forwards
        assert set(stats.drafted_by_source) <= set(config.proposers)
        for whole, parts in (
            (stats.drafted_tokens, stats.drafted_by_source),
            (stats.accepted_tokens, stats.accepted_by_source),
            (stats.expected_tokens, stats.expected_by_source),
        ):
            assert max(parts.values(), default=0) <= whole + 1e-6
            assert sum(parts.values()) >= whole - 1e-6
            if len(config.proposers) == 1:
                assert sum(parts.values()) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("names", "every"),
    [pytest.param(names, False, id="+".join(names)) for names in BY_DEFAULT]
    + [pytest.param(names, True, id=f"{'+'.join(names)}-all", marks=pytest.mark.exhaustive) for names in COMBINATIONS],
)
def test_every_combination_of_sources_gives_the_tokens_of_generate(
    looping_llama: PreTrainedModel,
    pool: str,
    expected: list[list[list[int]]],
    names: tuple[str, ...],
    every: bool,
) -> None:
    ways = list(product(("auto", "fixed"), SIZES))
    for call, (rows, mode) in enumerate(CALLS):
        turn = call + COMBINATIONS.index(names)
        some = ways if every else [way for i, way in enumerate(ways) if (i + turn) % len(CALLS) == 0]
        for draft, size in some:
            options = size if "jacobi" in names else {"max_nodes": size["max_nodes"]}
            source = {"pool": pool} if "corpus" in names else {}
            config = LookaheadConfig(proposers=names, draft=draft, **source, **options)
            outputs, stats = run(looping_llama, inputs_of(rows, mode), config)
            assert outputs == expected[call], (config, mode)
            check_sums(stats, config)


def test_every_source_is_heard_in_a_draft_of_all(looping_llama: PreTrainedModel, pool: str) -> None:
    config = LookaheadConfig(proposers=NAMES, pool=pool, draft="fixed", min_probability=0.0)
    unknown, known = ROWS[1:, 5:], ROWS[:1]  # to the pool, of which short matches are left out beside recycled tokens
    drafted: set[str] = set()
    with use_learned(looping_llama, LearnedState()):
        for ids in (unknown, unknown, known):  # the second call finds what the first one left
            inputs = {"input_ids": ids, "max_new_tokens": 40, "do_sample": False}
            _, stats = run(looping_llama, inputs, config)
            drafted |= {name for name, nodes in stats[0].drafted_by_source.items() if nodes}
    assert drafted == set(NAMES)


@pytest.mark.parametrize("family", CHAIN_FAMILIES, ids=lambda family: family.name)
def test_where_only_chains_are_verified_a_branch_left_to_costs_stays_off(family: Any) -> None:
    model = build(family)
    inputs = {"input_ids": ROWS[:1], "max_new_tokens": 19, "do_sample": False}
    expected = model.generate(**inputs)[:, ROWS.shape[1] :].tolist()
    for names in (("jacobi",), ("prompt", "outputs", "recycled", "jacobi")):
        config = LookaheadConfig(proposers=names)
        outputs, stats = run(model, inputs, config)
        assert outputs == expected
        assert stats[0].drafted_by_source["jacobi"] == 0
        check_sums(stats, config)
