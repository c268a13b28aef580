"""The Python API: `generate`, `stream` and `stream_many`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteriaList

from lookahead.backend.protocol import OnPrefill
from lookahead.config import LookaheadConfig
from lookahead.decoding import validation
from lookahead.decoding.hf_outputs import return_cache
from lookahead.decoding.loops import loops
from lookahead.decoding.prediction_reading import Prediction, Predictions
from lookahead.decoding.prompts import Prompt, PromptReader, Prompts, Truncation
from lookahead.decoding.request import Completion
from lookahead.decoding.scheduler import Scheduler
from lookahead.decoding.text_stream import TextStream
from lookahead.errors import PromptError, UnsupportedModelError
from lookahead.model.facts import cache_in
from lookahead.stats import DecodingStats, total
from lookahead.utils.seams import plugin_for
from lookahead.verification.per_row import PerRow
from lookahead.verification.rules import FinishReason, stateful_name

_DRAWS = frozenset(("temperature", "top_p", "top_k", "min_p"))  # options that only affect sampling


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The result of `generate`.

    Attributes:
        texts: The new text of each prompt, without special tokens.
        token_ids: The new tokens of each prompt, including an end-of-sequence token.
        stats: The sum of all rows.
        row_stats: One per prompt.
        finish_reasons: Why each output ended: `"stop"` by an end-of-sequence token or a stop string, `"length"` by
            `max_new_tokens`, `max_length` or a full context, `"criteria"` by another stopping criterion.
    """

    texts: list[str]
    token_ids: list[list[int]]
    stats: DecodingStats
    row_stats: list[DecodingStats]
    finish_reasons: list[FinishReason]

    @property
    def loops(self) -> list[bool]:
        """Whether each output repeats one phrase up to its end (`lookahead.decoding.loops`)."""
        return [loops(tokens) for tokens in self.token_ids]


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    *,
    config: LookaheadConfig | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    prediction: Predictions = None,
    json_schema: Any = None,
    regex: str | None = None,
    grammar: str | None = None,
    per_row: Callable[[], Any] | None = None,
    add_special_tokens: bool = True,
    truncate: Truncation | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_prefill: OnPrefill | None = None,
    **generate_kwargs: Any,
) -> GenerationResult:
    """Generate from text, chats or token ids, with the tokens of `model.generate`.

    Text is continued as given. Chat messages are rendered by the tokenizer's chat template, as by
    `tokenizer.apply_chat_template(messages, add_generation_prompt=True)`; a final assistant message is continued. An
    output ends with the reason `"length"` when the model's context is full.

    Args:
        model: Any HuggingFace causal LM.
        tokenizer: Its tokenizer.
        prompts: One prompt or a list of them, decoded together. A prompt is a string, a list of messages
            (`{"role": ..., "content": ...}`), or token ids: a list, a tensor or array `[tokens]`, or the output of the
            tokenizer. Tensors and tokenizer outputs may be `[batch, tokens]`; masked tokens are left out. The output of
            a processor may hold images or audio too, in the form `model.generate` takes.
        config: How to draft; the defaults when None.
        generation_config: As for `model.generate`.
        seed: Seeds torch's random numbers first, for reproducible sampling.
        prediction: The expected output: a text, such as the file before an edit or yesterday's answer, or token ids; or
            several alternatives. For several prompts a list with an entry for each, None for none. It is a source of
            drafts, `"prediction"` in the stats, and not part of the prompt: it adds no prefill, and a wrong one changes
            no token.
        json_schema: A JSON schema that every output follows, as in `lookahead.Grammar`: a dict, text, or a pydantic
            model class. The output is valid if it ends with `"stop"`. Forced tokens are a source of drafts, `"grammar"`
            in the stats.
        regex: A regular expression that every output matches, instead of a schema.
        grammar: A context-free grammar that every output follows, instead of a schema.
        per_row: Makes a logits processor, which may keep a state, for every row, as in `lookahead.PerRow`.
        add_special_tokens: Whether the tokenizer adds its special tokens to text; False for text that holds them.
        truncate: Where to cut a prompt that leaves no room for `max_new_tokens` in the model's context: `"left"` cuts
            its beginning, `"right"` its end. A chat loses its oldest turns first. None refuses a prompt that is longer
            than the context.
        chat_template_kwargs: Further arguments of the chat template, such as `tools` or `enable_thinking`.
        on_prefill: Called before the first prefill pass and after every pass with the tokens read so far of the longest
            prompt and its length. A pass reads about 1024; in half precision most prompts take one pass.
        **generate_kwargs: Options of `model.generate`, such as `max_new_tokens` or `temperature`. Tokens are sampled
            if `do_sample=True`, `temperature`, `top_p`, `top_k` or `min_p` is given, unless `do_sample=False` is given
            too. `temperature=0` is greedy. Without any of them the model's own `generation_config` decides.
            `model.generate` itself considers only `do_sample`. A `DynamicCache` as `cache` is continued and grows in
            place; before transformers 5.24 its name is `past_key_values`.

    Raises:
        ConfigError: An argument has the wrong type, or is out of its range.
        PoolError: The pool of the configuration cannot be opened, or was made with another tokenizer.
        PromptError: A prompt has no tokens, there is no room for a new one, or a prediction is neither text nor token
            ids.
        UnsupportedModelError: The generation mode cannot be served.
    """
    arguments = (config, generation_config, seed, add_special_tokens, truncate, chat_template_kwargs)
    grammars = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    options = options_of(model, tokenizer, generation_config, generate_kwargs, per_row, grammars)
    reader = PromptReader(model, tokenizer, *arguments, **options)
    encoded = [reader.read(prompt, i) for i, prompt in enumerate(reader.separate(prompts))]
    if not encoded:
        return GenerationResult([], [], DecodingStats(), [], [])
    scheduler = Scheduler(reader, on_prefill=on_prefill)
    plan = reader.plan(encoded, predictions=prediction, facts=reader.facts)
    loop, done = scheduler.begin(plan), list[Completion]()
    with loop.serving(is_alone=on_prefill is None):
        while not scheduler.is_idle:
            done += scheduler.step()
    return_cache(loop, cache_in(generate_kwargs))
    done.sort(key=lambda completion: completion.index)
    row_stats = [completion.stats for completion in done]
    return GenerationResult(
        [completion.text for completion in done],
        [completion.token_ids for completion in done],
        total(row_stats),
        row_stats,
        [completion.finish_reason or "length" for completion in done],
    )


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompts,
    *,
    config: LookaheadConfig | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    prediction: Predictions = None,
    json_schema: Any = None,
    regex: str | None = None,
    grammar: str | None = None,
    per_row: Callable[[], Any] | None = None,
    add_special_tokens: bool = True,
    truncate: Truncation | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_prefill: OnPrefill | None = None,
    **generate_kwargs: Any,
) -> TextStream:
    """Generate from one prompt, yielding text as soon as its tokens are verified.

    The arguments are checked immediately, before the first piece is requested.

    Args:
        model: As for `generate`, as are the others.
        tokenizer: Its tokenizer.
        prompt: One prompt.
        config: How to draft.
        generation_config: As for `model.generate`.
        seed: Seeds torch's random numbers first.
        prediction: The expected output.
        json_schema: A JSON schema that the output follows.
        regex: A regular expression that the output matches.
        grammar: A context-free grammar that the output follows.
        per_row: Makes a logits processor for every row.
        add_special_tokens: Whether the tokenizer adds its special tokens to text.
        truncate: Where to cut a prompt that is too long, `"left"` or `"right"`.
        chat_template_kwargs: Further arguments of the chat template.
        on_prefill: Called as the prompt is read.
        **generate_kwargs: Options of `model.generate`; a `temperature` means sampling, as for `generate`.

    Returns:
        An iterator over the pieces of the text, with `token_ids`, `stats` and `finish_reason`.

    Raises:
        PromptError: There is not exactly one prompt. All errors of `generate` are raised too.
    """
    arguments = (config, generation_config, seed, add_special_tokens, truncate, chat_template_kwargs)
    grammars = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    options = options_of(model, tokenizer, generation_config, generate_kwargs, per_row, grammars)
    reader = PromptReader(model, tokenizer, *arguments, **options)
    encoded = [reader.read(part, i) for i, part in enumerate(reader.separate(prompt))]
    if len(encoded) != 1:
        raise PromptError(f"stream takes one prompt, got {len(encoded)}; lookahead.stream_many takes several")
    scheduler = Scheduler(reader, on_prefill=on_prefill)
    loop = scheduler.begin(reader.plan(encoded, predictions=prediction, facts=reader.facts))
    return TextStream(scheduler, loop, tokenizer, cache_in(generate_kwargs))


