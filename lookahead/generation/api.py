"""The Python API: `generate` and `stream`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lookahead.config import LookaheadConfig
from lookahead.errors import PromptError
from lookahead.generation.hf import prepare
from lookahead.generation.hf_outputs import TextStream, collect, return_cache
from lookahead.generation.prompts import PromptReader, Prompts, Truncation, pad_token_of, within
from lookahead.generation.request import pad_prompts, serve_stop_strings
from lookahead.generation.validation import check_options, check_pair, context_limit, resolved
from lookahead.models.cache import cache_in
from lookahead.models.target import OnPrefill, input_device
from lookahead.stats import DecodingStats, total
from lookahead.verification.stopping import FinishReason


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What `generate` returns.

    Attributes:
        texts: The new text of each prompt, special tokens left out.
        token_ids: The new tokens of each prompt, an end-of-sequence token included.
        stats: All rows added up.
        row_stats: One per prompt.
        finish_reasons: Why each output ended: `"stop"` by an end-of-sequence token or a stop string, `"length"` by
            `max_new_tokens`, `max_length` or a full context, `"criteria"` by another stopping criterion.
    """

    texts: list[str]
    token_ids: list[list[int]]
    stats: DecodingStats
    row_stats: list[DecodingStats]
    finish_reasons: list[FinishReason]


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    *,
    config: LookaheadConfig | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    add_special_tokens: bool = True,
    truncate: Truncation | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    compile: bool = False,
    on_prefill: OnPrefill | None = None,
    **generate_kwargs: Any,
) -> GenerationResult:
    """Generate from text, chats or token ids, token for token what `model.generate` gives.

    Text is continued as it stands. Chat messages are rendered by the tokenizer's chat template, as by
    `tokenizer.apply_chat_template(messages, add_generation_prompt=True)`; an assistant's message at their end is
    continued. An output ends where the model's context is full, with the reason `"length"`.

    Args:
        model: Any HuggingFace causal LM.
        tokenizer: Its tokenizer.
        prompts: One prompt or a list of them, decoded together. A prompt is a string, a list of messages
            (`{"role": ..., "content": ...}`), or token ids: a list, a tensor or array `[tokens]`, or what the tokenizer
            returns. Tensors and what the tokenizer returns may be `[batch, tokens]`; what its mask hides is left out.
        config: How to draft; the defaults when None.
        generation_config: As for `model.generate`.
        seed: Seeds torch's random numbers first, for reproducible sampling.
        add_special_tokens: Whether the tokenizer adds its special tokens to text; False for text that holds them.
        truncate: What a prompt loses that leaves no room for `max_new_tokens` in the model's context: `"left"`, its
            beginning, or `"right"`, its end. A chat loses its oldest turns first. None refuses a prompt that is longer
            than the context.
        chat_template_kwargs: Further arguments of the chat template, such as `tools` or `enable_thinking`.
        compile: Whether to compile the model's passes, as by `LookaheadConfig(compile=True)`.
        on_prefill: Called as prompts are read, before the first pass and behind every one, with the tokens read of the
            longest prompt and those it has. A pass reads some 1024; in half precision most prompts take one.
        **generate_kwargs: Options of `model.generate`, such as `max_new_tokens`, `do_sample` or `temperature`. A
            `DynamicCache` as `cache` is continued from, and grows in place; before transformers 5.24 its name is
            `past_key_values`.

    Raises:
        ConfigError: An argument has the wrong type, or is out of its range.
        PoolError: The pool of the configuration cannot be opened, or was made with another tokenizer.
        PromptError: A prompt has no tokens, or there is no room for a new one.
        UnsupportedModelError: The generation mode cannot be served.
    """
    reading = add_special_tokens, truncate, chat_template_kwargs
    encoded = _read(model, tokenizer, prompts, config, generation_config, seed, reading, generate_kwargs)
    config = replace(config or LookaheadConfig(), compile=True) if compile else config
    if not encoded:
        return GenerationResult([], [], DecodingStats(), [], [])
    engine = prepare_ids(model, tokenizer, encoded, config, generation_config, seed, generate_kwargs)
    engine.report_prefill(on_prefill)
    token_ids, reasons = collect(engine)
    return_cache(engine, cache_in(generate_kwargs))
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in token_ids]
    return GenerationResult(texts, token_ids, total(engine.stats), engine.stats, reasons)


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompts,
    *,
    config: LookaheadConfig | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    add_special_tokens: bool = True,
    truncate: Truncation | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    compile: bool = False,
    on_prefill: OnPrefill | None = None,
    **generate_kwargs: Any,
) -> TextStream:
    """Generate from one prompt, yielding text as soon as its tokens are verified.

    The arguments are those of `generate`, for one prompt. They are checked at once, before the first piece is asked
    for.

    Returns:
        An iterator over the pieces of the text, which tells its `token_ids`, `stats` and `finish_reason`.
    """
    reading = add_special_tokens, truncate, chat_template_kwargs
    encoded = _read(model, tokenizer, prompt, config, generation_config, seed, reading, generate_kwargs)
    config = replace(config or LookaheadConfig(), compile=True) if compile else config
    if len(encoded) != 1:
        raise PromptError(f"stream takes one prompt, got {len(encoded)}; lookahead.stream_many takes several")
    engine = prepare_ids(model, tokenizer, encoded, config, generation_config, seed, generate_kwargs)
    engine.report_prefill(on_prefill)
    return TextStream(engine, tokenizer, cache_in(generate_kwargs))


def _read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    config: LookaheadConfig | None,
    generation_config: GenerationConfig | None,
    seed: int | None,
    reading: tuple[bool, Truncation | None, Mapping[str, Any] | None],
    generate_kwargs: dict[str, Any],
) -> list[list[int]]:
    check_pair(model, tokenizer, stacklevel=5)
    check_options(model, tokenizer, config, generation_config, generate_kwargs, seed)
    reader = PromptReader(model, tokenizer, generation_config, *reading, generate_kwargs)
    return [reader.read(prompt, i) for i, prompt in enumerate(reader.separate(prompts))]


def prepare_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Sequence[list[int]],
    config: LookaheadConfig | None,
    generation_config: GenerationConfig | None,
    seed: int | None,
    generate_kwargs: dict[str, Any],
    method: Callable[..., Any] = prepare,
) -> Any:
    """Pad prompts, and let `model.generate` resolve its options for a custom method: `prepare`, or one like it."""
    has_encoder = model.config.is_encoder_decoder
    pad = pad_token_of(tokenizer)
    padded, mask = pad_prompts(encoded, pad, on_the_right=has_encoder)
    longest, context = (1, None) if has_encoder else (padded.shape[1], context_limit(model))
    room = None if context is None else context + 1 - min(map(len, encoded))
    generate_kwargs = within(room, longest, model, generation_config, generate_kwargs)
    if resolved(model, generation_config, generate_kwargs, "pad_token_id") is None:
        generate_kwargs = {**generate_kwargs, "pad_token_id": pad}
    generation_config, generate_kwargs = serve_stop_strings(model, tokenizer, generation_config, generate_kwargs)
    if seed is not None:
        torch.manual_seed(seed)
    causal_lm: Any = model
    device = input_device(model)
    return causal_lm.generate(
        padded.to(device),
        attention_mask=mask.to(device),
        generation_config=generation_config,
        custom_generate=method,
        lookahead_config=config,
        lookahead_tokenizer=tokenizer,
        lookahead_context=context,
        **generate_kwargs,
    )
