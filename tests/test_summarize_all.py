"""Many documents summarized together: the summaries of one at a time, and nothing lost."""

from __future__ import annotations

import copy

import pytest

from lookahead import ConfigError, LookaheadConfig
from lookahead.decoding.shared_rows import SharedRows
from lookahead.documents.decode_text import Document, Reject
from lookahead.summarization.prompting import PromptFitter
from lookahead.summarization.summarizer import Summarizer

SENTENCE = "The cat sat on the mat. "
LENGTHS = (2, 30, 1, 5, 100, 3, 0, 8, 2, 4)  # sentences; the second and the fifth are too long for one prompt

SHORT = [Document(f"doc{i}", f"Number {i}. " + SENTENCE * (i + 1)) for i in range(3)]


def documents():
    return [Document(f"doc{i}", (f"Number {i}. " + SENTENCE * n) if n else " ") for i, n in enumerate(LENGTHS)]


def in_order(outcomes):
    named = {each.id if isinstance(each, Reject) else each.document.id: each for each in outcomes}
    assert len(named) == len(LENGTHS)
    return [named[f"doc{i}"] for i in range(len(LENGTHS))]


def assert_like_one_at_a_time(outcomes, summarizer):
    for document, got in zip(documents(), in_order(outcomes), strict=True):
        alone = summarizer.summarize_or_reject(document)
        if isinstance(alone, Reject):
            assert got == alone
            continue
        fields = ("text", "document_tokens", "summary_tokens", "parts", "split", "finish_reason")
        assert [getattr(got.summary, name) for name in fields] == [getattr(alone.summary, name) for name in fields]
        for name in ("emitted_tokens", "prompt_tokens"):
            assert getattr(got.summary.stats, name) == getattr(alone.summary.stats, name)


@pytest.mark.parametrize("rows", [1, 4])
def test_long_and_short_documents_are_summarized_as_one_at_a_time(tiny_llama, tiny_tokenizer, rows):
    summarizer = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=12)
    outcomes = list(summarizer.summarize_all(documents(), rows))
    assert isinstance(in_order(outcomes)[6], Reject)
    assert in_order(outcomes)[4].summary.parts > 4
    assert_like_one_at_a_time(outcomes, summarizer)


def test_summaries_of_parts_are_summarized_in_rounds(tiny_llama, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = 90
    summarizer = Summarizer(tiny_llama, tokenizer, max_new_tokens=20)
    assert_like_one_at_a_time(list(summarizer.summarize_all(documents(), 5)), summarizer)


def test_a_document_may_come_with_its_older_summary(tiny_llama, tiny_tokenizer):
    plain = {each.document.id: each.summary for each in Summarizer(tiny_llama, tiny_tokenizer).summarize_all(SHORT)}
    known = [Document(each.id, each.text, plain[each.id].text if i else None) for i, each in enumerate(SHORT)]
    config = LookaheadConfig(draft="fixed")
    summarizer = Summarizer(tiny_llama, tiny_tokenizer, config=config, predicts=True)
    for outcomes in (summarizer.summarize_all(known), map(summarizer.summarize_or_reject, known)):
        for each in outcomes:
            assert each.summary.text == plain[each.document.id].text
            assert (each.summary.stats.accepted_by_source["prediction"] > 0) == (each.document.id != "doc0")


def test_documents_are_taken_as_rows_come_free(tiny_llama, tiny_tokenizer):
    taken = []
    source = (taken.append(1) or Document(len(taken), SENTENCE) for _ in range(100))
    outcomes = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=4).summarize_all(source, 3)
    for number, _ in zip(range(1, 20), outcomes, strict=False):
        assert len(taken) <= number + 3


def test_a_document_that_fails_is_rejected_alone(tiny_llama, tiny_tokenizer, monkeypatch):
    fit = PromptFitter.fit
    monkeypatch.setattr(PromptFitter, "fit", lambda self, text: 1 / 0 if "Number 3" in text else fit(self, text))
    summarizer = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=8)
    outcomes = in_order(summarizer.summarize_all(documents(), 4))
    assert [isinstance(each, Reject) for each in outcomes] == [i in (3, 6) for i in range(10)]
    assert outcomes[3].error == "doc3: ZeroDivisionError: division by zero"


def test_where_all_rows_fail_every_document_in_them_is_summarized_alone(tiny_llama, tiny_tokenizer, monkeypatch):
    steps, calls = SharedRows.steps, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) % 3 == 2:
            raise MemoryError("no room")
        return steps(*arguments)

    monkeypatch.setattr(SharedRows, "steps", failing)
    summarizer = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=8)
    assert_like_one_at_a_time(list(summarizer.summarize_all(documents(), 2)), summarizer)
    assert len(calls) > 5


def test_documents_that_break_off_are_told_of_once_those_before_are_done(tiny_llama, tiny_tokenizer):
    def broken():
        yield from documents()
        raise OSError("the disk is gone")

    done = []
    outcomes = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=4).summarize_all(broken(), 3)
    with pytest.raises(OSError, match="the disk is gone"):
        for each in outcomes:
            done.append(each)
    assert len(in_order(done)) == 10


def test_with_compare_every_document_is_decoded_plainly_too(tiny_llama, tiny_tokenizer):
    summarizer = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=8, compare=True)
    outcomes = list(summarizer.summarize_all(documents()[:3], 2))
    assert all(each.summary.plain.identical for each in outcomes)


def test_rows_out_of_range_are_refused_at_once(tiny_llama, tiny_tokenizer):
    with pytest.raises(ConfigError, match="rows must be a whole number from 1 to 1024, got 0"):
        Summarizer(tiny_llama, tiny_tokenizer).summarize_all([], 0)
