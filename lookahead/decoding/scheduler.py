"""Continuous batching: many prompts in a fixed number of rows; when one ends, the next takes its row."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from lookahead.backend.protocol import OnPrefill
from lookahead.backend.read_prompt import PrefixStore, ReadingAhead, prefixes_of, reads_apart
from lookahead.backend.support import support_of
from lookahead.config import LookaheadConfig, check_whole
from lookahead.decoding.assembly import assemble, has_kernels
from lookahead.decoding.cache_room import MAX_ROWS, cache_tokens_of, fits, make_room, rows_of
from lookahead.decoding.loops import loops
from lookahead.decoding.plan import RequestPlan, generator_for, joins_alone, shape_of
from lookahead.decoding.prompts import Prompt, PromptReader
from lookahead.decoding.validation import check_seed, validate_call
from lookahead.engine.engine import Engine
from lookahead.engine.row import Row, StepOutput
from lookahead.errors import LogitsError, PromptError, UnsupportedModelError
from lookahead.model.facts import input_device, prefills_at_once
from lookahead.model.model_kind import kind_of
from lookahead.model.model_state import recognise
from lookahead.stats import DecodingStats
from lookahead.verification.stopping import FinishReason, stateful_name

_PASS = {"cpu": 64, "cuda": 512}  # padding tokens that cost no more than another pass
_PASSES = 8  # passes of a step in which no row ends; entering `serving` takes a tenth of a pass
_SIMILAR = 0.75  # minimum ratio of the lengths of encoder inputs that are padded to one length


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its options; its `row`, a `Row`, is None if it is decoded outside the shared rows."""

    index: int
    ids: list[int]
    max_new_tokens: int | None
    prediction: Any = None
    row: Any = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt.

    Attributes:
        index: The number of the prompt, from 0.
        text: Its new text, without special tokens.
        token_ids: Its new tokens, including an end-of-sequence token.
        stats: Its counters; seconds are wall time, shared with other rows.
        error: Why the prompt could not be served; None if it was. Other prompts are not affected.
        finish_reason: Why the output ended, `"stop"`, `"length"` or `"criteria"` as in `GenerationResult`; None after
            an error.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stats: DecodingStats = field(default_factory=DecodingStats)
    error: Exception | None = None
    finish_reason: FinishReason | None = None

    @property
    def loops(self) -> bool:
        """Whether the output repeats one phrase up to its end (`lookahead.decoding.loops`)."""
        return loops(self.token_ids)