def stream_many(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    *,
    rows: int | None = None,
    config: LookaheadConfig | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    prediction: Iterable[Prediction | Sequence[Prediction] | None] | None = None,
    json_schema: Any = None,
    regex: str | None = None,
    grammar: str | None = None,
    per_row: Callable[[], Any] | None = None,
    add_special_tokens: bool = True,
    truncate: Truncation | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    cache_tokens: int | None = None,
    prefix_bytes: int = 0,
    **generate_kwargs: Any,
) -> Iterator[Completion]:
    """Continue any number of prompts, several at a time; each is yielded as soon as it is done.

    A prompt is taken from `prompts` only when a row is free, so `prompts` may be an endless stream. Every prompt gets
    the tokens that `generate` gives it alone. A prompt that cannot be served is yielded with its `error`. If `prompts`
    raises, the running prompts are finished and yielded first.

    Prompts are decoded one at a time where batching is not exact: with sampling without a seed, custom processors,
    criteria or proposers, and models that cannot score trees. Inputs of encoder-decoder models on a GPU are decoded in
    batches, one batch after the other.

    Args:
        model: As for `generate`, as are the others.
        tokenizer: Its tokenizer.
        prompts: Any number of prompts.
        rows: Prompts decoded together, 1 to 1024. None means 16 on a CPU, 32 on a GPU.
        config: How to draft.
        generation_config: As for `model.generate`.
        seed: Seed of the first prompt; each further prompt uses the next number and is sampled as `generate` samples it
            with that seed.
        prediction: The expected output of each prompt, one entry for each, None for none; it may be a stream too.
        json_schema: A JSON schema that the output follows.
        regex: A regular expression that the output matches.
        grammar: A context-free grammar that the output follows.
        per_row: Makes a logits processor for every row.
        add_special_tokens: Whether the tokenizer adds its special tokens to text.
        truncate: Where to cut a prompt that is too long, `"left"` or `"right"`.
        chat_template_kwargs: Further arguments of the chat template.
        cache_tokens: Capacity of the cache in tokens, all rows together. None means 2048 a row on a CPU and 4096 on a
            GPU, but at most the bytes of the model's weights, or 256 MiB if that is more. A prompt, including an
            encoder's input, waits until there is room for it and its output; one that needs more than the capacity is
            decoded alone.
        prefix_bytes: Bytes of keys and values of earlier texts to keep: a prompt that starts with one of them reads
            only the rest, counted in `stats.reused_tokens`. In half precision earlier prompts are reused as far as this
            keeps every bit. 0 reads every prompt whole.
        **generate_kwargs: Options of `model.generate`; a `temperature` means sampling, as for `generate`. Processors
            and criteria must be transformers' own and keep no state. Pass custom ones as `per_row`.

    Example:
        >>> for done in lookahead.stream_many(model, tokenizer, prompts, max_new_tokens=128):  # doctest: +SKIP
        ...     print(done.index, done.text)

    Raises:
        ConfigError: An option is out of its range.
        PoolError: The pool of the configuration cannot be opened, or was made with another tokenizer.
        PromptError: The prompts are the output of a processor with images or audio.
        UnsupportedModelError: The model or the generation mode cannot be served, or a processor, criterion or
            `prefix_allowed_tokens_fn` may keep a state from one prompt to the next.
    """
    arguments = (config, generation_config, None, add_special_tokens, truncate, chat_template_kwargs)
    grammars = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    options = options_of(model, tokenizer, generation_config, generate_kwargs, per_row, grammars)
    reader = PromptReader(model, tokenizer, *arguments, **options)
    separated = iter(reader.separate(prompts))
    if reader.further:
        raise PromptError(
            f"stream_many takes tokens alone, got {', '.join(reader.further)}; lookahead.generate takes them"
        )
    if isinstance(prediction, str | Mapping) or not isinstance(prediction, Iterable | None):
        raise PromptError(f"prediction must have an entry for each prompt, got {type(prediction).__name__}")
    _refuse_stateful(reader)
    expected = repeat(None) if prediction is None else iter(prediction)
    kept: dict[str, Any] = {"prefix_bytes": prefix_bytes, "seed": seed}
    scheduler = Scheduler(reader, rows, cache_tokens, predicts=prediction is not None, **kept)
    return _stream(scheduler, separated, expected)


