"""What all documents of a job would take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lookahead.documents.decode_text import Document
from lookahead.documents.inputs import find_inputs
from lookahead.documents.readers import read_documents
from lookahead.jobs import job
from lookahead.jobs.job import MAX_TIMED_PARTS, estimate_job
from lookahead.summarization.prompting import PromptFitter
from tests.support.stand_ins import StandIn


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_estimate_counts_everything_and_writes_nothing(folder, tiny_llama, tiny_tokenizer):
    Path("a.jsonl").write_text('{"text": "One one."}\n{"text": "One one."}\n{"text": \n' + '{"text": "Two."}\n' * 3)
    fitter = PromptFitter(tiny_llama, tiny_tokenizer, 8)
    before = sorted(os.listdir())
    items = read_documents(find_inputs(["a.jsonl"]))
    estimate = estimate_job(items, fitter, StandIn().summarize_all)
    assert (estimate.documents, estimate.failed, estimate.copies, estimate.parts) == (5, 1, 3, 2)
    assert (estimate.document_tokens, estimate.most_new_tokens, estimate.tried) == (12, 16, 2)
    assert estimate.seconds >= 0
    assert sorted(os.listdir()) == before
    assert estimate_job([], fitter, StandIn().summarize_all).seconds is None


def letters(text):
    return "".join(text.split())


class Clocked(StandIn):
    """Takes a second for every character; a clock stands still meanwhile."""

    def __init__(self, monkeypatch):
        self.seen = []
        monkeypatch.setattr(job.time, "perf_counter", lambda: float(sum(map(len, self.seen))))

    def summarize_all(self, documents):
        for document in documents:
            self.seen.append(document.text)
            yield from super().summarize_all([document])


@pytest.mark.parametrize("copies", [1, 5], ids=["one book", "five books"])
def test_an_estimate_of_books_summarizes_some_parts_of_each_and_reckons_by_tokens(
    tiny_llama, tiny_tokenizer, monkeypatch, copies
):
    books = [Document(i, f"Book {i}. " + "The cat sat on the mat. " * 2000) for i in range(copies)]
    fitter, worker = PromptFitter(tiny_llama, tiny_tokenizer, 8), Clocked(monkeypatch)
    estimate = estimate_job(books, fitter, worker.summarize_all)
    tried = min(copies, 3)
    parts = len(fitter.fit(books[0].text).parts)
    assert parts > 5 * MAX_TIMED_PARTS and estimate.parts == copies * parts
    assert (estimate.tried, estimate.tried_parts, estimate.timed_parts) == (
        tried,
        tried * parts,
        tried * MAX_TIMED_PARTS,
    )
    assert len(worker.seen) == tried
    for text in worker.seen:
        assert len(fitter.fit(text).parts) <= MAX_TIMED_PARTS + 1 and any(
            letters(text) in letters(book.text) for book in books
        )
    assert estimate.seconds == pytest.approx(sum(len(book.text) for book in books), rel=0.01)


def test_an_estimate_of_ordinary_documents_summarizes_them_whole(tiny_llama, tiny_tokenizer, monkeypatch):
    fitter, worker = PromptFitter(tiny_llama, tiny_tokenizer, 8), Clocked(monkeypatch)
    long = "The cat sat on the mat. " * 60
    estimate = estimate_job([Document(1, "One."), Document(2, long)], fitter, worker.summarize_all)
    assert worker.seen == ["One.", long]
    assert 2 < estimate.tried_parts == estimate.timed_parts == estimate.parts <= MAX_TIMED_PARTS
    assert estimate.seconds == len("One.") + len(long)


def test_a_book_beside_short_documents_is_reckoned_by_its_tokens(tiny_llama, tiny_tokenizer, monkeypatch):
    fitter, worker = PromptFitter(tiny_llama, tiny_tokenizer, 8), Clocked(monkeypatch)
    items = [Document(1, "One."), Document(2, "The cat sat on the mat. " * 2000), Document(3, "Three.")]
    estimate = estimate_job(items, fitter, worker.summarize_all)
    assert sum(map(len, worker.seen)) < 10_000
    assert estimate.seconds == pytest.approx(sum(len(item.text) for item in items), rel=0.01)
