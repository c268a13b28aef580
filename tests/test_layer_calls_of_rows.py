"""Passes of several rows that are one call: each row computes what it does alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookahead.backend.choice import backend_for
from lookahead.backend.cpu.exact_attention import takes_rows
from lookahead.backend.protocol import BitPolicy
from lookahead.backend.read_prompt import PrefixStore, ReadingAhead
from lookahead.drafting.tree import TokenTree
from tests.support.small_layers import HALF, SINGLE, WIDE, calls, made, on_x86, tables, trees_of

__all__ = ["calls", "tables"]  # fixtures


@on_x86
@pytest.mark.parametrize(("dtype", "shared"), [(HALF, 540), (SINGLE, 70)])
def test_rows_that_copied_a_text_read_it_once_and_compute_what_each_does_alone(dtype, shared, calls, tables):
    """They leave in any order, the one that the others read too; rows that copied nothing take their places."""
    model = made("llama", dtype, **WIDE)
    if dtype == HALF and not takes_rows(model.config):
        pytest.skip("there is no kernel for the nodes of half precision on this CPU")
    text = np.arange(shared, dtype=np.int32) % 60 + 3
    prompts = [np.append(text, np.arange(5, 7 + row, dtype=np.int32)) for row in range(8)]
    for row in (2, 5, 6, 7):
        prompts[row] = prompts[row][::-1].copy()
    store = PrefixStore(1 << 30)
    ReadingAhead(model, store, {}).read(text)
    together, alone = backend_for(model, rows=5, capacity=700), []
    together.cache.slots.active, places, shared_rows = 0, list[int](), list[int]()

    def join(row: int) -> None:
        places.append(row)
        alone.append(backend_for(model, rows=1, capacity=700))
        together.cache.slots.active += 1
        for target, place in ((together, len(places) - 1), (alone[row], 0)):
            with target.serving():
                store.longest(prompts[row]).copy_to(target.cache, place)
                target.read([prompts[row]], place)

    for row in range(5):
        join(row)
    for step, gone in enumerate((0, 1, 0, 3)):
        trees = [trees_of(1, 1 + (row + step) % 4, step + 10 * row)[0] for row in places]
        with together.serving():
            got = together.score(trees, BitPolicy.SOLO)
        assert together.is_ragged
        (groups,) = (table._groups for kind, table in together.cache.tables.items() if kind[3] == len(places))
        shared_rows.append(max((rows for slots, rows, *_ in groups.tolist() if slots), default=0))
        for at, row in enumerate(places):
            with alone[row].serving():
                expected = alone[row].score([trees[at]], BitPolicy.SOLO)[0]
            error = 0.0 if dtype == HALF else 1e-4 * float(expected.abs().max())
            torch.testing.assert_close(got[at, : len(expected)], expected, rtol=0, atol=error)
            path = np.arange(min(len(trees[at]), 2), dtype=np.int32)
            together.cache.commit(at, path)
            alone[row].cache.commit(0, path)
        with together.serving():
            together.retire(gone)
        last = places.pop()
        if gone < len(places):
            places[gone] = last
        if len(alone) < len(prompts):
            join(len(alone))
    assert shared_rows[:2] == [4, 3]


@on_x86
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("scored", [0, 1])
def test_rows_of_any_sizes_are_one_call_and_each_computes_what_it_does_alone(scored, name, dtype, calls, tables):
    """They join one by one, have trees of other sizes at every step, and leave in any order."""
    model = made(name, dtype, **WIDE)
    if dtype == HALF and not takes_rows(model.config):
        pytest.skip("there is no kernel for the nodes of half precision on this CPU")
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (5, 21, 11, 2)]
    sizes, places = [(1, 9, 4, 6), (7, 1, 1, 3), (2, 3, 30, 1)], [0, 1, 2, 3]
    together = backend_for(model, rows=4, capacity=64)
    alone = [backend_for(model, rows=1, capacity=64) for _ in prompts]
    together.cache.slots.active = 0
    with together.serving():
        for row, prompt in enumerate(prompts):
            together.cache.slots.active += 1
            together.read([prompt], row)
    for target, prompt in zip(alone, prompts, strict=True):
        with target.serving():
            target.read([prompt])
    for step, counts in enumerate(sizes):
        trees = [trees_of(1, counts[row], step + 10 * row)[0] for row in places]
        firsts = [min(scored, len(tree) - 1) for tree in trees]
        for target, which in ((together, places), *((alone[row], [row]) for row in places)):
            with target.serving():
                if scored:  # the roots, by an earlier pass
                    roots = [TokenTree.root(int(trees[places.index(row)].tokens[0])) for row in which]
                    target.score(roots, BitPolicy.SOLO)
        calls.clear()
        tables.clear()
        with together.serving():
            got = together.score(trees, BitPolicy.SOLO, np.array(firsts) if scored else None)
        assert len(tables) == 1 and together.is_ragged
        for at, row in enumerate(places):
            nodes = len(trees[at]) - firsts[at]
            with alone[row].serving():
                expected = alone[row].score([trees[at]], BitPolicy.SOLO, np.array([firsts[at]]) if scored else None)[0]
            error = 0.0 if dtype == HALF else 1e-4 * float(expected.abs().max())
            torch.testing.assert_close(got[at, :nodes], expected[:nodes], rtol=0, atol=error)
            path = np.arange(min(len(trees[at]), 2), dtype=np.int32)
            together.cache.commit(at, path)
            alone[row].cache.commit(0, path)
        gone = step % len(places)
        with together.serving():
            together.retire(gone)
        last = places.pop()
        if gone < len(places):
            places[gone] = last


@on_x86
def test_a_pass_of_rows_tells_how_many_nodes_it_may_have(calls):
    model = made("llama", HALF, **WIDE)
    if not takes_rows(model.config):
        pytest.skip("there is no kernel for the nodes of half precision on this CPU")
    rows = 4
    together = backend_for(model, rows=rows, capacity=128)
    together.cache.slots.active = 0

    def is_ragged(nodes: int) -> bool:
        sizes = [nodes // rows + (row < nodes % rows) for row in range(rows)]
        with together.serving():
            together.score([trees_of(1, size, row)[0] for row, size in enumerate(sizes)], BitPolicy.SOLO)
        return together.is_ragged

    with together.serving():
        for row in range(rows):
            together.cache.slots.active += 1
            together.read([np.arange(3, 9, dtype=np.int32)], row)
    assert is_ragged(rows)
    most = together.ragged_nodes
    assert rows < most and is_ragged(most) and not is_ragged(most + 1)
