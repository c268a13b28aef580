"""Generate: the drop-in for `model.generate`, the Python API and streaming."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
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

from lookahead.assembly import assemble
from lookahead.config import LookaheadConfig
from lookahead.emission import Carried
from lookahead.engine import Engine
from lookahead.errors import PromptError, UnsupportedModelError
from lookahead.handover import adopt, hand_back, output_dict, padded_sequences
from lookahead.pieces import PieceStreamer
from lookahead.plain import PlainLoop
from lookahead.pools.fingerprint import fingerprint_of
from lookahead.pools.opening import open_pool
from lookahead.request import (
    call_of,
    check_lengths,
    foreigner,
    pad_prompts,
    prompt_lengths,
    refuse_inputs,
    refuse_long_prompts,
    refuse_model,
    refuse_past,
    refuse_positions,
    refuse_unsupported,
    serve_stop_strings,
    stopping_rule,
    vocabulary_size,
)
from lookahead.rows import Row
from lookahead.sampling import TokenChooser, warp_of
from lookahead.seq2seq.preparation import prepare_encoder_decoder
from lookahead.stats import DecodingStats, total
from lookahead.support import Support, support_of
from lookahead.target import input_device


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What `generate` returns.

    Attributes:
        texts: The new text of each prompt, special tokens left out.
        token_ids: The new tokens of each prompt, an end-of-sequence token included.
        stats: All rows added up.
        row_stats: One per prompt.
    """

    texts: list[str]
    token_ids: list[list[int]]
    stats: DecodingStats
    row_stats: list[DecodingStats]


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
    outputs = _collect(engine, lookahead_streamer, generation_config._pad_token_tensor)
    sequences = padded_sequences(input_ids, outputs, generation_config)
    past = model_kwargs.get("past_key_values")
    past = past if isinstance(past, DynamicCache | StaticCache | EncoderDecoderCache) else None
    if engine.kept and isinstance(past, DynamicCache | StaticCache):
        rows = [engine.kept[row] for row in range(len(outputs))]
        hand_back(past, rows, np.array([row.padding for row in engine.batch]), sequences.shape[1] - 1)
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
    **model_kwargs: Any,
) -> Engine | PlainLoop:
    """Check a call of `model.generate` and build what serves it; the arguments are those of `decode`."""
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
    causal_lm: Any = model
    sample = partial(
        causal_lm._sample, input_ids, logits_processor, generation_config=generation_config, **model_kwargs
    )
    plain = PlainLoop(sample, input_ids, lengths, stopping_criteria)
    if stopping.max_length <= longest + 1:
        return plain  # a single token: there is nothing to draft
    stranger = foreigner(logits_processor, stopping_criteria, generation_config) if batch_size > 1 else ""
    if stranger:
        warnings.warn(
            f"{stranger} may keep a state, or look at other rows, so it must see every step of the whole batch: "
            f"the {batch_size} rows are decoded plainly; a prompt by itself is drafted for",
            stacklevel=2,
        )
        return plain
    support = support_of(model, shortest=int(lengths.min()), max_length=stopping.max_length)
    complaint = _complaint(model, support, batch_size, config)
    if complaint and lookahead_config is not None and lookahead_config.proposers:
        raise UnsupportedModelError(f"{complaint}; leave out the configuration to decode it plainly")
    if batch_size > 1 and stopping.custom is not None and not stopping.eos_tokens.size:
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
    rows = [
        Row.begin(i, ids, chooser, stopping, padding=longest - length, place=i, device=input_ids.device)
        for i, (ids, length) in enumerate(zip(input_ids.cpu().numpy(), lengths.tolist(), strict=True))
    ]
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
    prompts: str | Sequence[str],
    *,
    config: LookaheadConfig | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    add_special_tokens: bool = True,
    compile: bool = False,
    **generate_kwargs: Any,
) -> GenerationResult:
    """Generate from text, token for token what `model.generate` gives.

    Args:
        model: Any HuggingFace causal LM.
        tokenizer: Its tokenizer.
        prompts: One prompt or several; several are decoded together.
        config: How to draft; the defaults when None.
        generation_config: As for `model.generate`.
        seed: Seeds torch's random numbers first, for reproducible sampling.
        add_special_tokens: Whether the tokenizer adds its special tokens; False for text from a chat template.
        compile: Whether to compile the model's passes, as by `LookaheadConfig(compile=True)`.
        **generate_kwargs: Options of `model.generate`, such as `max_new_tokens`, `do_sample` or `temperature`.

    Raises:
        PoolError: The pool of the configuration cannot be opened, or was made with another tokenizer.
        PromptError: A prompt has no tokens, or there is no room for a new one.
        UnsupportedModelError: The generation mode cannot be served.
    """
    config = replace(config or LookaheadConfig(), compile=True) if compile else config
    batch = [prompts] if isinstance(prompts, str) else list(prompts)
    if not batch:
        return GenerationResult([], [], DecodingStats(), [])
    engine = prepare_text(model, tokenizer, batch, config, generation_config, seed, add_special_tokens, generate_kwargs)
    token_ids = _collect(engine)
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in token_ids]
    return GenerationResult(texts, token_ids, total(engine.stats), engine.stats)


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    config: LookaheadConfig | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    add_special_tokens: bool = True,
    compile: bool = False,
    **generate_kwargs: Any,
) -> Iterator[str]:
    """Generate from one prompt, yielding text as soon as its tokens are verified.

    The arguments are those of `generate`. They are checked at once, before the first piece is asked for.
    """
    config = replace(config or LookaheadConfig(), compile=True) if compile else config
    engine = prepare_text(
        model, tokenizer, [prompt], config, generation_config, seed, add_special_tokens, generate_kwargs
    )
    return _pieces(engine, tokenizer)


