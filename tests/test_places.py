"""Arrays that compiled code reads where they lie: they stay there, or it is told."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from lookahead.ngram.acceptance import HitRates
from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.raw_arrays import RawArrays
from lookahead.ngram.recycled import RecycledTable
from tests.support.index_queries import grow_trie


@pytest.mark.parametrize("made", [ChainIndex, HitRates, lambda: RecycledTable(contexts=16)])
def test_what_compiled_code_reads_where_it_lies_can_not_be_copied(made):
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can be neither copied nor pickled"):
            copying(made())


def test_arrays_with_gaps_have_no_place():
    with pytest.raises(ValueError, match="array 1 must be contiguous"):
        RawArrays(2)._point_to(np.zeros(4), np.zeros((4, 4))[:, ::2])


def test_a_tree_grown_after_the_arena_moved_and_after_it_forgot_is_that_of_a_new_index():
    rng, capped, text = np.random.default_rng(0), ChainIndex(max_tokens=4096), []
    for _ in range(60):
        piece = rng.integers(0, 500, 200).tolist()
        capped.append(piece)
        text += piece
        fresh = ChainIndex()
        fresh.append(text[-(len(capped) - 1) :])
        ours, theirs = (grow_trie([index], HitRates(), 12) for index in (capped, fresh))
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert ours.parents.tolist() == theirs.parents.tolist()
