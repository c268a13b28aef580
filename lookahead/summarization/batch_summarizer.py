"""Many documents in the rows of one engine: short ones, and the parts of long ones, side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from lookahead.documents.decode_text import Document, Reject, check_words
from lookahead.errors import DocumentError
from lookahead.stats import DecodingStats, total
from lookahead.summarization.pipeline import Course
from lookahead.summarization.summary import Summarized

if TYPE_CHECKING:
    from lookahead.generation.scheduler import Completion, Scheduler
    from lookahead.verification.stopping import FinishReason

Outcome = Summarized | Reject


@dataclass(slots=True)
class _Task:
    """A document on its way to a summary, and what its prompts of this round came to."""

    document: Document
    course: Course
    summaries: dict[int, str] = field(default_factory=dict)  # by the place of their prompt
    stats: list[DecodingStats] = field(default_factory=list)
    finish_reason: FinishReason = "stop"  # of the last prompt


class BatchSummarizer:
    """Summarizes documents as fast as rows come free, in the order in which they are done.

    Args:
        open_rows: Gives the rows; called again where all of them failed together.
        begin: Sets out with the text of a document.
        alone: Summarizes one document by itself, or says why not: its word counts where a document fails here.
    """

    def __init__(
        self,
        open_rows: Callable[[], Scheduler],
        begin: Callable[[str], Course],
        alone: Callable[[Document], Outcome],
    ) -> None:
        self._open_rows = open_rows
        self._set_out = begin
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
        try:
            check_words(document.text)
            task = _Task(document, self._set_out(document.text))
        except Exception:
            self._done.append(self._alone(document))
        else:
            self._queue_round(task)

    def _queue_round(self, task: _Task) -> None:
        """Let the prompts of a task's round wait for rows."""
        self._queue.extend((task, place) for place in range(len(task.course.prompts)))

    def _put(self) -> None:
        """Give the next prompt a row."""
        task, place = self._queue.popleft()
        number = next(self._numbers)
        self._places[number] = task, place
        try:
            self._rows.put(number, task.course.prompts[place], task.course.limit)
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
        if place == len(task.course.prompts) - 1 and completion.finish_reason is not None:
            task.finish_reason = completion.finish_reason
        task.stats.append(completion.stats)
        if len(task.summaries) == len(task.course.prompts):
            try:
                self._end_round(task)
            except DocumentError as error:
                self._done.append(Reject(task.document.id, f"{task.document.id}: {error}", task.document))
            except Exception:
                self._give_up(task)

    def _end_round(self, task: _Task) -> None:
        """Go on to the next round, or be done."""
        summaries = [task.summaries[place] for place in range(len(task.course.prompts))]
        stats, task.summaries, task.stats = total(task.stats), {}, []
        task.course.take(summaries, stats, task.finish_reason)
        if task.course.summary is None:
            self._queue_round(task)
        else:
            self._done.append(Summarized(task.document, task.course.summary.check()))

    def _give_up(self, task: _Task) -> None:
        """Summarize a document by itself, which also finds the words for what is wrong with it."""
        self._queue = deque(each for each in self._queue if each[0] is not task)
        self._places = {number: each for number, each in self._places.items() if each[0] is not task}
        self._done.append(self._alone(task.document))
