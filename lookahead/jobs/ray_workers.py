"""A crew of workers on a Ray cluster, which does what one summarizer does here.

These are actors of Ray, and not a pool of its `map_batches`. That does the same job as well while nothing dies: with a
document a batch, and several side by side in an actor, each result comes as soon as it is done. Otherwise:

- `from_items` has read all documents before the first result. The journal, which passes over what is finished and what
  has an equal before it, goes on in this process, from document to document, and what there is no room for yet waits.
- A document that kills workers is tried again without end unless Ray is told otherwise, and the job does not end. With
  a bound (`max_task_retries`, `max_errored_blocks`) it ends, and documents in hand beside that one are lost with it; no
  answer names any of them.
- What died with a worker waits until Ray has started that one again and it has loaded the model.

So a document is a call of its own. A worker has a few more in hand than it has rows, and decodes them together; each
comes back as soon as it is done, and goes to another worker where its own dies. Those that several died with go last
and alone, so that the one which kills workers takes no other along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lookahead.documents.decode_text import Document, Reject
from lookahead.errors import ClusterError, LookaheadError
from lookahead.jobs.ray_cluster import first_line
from lookahead.jobs.ray_worker import Introduction, RayWorker, WorkerOptions
from lookahead.summarization.summarizer import Summarized

if TYPE_CHECKING:
    from lookahead.jobs.ray_cluster import Plan

Outcome = Summarized | Reject

TRIES = 3  # workers that may die with a document in hand before it is put aside
FAILED_STARTS = 3  # workers in a row that may die while they start before none is started any more
_CALLS = 2048  # that an actor answers side by side: more than it is ever given


@dataclass(slots=True, eq=False)
class _Member:
    """One worker: its handle, how many documents it may have in hand, and how many it has."""

    handle: Any
    room: int = 0
    in_hand: int = 0
    is_alive: bool = True


@dataclass(frozen=True, slots=True)
class _Call:
    """What a worker was asked: to start, or to summarize what died with so many others and takes so much room."""

    member: _Member
    document: Document | None = None
    deaths: int = 0
    room: int = 0


class Crew:
    """Summarizes documents with workers on a cluster; entered, it starts them, and left it stops them.

    Args:
        ray: The module, connected.
        options: How the workers work.
        plan: How many there are, and what each takes.

    Attributes:
        notes: What a user should know, in words.
    """

    def __init__(self, ray: Any, options: WorkerOptions, plan: Plan) -> None:
        self._ray = ray
        resources = {"num_cpus": plan.threads, "num_gpus": plan.gpus, "max_concurrency": _CALLS}
        self._make = ray.remote(RayWorker).options(**resources).remote
        self._options = options
        self._size = plan.workers
        self._members: list[_Member] = []
        self._calls: dict[Any, _Call] = {}
        self._again: deque[tuple[Document, int]] = deque()  # of workers that died, and how many did
        self._suspects: deque[Document] = deque()  # that have one chance left
        self._first: Introduction | None = None
        self._failed_starts = 0
        self.notes: list[str] = []

    def __enter__(self) -> Crew:
        for _ in range(self._size):
            self._hire()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            self._ray.kill(member.handle)

    def introduce(self, workers: int = 1) -> Introduction:
        """Wait for so many workers to be ready; the others go on with starting.

        Raises:
            LookaheadError: The options are wrong, or no worker lives to be ready.
        """
        while self._first is None or sum(member.room > 0 for member in self._members) < workers:
            for _ in self._collect(waits=True):
                pass
        return self._first

    def summarize_all(self, documents: Iterable[Document], rows: int | None = None) -> Iterator[Outcome]:
        """Summarize documents; they are taken as workers come free, and come as they are done.

        Where `documents` itself raises, what is being decoded is finished and yielded first.

        Args:
            documents: The documents.
            rows: Nothing: how many a worker decodes together is among its options.

        Raises:
            ClusterError: No worker is left, and none can be started.
        """
        source, error, is_open = iter(documents), None, True
        while True:
            member = self._freest()
            if member is not None and self._again:
                self._give(member, *self._again.popleft())
            elif member is not None and is_open:
                try:
                    self._give(member, next(source), 0)
                except StopIteration:
                    is_open = False
                except Exception as raised:
                    error, is_open = raised, False
            elif member is not None and member.in_hand == 0 and self._suspects:
                self._give(member, self._suspects.popleft(), TRIES - 1)
            free = self._freest()
            is_alone = free is not None and free.in_hand == 0 and bool(self._suspects)
            has_more = free is not None and (is_open or bool(self._again) or is_alone)
            if not (has_more or is_open or self._again or self._suspects or self._is_busy):
                break
            yield from self._collect(waits=not has_more)
        if error is not None:
            raise error

    @property
    def _is_busy(self) -> bool:
        """Whether a document is in hand."""
        return any(call.document is not None for call in self._calls.values())

    def _hire(self) -> None:
        """Start a worker: Ray finds a place for it, or waits until there is one."""
        member = _Member(self._make(self._options))
        self._members.append(member)
        self._calls[member.handle.start.remote()] = _Call(member)

    def _freest(self) -> _Member | None:
        """The worker with the fewest documents in hand, if any may have another."""
        free = [member for member in self._members if member.in_hand < member.room]
        return min(free, key=lambda member: member.in_hand, default=None)

    def _give(self, member: _Member, document: Document, deaths: int) -> None:
        """Let a worker summarize a document; one on its last chance takes all the room."""
        room = member.room if deaths == TRIES - 1 else 1
        self._calls[member.handle.summarize.remote(document)] = _Call(member, document, deaths, room)
        member.in_hand += room

    def _collect(self, *, waits: bool) -> Iterator[Outcome]:
        """What is done, one answer at least where this waits for it."""
        calls = list(self._calls)
        if not calls:
            return
        wanted, patience = (1, None) if waits else (len(calls), 0)
        done, _ = self._ray.wait(calls, num_returns=wanted, timeout=patience)
        for each in done:
            call = self._calls.pop(each)
            call.member.in_hand -= call.room
            try:
                answer = self._ray.get(each)
            except self._ray.exceptions.RayError as error:
                yield from self._lose(call, error)
                continue
            if call.document is None:
                self._welcome(call.member, answer)
            elif isinstance(answer, str):
                yield Reject(call.document.id, answer, call.document)
            else:
                yield Summarized(call.document, answer)

    def _welcome(self, member: _Member, answer: Introduction | LookaheadError) -> None:
        """Count on a worker that is ready, if it does what the others do."""
        if isinstance(answer, Introduction):
            self._first = self._first or answer
            different = answer.identity.differences(self._first.identity.to_dict())
            if not different:
                self._failed_starts = 0
                member.room = answer.rows + max(1, answer.rows // 4)  # so that none waits for the next one to come
                return
            answer = ClusterError(f"it would do another job: {different}")
        if self._first is None:
            raise answer
        self._dismiss(member)
        self.notes.append(f"a worker was left out: {answer}")
        self._check_is_manned(str(answer))

    def _lose(self, call: _Call, error: Exception) -> Iterator[Outcome]:
        """Replace a worker that died, and let another have the document it had in hand."""
        reason = first_line(error)
        if call.member.is_alive:
            self._dismiss(call.member)
            self._failed_starts += call.document is None
            if call.document is not None:
                self.notes.append(f"a worker died, and others did what it had in hand: {reason}")
            if self._failed_starts < FAILED_STARTS:
                self._hire()
            self._check_is_manned(reason)
        if call.document is None:
            return
        deaths = call.deaths + 1
        if deaths < TRIES - 1:
            self._again.append((call.document, deaths))
        elif deaths < TRIES:
            self._suspects.append(call.document)
        else:
            name = call.document.id
            yield Reject(name, f"{name}: {TRIES} workers died with it in hand: {reason}", call.document)

    def _dismiss(self, member: _Member) -> None:
        """Count on a worker no more; what it was asked comes back as an error."""
        member.is_alive, member.room = False, 0
        self._members.remove(member)
        self._ray.kill(member.handle)

    def _check_is_manned(self, reason: str) -> None:
        """Fail where nobody is left who could work."""
        if not self._members:
            raise ClusterError(f"no worker lives to do the work; the last one: {reason}")