def _pieces(engine: Engine | PlainLoop, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Turn the emissions of a one-row engine into text, whole words at a time."""
    streamer: Any = PieceStreamer(tokenizer, skip_special_tokens=True)
    for emissions in engine.run():
        for emission in emissions:
            streamer.put(torch.from_numpy(emission.tokens))
            yield from streamer.take()
    streamer.end()
    yield from streamer.take()


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
    check_lengths(generate_kwargs)
    if config is not None and config.pool is not None:
        open_pool(os.fspath(config.pool), fingerprint=fingerprint_of(tokenizer))
    encoded = [tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"] for prompt in prompts]
    for i, ids in enumerate(encoded):
        if not ids:
            raise PromptError(f"prompt {i} has no tokens: {prompts[i]!r}; a prompt needs at least one")
    refuse_inputs(model, encoded)
    pad = pad_token_of(tokenizer)
    padded, mask = pad_prompts(encoded, pad, on_the_right=model.config.is_encoder_decoder)
    longest = 1 if model.config.is_encoder_decoder else len(padded[0])
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
    engine: Engine | PlainLoop = causal_lm.generate(
        torch.tensor(padded, device=device),
        attention_mask=torch.tensor(mask, device=device),
        generation_config=generation_config,
        custom_generate=prepare,
        lookahead_config=config,
        lookahead_tokenizer=tokenizer,
        **generate_kwargs,
    )
    return engine


def pad_token_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token to fill rows with; masks hide it, so that any will do."""
    pad: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    return pad


def _collect(engine: Engine | PlainLoop, streamer: Any = None, pad: Tensor | None = None) -> list[list[int]]:
    """Run to the end; the new tokens of every row, shown to a streamer a column at a time as transformers does."""
    outputs: list[list[int]] = [[] for _ in engine.stats]
    running = set(range(len(outputs)))
    shown = 0
    try:
        with engine.serving():
            for emissions in engine.run():
                for emission in emissions:
                    outputs[emission.row].extend(emission.tokens.tolist())
                    if emission.finished:
                        running.discard(emission.row)
                whole = min(map(len, (outputs[row] for row in running))) if running else max(map(len, outputs))
                for step in range(shown, whole if streamer is not None else shown):
                    streamer.put(torch.tensor([row[step] if step < len(row) else int(pad or 0) for row in outputs]))
                shown = whole
    except Carried as carried:
        assert carried.__cause__ is not None
        raise carried.__cause__ from None
    if streamer is not None:
        streamer.end()
    return outputs
