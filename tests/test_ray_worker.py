"""What a worker on a cluster does, here without one: it is a class like any other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import pytest

from lookahead.cli.job_options import JobOptions
from lookahead.documents.decode_text import Document
from lookahead.errors import UnsupportedModelError
from lookahead.jobs.identity import JobSettings
from lookahead.jobs.worker_pool import RayWorker
from lookahead.plugins.heads.head_files import Heads
from lookahead.summarization.summarizer import Summarizer


def worker_for(folder, **options):
    asked = {"dtype": "fp32", "device": "cpu", "threads": 1, "rows": 3, "max_new_tokens": 12}
    return RayWorker(JobSettings(model=str(folder), **{**asked, **options}))


@pytest.mark.parametrize("compare", [False, True])
def test_calls_side_by_side_give_the_summaries_of_one_by_one(model_folder, tiny_llama, tiny_tokenizer, compare):
    worker = worker_for(model_folder, compare=compare)
    documents = [Document(i, f"Text number {i}, " + "which goes on. " * i) for i in range(12)]

    async def work():
        _, rows = await worker.start()
        first = await asyncio.gather(*map(worker.summarize, documents[:7]))
        late = await worker.summarize(documents[7])  # after the rows have been idle
        return rows, [*first, late, *await asyncio.gather(*map(worker.summarize, documents[8:]))]

    rows, done = asyncio.run(work())
    assert rows == (1 if compare else 3)
    summarizer = Summarizer(tiny_llama, tiny_tokenizer, max_new_tokens=12)
    assert [summary.text for summary in done] == [summarizer.summarize(each.text).text for each in documents]


def test_a_document_that_fails_is_answered_with_words(model_folder):
    worker = worker_for(model_folder)

    async def work():
        await worker.start()
        return await worker.summarize(Document("blank", "  "))

    assert asyncio.run(work()) == "blank: the document is empty"


def test_a_model_that_is_not_there_is_told_and_not_raised(tmp_path):
    assert isinstance(asyncio.run(worker_for(tmp_path).start()), UnsupportedModelError)


def test_an_engine_that_stops_lets_nobody_wait(model_folder, monkeypatch):
    worker = worker_for(model_folder)

    def stops(self, documents, rows):
        next(documents)
        raise MemoryError("no more of it")
        yield

    async def work():
        await worker.start()
        return await asyncio.gather(*(worker.summarize(Document(i, "Text.")) for i in range(3)), return_exceptions=True)

    monkeypatch.setattr(Summarizer, "summarize_all", stops)
    answers = asyncio.run(asyncio.wait_for(work(), 60))
    assert [type(answer) for answer in answers] == [RuntimeError] * 3
    assert "the engine stopped" in str(answers[0]) and "no more of it" in str(answers[0])


def test_a_job_goes_to_another_process_as_it_is_and_heads_by_their_folder(tmp_path):
    (tmp_path / "prompt.txt").write_text("In one word: {document}")
    options = JobOptions(heads="folder", window="auto", refine=True, rows=2, prompt_file=tmp_path / "prompt.txt")
    settings = options.settings()
    sent = ForkingPickler.loads(ForkingPickler.dumps(settings))
    (heads,) = [each for each in sent.config.proposers if not isinstance(each, str)]
    assert isinstance(heads, Heads) and heads._folder == "folder"
    config = replace(sent.config, proposers=settings.config.proposers)  # every process has its own object
    assert replace(sent, config=config) == settings
