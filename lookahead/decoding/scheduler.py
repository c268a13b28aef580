"""The scheduler: requests are put, stepped and cancelled. Every call of `lookahead` decodes with it."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, cast

import torch

from lookahead.backend.protocol import OnPrefill
from lookahead.backend.support import support_of
from lookahead.config import DEFAULTS, check_seed, check_whole
from lookahead.decoding.cache_room import MAX_ROWS, cache_tokens_of, rows_of
from lookahead.decoding.plan import Loop, RequestPlan, generator_for, joins_alone, shape_of
from lookahead.decoding.prompts import Prompt, PromptReader
from lookahead.decoding.prompts_ahead import PromptsAhead
from lookahead.decoding.request import Completion, Request
from lookahead.decoding.shared_rows import SharedRows
from lookahead.engine.engine import Engine
from lookahead.errors import LogitsError, PromptError
from lookahead.model.calls import kind_of
from lookahead.model.facts import input_device, prefills_at_once
from lookahead.verification.rules import has_own

_SIMILAR = 0.75  # minimum ratio of the lengths of encoder inputs that are padded to one length


class Scheduler:
    """Decodes the requests of a reader in `rows` rows; others may be put meanwhile.

    `rows`, `cache_tokens`, `prefix_bytes` and `seed` are as in `stream_many`.

    A request is decoded in a batch of its own where rows are not exact: with sampling without a seed, a user's own
    processors, criteria or proposers, and with models that cannot score trees.

    Args:
        reader: Reads the prompts.
        rows: Requests decoded together.
        cache_tokens: Capacity of the cache.
        prefix_bytes: Bytes of keys and values of earlier texts to keep.
        seed: Seed of the request with index 0.
        predicts: Whether prompts may come with predictions.
        rounds_prefixes: Whether half-precision prompts reuse earlier texts as far as they share them, which may change
            tokens; else as far as that changes no bit.
        is_mixed: Whether requests have options of their own, as those of a server; long prompts are then read on
            another thread, so that running outputs continue meanwhile; on a GPU between two steps.
        on_prefill: As in `generate`.
    """

    def __init__(
        self,
        reader: PromptReader,
        rows: int | None = None,
        cache_tokens: int | None = None,
        *,
        prefix_bytes: int = 0,
        seed: int | None = None,
        predicts: bool = False,
        rounds_prefixes: bool = False,
        is_mixed: bool = False,
        on_prefill: OnPrefill | None = None,
    ) -> None:
        self._reader, self._config = reader, reader.config or DEFAULTS
        if rows is not None:
            check_whole("rows", rows, 1, MAX_ROWS)
        if cache_tokens is not None:
            check_whole("cache_tokens", cache_tokens, 1)
        check_whole("prefix_bytes", prefix_bytes, 0)
        if seed is not None:
            check_seed(seed)
        self._most, self._room, self._seed = rows, cache_tokens, seed
        self._prefix_bytes, self._rounds = prefix_bytes, rounds_prefixes
        self._predicts, self._is_mixed, self._on_prefill, self._has_warned = predicts, is_mixed, on_prefill, False
        self._waiting: deque[Request] = deque()
        self._ended: list[Request] = []  # before their first step
        self._group: Sequence[Request] = ()  # the requests of the batch that is being decoded
        self._group_steps: Iterator[list[Request]] = iter(())
        self._has_further = False  # whether the batch has rows of no request: further sequences of a prompt
        self._shared: SharedRows | None = None

    @cached_property
    def rows(self) -> int:
        """Requests decoded together."""
        return rows_of(self._reader.model) if self._most is None else self._most

    @property
    def running(self) -> list[Request]:
        """The requests that are being decoded, or whose prompts are being read."""
        group = [request for request in self._group if not request.is_over]
        return [*group, *(self._shared.unfinished if self._shared is not None else ())]

    @property
    def is_free(self) -> bool:
        """Whether a row is free for another request."""
        return not self._ended and len(self._waiting) + len(self.running) < self.rows

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._ended or self._waiting or self._group or self.running)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of the rows, and of earlier texts."""
        return 0 if self._shared is None else self._shared.cache_bytes

    def put(self, index: int, prompt: Prompt, max_new_tokens: int | None = None, prediction: Any = None) -> Request:
        """Add a prompt in a form of `generate`; its `index` is unique among unfinished requests."""
        request = Request(index, max_new_tokens=max_new_tokens)
        try:
            request.ids = ids = self._reader.read(prompt, index)
            request.prediction = self._reader.read_prediction(prediction, index)
            if self._seed is not None:
                request.seed = self._seed + index - (1 << 64 if self._seed + index >= 1 << 64 else 0)
            if self._shares == "rows":
                plan = self._reader.plan([ids], max_new_tokens, [request.prediction])
                if plan.is_sampled and request.seed is not None:
                    plan = replace(plan, generator=generator_for(self._reader.model, request.seed))
                request.join(plan)
            self.add(request)
        except PromptError as error:
            request.fail(error)
            self._ended.append(request)
        return request

    def add(self, request: Request) -> None:
        """Add a request that has a plan or a row, after those whose turn is not later."""
        insort(self._waiting, request, key=lambda other: other.turn)

    def begin(self, plan: RequestPlan) -> Loop:
        """Begin to decode a plan in a batch of its own, a request for each row; the scheduler must be idle."""
        loop = plan.begin()
        self._group = [Request(i) for i in range(len(loop.stats))]
        self._group_steps = self._follow(loop, self._group)
        return loop

    def cancel(self, request: Request) -> None:
        """End a request, from any thread; its row is free before the next pass."""
        request.is_cancelled = True

    def clear(self) -> list[Request]:
        """Drop the requests that are being decoded, or the one whose turn it was, after an error; returns them."""
        dropped = [request for request in self._group if not request.is_over]
        self._group, self._group_steps = (), iter(())
        if self._shared is not None:
            dropped += self._shared.clear()
        if not dropped and self._waiting:
            dropped.append(self._waiting.popleft())
        return dropped

    def step(self) -> list[Completion]:
        """Decode a block of steps; returns the results of the prompts that ended."""
        try:
            ended = [request for requests in self.steps() for request in requests if request.is_finished]
        except RuntimeError as error:
            if isinstance(error.__cause__, StopIteration):  # raised by a processor or criterion inside a generator
                raise error.__cause__ from None
            raise
        return [self._completion(request) for request in ended]

    def steps(self) -> Generator[list[Request], None, None]:
        """Decode a block of steps, which ends with the first request; yields those that got tokens or ended in each."""
        gone = [request for request in self._waiting if request.is_cancelled]
        for request in gone:
            self._waiting.remove(request)
            request.is_over = True
        ended, self._ended = [*self._ended, *gone], []
        if ended:
            yield ended
            return
        if not self._group and self._waiting and self._waiting[0].row is None:
            self._group = self._alike()
            self._group_steps = self._decode(self._group)
        if self._group:
            requests = next(self._group_steps, None)
            is_over = all(request.is_over for request in self._group)
            is_left = is_over and (not self._has_further or all(request.is_cancelled for request in self._group))
            if requests is None or is_left:
                self._group, self._group_steps = (), iter(())  # the cache of the batch is freed with its loop
            if requests is not None:
                yield requests
            return
        if self._shared is None and self._waiting:
            self._shared = self._open_rows()
        if self._shared is not None:
            yield from self._shared.steps(self._waiting)

    def close(self) -> None:
        """End the thread that reads prompts."""
        if self._shared is not None:
            self._shared.close()

    def _completion(self, request: Request) -> Completion:
        """The result of a request that ended."""
        last, ids = request.last, request.token_ids
        assert last is not None
        if last.error is not None:
            return Completion(request.index, stats=request.stats, error=last.error)
        text = str(self._reader.tokenizer.decode(ids, skip_special_tokens=True))
        return Completion(request.index, text, ids, request.stats, finish_reason=last.finish_reason)

    @cached_property
    def _shares(self) -> Literal["rows", "batches", "nothing"]:
        """What the prompts of the reader share."""
        reader, model, config = self._reader, self._reader.model, self._config
        # A user's objects belong to the rows of one call.
        own = has_own(reader.given) or not all(isinstance(proposer, str) for proposer in config.proposers)
        if own or prefills_at_once(model):
            return "nothing"
        verdict = support_of(model, shortest=1, max_length=1, trusted=config.trust_user_code)
        if not kind_of(model).has_encoder:
            # If the model itself must read a prompt, its plan has already read it.
            return "nothing" if verdict.behind_own else "rows"
        # Draws, beams, stop strings, time limits and decoder prompts belong to one call.
        is_single = reader.option("do_sample") or reader.option("max_time") or (reader.option("num_beams") or 1) > 1
        is_single = is_single or bool({"decoder_input_ids", "decoder_attention_mask"} & reader.options.keys())
        if is_single or reader.options.get("stopping_criteria") or config.acceptance != "exact":
            return "nothing"
        if shape_of(model, verdict, config, rows=2)[0] != "trees":
            return "nothing"
        return "rows" if joins_alone(model, config) else "batches"

    @cached_property
    def _cache_tokens(self) -> int:
        return cache_tokens_of(self._reader.model, self.rows) if self._room is None else self._room

    def _open_rows(self) -> SharedRows:
        """The rows of one engine for all requests that can share it."""
        model, config, ahead = self._reader.model, self._config, None
        if self._prefix_bytes or self._is_mixed:
            is_beside = self._is_mixed and input_device(model).type == "cpu"
            ahead = PromptsAhead(model, config, self._prefix_bytes, is_beside=is_beside, rounds=self._rounds)
        options: dict[str, Any] = {
            "predicts": self._predicts,
            "is_mixed": self._is_mixed,
            "on_prefill": self._on_prefill,
        }
        return SharedRows(self._reader, self.rows, self._cache_tokens, ahead, **options)

    def _alike(self) -> list[Request]:
        """Take the first waiting request, which has no row, and those of similar length that may share its batch."""
        first = self._waiting[0]
        is_single = first.plan is not None or self._shares != "batches"
        most = 1 if is_single else int(self._cache_tokens * _SIMILAR / len(first.ids))

        def is_similar(request: Request) -> bool:
            lengths = len(request.ids), len(first.ids)
            return min(lengths) >= _SIMILAR * max(lengths) and request.max_new_tokens == first.max_new_tokens

        group = [first] if most < 2 else list(filter(is_similar, self._waiting))[:most]
        for request in group:
            self._waiting.remove(request)
        return group

    def _decode(self, group: Sequence[Request]) -> Iterator[list[Request]]:
        """Decode requests as a batch; if one fails, the unfinished ones are decoded again, each alone."""
        first = group[0]
        try:
            if first.seed is not None:
                torch.manual_seed(first.seed)
            plan = first.plan() if callable(first.plan) else first.plan
            if plan is None:
                ids, predictions = zip(*((request.ids, request.prediction) for request in group), strict=True)
                plan = self._reader.plan(ids, first.max_new_tokens, predictions)
            loop = plan.begin(warns=not self._has_warned)
            self._has_warned = True  # once for all prompts
            if not isinstance(loop, Engine):
                loop.end_if(lambda: all(request.is_cancelled for request in group))
            yield from self._follow(loop, group)
        except (PromptError, LogitsError) as error:
            if len(group) == 1:
                first.fail(error)
                yield [first]
                return
            for request in group:
                if not request.is_over:
                    yield from self._decode([request])

    def _follow(self, loop: Loop, group: Sequence[Request]) -> Iterator[list[Request]]:
        """Run a loop to its end; yields the requests that got tokens or ended in a step. Its first rows are theirs."""
        if self._on_prefill is not None:
            loop.report_prefill(self._on_prefill)
        rows = loop.batch if isinstance(loop, Engine) else [None] * len(group)
        self._has_further = len(loop.stats) > len(group)
        for request, row, stats in zip(group, rows, loop.stats, strict=False):
            request.row, request.stats = row, stats
        for outputs in loop.run():
            taken = [(group[output.row], output) for output in outputs if output.row < len(group)]
            for request, output in taken:
                request.take(output)
            yield [request for request, _ in taken]
            gone = [request for request in group if request.is_cancelled and not request.is_over]
            for request in gone:
                request.is_over = True
                with loop.serving():
                    cast(Engine, loop).end(request.row.index)
            if gone:
                yield gone
