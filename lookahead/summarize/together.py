"""Many documents in the rows of one engine: short ones, and the parts of long ones, side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from lookahead.files.text import Document, Reject
from lookahead.stats import DecodingStats, total
from lookahead.summarize.decoding import total_in_sequence
from lookahead.summarize.fitting import FittedDocument, PromptFitter
from lookahead.summarize.summarizer import Summarized, Summary

if TYPE_CHECKING:
    from lookahead.batching import Batching, Completion

Outcome = Summarized | Reject


@dataclass(slots=True)
class _Task:
    """A document on its way to a summary: round after round, until what is left of it is one prompt."""

    document: Document
    whole: FittedDocument
    prompts: list[str] = field(default_factory=list)
    summaries: dict[int, str] = field(default_factory=dict)  # of this round, by the place of their prompt
    stats: list[DecodingStats] = field(default_factory=list)  # of this round
    rounds: list[DecodingStats] = field(default_factory=list)  # of those before


class Together:
    """Summarizes documents as fast as rows come free, in the order in which they are done.

    Args:
        open_rows: Gives the rows; called again where all of them failed together.
        fitter: Cuts documents and renders prompts.
        max_new_tokens: Most tokens of a summary.
        alone: Summarizes one document by itself, or says why not: its word counts where a document fails here.
    """

    def __init__(
        self,
        open_rows: Callable[[], Batching],
        fitter: PromptFitter,
        max_new_tokens: int,
        alone: Callable[[Document], Outcome],
    ) -> None:
        self._open_rows = open_rows
        self._fitter = fitter
        self._max_new_tokens = max_new_tokens
        self._alone = alone
        self._numbers = count()
        self._rows = open_rows()
        self._queue: deque[tuple[_Task, int]] = deque()  # prompts that wait, by their place in a task
        self._places: dict[int, tuple[_Task, int]] = {}  # those being decoded, by their number
        self._done: list[Outcome] = []

    def run(self, documents: Iterable[Document | None]) -> Iterator[Outcome]:
        """Summarize documents; they are taken as rows come free.

        Where `documents` itself raises, what is being decoded is finished and yielded first. A None says that none has
        come yet, and that those which are being decoded need not wait for it: it may come only while there are some.
        """
        source, error = iter(documents), None
        is_open = True
        while True:
            while self._rows.is_free and (self._queue or is_open) and not self._done:
                if self._queue:
                    self._put()
                    continue
                try:
                    document = next(source)
                except StopIteration:
                    is_open = False
                except Exception as raised:
                    error, is_open = raised, False
                else:
                    if document is None:
                        break
                    self._begin(document)
            if not self._done and self._rows.is_idle:
                if error is not None:
                    raise error
                return
            yield from self._take_done()
            self._step()
            yield from self._take_done()

    def _take_done(self) -> list[Outcome]:
        """What is done since this was asked last."""
        done, self._done = self._done, []
        return done

    def _begin(self, document: Document) -> None:
        """Cut a document into prompts."""
        if not document.text.strip():
            self._done.append(self._alone(document))
            return
        try:
            task = _Task(document, self._fitter.fit(document.text))
        except Exception:
            self._done.append(self._alone(document))
        else:
            self._queue_round(task, task.whole.prompts)

    def _queue_round(self, task: _Task, prompts: list[str]) -> None:
        """Let the prompts of a task's next round wait for rows."""
        task.prompts = prompts
        self._queue.extend((task, place) for place in range(len(prompts)))

    def _put(self) -> None:
        """Give the next prompt a row."""
        task, place = self._queue.popleft()
        number, limit = next(self._numbers), self._max_new_tokens
        if len(task.prompts) > 1:
            limit = min(limit, self._fitter.partial_summary_limit or limit)
        self._places[number] = task, place
        try:
            self._rows.put(number, task.prompts[place], limit)
        except Exception:
            del self._places[number]
            self._give_up(task)

    def _step(self) -> None:
        """Let the rows advance; where that fails for all of them, every document in them is decoded by itself."""
        try:
            done = self._rows.step()
        except Exception:
            tasks = {id(task): task for task, _ in self._places.values()}
            self._places.clear()
            self._rows = self._open_rows()
            for task in tasks.values():
                self._give_up(task)
            return
        for completion in done:
            self._finish(completion)

    def _finish(self, completion: Completion) -> None:
        """Take the summary of a part, and go on where it was the last one of its round."""
        if completion.index not in self._places:
            return  # of a document that was given up
        task, place = self._places.pop(completion.index)
        if completion.error is not None:
            self._give_up(task)
            return
        task.summaries[place] = completion.text
        task.stats.append(completion.stats)
        if len(task.summaries) == len(task.prompts):
            try:
                self._end_round(task)
            except Exception:
                self._give_up(task)

    def _end_round(self, task: _Task) -> None:
        """Summarize what came of the parts, or be done."""
        summaries = [task.summaries[place] for place in range(len(task.prompts))]
        last = total(task.stats)
        task.rounds.append(last)
        task.summaries, task.stats = {}, []
        if len(summaries) > 1:
            # A model with nothing to say of any part may still have something to say of the first.
            joined = self._fitter.join(summaries) or task.whole.parts.texts[0]
            self._queue_round(task, self._fitter.fit(joined).prompts)
            return
        summary = Summary(
            text=summaries[0].strip(),
            document_tokens=task.whole.parts.tokens,
            summary_tokens=last.emitted_tokens,
            parts=len(task.whole.parts.texts),
            split=task.whole.parts.split,
            stats=total_in_sequence(task.rounds),
        )
        self._done.append(Summarized(task.document, summary))

    def _give_up(self, task: _Task) -> None:
        """Summarize a document by itself, which also finds the words for what is wrong with it."""
        self._queue = deque(each for each in self._queue if each[0] is not task)
        self._places = {number: each for number, each in self._places.items() if each[0] is not task}
        self._done.append(self._alone(task.document))
