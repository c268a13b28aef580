"""Continuous batching: many prompts in a fixed number of rows; when one ends, the next takes its row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lookahead.config import LookaheadConfig, check_whole
from lookahead.engine.engine import Engine
from lookahead.engine.row import Row, StepOutput
from lookahead.errors import LogitsError, PromptError
from lookahead.generation.hf import assemble
from lookahead.generation.prompts import Prompt, Prompts, Truncation
from lookahead.generation.queue import Request, RequestReader
from lookahead.models.target import OnPrefill, input_device
from lookahead.stats import DecodingStats
from lookahead.verification.stopping import FinishReason

MOST_ROWS = 1024
_ROWS = {"cpu": 16, "cuda": 32}
_SLOTS = {"cpu": 2048, "cuda": 4096}  # default cache slots of a row
_PASS = {"cpu": 64, "cuda": 512}  # tokens of padding that cost no more than another pass
_PASSES = 8  # of a step in which no row ends: to put the model into service takes as long as a tenth of a pass
_SIMILAR = 0.75  # length of an encoder's input relative to another one, with which it is padded to one length
_LEAST_CACHE = 256 << 20  # bytes that a cache may take, however small the model


def cache_tokens_of(model: PreTrainedModel, rows: int) -> int:
    """Default number of tokens of a cache of so many rows, all rows together, as `stream_many` documents it."""
    kind = input_device(model).type
    tokens = rows * _SLOTS.get(kind, _SLOTS["cuda"])
    config: Any = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    layers, size = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(size, int)):
        return tokens  # this configuration does not show the size of a token
    head_size = getattr(config, "head_dim", None) or size // (getattr(config, "num_attention_heads", None) or heads)
    most_bytes = max(_LEAST_CACHE, int(model.get_memory_footprint()))
    token_bytes: int = 2 * layers * heads * head_size * model.dtype.itemsize  # keys and values
    return max(1, min(tokens, most_bytes // token_bytes))


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt.

    Attributes:
        index: The number of the prompt, counted from 0.
        text: Its new text, special tokens left out.
        token_ids: Its new tokens, an end-of-sequence token included.
        stats: The counters of its decoding; seconds are wall time, shared with other rows.
        error: Why there is no text, where the prompt could not be served; other prompts are not affected.
        finish_reason: Why the output ended, `"stop"`, `"length"` or `"criteria"` as in `GenerationResult`; None where
            there is an error.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stats: DecodingStats = field(default_factory=DecodingStats)
    error: Exception | None = None
    finish_reason: FinishReason | None = None


def stream_many(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    *,
    rows: int | None = None,
    config: LookaheadConfig | None = None,
    generation_config: GenerationConfig | None = None,
    add_special_tokens: bool = True,
    truncate: Truncation | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    cache_tokens: int | None = None,
    **generate_kwargs: Any,
) -> Iterator[Completion]:
    """Continue any number of prompts, several at a time; each is yielded as soon as it is done.

    A prompt is taken from `prompts` only when a row is free for it, so that they may come from a stream without an end.
    The tokens are those that `generate` gives for every prompt alone. A prompt that cannot be served is yielded with
    its `error`. Where `prompts` itself raises, what is being decoded is finished and yielded first.

    Example:
        >>> for done in lookahead.stream_many(model, tokenizer, prompts, max_new_tokens=128):  # doctest: +SKIP
        ...     print(done.index, done.text)

    Args:
        model: Any HuggingFace causal LM.
        tokenizer: Its tokenizer.
        prompts: The prompts, each as `generate` takes it: text, chat messages, token ids.
        rows: How many are decoded together, 1 to 1024; None decides: 16 on a CPU, 32 on a GPU. One after the other
            where nothing else is exact: where tokens are sampled, with processors or criteria that you give, or sources
            of drafts of your own, and with causal models that score no trees. Prompts of an encoder-decoder model are
            decoded in batches: a batch is taken when the one before has ended.
        config: How to draft; the defaults when None.
        generation_config: As for `model.generate`.
        add_special_tokens: Whether the tokenizer adds its special tokens to text; False for text that holds them.
        truncate: What a prompt loses that leaves no room for its output, as for `generate`.
        chat_template_kwargs: Further arguments of the chat template.
        cache_tokens: Tokens that the cache has room for, all rows together; when None 2048 a row on a CPU and 4096 on
            a GPU, as far as they take no more bytes than the model's weights, or 256 MiB. A prompt waits until there
            is room for it and its output, and one that needs more than all of it is decoded alone.
        **generate_kwargs: Options of `model.generate`, such as `max_new_tokens`; processors and criteria must be of
            transformers' own kinds that keep no state.

    Raises:
        ConfigError: An option is out of its range.
        PoolError: The pool of the configuration cannot be opened, or was made with another tokenizer.
        UnsupportedModelError: The model or the generation mode cannot be served, or a processor, criterion or
            `prefix_allowed_tokens_fn` may keep a state from one prompt to the next.
    """
    scheduler = Scheduler(
        model,
        tokenizer,
        rows=rows,
        config=config,
        generation_config=generation_config,
        add_special_tokens=add_special_tokens,
        truncate=truncate,
        chat_template_kwargs=chat_template_kwargs,
        cache_tokens=cache_tokens,
        **generate_kwargs,
    )
    return _stream(scheduler, iter(scheduler.separate(prompts)))


def _stream(scheduler: Scheduler, prompts: Iterator[Prompt]) -> Iterator[Completion]:
    numbered: Iterator[tuple[int, Prompt]] = enumerate(prompts)
    error: Exception | None = None
    is_open = True
    while True:
        while is_open and scheduler.is_free:
            try:
                scheduler.put(*next(numbered))
            except StopIteration:
                is_open = False
            except Exception as raised:
                error, is_open = raised, False
        if scheduler.is_idle:
            if error is not None:
                raise error
            return
        yield from scheduler.step()


class Scheduler:
    """Decodes prompts in `rows` rows; they may be added while others are being decoded.

    The arguments are those of `stream_many`; `on_prefill` may be set to what `generate` takes by that name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        rows: int | None = None,
        config: LookaheadConfig | None = None,
        cache_tokens: int | None = None,
        **options: Any,
    ) -> None:
        self._config = config if config is not None else LookaheadConfig()
        self._requests = RequestReader(model, tokenizer, self._config, **options)
        self.separate = self._requests.reader.separate
        kind = input_device(model).type
        self.rows = _ROWS.get(kind, _ROWS["cuda"]) if rows is None else rows
        check_whole("rows", self.rows, 1, MOST_ROWS)
        self._cache_tokens = cache_tokens_of(model, self.rows) if cache_tokens is None else cache_tokens
        check_whole("cache_tokens", self._cache_tokens, 1)
        self._pass_tokens = _PASS.get(kind, _PASS["cuda"])
        self._model = model
        self._tokenizer = tokenizer
        self._engine: Engine | None = None
        self.on_prefill: OnPrefill | None = None
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._failed: list[Completion] = []
        self._apart: Iterator[list[Completion]] | None = None

    @property
    def is_free(self) -> bool:
        """Whether there is a row for another prompt."""
        return not self._failed and len(self._waiting) + len(self._running) < self.rows

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._failed or self._waiting or self._running)

    def put(self, index: int, prompt: Prompt, max_new_tokens: int | None = None) -> None:
        """Add a prompt as `generate` takes it; its `index` is unique among the prompts that are not done."""
        try:
            self._waiting.append(self._requests.take(index, prompt, max_new_tokens))
        except PromptError as error:
            self._failed.append(Completion(index, error=error))

    def step(self) -> list[Completion]:
        """Admit the prompts that fit; if there are none, advance the rows until one ends, or by a few passes."""
        if self._failed:
            failed, self._failed = self._failed, []
            return failed
        if self._apart is None and self._waiting and self._waiting[0].row is None:
            self._apart = self._decode_apart()
        if self._apart is not None:
            done = next(self._apart, None)
            if done is not None:
                return done
            self._apart = None
        joining = self._joining()
        engine = self._engine
        if engine is None:
            return []
        step_outputs: list[StepOutput] = []
        engine.report_prefill(self.on_prefill)
        with engine.serving():
            for rows in self._in_passes(joining):
                step_outputs += engine.admit(rows)
            for _ in range(0 if joining else _PASSES):
                step_outputs = engine.step(is_refilled=bool(self._waiting) or len(self._running) == self.rows)
                if any(each.finished for each in step_outputs):
                    break
        return [self._complete(step_output) for step_output in step_outputs if step_output.finished]

    def _decode_apart(self) -> Iterator[list[Completion]]:
        """Decode the first waiting prompt, which has no row, and those of about its length that may share its batch."""
        first = self._waiting.popleft()
        group, most = [first], int(self._cache_tokens * _SIMILAR / len(first.ids))
        for request in list(self._waiting) if self._requests.shares_batches else ():
            lengths = len(request.ids), len(first.ids)
            is_similar = min(lengths) >= _SIMILAR * max(lengths) and request.max_new_tokens == first.max_new_tokens
            if is_similar and len(group) < most:
                self._waiting.remove(request)
                group.append(request)
        yield from self._decode_group(group)

    def _decode_group(self, group: Sequence[Request]) -> Iterator[list[Completion]]:
        """Decode prompts as a batch; those that run when one of them fails are decoded again, each alone."""
        tokens: dict[int, list[int]] = {row: [] for row in range(len(group))}
        self._running |= {request.index: request for request in group}
        try:
            engine = self._requests.engine(group)
            engine.report_prefill(self.on_prefill)
            for step_outputs in engine.run():
                done = []
                for step_output in step_outputs:
                    row = step_output.row
                    if row not in tokens:  # a further sequence of a prompt
                        continue
                    tokens[row] += step_output.tokens.tolist()
                    if step_output.finish_reason is not None:
                        del self._running[group[row].index]
                        done.append(self._completion(step_output, group[row].index, tokens.pop(row), engine.stats[row]))
                yield done
        except (PromptError, LogitsError) as error:
            if len(group) == 1:
                yield [Completion(group[0].index, error=error)]
            for row in tokens if len(group) > 1 else ():
                yield from self._decode_group([group[row]])
        finally:
            for request in group:
                self._running.pop(request.index, None)

    def _joining(self) -> list[Row]:
        """Take the next prompts, in order, that there are free rows and slots for."""
        joining: list[Row] = []
        longest = max((request.slots for request in self._running.values()), default=0)
        while self._waiting and len(self._running) < self.rows:
            request = self._waiting[0]
            needed = max(longest, request.slots)
            rows = len(self._running) + 1
            if request.row is None or (rows > 1 and rows * needed > self._cache_tokens):
                break
            longest = needed
            self._running[request.index] = self._waiting.popleft()
            joining.append(request.row)
        if joining:
            self._make_room(joining[0], len(self._running), longest)
        return joining

    def _make_room(self, first: Row, rows: int, longest: int) -> None:
        """Grow the cache to at least so many rows and slots."""
        too_large = False
        if self._engine is None:
            self._engine = assemble(
                self._model,
                self._config,
                slots=self.rows,
                stopping=first.stopping,
                tokenizer=self._tokenizer,
                capacity=longest,
                isolates=True,
            )
            too_large = self.rows * longest > self._cache_tokens
        slots = self._engine.cache.slots
        if too_large or longest > slots.capacity or rows > slots.rows:
            most = max(rows, min(self.rows, self._cache_tokens // longest))
            capacity = max(longest, min(slots.capacity, self._cache_tokens // most))
            self._engine.cache.resize(rows=most, capacity=capacity)

    def _in_passes(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Group rows whose prompts are read in one pass: those of similar length, so that little padding is read."""
        if self._engine is not None and self._engine.reads_alone:
            return [[row] for row in rows]
        passes: list[list[Row]] = []
        for row in sorted(rows, key=lambda each: each.tokens):
            if passes and len(passes[-1]) * (row.tokens - passes[-1][-1].tokens) <= self._pass_tokens:
                passes[-1].append(row)
            else:
                passes.append([row])
        return passes

    def _complete(self, step_output: StepOutput) -> Completion:
        row = self._running.pop(step_output.row).row
        assert row is not None
        if step_output.error is not None:
            return Completion(row.index, stats=row.stats, error=step_output.error)
        tokens = row.ids[row.length - row.emitted : row.length].tolist()
        return self._completion(step_output, row.index, tokens, row.stats)

    def _completion(self, last: StepOutput, index: int, tokens: list[int], stats: DecodingStats) -> Completion:
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        return Completion(index, text, tokens, stats, finish_reason=last.finish_reason)
