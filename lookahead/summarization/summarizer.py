"""Summaries of documents of any length: of one document, or of many in the rows of one scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.backend.protocol import OnPrefill
from lookahead.config import LookaheadConfig
from lookahead.decoding.api import GenerationResult, generate
from lookahead.decoding.cache_room import cache_tokens_of
from lookahead.decoding.comparison import decode_plainly
from lookahead.decoding.loops import loops
from lookahead.decoding.prompts import PromptReader
from lookahead.decoding.request import Completion
from lookahead.decoding.scheduler import Scheduler
from lookahead.documents.decode_text import Document, Reject, check_words
from lookahead.errors import ConfigError, LookaheadError
from lookahead.stats import total, total_in_sequence
from lookahead.summarization.pipeline import PlainFigures, Summarized, Summary, SummaryPipeline
from lookahead.summarization.prompting import PromptFitter, SummaryRequest

__all__ = ["PlainFigures", "Summarized", "Summarizer", "Summary"]

Outcome = Summarized | Reject

_ROWS_TOGETHER = 8  # prompts of one document


class Summarizer:
    """Summarizes documents with one model.

    Args:
        model: Any causal language model, or an encoder-decoder.
        tokenizer: The tokenizer of `model`.
        max_new_tokens: Maximum number of tokens of a summary, at least 1.
        num_beams: Beams of the search, at least 1; `None` uses the model's own number.
        sampling: Other options of `model.generate`; greedy without `do_sample`.
        seed: Seeds torch's random numbers before every call that samples.
        config: How drafts are made.
        compare: Whether every document is also decoded plainly.
        request: The instruction for the model; `None` asks for a summary in two sentences.
        predicts: Whether documents may have predictions of their summaries.

    Raises:
        ConfigError: A number is out of range, no document would fit, or the model cannot follow the request.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int = 200,
        num_beams: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        seed: int = 0,
        config: LookaheadConfig | None = None,
        compare: bool = False,
        request: SummaryRequest | None = None,
        predicts: bool = False,
    ) -> None:
        self.fitter = PromptFitter(model, tokenizer, max_new_tokens, request)
        self.on_prefill: OnPrefill | None = None  # as for `lookahead.generate`
        # Receives the parts that are summarized of the only document, and all its parts.
        self.on_progress: Callable[[int, int], None] = lambda done, parts: None
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._compare, self._predicts = compare, predicts
        self._encoding: Any = {"add_special_tokens": self.fitter.add_special_tokens}
        if num_beams is not None and num_beams < 1:
            raise ConfigError(f"num_beams must be at least 1, got {num_beams}")
        own = model.generation_config.num_beams if model.generation_config is not None else None
        self._num_beams: int = num_beams or own or 1
        self._sampling = {"do_sample": False, **(sampling or {})}
        self._seed = seed if self._sampling["do_sample"] else None
        # Whether documents are summarized one after the other.
        self._is_alone = compare or self._num_beams > 1 or self._seed is not None

    def summarize(self, text: str, prediction: str | None = None) -> Summary:
        """Summarize one document; `prediction` is a text that the summary will largely repeat, to draft from.

        Raises:
            DocumentError: The document has no letter or digit, or the summary is empty.
        """
        pipeline, plain = self.begin(text), PlainFigures()
        while pipeline.summary is None:
            done, figures = self._decode(
                pipeline.prompts,
                pipeline.limit,
                pipeline.expected(prediction),
                on_outputs=lambda outputs: self.on_progress(*pipeline.progress(outputs)),
            )
            plain += figures
            texts = [text for result in done for text in result.texts]
            stats = total_in_sequence(result.stats for result in done)
            is_looping = any(loops(tokens) for result in done for tokens in result.token_ids)
            pipeline.take(texts, stats, done[-1].finish_reasons[-1], loops=is_looping)
        return replace(pipeline.summary, plain=plain if self._compare else None)

    def summarize_all(self, documents: Iterable[Document | None], rows: int | None = None) -> Iterator[Outcome]:
        """Summarize many documents with the prompts of several decoded together, and yield them as they finish.

        A document is taken when a row is free, so memory does not grow with their number. A document that cannot be
        summarized is rejected; the others continue. The summaries equal the results of `summarize`. With `compare`,
        beams or sampling, documents are summarized one after the other.

        Args:
            documents: The documents. `None` means that the next one has not arrived yet, allowed while others are
                unfinished.
            rows: Prompts decoded together, 1 to 1024; `None` chooses automatically.
        """
        if self._is_alone:
            return (self.summarize_or_reject(document) for document in documents if document is not None)
        return _BatchSummarizer(self, rows).run(documents)

    def rows_together(self, rows: int | None = None) -> int:
        """The number of prompts that `summarize_all` decodes together for this `rows`."""
        return 1 if self._is_alone else self.open_scheduler(rows).rows

    def summarize_or_reject(self, document: Document) -> Outcome:
        """Summarize one document, or return the reason why it cannot be summarized."""
        try:
            return Summarized(document, self.summarize(document.text, document.prediction))
        except Exception as error:  # also out of memory, or a tokenizer panic: the other documents continue
            kind = "" if isinstance(error, LookaheadError) else f"{type(error).__name__}: "
            return Reject(document.id, f"{document.id}: {kind}{' '.join(str(error).split())}", document)

    def warm_up(self) -> None:
        """Decode a few tokens with every proposer, so that the first document does not pay for compilation."""
        prompts = self.fitter.prompts(self.fitter.fit("One, two, three. One, two, three.").parts)
        everything = replace(self._config or LookaheadConfig(), draft="fixed", min_probability=0.0)
        self._generate(prompts[:1], 12, config=everything, num_beams=1)
        self._decode(prompts, 8)

    def begin(self, text: str) -> SummaryPipeline:
        """Cut a document into the prompts of its first round."""
        check_words(text)
        return SummaryPipeline(text, self.fitter)

    def open_scheduler(self, rows: int | None) -> Scheduler:
        """A scheduler that decodes the prompts of several documents together."""
        reader = PromptReader(self._model, self._tokenizer, self._config, **self._sampling, **self._encoding)
        return Scheduler(reader, rows, predicts=self._predicts, on_prefill=self.on_prefill)

    def _decode(
        self,
        prompts: Sequence[str],
        limit: int,
        prediction: str | None = None,
        on_outputs: Callable[[int], None] = lambda _: None,
    ) -> tuple[list[GenerationResult], PlainFigures]:
        """Continue each prompt by at most `limit` tokens, with as many prompts in a batch as the cache has room for.

        `on_outputs` receives the number of finished outputs before each batch.
        """
        ids: list[list[int]] = self._tokenizer(list(prompts), **self._encoding, verbose=False)["input_ids"]
        room = cache_tokens_of(self._model, _ROWS_TOGETHER) // (max(map(len, ids)) + limit)
        rows = max(1, min(_ROWS_TOGETHER // self._num_beams, room))
        if self._compare and "stop_strings" in self._sampling:
            rows = 1  # in a batch, transformers pads outputs that end early, and does not report where
        done: list[GenerationResult] = []
        plain = PlainFigures()
        for start in range(0, len(prompts), rows):
            on_outputs(start)
            batch = list(prompts[start : start + rows])
            result = self._generate(batch, limit, prediction=prediction)
            if self._compare:
                beams = self._num_beams
                if self._seed is not None:
                    torch.manual_seed(self._seed)
                tokens, stats = decode_plainly(
                    self._model, self._tokenizer, ids[start : start + rows], limit, num_beams=beams, **self._sampling
                )
                plain += PlainFigures(stats, tokens == result.token_ids, any(map(loops, tokens)))
            done.append(result)
        return done, plain

    def _generate(self, prompts: list[str], limit: int, **changed: Any) -> GenerationResult:
        options = {"config": self._config, "num_beams": self._num_beams, "on_prefill": self.on_prefill, **changed}
        options |= {"max_new_tokens": limit, **self._sampling, **self._encoding}
        return generate(self._model, self._tokenizer, prompts, seed=self._seed, **options)


@dataclass(slots=True, eq=False)
class _Task:
    """A document in progress, with the outputs of its current round by prompt index."""

    document: Document
    pipeline: SummaryPipeline = field(init=False)
    done: dict[int, Completion] = field(default_factory=dict)


class _BatchSummarizer:
    """Summarizes documents in the rows of a scheduler, as rows become free."""

    def __init__(self, summarizer: Summarizer, rows: int | None) -> None:
        self._summarizer, self._rows = summarizer, rows
        self._scheduler = summarizer.open_scheduler(rows)
        self._numbers = count()
        self._queue: deque[tuple[_Task, int]] = deque()  # tasks and indices of waiting prompts
        self._running: dict[int, tuple[_Task, int]] = {}  # the same for prompts in the scheduler, by number
        self._outcomes: list[Outcome] = []

    def run(self, documents: Iterable[Document | None]) -> Iterator[Outcome]:
        """Summarize documents. If `documents` raises, the documents before it are finished and yielded first."""
        source, is_open = iter(documents), True
        error: Exception | None = None
        while True:
            while self._scheduler.is_free and (self._queue or is_open) and not self._outcomes:
                if self._queue:
                    self._put(*self._queue.popleft())
                    continue
                try:
                    document = next(source)
                except Exception as raised:
                    error, is_open = None if isinstance(raised, StopIteration) else raised, False
                    continue
                if document is None:  # not arrived yet
                    break
                with self._alone_after_error(task := _Task(document)):
                    task.pipeline = self._summarizer.begin(document.text)
                    self._queue_round(task)
            if not self._outcomes:
                if self._scheduler.is_idle:
                    if error is not None:
                        raise error
                    return
                tasks = {task for task, _ in (*self._running.values(), *self._queue)}
                if len(tasks) == 1:
                    (task,) = tasks
                    self._summarizer.on_progress(*task.pipeline.progress(len(task.done)))
                self._step()
            while self._outcomes:
                yield self._outcomes.pop(0)

    @contextmanager
    def _alone_after_error(self, task: _Task) -> Iterator[None]:
        """Summarize a document alone after an error, so that a reject holds the document's own error."""
        try:
            yield
        except Exception:
            self._queue = deque(entry for entry in self._queue if entry[0] is not task)
            self._running = {number: entry for number, entry in self._running.items() if entry[0] is not task}
            self._outcomes.append(self._summarizer.summarize_or_reject(task.document))

    def _queue_round(self, task: _Task) -> None:
        self._queue.extend((task, index) for index in range(len(task.pipeline.prompts)))

    def _put(self, task: _Task, index: int) -> None:
        number = next(self._numbers)
        self._running[number] = task, index
        with self._alone_after_error(task):
            pipeline, prediction = task.pipeline, task.pipeline.expected(task.document.prediction)
            self._scheduler.put(number, pipeline.prompts[index], pipeline.limit, prediction)

    def _step(self) -> None:
        """Run one step of the scheduler. If it fails, summarize every document in its rows alone."""
        try:
            completions = self._scheduler.step()
        except Exception as error:
            self._scheduler = self._summarizer.open_scheduler(self._rows)
            while self._running:
                with self._alone_after_error(next(iter(self._running.values()))[0]):
                    raise error
            return
        for completion in completions:
            if completion.index in self._running:  # else its document was already summarized alone
                task, index = self._running.pop(completion.index)
                with self._alone_after_error(task):
                    self._finish(task, index, completion)

    def _finish(self, task: _Task, index: int, completion: Completion) -> None:
        """Store the output of a prompt, and end the round after the last one."""
        if completion.error is not None:
            raise completion.error
        task.done[index] = completion
        if len(task.done) < len(task.pipeline.prompts):
            return
        done, task.done = [task.done[index] for index in range(len(task.done))], {}
        task.pipeline.take(
            [part.text for part in done],
            total(part.stats for part in done),
            done[-1].finish_reason or "stop",
            loops=any(loops(part.token_ids) for part in done),
        )
        if task.pipeline.summary is None:
            self._queue_round(task)
        else:
            self._outcomes.append(Summarized(task.document, task.pipeline.summary))
