"""Decodes the requests of several users together: each joins once its prompt is read, and leaves when it ends.

Prompts are read on a separate thread, so running outputs continue meanwhile; on a GPU between two steps. The keys and
values of prompts and outputs are kept: a prompt that starts with an earlier text reads only the rest.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.backend.read_prompt import Prefix, ReadingAhead, ReadPrompt, prefixes_of, reads_apart
from lookahead.config import LookaheadConfig, check_whole
from lookahead.decoding.api import with_row_processors
from lookahead.decoding.assembly import assemble, has_kernels
from lookahead.decoding.cache_room import MAX_ROWS, bytes_of_token, cache_tokens_of, fits, make_room, rows_of
from lookahead.decoding.plan import RequestPlan, generator_for
from lookahead.decoding.prompts import PromptReader
from lookahead.decoding.validation import validate_call
from lookahead.engine.engine import Engine
from lookahead.engine.row import Row, StepOutput
from lookahead.errors import ConfigError
from lookahead.kernels.jobs import torch_on_threads
from lookahead.model.facts import decoder_of, input_device, prefills_at_once
from lookahead.serving.alone import AloneWorker
from lookahead.serving.output import Output
from lookahead.serving.requests import GenerationRequest, LoopClosedError, OnUpdate, QueueFullError, Ticket
from lookahead.utils.machine import memory_bytes

_STEPS = 16  # steps of a block with the model in service
_MOST_SLOTS = 4096  # default maximum per row
_SHORT = 64  # maximum tokens read between two steps
_READ_AHEAD = 2  # prompts in the reader's queue, so that it does not wait for a step
_CLOSING_S = 1.0  # seconds that closing waits for a thread
_log = logging.getLogger(__name__)


class DecodingLoop:
    """Decodes requests together on its own thread.

    An output has the tokens, including draws by its seed, that `lookahead.generate` gives for it alone. With keys and
    values of an earlier text it equals transformers' output continued from them: in half precision, tokens may differ
    from a whole prefill where two are about equally likely.

    Requests that cannot share a batch, such as inputs of encoder-decoder models, are decoded in turn on another thread.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        config: How to draft; the defaults when None.
        rows: Outputs decoded together, 1 to 1024; None for the default of `lookahead.stream_many`.
        queue: Maximum waiting requests.
        cache_tokens: Capacity of the cache in tokens, all rows together; None for the default of
            `lookahead.stream_many`, or on a CPU an eighth of the memory, up to 4096 a row, if that is more.
        prefix_bytes: Bytes of keys and values of earlier texts to keep; 0 keeps none.
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
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config or LookaheadConfig()
        self._given = config  # None allows plain decoding of requests without drafts
        if self.config.acceptance != "exact":
            raise ConfigError(f"acceptance must be 'exact' for a server, got {self.config.acceptance!r}")
        self.rows = rows_of(model) if rows is None else rows
        check_whole("rows", self.rows, 1, MAX_ROWS)
        check_whole("queue", queue, 0)
        self._cache_tokens = _cache_tokens_of(model, self.rows) if cache_tokens is None else cache_tokens
        check_whole("cache_tokens", self._cache_tokens, 1)
        self._queue, self._numbers = queue, itertools.count()
        self._joins_none = decoder_of(model) is not model or prefills_at_once(model)
        self._reads_beside = input_device(model).type == "cpu"
        self._reads_apart = reads_apart(model)  # prompts with states or indexer keys are read in the rows' cache
        self._prefix_bytes, self.store = prefix_bytes, prefixes_of(model, prefix_bytes)
        self._engine: Engine | None = None
        self._reader: ReadingAhead | None = None
        self._changed, self._closed = threading.Condition(), False
        self._waiting, self._running = deque[Output](), dict[int, Output]()
        self._reading = deque[tuple[Output, Future[ReadPrompt]]]()
        self._alone = AloneWorker()
        self._read_tokens = self._reused_tokens = 0
        self._to_read = SimpleQueue[tuple[Output, Future[ReadPrompt]] | None]()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._run, self._run_reader)]
        for thread in self._threads:
            thread.start()

    def submit(self, request: GenerationRequest, on_update: OnUpdate) -> Ticket:
        """Validate and queue a request, from any thread. It may take milliseconds.

        `on_update` is called with every update on a thread of the loop; it must not block.

        Raises:
            QueueFullError: Too many requests wait.
            LoopClosedError: The loop was closed.
            ConfigError, PromptError, UnsupportedModelError: The request cannot be served.
        """
        self._check_room()
        plan = self._plan(request)
        row = self._row_of(plan)
        output = Output(plan, row, self.tokenizer, on_update, request)
        with self._changed:
            self._check_room()
            if row is None:
                self._alone.put(output)
            else:
                self._waiting.append(output)
            self._changed.notify_all()
        return output.ticket

    def _check_room(self) -> None:
        waiting = len(self._waiting) + self._alone.waiting
        if self._closed:
            raise LoopClosedError("the decoding loop was closed")
        if waiting >= self._queue + max(0, self.rows - len(self._running)):
            raise QueueFullError(f"{waiting} requests wait, the maximum; try again later")

    def _plan(self, request: GenerationRequest) -> RequestPlan:
        options = dict(request.options)
        if request.top_logprobs is not None:
            options |= {"output_logits": True, "return_dict_in_generate": True}
        grammars = {"json_schema": request.json_schema, "regex": request.regex, "grammar": request.grammar}
        options = with_row_processors(self.model, self.tokenizer, None, options, None, grammars)
        reader = PromptReader(self.model, self.tokenizer, self._given, **options)
        plan = reader.plan([reader.read(request.ids, 0)], None, [request.prediction])
        if (store := prefixes_of(self.model, self._prefix_bytes)) is not self.store:  # the weights changed
            self.store, self._reader = store, None
        return replace(plan, generator=generator_for(self.model, request.seed)) if plan.is_sampled else plan

    def _row_of(self, plan: RequestPlan) -> Row | None:
        """A row for the prompt; None if it cannot share a batch."""
        validate_call(plan.call.model, plan.call.generation_config, plan.call.model_kwargs)
        if self._joins_none or not plan.can_join:
            return None
        (row,) = plan.rows()
        row.index, row.device = next(self._numbers), input_device(self.model)
        return row

    def figures(self) -> dict[str, float]:
        """Counts of running outputs and waiting requests, bytes of keys and values, prompt tokens read and reused."""
        cache = 0 if self._engine is None else sum(each.nbytes for each in self._engine.cache.buffers())
        waiting = self._alone.waiting  # before `running`: an output that starts meanwhile is counted
        with self._changed:
            running, waiting = len(self._running) + len(self._reading), waiting + len(self._waiting)
        return {
            "running": running + self._alone.running,
            "waiting": waiting,
            "cache_bytes": cache + self.store.nbytes,
            "read_tokens": self._read_tokens,
            "reused_tokens": self._reused_tokens,
        }

    def close(self) -> None:
        """End all outputs with `"cancelled"`. Threads end after their current step; waits at most a second for each."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._to_read.put(None)
        self._alone.close()
        for thread in self._threads:
            thread.join(_CLOSING_S)

    # The thread that decodes.

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception as error:
                _log.exception("a step failed, and with it the outputs that ran")
                self._fail(error)
        self._fail(None)

    def _turn(self) -> None:
        """Wait for work and run one block of steps."""
        with self._changed:
            while not (self._closed or self._running or self._can_join() or (self._waiting and not self._reading)):
                self._changed.wait()
        self._end_cancelled()
        self._join()
        self._join_short()
        self._begin_reading()
        if self._engine is None or not self._running:
            return
        with self._engine.serving():
            for _ in range(_STEPS):
                is_alone = not self._reading
                with self._share_of_threads():
                    step_outputs = self._engine.step(is_refilled=bool(self._waiting), is_timed=is_alone)
                self._tell(step_outputs)
                self._end_cancelled()
                if not self._running or self._closed:
                    break
                self._begin_reading()
                if self._can_join() or (not self._reading and self._first_waiting() is not None):
                    break

    def _can_join(self) -> bool:
        return bool(self._reading) and self._reading[0][1].done()

    def _share_of_threads(self) -> AbstractContextManager[None]:
        """Use half of the threads while a prompt is read during steps: more threads than cores slow each other down."""
        is_shared = self._reads_beside and self._running and self._reading
        return torch_on_threads(max(1, torch.get_num_threads() // 2)) if is_shared else nullcontext()

    def _begin_reading(self) -> None:
        """Start reading the first waiting prompt if a row and room are free, unless `_join_short` handles it."""
        if len(self._reading) >= _READ_AHEAD or (output := self._first_waiting()) is None:
            return
        if not self._reading and self._is_short(self._unread_of(output)[0]):
            return
        future: Future[ReadPrompt] = Future()
        with self._changed:
            self._waiting.remove(output)
            self._reading.append((output, future))
        if self._reads_beside:
            self._to_read.put((output, future))
        else:
            self._read(output, future)

    def _run_reader(self) -> None:
        while (each := self._to_read.get()) is not None:
            self._read(*each)

    def _read(self, output: Output, future: Future[ReadPrompt]) -> None:
        try:
            assert output.row is not None
            if self._reader is None:
                self._reader = ReadingAhead(self.model, self.store, {"has_kernels": has_kernels(self.model)})
            began = time.perf_counter()
            with self._share_of_threads():
                read = self._reader.read(output.row.text)
            output.row.stats.prefill_s = time.perf_counter() - began
            future.set_result(read)
        except BaseException as error:
            self._reader = None
            future.set_exception(error)
        with self._changed:
            self._changed.notify_all()

    def _join(self) -> None:
        """Admit the first prompt that was read."""
        if not self._can_join():
            return
        output, future = self._reading[0]
        error: Any = future.exception() or ("cancelled" if output.ticket.is_cancelled else None)
        with self._changed:  # an output always counts as running or waiting, so that its model is not closed
            self._reading.popleft()
            if error is None:
                self._count_as_running(output)
        if error is None:
            self._admit([output], read=future.result())
        else:
            output.stop(error)

    def _join_short(self) -> None:
        """Admit the first waiting prompts if all but a few of their tokens are known from earlier texts."""
        joining, prefixes, unread = list[Output](), list[Prefix](), 0
        while not self._reading and (output := self._first_waiting()) is not None:
            tokens, prefix = self._unread_of(output)
            unread += tokens
            if not self._is_short(unread):
                break
            with self._changed:
                self._waiting.remove(output)
                self._count_as_running(output)
            joining.append(output)
            prefixes.append(prefix)
            if self._engine is None or self._engine.reads_alone or not self._reads_apart:
                break
        if joining:
            self._admit(joining, prefixes=prefixes)

    def _is_short(self, unread: int) -> bool:
        """Whether `unread` tokens are read between two steps; always if prompts cannot be read separately."""
        return unread <= _SHORT or not self._reads_apart

    def _unread_of(self, output: Output) -> tuple[int, Prefix]:
        """The number of prompt tokens not known from earlier texts, and the known prefix."""
        assert output.row is not None
        prefix = self.store.longest(output.row.text)
        return output.row.tokens - prefix.tokens, prefix

    def _admit(self, outputs: list[Output], **known: Any) -> None:
        """Add outputs to the rows; `known` are options of `Engine.admit`."""
        rows = [output.row for output in outputs if output.row is not None]
        lengths = [row.tokens for row in rows]
        if self._engine is None:
            self._engine = self._assemble(outputs[0].plan)
        needs = [self._slots_of(each) for each in self._running.values()]
        with self._engine.serving():
            make_room(self._engine.cache, needs, self._cache_tokens, self.rows)
            step_outputs = self._engine.admit(rows, **known)
            for row, length in zip(rows, lengths, strict=True):
                self._read_tokens += length - row.stats.reused_tokens
                self._reused_tokens += row.stats.reused_tokens
            self._tell(step_outputs)

    def _first_waiting(self) -> Output | None:
        """The first waiting output, if a row and room in the cache are free for it."""
        held = [*self._running.values(), *(each for each, _ in self._reading)]
        needs = [self._slots_of(each) for each in held]
        with self._changed:
            if not self._waiting or len(needs) >= self.rows:
                return None
            first = self._waiting[0]
            return first if fits([*needs, self._slots_of(first)], self._cache_tokens) else None

    def _assemble(self, plan: RequestPlan) -> Engine:
        return assemble(
            self.model,
            self.config,
            plan.stopping,
            self.tokenizer,
            slots=self.rows,
            predicts=True,
            is_constrained=True,
            keep_cache=self.store.most_bytes > 0,
        )

    def _count_as_running(self, output: Output) -> None:
        assert output.row is not None
        self._running[output.row.index] = output

    def _slots_of(self, output: Output) -> int:
        """Slots that an output may need in the cache, drafts included."""
        assert output.row is not None
        return int(output.row.stopping.max_length) + self.config.node_budget + 1

    def _tell(self, step_outputs: list[StepOutput]) -> None:
        """Send the updates of a step, and keep the keys and values of finished rows."""
        assert self._engine is not None
        for each in step_outputs:
            output = self._running[each.row]
            row = output.row
            assert row is not None
            if each.finished:
                del self._running[each.row]
                self._keep(row)
            output.step(each, row, row.stats)

    def _keep(self, row: Row) -> None:
        """Keep the keys and values of a row that has left the engine."""
        assert self._engine is not None
        held = self._engine.kept.pop(row.index, None)
        if held is not None:
            self.store.put(row.text[: held.tokens], held)

    def _end_cancelled(self) -> None:
        """Remove cancelled outputs."""
        with self._changed:
            gone = [each for each in self._waiting if each.ticket.is_cancelled]
            self._waiting = deque(each for each in self._waiting if not each.ticket.is_cancelled)
        for index, output in list(self._running.items()):
            if output.ticket.is_cancelled and self._engine is not None and output.row is not None:
                gone.append(self._running.pop(index))
                with self._engine.serving():
                    self._engine.end(index)
                self._keep(output.row)
        for output in gone:
            output.stop("cancelled")

    def _fail(self, error: Exception | None) -> None:
        """End the running outputs with an error, or all outputs if the loop is closed."""
        with self._changed:
            ended = list(self._running.values())
            self._running.clear()
            if error is None:
                ended += [*self._waiting, *(output for output, _ in self._reading)]
                self._waiting.clear()
                self._reading.clear()
        self._engine = None
        for output in ended:
            output.stop("cancelled" if error is None else error)


def _cache_tokens_of(model: PreTrainedModel, rows: int) -> int:
    """Default capacity of the cache in tokens."""
    least, token_bytes = cache_tokens_of(model, rows), bytes_of_token(model)
    if not token_bytes or input_device(model).type != "cpu":
        return least
    return max(least, min(rows * _MOST_SLOTS, memory_bytes() // 8 // token_bytes))
