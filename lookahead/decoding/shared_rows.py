"""Continuous batching: requests in a fixed number of rows; when one ends, the next takes its row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import takewhile
from typing import Any

from lookahead.backend.protocol import OnPrefill
from lookahead.backend.read_prompt import Prefix
from lookahead.config import LookaheadConfig
from lookahead.decoding.assembly import Common, assemble
from lookahead.decoding.cache_room import fits, make_room
from lookahead.decoding.prompts import PromptReader
from lookahead.decoding.prompts_ahead import BETWEEN_STEPS, PromptsAhead
from lookahead.decoding.request import Request
from lookahead.engine.engine import Engine
from lookahead.engine.row import Row, StepOutput
from lookahead.model.facts import input_device

_PASS = {"cpu": 64, "cuda": 512}  # padding tokens that cost no more than another pass
_PASSES = 16  # passes of a block; entering `serving` takes a tenth of a pass
_BRIEF = 16  # maximum new tokens of a short request
_ROWS_PER_SEAT = 8


class SharedRows:
    """The rows of one engine, which requests join and leave.

    A server on a CPU has a seat for every 8 rows: a further row for short requests only, which so wait for no row.

    Args:
        reader: Holds the model, its tokenizer and how to draft.
        rows: Maximum rows.
        cache_tokens: Capacity of the cache in tokens, all rows together.
        ahead: Reads prompts ahead; None reads all of them whole, together if they are of similar length.
        predicts: Whether requests may come with predictions.
        is_mixed: Whether each request has its own options.
        on_prefill: As in `generate`.

    Attributes:
        engine: The engine; None before the first request.
        running: The requests that have a row, by number.
    """

    def __init__(
        self,
        reader: PromptReader,
        rows: int,
        cache_tokens: int,
        ahead: PromptsAhead | None,
        *,
        predicts: bool,
        is_mixed: bool,
        on_prefill: OnPrefill | None,
    ) -> None:
        self._config = reader.config or LookaheadConfig()
        self._common = Common(
            model=reader.model,
            config=self._config,
            tokenizer=reader.tokenizer,
            keep_cache=ahead is not None and ahead.store.most_bytes > 0,
            predicts=predicts,
        )
        self._rows, self._cache_tokens, self._ahead = rows, cache_tokens, ahead
        self._is_mixed, self._on_prefill = is_mixed, on_prefill
        self._seats = rows // _ROWS_PER_SEAT if is_mixed and input_device(reader.model).type == "cpu" else 0
        self._pass_tokens = _PASS.get(input_device(reader.model).type, _PASS["cuda"])
        self._unstepped = 0  # tokens of prompts that were read since the last step
        self.engine: Engine | None = None
        self.running: dict[int, Request] = {}

    @property
    def unfinished(self) -> list[Request]:
        """The requests that have a row, or one to come once their prompt is read."""
        reading = () if self._ahead is None else self._ahead.reading
        return [*self.running.values(), *(request for request, _ in reading)]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of the rows, and of earlier texts."""
        engine, kept = self.engine, 0 if self._ahead is None else self._ahead.store.nbytes
        return kept + (0 if engine is None else sum(buffer.nbytes for buffer in engine.cache.buffers()))

    def clear(self) -> list[Request]:
        """Drop the running requests and the engine, after an error; returns them. Prompts that are read stay."""
        self.engine, dropped = None, list(self.running.values())
        self.running.clear()
        return dropped

    def close(self) -> None:
        """End the thread that reads prompts."""
        if self._ahead is not None:
            self._ahead.close()

    def steps(self, waiting: deque[Request]) -> Iterator[list[Request]]:
        """Admit waiting requests, then advance all rows until one ends, at most `_PASSES` passes.

        Yields the requests that emitted tokens or ended in a step. Between blocks the model is restored.
        """
        admitted, is_ended = list[Request](), False
        while not is_ended and self._may_read and (admitted := self._admit(waiting)):
            is_ended = any(request.is_over for request in admitted)
            self._unstepped += sum(request.row.tokens - request.stats.reused_tokens for request in admitted)
            yield admitted  # a server may drop this block here, to take new requests
        engine, ahead = self.engine, self._ahead
        if engine is None or not self.running or is_ended:
            if not self.running and not admitted and ahead is not None:
                ahead.wait()
            return
        with engine.serving(is_alone=True):
            for _ in range(_PASSES):
                requests = self._end_cancelled(engine)
                if not requests:
                    is_beside = ahead is not None and bool(ahead.reading)
                    with nullcontext() if ahead is None else ahead.share_of_threads(is_beside):
                        is_refilled = bool(waiting) or len(self.running) == self._rows
                        outputs = engine.step(is_refilled=is_refilled, is_timed=not is_beside)
                    self._unstepped = 0
                    requests = [self._take(output) for output in outputs]
                yield requests
                # Requests of one call are put as rows come free; those of a server wait already.
                is_free = any(request.is_over for request in requests) and (bool(waiting) or not self._is_mixed)
                if is_free or not self.running or (ahead is not None and self._can_admit(waiting, ahead)):
                    return

    @property
    def _may_read(self) -> bool:
        """Whether prompts may be read before the next step: the outputs of a server go on in between."""
        return not (self._is_mixed and self.running and self._unstepped >= BETWEEN_STEPS)

    def _can_admit(self, waiting: deque[Request], ahead: PromptsAhead) -> bool:
        """Whether a prompt was read, or a waiting one can be."""
        candidates = self._candidates(waiting, ahead)
        return ahead.has_read or any(map(ahead.is_short, candidates)) or any(ahead.beginning(candidates))

    def _end_cancelled(self, engine: Engine) -> list[Request]:
        """Free the rows of cancelled requests."""
        gone = [request for request in self.running.values() if request.is_cancelled]
        for request in gone:
            engine.end(request.index)
            self._leave(request)
        return gone

    def _take(self, output: StepOutput) -> Request:
        """Pass the output of a step to its request."""
        request = self.running[output.row]
        request.take(output)
        if request.is_over:
            self._leave(request)
        return request

    def _leave(self, request: Request) -> None:
        """Note that a request has left the engine, and keep its keys and values for later prompts."""
        assert self.engine is not None
        del self.running[request.index]
        request.is_over, row = True, request.row
        copy = self.engine.kept.pop(row.index, None)
        if copy is not None and self._ahead is not None:
            store = self._ahead.store
            tokens = request.stats.prompt_tokens if store.keeps_bits else copy.tokens  # outputs have other bits
            if tokens <= copy.tokens:
                store.put(row.text[:tokens], copy, request.salt)

    def _admit(self, waiting: deque[Request]) -> list[Request]:
        """Admit requests in order while rows and room are free; returns those that left the queue."""
        ahead = self._ahead
        if ahead is None:
            return self._add(list(self._taken(waiting)))
        if waiting:
            ahead.refresh()
        for request in ahead.beginning(self._candidates(waiting, ahead)):
            if self._has_room_for(request):
                waiting.remove(request)
                ahead.begin(request, is_shared=bool(self.running))
        if not ahead.has_read:
            return self._add_short(waiting, ahead)
        request, future = ahead.take()
        if request.is_cancelled:
            request.is_over = True
        elif error := future.exception():
            request.fail(error)
        else:
            self.running[request.index] = request
            return self._add([request], read=future.result())
        return [request]

    def _add_short(self, waiting: deque[Request], ahead: PromptsAhead) -> list[Request]:
        """Admit waiting requests if all but a few of their tokens are known from earlier texts."""
        joining, prefixes, unread = list[Request](), list[Prefix](), 0
        for request in self._candidates(waiting, ahead):
            if not ahead.is_short(request, unread) or not self._has_room_for(request):
                continue
            prefixes.append(ahead.prefix(request))
            unread += request.row.tokens - prefixes[-1].tokens
            ahead.count(request)
            joining.append(request)
            waiting.remove(request)
            self.running[request.index] = request
            if self.engine is None or self.engine.reads_alone or not ahead.reads_apart:
                break
        return self._add(joining, prefixes=prefixes)

    def _candidates(self, waiting: deque[Request], ahead: PromptsAhead) -> list[Request]:
        """The waiting requests that may be next, up to the first without room: a large one is not passed for ever.

        Short ones pass it to seats, if it fits beside them.
        """
        candidates = [request for request in ahead.candidates(waiting) if not request.is_cancelled]
        fitting = list(takewhile(self._has_room_for, candidates))
        if self._seats and len(fitting) < len(waiting):
            largest = self._tokens_of(candidates[len(fitting)]) if len(fitting) < len(candidates) else 1
            if fits([largest] * (1 + self._seats), self._cache_tokens):
                fitting += [r for r in waiting if r not in fitting and self._is_brief(r) and self._has_room_for(r)]
        return ahead.in_order(fitting)

    def _is_brief(self, request: Request) -> bool:
        """Whether a request is short: few tokens to write and to read."""
        row, ahead = request.row, self._ahead
        if row is None or ahead is None or request.is_cancelled:
            return False
        return bool(row.stopping.max_length - row.length <= _BRIEF) and ahead.is_short(request)

    def _taken(self, waiting: deque[Request]) -> Iterator[Request]:
        """Take requests from the queue while rows and room are free."""
        while (request := self._next(waiting)) is not None:
            self.running[request.index] = waiting.popleft()
            yield request

    def _next(self, waiting: deque[Request]) -> Request | None:
        """The first waiting request, if a row and room in the cache are free for it."""
        return waiting[0] if waiting and self._has_room_for(waiting[0]) else None

    def _has_room_for(self, request: Request) -> bool:
        """Whether a row and room in the cache are free for a request."""
        running = self.unfinished
        if request.row is None or len(running) >= self._rows + self._seats:
            return False
        if len(running) >= self._rows and not self._is_brief(request):
            return False
        needs = [self._tokens_of(other) for other in (*running, request)]
        return fits(needs, self._cache_tokens)

    def _add(self, requests: list[Request], **options: Any) -> list[Request]:
        """Add requests to the engine, which reads their prompts; `options` are those of `Engine.admit`."""
        if not requests:
            return []
        rows: list[Row] = [request.row for request in requests]
        self.engine = engine = self.engine or self._assemble(rows[0])
        running = self.running.values()
        needs, longest = list(map(self._slots_of, running)), max(map(self._tokens_of, running))
        make_room(engine.cache, needs, self._cache_tokens, self._rows + self._seats, longest)
        engine.report_prefill(self._on_prefill)
        with engine.serving():
            passes = [rows] if options else self._in_passes(rows)
            return [self._take(output) for part in passes for output in engine.admit(part, **options)]

    def _assemble(self, first: Row) -> Engine:
        is_constrained = self._is_mixed or first.forcing is not None
        common, most = replace(self._common, is_constrained=is_constrained), self._rows + self._seats
        return assemble(common, first.stopping, slots=most)

    def _slots_of(self, request: Request) -> int:
        """Slots that a request may need in the cache, drafts included."""
        return int(request.row.stopping.max_length) + self._config.node_budget + 1

    def _tokens_of(self, request: Request) -> int:
        """Tokens whose keys and values a request may need, including an encoder's input."""
        return self._slots_of(request) + request.encoder_tokens

    def _in_passes(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Group rows that are read together: all if that needs no padding, else those of similar prompt length."""
        if self.engine is not None and self.engine.packs_prompts:
            return [list(rows)]
        if self.engine is not None and self.engine.reads_alone:
            return [[row] for row in rows]
        passes: list[list[Row]] = []
        for row in sorted(rows, key=lambda row: row.tokens):
            if passes and len(passes[-1]) * (row.tokens - passes[-1][-1].tokens) <= self._pass_tokens:
                passes[-1].append(row)
            else:
                passes.append([row])
        return passes
