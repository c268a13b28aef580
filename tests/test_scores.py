"""What is read of a step's logits: the same on a CPU and by torch, in the same order as sorting them would give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from lookahead.kernels.scalars import exp
from lookahead.kernels.topk import DTYPES as CPU_DTYPES
from lookahead.kernels.topk import likeliest, ranked, read_scores
from lookahead.ngram.successors import TOP

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
VOCABULARIES = [1, 3, 7, 8, 9, 63, 64, 65, 129, 1000, 4096, 40_000]  # so many logits take several readings


def logits_of(vocabulary: int, dtype: torch.dtype, seed: int, *, levels: int | None = None) -> torch.Tensor:
    """Random `[2, 5, vocabulary]`; with `levels` they are whole numbers of so few that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    if levels is not None:
        return torch.randint(levels, (2, 5, vocabulary), generator=generator).to(dtype)
    return (4 * torch.randn(2, 5, vocabulary, generator=generator)).to(dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("levels", [None, 1, 2, 40])
def test_the_top_is_what_sorting_gives_and_the_lower_token_comes_first_among_equals(vocabulary, dtype, levels):
    logits = logits_of(vocabulary, dtype, seed=vocabulary, levels=levels)
    scores = read_scores(logits, TOP)
    chances = logits.double().softmax(-1)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[..., :TOP]
    kept = order.shape[-1]
    assert (scores.argmax == order[..., 0].numpy()).all()
    assert scores.top.dtype == scores.argmax.dtype == np.int32 and scores.probabilities.dtype == np.float32
    np.testing.assert_allclose(scores.probabilities[..., :kept], chances.gather(-1, order), rtol=1e-5, atol=1e-6)
    assert (scores.top[..., kept:] == -1).all() and not scores.probabilities[..., kept:].any()
    if dtype != torch.float64:  # torch's own order of equals is left to those that need torch
        assert (scores.top[..., :kept] == order.numpy()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_cpu_reads_what_torch_reads(vocabulary, dtype):
    # Two devices must not decode differently: the argmax is the same, ties included, and so is what is learned.
    for levels in (None, 3):
        logits = logits_of(vocabulary, dtype, seed=7, levels=levels)
        ours, torchs = read_scores(logits, TOP), read_scores(logits, TOP, ranked(logits, TOP))
        assert (ours.argmax == torchs.argmax).all()
        assert (read_scores(logits).argmax == torchs.argmax).all()
        np.testing.assert_allclose(ours.probabilities, torchs.probabilities, rtol=1e-5, atol=1e-6)
        if levels is None and dtype == torch.float32:
            assert (ours.top == torchs.top).all()


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [5, 8, 200])
@pytest.mark.parametrize(
    ("placed", "argmax"),
    [
        ({3: NAN}, -1),
        ({0: NAN, 4: INFINITY}, -1),
        ({2: -NAN}, -1),
        ({4: INFINITY, 1: INFINITY}, 1),
        ({2: -INFINITY}, None),
        (dict.fromkeys(range(200), -INFINITY), 0),
        (dict.fromkeys(range(200), -0.0) | {3: 0.0}, 0),
    ],
    ids=str,
)
def test_what_is_no_finite_number_is_told_and_gives_no_probability_but_numbers(placed, argmax, vocabulary, dtype):
    logits = logits_of(vocabulary, dtype, seed=1)
    for token, value in placed.items():
        if token < vocabulary:
            logits[0, 2, token] = value
    wanted = likeliest(logits).numpy()
    if argmax is not None:
        assert wanted[0, 2] == argmax
    for with_top in (False, True):
        scores = read_scores(logits, TOP if with_top else 0)
        assert (scores.argmax == wanted).all()
    assert (scores.probabilities >= 0).all() and (scores.probabilities <= 1).all()
    undefined = argmax == -1 or any(value == INFINITY for value in placed.values()) or placed.get(4) == -INFINITY
    if undefined:
        assert not scores.probabilities[0, 2].any()
    torch.testing.assert_close(scores.probabilities, read_scores(logits, TOP, ranked(logits, TOP)).probabilities)


def test_strided_logits_are_read_as_they_are_indexed():
    logits = logits_of(300, torch.float32, seed=3)
    strided = torch.stack([logits, torch.full_like(logits, 99.0)], 2).flatten(1, 2)[:, ::2]
    assert not strided.is_contiguous()
    assert (read_scores(strided, TOP).top == read_scores(logits, TOP).top).all()


def test_double_precision_keeps_its_own_order():
    # Told apart in double precision only: rounded to single, the first of the two would win.
    logits = torch.tensor([[[1.0, 1.0 + 1e-12, 0.0]]], dtype=torch.float64)
    assert logits.dtype not in CPU_DTYPES
    assert read_scores(logits).argmax.tolist() == [[1]]


def test_the_exponential_is_that_of_float32():
    @njit
    def all_of(x):
        return np.array([exp(each) for each in x])

    x = np.concatenate((-np.geomspace(1e-30, 87, 20_000), [0.0, -87.001, -1e9, -np.inf, np.nan])).astype(np.float32)
    wanted = np.where(x < -87, 0.0, np.exp(x.astype(np.float64)))
    np.testing.assert_allclose(all_of(x), wanted, rtol=2e-7)
