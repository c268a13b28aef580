"""How far a long document is, and an estimate of the rest, while it is summarized."""

from __future__ import annotations

import pytest

from lookahead.cli.job_display import PartProgress
from lookahead.documents.decode_text import Document
from lookahead.summarization.pipeline import Progress
from lookahead.summarization.prompting import SummaryRequest
from lookahead.summarization.summarizer import Summarizer

SENTENCE = "The cat sat on the mat. "  # with the tokenizer of these tests a token is a character


@pytest.fixture
def clock():
    """A clock that stands where it is put."""

    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    return Clock()


def test_the_words_tell_the_part_what_is_read_and_the_rest(clock):
    words = PartProgress(clock)
    assert words.describe() == ""
    words.read(0, 8000)
    assert words.describe() == ", reading 0 of 8,000 tokens"
    words.advance(Progress(parts=4, parts_done=0, steps=5))
    assert words.describe() == ", part 1 of 4, reading 0 of 8,000 tokens"
    clock.now += 10
    words.read(4000, 8000)  # half of the reading, which is half of the first of five outputs
    assert words.describe() == ", part 1 of 4, reading 4,000 of 8,000 tokens, about 3 min left"
    clock.now += 10
    words.read(8000, 8000)
    words.advance(Progress(parts=4, parts_done=0, steps=5, written=1.0))
    assert words.describe() == ", part 1 of 4, about 80 s left"
    words.advance(Progress(parts=4, parts_done=4, steps=5))
    clock.now += 62
    words.read(0, 800)
    assert words.describe() == ", all parts together, reading 0 of 800 tokens, about 20 s left"
    words.begin()
    assert words.describe() == ""


def test_a_document_of_one_part_has_an_estimate_and_no_part(clock):
    words = PartProgress(clock)
    words.advance(Progress(parts=1, parts_done=0, steps=1))
    clock.now += 30
    words.read(500, 1000)
    assert words.describe() == ", reading 500 of 1,000 tokens, about 90 s left"


@pytest.mark.parametrize("options", [{}, {"compare": True}], ids=["together", "compared"])
@pytest.mark.parametrize("refine", [False, True])
def test_the_only_document_tells_every_part_in_turn(tiny_llama, chat_tokenizer, options, refine):
    request = SummaryRequest(refine=refine)
    summarizer, told = Summarizer(tiny_llama, chat_tokenizer, max_new_tokens=16, request=request, **options), []
    summarizer.on_progress = told.append
    (done,) = summarizer.summarize_all([Document("a", SENTENCE * 60)], rows=1)
    parts = done.summary.parts
    assert parts > 2 and {each.parts for each in told} == {parts}
    assert {each.steps for each in told} == {parts if refine else parts + 1}
    seen = [each.parts_done for each in told]
    assert seen == sorted(seen)
    if refine or not options:
        assert {*seen} == {*range(parts)} | (set() if refine else {parts})
    assert all(0 <= each.written <= 1 for each in told) and (options or any(each.written for each in told))


def test_of_several_documents_in_work_no_part_is_told(tiny_llama, tiny_tokenizer):
    summarizer, told = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=16), []
    summarizer.on_progress = told.append
    documents = [Document(name, SENTENCE) for name in "abc"]
    assert len(list(summarizer.summarize_all(iter(documents), rows=3))) == 3
    assert not told
