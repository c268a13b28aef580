"""Some of the documents of a job, and what all of them would take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.faults import StandIn
from lookahead.files.documents import read_documents
from lookahead.files.inputs import find_inputs
from lookahead.jobs.estimate import estimate_job
from lookahead.jobs.selection import select_documents
from lookahead.summarize.fitting import PromptFitter


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_documents_or_some_at_random_by_a_seed(folder):
    Path("a.jsonl").write_text("".join(f'{{"id": {i}, "text": "Text {i}."}}\n' for i in range(30)))
    inputs = find_inputs(["a.jsonl"])
    assert [document.id for document in select_documents(inputs, first=3)] == [0, 1, 2]
    drawn = [document.id for document in select_documents(inputs, sample=5, seed=1)]
    assert len(set(drawn)) == 5 and drawn == sorted(drawn)
    assert drawn == [document.id for document in select_documents(inputs, sample=5, seed=1)]
    assert drawn != [document.id for document in select_documents(inputs, sample=5, seed=2)]
    assert len(list(select_documents(inputs, sample=99))) == 30


def test_an_estimate_counts_everything_and_writes_nothing(folder, tiny_llama, tiny_tokenizer):
    Path("a.jsonl").write_text('{"text": "One one."}\n{"text": "One one."}\n{"text": \n' + '{"text": "Two."}\n' * 3)
    fitter = PromptFitter(tiny_llama, tiny_tokenizer, 8)
    before = sorted(os.listdir())
    items = read_documents(find_inputs(["a.jsonl"]))
    estimate = estimate_job(items, fitter, StandIn(), max_new_tokens=8, price_per_hour=3.6)
    assert (estimate.documents, estimate.failed, estimate.copies, estimate.parts) == (5, 1, 3, 2)
    assert (estimate.document_tokens, estimate.most_new_tokens, estimate.tried) == (12, 16, 2)
    assert estimate.seconds >= 0 and estimate.cost == pytest.approx(estimate.seconds / 1000, abs=1e-3)
    assert sorted(os.listdir()) == before
    assert estimate_job([], fitter, StandIn(), max_new_tokens=8).seconds is None
