"""How far a long document is while it is summarized."""

from __future__ import annotations

import pytest

from lookahead.cli.job_display import JobDisplay
from lookahead.documents.decode_text import Document
from lookahead.summarization.prompting import SummaryRequest
from lookahead.summarization.summarizer import Summarizer

SENTENCE = "The cat sat on the mat. "  # with the tokenizer of these tests a token is a character


def test_the_bar_of_a_job_tells_the_part_and_what_is_read_of_it(monkeypatch):
    display, words = JobDisplay(1, as_text=False, with_bar=False), []
    monkeypatch.setattr(display, "update", lambda task, read: words.append(read))
    display.reading(0, 8000)
    display.parts(0, 4)
    display.reading(8000, 8000)
    display.parts(4, 4)
    display.parts(0, 1)
    reading = ", reading 0 of 8,000 tokens"
    assert words == [reading, f", part 1 of 4{reading}", ", part 1 of 4", ", all parts together", ""]


@pytest.mark.parametrize("options", [{}, {"compare": True}], ids=["together", "compared"])
@pytest.mark.parametrize("refine", [False, True])
def test_the_only_document_tells_every_part_in_turn(tiny_llama, chat_tokenizer, options, refine):
    request = SummaryRequest(refine=refine)
    summarizer, told = Summarizer(tiny_llama, chat_tokenizer, max_new_tokens=16, request=request, **options), []
    summarizer.on_progress = lambda *told_of: told.append(told_of)
    (done,) = summarizer.summarize_all([Document("a", SENTENCE * 60)], rows=1)
    parts = done.summary.parts
    assert parts > 2 and {each[1] for each in told} == {parts}
    seen = [each[0] for each in told]
    assert seen == sorted(seen)
    if refine or not options:
        assert {*seen} == {*range(parts)} | (set() if refine else {parts})


def test_of_several_documents_in_work_no_part_is_told(tiny_llama, tiny_tokenizer):
    summarizer, told = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=16), []
    summarizer.on_progress = lambda *told_of: told.append(told_of)
    documents = [Document(name, SENTENCE) for name in "abc"]
    assert len(list(summarizer.summarize_all(iter(documents), rows=3))) == 3
    assert not told
