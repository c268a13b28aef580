"""Generate: the drop-in for `model.generate`, the Python API and streaming."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateNonBeamOutput

from lookahead.config import LookaheadConfig
from lookahead.engine.engine import Engine
from lookahead.engine.fallback import PlainLoop
from lookahead.engine.row import Row
from lookahead.errors import PromptError, UnsupportedModelError
from lookahead.generation.build import assemble
from lookahead.generation.encoder_decoder_request import prepare_encoder_decoder
from lookahead.generation.hf_outputs import adopt, output_dict, padded_sequences, return_cache
from lookahead.generation.prompts import Prompts, Truncation, pad_token_of, reader_of, within
from lookahead.generation.request import (
    call_of,
    pad_prompts,
    prompt_lengths,
    refuse_inputs,
    refuse_long_prompts,
    refuse_past,
    refuse_positions,
    refuse_unsupported,
    serve_stop_strings,
    stopping_rule,
    warns_of_foreigner,
)
from lookahead.generation.streaming import TextStream, collect
from lookahead.generation.validation import check_config, check_options, check_pair, context_limit
from lookahead.models.support import Support, support_of
from lookahead.models.target import OnPrefill, input_device
from lookahead.models.validate import refuse_model, vocabulary_size
from lookahead.pools.open_pool import open_pool
from lookahead.stats import DecodingStats, total
from lookahead.utils.fingerprints import tokenizer_fingerprint
from lookahead.verification.sampling import TokenChooser, warp_of
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


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig | None = None,
    lookahead_streamer: BaseStreamer | None = None,
    lookahead_tokenizer: PreTrainedTokenizerBase | None = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateNonBeamOutput:
    """Decode speculatively inside `model.generate`, without changing a token.

    Example:
        `model.generate(**inputs, max_new_tokens=256, custom_generate=lookahead.decode)`; options go along as
        `lookahead_config=LookaheadConfig(...)`.

    Args:
        model: The model `generate` was called on.
        input_ids: int64 `[batch, tokens]`, left-padded.
        logits_processor: Prepared by `generate`.
        stopping_criteria: Prepared by `generate`.
        generation_config: Resolved by `generate`.
        lookahead_config: How to draft; the defaults when None.
        lookahead_streamer: Gets the new tokens of a single prompt as they are verified; transformers passes its
            own `streamer` argument to no custom method.
        lookahead_tokenizer: The model's tokenizer, for proposers that compare it with their own; `generate` passes its
            own `tokenizer` to no custom method either.
        inputs_tensor: What the encoder of an encoder-decoder model has read; passed by `generate`.
        **model_kwargs: What `generate` would pass to the model.

    Returns:
        int64 `[batch, tokens + new]`, or with `return_dict_in_generate` the output class that transformers gives,
        with it as `sequences`, the scores and logits asked for, and the cache. A filled `past_key_values` is continued
        from, and grows in place.

    Raises:
        PoolError: The pool of the configuration cannot be opened, or holds token ids the model does not know.
        UnsupportedModelError: The generation mode or an input cannot be served; the message names it.
    """
    arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config)
    engine = prepare(*arguments, lookahead_config, lookahead_tokenizer, inputs_tensor, **model_kwargs)
    if lookahead_streamer is not None:
        lookahead_streamer.put(input_ids.cpu())
    if isinstance(engine, PlainLoop):
        return cast(Tensor | GenerateNonBeamOutput, engine.sample(streamer=lookahead_streamer))
    outputs, _ = collect(engine, lookahead_streamer, generation_config._pad_token_tensor)
    sequences = padded_sequences(input_ids, outputs, generation_config)
    past = model_kwargs.get("past_key_values")
    past = past if isinstance(past, DynamicCache | StaticCache | EncoderDecoderCache) else None
    return_cache(engine, past)
    if not generation_config.return_dict_in_generate:
        return sequences
    has_encoder = model.config.is_encoder_decoder
    return output_dict(sequences, engine.batch[0].chooser, generation_config, past, is_encoder_decoder=has_encoder)


def prepare(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig | None = None,
    lookahead_tokenizer: PreTrainedTokenizerBase | None = None,
    inputs_tensor: Tensor | None = None,
    lookahead_context: int | None = None,
    **model_kwargs: Any,
) -> Engine | PlainLoop:
    """Check a call of `model.generate` and build what serves it; the arguments are those of `decode`.

    With a context of so many tokens a row ends where the model has read them all.
    """
    check_config("lookahead_config", lookahead_config)
    if model.config.is_encoder_decoder:
        arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config)
        options = (lookahead_config, lookahead_tokenizer, inputs_tensor, model_kwargs)
        return prepare_encoder_decoder(*arguments, *options)
    refuse_unsupported(model, generation_config, model_kwargs)
    past = model_kwargs.get("past_key_values")
    config = lookahead_config if lookahead_config is not None else LookaheadConfig()
    vocabulary = vocabulary_size(model)
    pool = open_pool(os.fspath(config.pool), vocabulary=vocabulary) if config.pool is not None else None
    lengths = prompt_lengths(input_ids, model_kwargs.get("attention_mask"), vocabulary)
    batch_size, longest = input_ids.shape
    refuse_long_prompts(model, lengths)
    is_continued = past is not None and past.get_seq_length() > 0
    if not is_continued:
        refuse_positions(model_kwargs.get("position_ids"), lengths, longest)
    stopping = stopping_rule(stopping_criteria, generation_config)
    lm: Any = model
    sample = partial(lm._sample, input_ids, logits_processor, generation_config=generation_config, **model_kwargs)
    plain = PlainLoop(sample, input_ids, lengths, stopping_criteria, lookahead_context)
    if stopping.max_length <= longest + 1:
        return plain  # a single token: there is nothing to draft
    if warns_of_foreigner(logits_processor, stopping_criteria, generation_config, batch_size, config.acceptance):
        return plain
    support = support_of(model, shortest=int(lengths.min()), max_length=stopping.max_length)
    complaint = _complaint(model, support, batch_size, config)
    if complaint and lookahead_config is not None and lookahead_config.proposers:
        raise UnsupportedModelError(f"{complaint}; leave out the configuration to decode it plainly")
    if batch_size > 1 and stopping.custom and not stopping.eos_tokens.size:
        # There transformers lets a row that was stopped go on until all are: how far depends on the slowest.
        complaint = "a batch with stopping criteria and no end-of-sequence token ends as one"
    if support.shape == "none" or complaint:
        warnings.warn(f"{complaint}; it is decoded plainly", stacklevel=2)
        return plain
    is_chain = support.shape == "chains"
    warp = warp_of(logits_processor) if generation_config.do_sample else None
    call = call_of(model, lookahead_tokenizer, batch_size, stopping, config, is_chain=is_chain, warp=warp)
    is_given = getattr(past, "_is_user_defined", False)
    chooser = TokenChooser(
        logits_processor,
        do_sample=bool(generation_config.do_sample),
        batch_size=batch_size,
        keep=bool(generation_config.output_scores or generation_config.output_logits),
    )
    rows = []
    for i, (ids, length) in enumerate(zip(input_ids.cpu().numpy(), lengths.tolist(), strict=True)):
        padding = longest - length
        rule = stopping if lookahead_context is None else stopping.within(padding + lookahead_context)
        rows.append(Row.begin(i, ids, chooser, rule, padding=padding, place=i, device=input_ids.device))
    engine = assemble(
        model,
        config,
        call,
        pool,
        rows,
        # Room for what short outputs need; the cache grows when an output turns out long.
        capacity=longest + min(stopping.max_length - longest, 256) + config.node_budget + 1,
        shape=support.shape,
        runs_to_limit=stopping.is_only_length,
        keep_cache=bool(generation_config.return_dict_in_generate or is_continued or is_given),
    )
    if is_continued:
        refuse_past(past, input_ids, generation_config, model_kwargs.get("attention_mask"))
        refuse_positions(model_kwargs.get("position_ids"), lengths, longest)
        adopt(cast(DynamicCache, past), engine.cache, longest - lengths)
    return engine


def _complaint(model: PreTrainedModel, support: Support, batch_size: int, config: LookaheadConfig) -> str:
    """Why a model cannot verify what is asked for, or an empty string."""
    name = type(model).__name__
    if support.shape == "none":
        return f"{name} cannot be decoded speculatively: {support.reason}"
    if support.shape == "chains" and batch_size > 1:
        return f"{name} cannot be decoded speculatively for {batch_size} prompts at once: {support.reason}"
    if support.shape == "chains" and "jacobi" in config.proposers and not config.decides_branch:
        return f"{name} cannot verify the lookahead branch: {support.reason}"
    if support.shape == "chains" and config.acceptance == "rejection" and len(config.proposers) > 1:
        return f"{name} cannot verify what several proposers draw: {support.reason}"
    return ""


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
            `DynamicCache` as `past_key_values` is continued from, and grows in place.

    Raises:
        ConfigError: An argument has the wrong type, or is out of its range.
        PoolError: The pool of the configuration cannot be opened, or was made with another tokenizer.
        PromptError: A prompt has no tokens, or there is no room for a new one.
        UnsupportedModelError: The generation mode cannot be served.
    """
    check_pair(model, tokenizer)
    refuse_model(model)
    check_options(model, config, generation_config, generate_kwargs, seed)
    config = replace(config or LookaheadConfig(), compile=True) if compile else config
    reader = reader_of(
        model, tokenizer, generation_config, add_special_tokens, truncate, chat_template_kwargs, generate_kwargs
    )
    encoded = [reader.read(prompt, i) for i, prompt in enumerate(reader.separate(prompts))]
    if not encoded:
        return GenerationResult([], [], DecodingStats(), [], [])
    engine = prepare_ids(model, tokenizer, encoded, config, generation_config, seed, generate_kwargs)
    engine.report_prefill(on_prefill)
    token_ids, reasons = collect(engine)
    return_cache(engine, generate_kwargs.get("past_key_values"))
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
    check_pair(model, tokenizer)
    refuse_model(model)
    check_options(model, config, generation_config, generate_kwargs, seed)
    config = replace(config or LookaheadConfig(), compile=True) if compile else config
    reader = reader_of(
        model, tokenizer, generation_config, add_special_tokens, truncate, chat_template_kwargs, generate_kwargs
    )
    prompts = list(reader.separate(prompt))
    if len(prompts) != 1:
        raise PromptError(f"stream takes one prompt, got {len(prompts)}; lookahead.stream_many takes several")
    encoded = [reader.read(prompts[0], 0)]
    engine = prepare_ids(model, tokenizer, encoded, config, generation_config, seed, generate_kwargs)
    engine.report_prefill(on_prefill)
    return TextStream(engine, tokenizer, partial(return_cache, engine, generate_kwargs.get("past_key_values")))


