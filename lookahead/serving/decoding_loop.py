"""Decodes the requests of several users together: each joins once its prompt is read, and leaves when it ends."""

from __future__ import annotations

import itertools
import logging
import threading
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead import LookaheadConfig
from lookahead.config import check_whole
from lookahead.decoding.api import options_of
from lookahead.decoding.cache_room import MAX_ROWS, bytes_of_token, cache_tokens_of, rows_of
from lookahead.decoding.plan import RequestPlan, generator_for
from lookahead.decoding.prompts import PromptReader
from lookahead.decoding.request import Request
from lookahead.decoding.scheduler import Scheduler
from lookahead.errors import ConfigError
from lookahead.model.facts import decoder_of, input_device, prefills_at_once
from lookahead.serving.api_errors import ApiError, shutting_down
from lookahead.serving.requests import GenerationRequest, OnUpdate, Output
from lookahead.utils.machine import memory_bytes

_MOST_SLOTS = 8192  # default maximum per row
_CLOSING_S = 1.0  # seconds that closing waits for a thread
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request whose prompt, options and grammar are ready to be decoded.

    Attributes:
        request: The request.
        reader: Its options, with its grammar.
        plan: The plan of its first choice, and of all that can share rows; None for a prompt with images or sounds,
            which the model reads as it is planned.
    """

    request: GenerationRequest
    reader: PromptReader
    plan: RequestPlan | None

    def planned(self) -> RequestPlan:
        """A plan of a choice of its own."""
        return self.reader.plan([self.request.ids], None, [self.request.prediction])


class DecodingLoop:
    """Decodes requests together on its own thread.

    An output has the tokens, including draws by its seed, that `lookahead.generate` gives for it alone.

    Requests that cannot share a batch, such as inputs of encoder-decoder models, are decoded in turn on another thread.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        config: How to draft; the defaults when None.
        rows: Outputs decoded together, 1 to 1024; None for the default of `lookahead.stream_many`.
        queue: Maximum waiting outputs; further ones are only taken of clients that have none.
        cache_tokens: Capacity of the cache in tokens, all rows together; None for the default of
            `lookahead.stream_many`, or on a CPU an eighth of the memory, up to 8192 a row, if that is more.
        prefix_bytes: Bytes of keys and values of earlier texts to keep; 0 keeps none.
        rounds_prefixes: Whether half-precision prompts reuse earlier texts as far as they share them. Tokens may then
            differ where two are nearly equally likely.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        config: LookaheadConfig | None = None,
        rows: int | None = None,
        queue: int = 64,
        cache_tokens: int | None = None,
        prefix_bytes: int = 1 << 30,
        rounds_prefixes: bool = False,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._config = config  # None allows plain decoding of requests without drafts
        if config is not None and config.acceptance != "exact":
            raise ConfigError(f"acceptance must be 'exact' for a server, got {config.acceptance!r}")
        self.rows = rows_of(model) if rows is None else rows
        check_whole("rows", self.rows, 1, MAX_ROWS)
        check_whole("queue", queue, 0)
        room = _cache_tokens_of(model, self.rows) if cache_tokens is None else cache_tokens
        self._queue, self._numbers = queue, itertools.count()
        self._submitting = threading.Lock()
        self._shares_rows = decoder_of(model) is model and not prefills_at_once(model)
        reader = PromptReader(model, tokenizer, config)
        kept: dict[str, Any] = {"prefix_bytes": prefix_bytes, "rounds_prefixes": rounds_prefixes}
        self._together, self._apart = self._lanes = [
            _Lane(Scheduler(reader, self.rows, room, predicts=True, is_mixed=True, **kept)) for _ in range(2)
        ]

    @property
    def most_outputs(self) -> int:
        """Outputs that can run and wait at once."""
        return self.rows + self._queue

    def submit(self, request: GenerationRequest, on_update: OnUpdate) -> Output:
        """Plan and queue one output of a request, from any thread. It may take milliseconds.

        `on_update` is called with every update on a thread of the loop; it must not block.

        Raises:
            ApiError: Too many requests wait, or the loop was closed.
            ConfigError, PromptError, UnsupportedModelError: The request cannot be served.
        """
        return self.put(self.plan(request), on_update)

    def plan(self, request: GenerationRequest) -> PlannedRequest:
        """Validate a request and compile its grammar, once for all its choices, from any thread; raises as `submit`.

        A thread may be interrupted here, since nothing of the loop changes.
        """
        self._check_room(request.client)
        options = dict(request.options)
        if request.top_logprobs is not None:
            options |= {"output_logits": True, "return_dict_in_generate": True}
        grammars = {name: options.pop(name, None) for name in ("json_schema", "regex", "grammar")}
        options = options_of(self.model, self.tokenizer, None, options, None, grammars)
        config = self._config if request.drafts else replace(self._config or LookaheadConfig(), proposers=())
        reader = PromptReader(self.model, self.tokenizer, config, recognises=False, **options)
        if request.inputs:
            reader.separate(request.inputs)
        reader.read(request.ids, 0)
        planned = PlannedRequest(request, reader, None)
        return planned if request.inputs else replace(planned, plan=planned.planned())

    def put(self, planned: PlannedRequest, on_update: OnUpdate, choice: int = 0) -> Output:
        """Queue a choice of a planned request, as `submit` does."""
        request, plan = planned.request, planned.plan
        seed = None if request.seed is None else (request.seed + choice) % (1 << 63)

        def seeded(plan: RequestPlan) -> RequestPlan:
            return replace(plan, generator=generator_for(self.model, seed)) if plan.is_sampled else plan

        put = Request(next(self._numbers), seed=seed, salt=request.salt)
        if plan is None:
            put.plan = lambda: seeded(planned.planned())
        else:
            plan = seeded(plan)
            if choice and not (self._shares_rows and plan.can_join):  # a plan that is decoded apart may hold its cache
                plan = seeded(planned.planned())
            put.plan = plan
            put.join(plan, shares_rows=self._shares_rows)
        if put.row is not None:
            put.row.drafts = request.drafts
        lane = self._apart if put.row is None else self._together
        with self._submitting:
            self._check_room(request.client)
            return lane.put(Output(put, self.tokenizer, on_update, request))

    def _check_room(self, client: str) -> None:
        """Raise ApiError if the queue is full, which a client that has no output yet cannot have caused."""
        waiting = sum(lane.waiting for lane in self._lanes)
        if self._together.is_closed:
            raise shutting_down()
        is_full = waiting >= self._queue + max(0, self.rows - self._together.running)
        if is_full and any(lane.serves(client) for lane in self._lanes):
            message = f"{waiting} requests wait, the maximum; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})

    def figures(self) -> dict[str, float]:
        """Counts of running outputs and waiting requests, bytes of keys and values, prompt tokens read and reused."""
        counts = [lane.figures() for lane in self._lanes]
        return {name: sum(count[name] for count in counts) for name in counts[0]}

    def close(self) -> None:
        """End all outputs with `"cancelled"`. Threads end after their current step; waits at most a second for each."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """A scheduler, and the thread that steps it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._changed, self.is_closed = scheduler, threading.Condition(), False
        self._new = list[Request]()
        self._outputs: dict[int, Output] = {}  # those that have not ended, by number
        self._running = self._read_tokens = self._reused_tokens = 0
        self._turn_now = 0  # the latest turn of an output that has begun
        self._thread: threading.Thread | None = None  # started with the first output

    @property
    def running(self) -> int:
        """Outputs that are being decoded, or whose prompts are being read."""
        return min(self._running, len(self._outputs))

    @property
    def waiting(self) -> int:
        """Outputs that wait."""
        return max(0, len(self._outputs) - self._running)

    def serves(self, client: str) -> bool:
        """Whether a client has outputs that have not ended."""
        with self._changed:
            return any(output.client == client for output in self._outputs.values())

    def figures(self) -> dict[str, float]:
        """The figures of `DecodingLoop` for these outputs."""
        counts: dict[str, float] = {
            "running": self.running,
            "waiting": self.waiting,
            "cache_bytes": self._scheduler.cache_bytes,
        }
        return counts | {"read_tokens": self._read_tokens, "reused_tokens": self._reused_tokens}

    def put(self, output: Output) -> Output:
        """Add an output. Clients take turns: one waits for as many outputs of others as it has itself."""
        with self._changed:
            if self.is_closed:
                raise shutting_down()
            output.request.turn = self._turn_now + sum(o.client == output.client for o in self._outputs.values())
            self._outputs[output.request.index] = output
            self._new.append(output.request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return output

    def close(self) -> None:
        """End all outputs with `"cancelled"`, and the thread after its step."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
            for output in self._outputs.values():
                output.cancel()
        if self._thread is not None:
            self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        while not self.is_closed:
            try:
                self._turn()
            except Exception as error:
                _log.exception("a step failed, and with it the outputs that ran")
                for request in self._scheduler.clear():
                    request.fail(error)
                    self._tell(request)
            self._running = len(self._scheduler.running)
        self._scheduler.close()
        for output in list(self._outputs.values()):
            output.request.is_over = True
            self._tell(output.request)

    def _turn(self) -> None:
        """Take new requests, decode a block of steps, and hand out what they wrote."""
        with self._changed:
            while not (self.is_closed or self._outputs):
                self._changed.wait()
            new, self._new = self._new, []
        for request in new:
            self._scheduler.add(request)
        with closing(self._scheduler.steps()) as steps:
            for requests in steps:
                self._running = len(self._scheduler.running)
                for request in requests:
                    self._tell(request)
                if self.is_closed or self._new:
                    return

    def _tell(self, request: Request) -> None:
        """Send an update to the client of a request."""
        output, stats = self._outputs[request.index], request.stats
        self._turn_now = max(self._turn_now, request.turn)
        if request.last is not None and not output.has_begun:
            self._read_tokens += stats.prompt_tokens - stats.reused_tokens
            self._reused_tokens += stats.reused_tokens
        if request.is_over:
            with self._changed:
                del self._outputs[request.index]
        try:
            output.tell()
        except Exception:  # of its client alone; the other outputs go on
            _log.exception("an update could not be sent, and its request is cancelled")
            output.cancel()


def _cache_tokens_of(model: PreTrainedModel, rows: int) -> int:
    """Default capacity of the cache in tokens."""
    least, token_bytes = cache_tokens_of(model, rows), bytes_of_token(model)
    if not token_bytes or input_device(model).type != "cpu":
        return least
    return max(least, min(rows * _MOST_SLOTS, memory_bytes() // 8 // token_bytes))