def _refuse_stateful(reader: PromptReader) -> None:
    """Refuse processors and criteria that may keep a state from one prompt to the next."""
    processors, criteria = (reader.options.get(name) or () for name in ("logits_processor", "stopping_criteria"))
    name = stateful_name(LogitsProcessorList(processors), StoppingCriteriaList(criteria), GenerationConfig())
    if not name and reader.options.get("prefix_allowed_tokens_fn") is not None:
        name = "prefix_allowed_tokens_fn"
    if name:
        raise UnsupportedModelError(
            f"{name} may keep a state, which would pass from one prompt to another; pass per_row, a function that "
            "makes one for each prompt, or call lookahead.generate for one prompt at a time"
        )


def options_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    options: dict[str, Any],
    per_row: Callable[[], Any] | None,
    grammars: dict[str, Any],
) -> dict[str, Any]:
    """The options of `model.generate` for a call: `do_sample` is set, and rows have their grammar and processor.

    Tokens are sampled if a temperature, `top_p`, `top_k` or `min_p` is given. A temperature of 0 is greedy.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        generation_config: As for `generate`.
        options: Options of `model.generate`.
        per_row: Makes a processor for every row; None for none.
        grammars: `json_schema`, `regex` and `grammar` of `generate`.

    Raises:
        ConfigError: A grammar is invalid, or llguidance is missing.
    """
    names = {name for name, value in options.items() if value is not None}
    # With `penalty_alpha` `top_k` is an option of contrastive search.
    if names & _DRAWS and not names & {"do_sample", "penalty_alpha"}:
        if options.get("temperature") == 0:
            validation.check_numbers({name: options[name] for name in names})
            options = {name: value for name, value in options.items() if name not in _DRAWS} | {"do_sample": False}
        elif getattr(generation_config, "do_sample", None) is not False:
            options = {**options, "do_sample": True}
    added: list[PerRow] = []
    if any(grammar is not None for grammar in grammars.values()):
        validation.check_pair(model, tokenizer)
        ends = validation.resolved(model, generation_config, options, "eos_token_id")
        if ends is None:
            ends = tokenizer.eos_token_id  # without one an output could not end where its grammar does
            options = {**options, "eos_token_id": ends}
        added.append(plugin_for("processor", "grammar")(tokenizer, **grammars, eos_token_id=ends))
    if per_row is not None:
        added.append(PerRow(per_row))
    return {**options, "logits_processor": [*(options.get("logits_processor") or ()), *added]} if added else options


def _stream(scheduler: Scheduler, prompts: Iterator[Prompt], predictions: Iterator[Any]) -> Iterator[Completion]:
    numbered: Iterator[tuple[int, Prompt]] = enumerate(prompts)
    error: Exception | None = None
    is_open = True
    while is_open or not scheduler.is_idle:
        while is_open and scheduler.is_free:
            try:
                index, prompt = next(numbered)
                scheduler.put(index, prompt, prediction=_next_of(predictions, index))
            except Exception as raised:
                error, is_open = raised, False
        yield from scheduler.step()
    if error is not None and not isinstance(error, StopIteration):
        raise error


def _next_of(predictions: Iterator[Any], index: int) -> Any:
    for prediction in predictions:
        return prediction
    raise PromptError(f"prediction must have an entry for each prompt, and has none for prompt {index}")