def prepare_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    config: LookaheadConfig | None,
    generation_config: GenerationConfig | None,
    seed: int | None,
    add_special_tokens: bool,
    generate_kwargs: dict[str, Any],
) -> Engine | PlainLoop:
    """Tokenize, pad, and let `model.generate` resolve its options into an engine."""
    refuse_model(model)
    check_options(model, config, generation_config, generate_kwargs, seed)
    reader = reader_of(model, tokenizer, generation_config, add_special_tokens, None, None, generate_kwargs)
    encoded = [reader.read(prompt, i) for i, prompt in enumerate(prompts)]
    return prepare_ids(model, tokenizer, encoded, config, generation_config, seed, generate_kwargs)


def prepare_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Sequence[list[int]],
    config: LookaheadConfig | None,
    generation_config: GenerationConfig | None,
    seed: int | None,
    generate_kwargs: dict[str, Any],
) -> Engine | PlainLoop:
    """Pad prompts, and let `model.generate` resolve its options into an engine."""
    if config is not None and config.pool is not None:
        open_pool(os.fspath(config.pool), fingerprint=tokenizer_fingerprint(tokenizer))
    refuse_inputs(model, encoded)
    pad = pad_token_of(tokenizer)
    padded, mask = pad_prompts(encoded, pad, on_the_right=model.config.is_encoder_decoder)
    longest = 1 if model.config.is_encoder_decoder else len(padded[0])
    context = None if model.config.is_encoder_decoder else context_limit(model)
    if context is not None:
        room = context + 1 - min(map(len, encoded))
        generate_kwargs = within(room, longest, model, generation_config, generate_kwargs)
    limit = generate_kwargs.get("max_length") if generate_kwargs.get("max_new_tokens") is None else None
    if limit is not None and limit <= longest:
        raise PromptError(f"max_length must be more than the longest prompt, {longest} tokens, got {limit}")
    if "pad_token_id" not in generate_kwargs and model.generation_config.pad_token_id is None:
        generate_kwargs = {**generate_kwargs, "pad_token_id": pad}
    generation_config, generate_kwargs = serve_stop_strings(model, tokenizer, generation_config, generate_kwargs)
    if seed is not None:
        torch.manual_seed(seed)
    causal_lm: Any = model
    device = input_device(model)
    engine = causal_lm.generate(
        torch.tensor(padded, device=device),
        attention_mask=torch.tensor(mask, device=device),
        generation_config=generation_config,
        custom_generate=prepare,
        lookahead_config=config,
        lookahead_tokenizer=tokenizer,
        lookahead_context=context,
        **generate_kwargs,
    )
    return cast(Engine | PlainLoop, engine)