class Scheduler:
    """Decodes the prompts of a reader in `rows` rows; prompts may be added while others are decoded.

    `rows`, `cache_tokens`, `prefix_bytes` and `seed` are as in `stream_many`; `on_prefill` may be set as in `generate`.
    A prompt is decoded outside these rows where batching is not exact: with sampling without a seed, a user's own
    processors, criteria or proposers, and with models that cannot score trees.
    """

    def __init__(
        self,
        reader: PromptReader,
        rows: int | None = None,
        cache_tokens: int | None = None,
        *,
        prefix_bytes: int = 0,
        seed: int | None = None,
        predicts: bool = False,  # whether prompts may come with predictions
    ) -> None:
        self._reader, self._model, self._tokenizer = reader, reader.model, reader.tokenizer
        self._config = config = reader.config or LookaheadConfig()
        processors, criteria = (reader.options.get(name) or () for name in ("logits_processor", "stopping_criteria"))
        name = stateful_name(LogitsProcessorList(processors), StoppingCriteriaList(criteria), GenerationConfig())
        if not name and reader.options.get("prefix_allowed_tokens_fn") is not None:
            name = "prefix_allowed_tokens_fn"
        if name:
            raise UnsupportedModelError(
                f"{name} may keep a state, which would pass from one prompt to another; pass per_row, a function that "
                "makes one for each prompt, or call lookahead.generate for one prompt at a time"
            )
        has_encoder, kind = kind_of(self._model).has_encoder, input_device(self._model).type
        own = reader.has_own or not all(isinstance(each, str) for each in config.proposers)
        found = support_of(self._model, shortest=1, max_length=1, trusted=config.trust_user_code)
        # Draws, beams, stop strings, time limits and decoder prompts belong to one call.
        self._shares_batches = (
            has_encoder
            and not (own or criteria or reader.option("do_sample") or reader.option("max_time"))
            and (reader.option("num_beams") or 1) == 1
            and not {"decoder_input_ids", "decoder_attention_mask"} & reader.options.keys()
            and config.acceptance == "exact"
            and shape_of(self._model, found, config, rows=2)[0] == "trees"
        )
        # A user's objects belong to the rows of one call.
        self._is_apart = own or prefills_at_once(self._model)
        # If the model itself must read a prompt, `RequestPlan` has already read it.
        self._is_apart |= not has_encoder and found.behind_own
        if has_encoder and not (self._shares_batches and joins_alone(self._model, config)):
            self._is_apart = True  # `put` would run the encoder only to resolve options
        self.rows = rows_of(self._model) if rows is None else rows
        check_whole("rows", self.rows, 1, MAX_ROWS)
        self._cache_tokens = cache_tokens_of(self._model, self.rows) if cache_tokens is None else cache_tokens
        check_whole("cache_tokens", self._cache_tokens, 1)
        check_whole("prefix_bytes", prefix_bytes, 0)
        check_seed(seed)
        self._prefix_bytes, self._seed, self._predicts = prefix_bytes, seed, predicts
        self._prefixes: PrefixStore | None = None
        self._has_warned = False
        self._reader_ahead: ReadingAhead | None = None
        self._pass_tokens = _PASS.get(kind, _PASS["cuda"])
        self._engine: Engine | None = None
        self.on_prefill: OnPrefill | None = None
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._failed: list[Completion] = []
        self._apart: Iterator[list[Completion]] | None = None

    @property
    def is_free(self) -> bool:
        """Whether a row is free for another prompt."""
        return not self._failed and len(self._waiting) + len(self._running) < self.rows

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._failed or self._waiting or self._running)

    @property
    def written(self) -> list[int]:
        """New tokens so far of every prompt in a row."""
        return [request.row.emitted for request in self._running.values() if request.row is not None]

    def put(self, index: int, prompt: Prompt, max_new_tokens: int | None = None, prediction: Any = None) -> None:
        """Add a prompt in a form of `generate`; its `index` is unique among unfinished prompts."""
        try:
            ids = self._reader.read(prompt, index)
            expected = self._reader.read_prediction(prediction, index)
            row = None if self._is_apart else self._row_of(index, self._reader.plan([ids], max_new_tokens, [expected]))
        except PromptError as error:
            self._failed.append(Completion(index, error=error))
            return
        self._waiting.append(Request(index, ids, max_new_tokens, expected, row))

    def _row_of(self, index: int, plan: RequestPlan) -> Row | None:
        """A row for a prompt; None if it cannot share a batch."""
        if self._seed is not None and plan.is_sampled:
            plan = replace(plan, generator=generator_for(self._model, self._seed_of(index)))
        validate_call(plan.call.model, plan.call.generation_config, plan.call.model_kwargs)
        if not plan.can_join:
            return None
        (row,), encoded = plan.rows(), plan.encoded()
        row.index, row.device = index, input_device(self._model)
        if encoded is not None:
            row.read_by_encoder(encoded.tokens[0], encoded)
        return row

    def _seed_of(self, index: int) -> int:
        """The seed of a prompt."""
        assert self._seed is not None
        seed = self._seed + index
        return seed if seed < 1 << 64 else seed - (1 << 64)

    def step(self) -> list[Completion]:
        """Admit the prompts that fit; if none does, advance the rows until one ends, at most `_PASSES` passes."""
        if self._failed:
            failed, self._failed = self._failed, []
            return failed
        if self._apart is None and self._waiting and self._waiting[0].row is None:
            self._apart = self._decode_group(self._alike())
        if self._apart is not None:
            done = next(self._apart, None)
            if done is not None:
                return done
            self._apart = None
        joining = self._joining()
        engine = self._engine
        if engine is None or not self._running:
            return []
        step_outputs: list[StepOutput] = []
        engine.report_prefill(self.on_prefill)
        if joining and self._prefix_bytes:
            recognise(self._model, trusted=self._config.trust_user_code)
        with engine.serving():
            for rows in self._in_passes(joining):
                step_outputs += self._admit(engine, rows)
            for _ in range(0 if joining else _PASSES):
                step_outputs = engine.step(is_refilled=bool(self._waiting) or len(self._running) == self.rows)
                if any(each.finished for each in step_outputs):
                    break
        ended = [(each, self._running[each.row].row) for each in step_outputs if each.finished]
        for _, row in ended:
            held = engine.kept.pop(row.index, None)
            if held is not None and self._prefixes is not None:
                self._prefixes.put(row.text[: held.tokens], held)
        return [self._completion(last.row, last, row.stats, row) for last, row in ended]

    def _admit(self, engine: Engine, rows: Sequence[Row]) -> list[StepOutput]:
        """Admit rows; if earlier texts are kept, a prompt that starts with one of them reads only the rest."""
        if not self._prefix_bytes:
            return engine.admit(rows)
        (row,), store = rows, prefixes_of(self._model, self._prefix_bytes)
        if store is not self._prefixes:
            options = {"has_kernels": has_kernels(self._model)}
            self._prefixes, self._reader_ahead = store, ReadingAhead(self._model, store, options)
        if self._reader_ahead is None or not reads_apart(self._model):
            return engine.admit(rows, prefixes=[store.longest(row.text)])
        began = time.perf_counter()
        read = self._reader_ahead.read(row.text)
        row.stats.prefill_s = time.perf_counter() - began
        return engine.admit(rows, read=read)

    def _completion(self, index: int, last: StepOutput, stats: DecodingStats, row: Row | None) -> Completion:
        """The result of a prompt that ended with a step; without a row, this step holds all its tokens."""
        del self._running[index]
        if last.error is not None:
            return Completion(index, stats=stats, error=last.error)
        ids = (last.tokens if row is None else row.ids[row.length - row.emitted : row.length]).tolist()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return Completion(index, text, ids, stats, finish_reason=last.finish_reason)

    def _alike(self) -> list[Request]:
        """Take the first waiting prompt, which has no row, and prompts of similar length that may share its batch."""
        first = self._waiting[0]
        most = int(self._cache_tokens * _SIMILAR / len(first.ids)) if self._shares_batches else 1

        def is_similar(request: Request) -> bool:
            lengths = len(request.ids), len(first.ids)
            return min(lengths) >= _SIMILAR * max(lengths) and request.max_new_tokens == first.max_new_tokens

        group = list(filter(is_similar, self._waiting))[: max(1, most)]
        self._waiting = deque(request for request in self._waiting if request not in group)
        return group

    def _decode_group(self, group: Sequence[Request]) -> Iterator[list[Completion]]:
        """Decode prompts as a batch; if one fails, the unfinished ones are decoded again, each alone."""
        self._running |= {request.index: request for request in group}
        try:
            if self._seed is not None:
                torch.manual_seed(self._seed_of(group[0].index))
            ids, predictions = zip(*((request.ids, request.prediction) for request in group), strict=True)
            engine = self._reader.plan(ids, group[0].max_new_tokens, predictions).begin(warns=not self._has_warned)
            self._has_warned = True  # once for all prompts
            engine.report_prefill(self.on_prefill)
            rows = engine.batch if isinstance(engine, Engine) else [None] * len(group)
            for step_outputs in engine.run():  # later rows are further sequences of a prompt
                ended = [(each, each.row) for each in step_outputs if each.finished and each.row < len(group)]
                yield [self._completion(group[i].index, last, engine.stats[i], rows[i]) for last, i in ended]
        except (PromptError, LogitsError) as error:
            if len(group) == 1:
                yield [Completion(group[0].index, error=error)]
            for request in group if len(group) > 1 else ():
                if request.index in self._running:
                    yield from self._decode_group([request])
        finally:
            for request in group:
                self._running.pop(request.index, None)

    def _joining(self) -> list[Row]:
        """Take the next prompts in order while rows and slots are free."""
        joining: list[Row] = []
        needs = list(map(self._tokens_of, self._running.values()))
        while self._waiting and len(needs) < self.rows:
            request = self._waiting[0]
            if request.row is None or not fits([*needs, self._tokens_of(request)], self._cache_tokens):
                break
            needs.append(self._tokens_of(request))
            self._running[request.index] = self._waiting.popleft()
            joining.append(request.row)
        if joining:
            self._make_room(joining[0], max(needs))
        return joining

    def _slots_of(self, request: Request) -> int:
        """Slots that a request may need in the cache, drafts included."""
        return int(request.row.stopping.max_length) + self._config.node_budget + 1

    def _tokens_of(self, request: Request) -> int:
        """Tokens whose keys and values a request may need, including an encoder's input."""
        return self._slots_of(request) + (len(request.ids) if kind_of(self._model).has_encoder else 0)

    def _make_room(self, first: Row, longest: int) -> None:
        """Grow the cache for the running requests, each of at most `longest` tokens."""
        if self._engine is None:
            model, config, tokenizer = self._model, self._config, self._tokenizer
            self._engine = assemble(
                model,
                config,
                first.stopping,
                tokenizer,
                slots=self.rows,
                predicts=self._predicts,
                is_constrained=first.forcing is not None,  # the options of all prompts are the same
                keep_cache=self._prefix_bytes > 0,
            )
        needs = list(map(self._slots_of, self._running.values()))
        make_room(self._engine.cache, needs, self._cache_tokens, self.rows, longest)

    def _in_passes(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Group rows of similar prompt length, which are read in one pass with little padding."""
        if self._prefix_bytes or (self._engine is not None and self._engine.reads_alone):
            return [[row] for row in rows]
        passes: list[list[Row]] = []
        for row in sorted(rows, key=lambda each: each.tokens):
            if passes and len(passes[-1]) * (row.tokens - passes[-1][-1].tokens) <= self._pass_tokens:
                passes[-1].append(row)
            else:
                passes.append([row])
        return passes
