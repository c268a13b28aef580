"""Generate: the drop-in for `model.generate`, the Python API and streaming."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lookahead.branch import Branch
from lookahead.config import MAX_NODES_LIMIT, LookaheadConfig
from lookahead.engine import Engine
from lookahead.errors import ConfigError, PromptError, UnsupportedModelError
from lookahead.experience import ModelExperience, experience_of
from lookahead.handover import adopt, hand_back, output_dict, padded_sequences
from lookahead.pacing import Pacing
from lookahead.pieces import PieceStreamer
from lookahead.plain import PlainLoop
from lookahead.pools.fingerprint import fingerprint_of
from lookahead.pools.opening import open_pool
from lookahead.proposers import make_proposers
from lookahead.request import (
    call_of,
    prompt_lengths,
    refuse_long_prompts,
    refuse_model,
    refuse_past,
    refuse_positions,
    refuse_unsupported,
    serve_stop_strings,
    stopping_rule,
    vocabulary_size,
)
from lookahead.sampling import TokenChooser, warp_of
from lookahead.stats import DecodingStats, total
from lookahead.support import Support, prefills_at_once, support_of
from lookahead.target import PREFILL_CHUNK, Target, input_device


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
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
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
        **model_kwargs: What `generate` would pass to the model.

    Returns:
        int64 `[batch, tokens + new]`, or with `return_dict_in_generate` a `GenerateDecoderOnlyOutput` that holds it
        as `sequences`, the scores and logits asked for, and the cache. A filled `past_key_values` is continued
        from, and grows in place.

    Raises:
        PoolError: The pool of the configuration cannot be opened, or holds token ids the model does not know.
        UnsupportedModelError: The generation mode or an input cannot be served; the message names it.
    """
    arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config)
    engine = prepare(*arguments, lookahead_config, lookahead_tokenizer, **model_kwargs)
    if lookahead_streamer is not None:
        lookahead_streamer.put(input_ids.cpu())
    if isinstance(engine, PlainLoop):
        return cast(Tensor | GenerateDecoderOnlyOutput, engine.sample(streamer=lookahead_streamer))
    outputs = _collect(engine, lookahead_streamer, generation_config._pad_token_tensor)
    sequences = padded_sequences(input_ids, outputs, generation_config)
    past = model_kwargs.get("past_key_values")
    past = past if isinstance(past, DynamicCache) else None
    if engine.kept and past is not None:
        rows = [engine.kept[row] for row in range(len(outputs))]
        hand_back(past, rows, engine.padding, sequences.shape[1] - 1)
    if not generation_config.return_dict_in_generate:
        return sequences
    return output_dict(sequences, engine.chooser, generation_config, past)


def prepare(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig | None = None,
    lookahead_tokenizer: PreTrainedTokenizerBase | None = None,
    **model_kwargs: Any,
) -> Engine | PlainLoop:
    """Check a call of `model.generate` and build what serves it; the arguments are those of `decode`."""
    refuse_unsupported(model, generation_config, model_kwargs)
    past = model_kwargs.get("past_key_values")
    config = lookahead_config if lookahead_config is not None else LookaheadConfig()
    vocabulary = vocabulary_size(model)
    pool = open_pool(os.fspath(config.pool), vocabulary=vocabulary) if config.pool is not None else None
    lengths = prompt_lengths(input_ids, model_kwargs.get("attention_mask"), vocabulary)
    batch_size, longest = input_ids.shape
    if batch_size > 1 and any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in logits_processor):
        raise UnsupportedModelError("guidance of several prompts is not served; leave out custom_generate for it")
    refuse_long_prompts(model, lengths)
    refuse_positions(model_kwargs.get("position_ids"), lengths, longest)
    stopping = stopping_rule(stopping_criteria, batch_size)
    causal_lm: Any = model
    sample = partial(
        causal_lm._sample, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    )
    if stopping.max_length <= longest + 1:
        return PlainLoop(sample, input_ids, lengths, stopping)  # a single token: there is nothing to draft
    support = support_of(model, shortest=int(lengths.min()), max_length=stopping.max_length)
    complaint = _complaint(model, support, batch_size, config)
    if complaint and lookahead_config is not None and lookahead_config.proposers:
        raise UnsupportedModelError(f"{complaint}; leave out the configuration to decode it plainly")
    if batch_size > 1 and stopping.custom is not None and not stopping.eos_tokens.size:
        # There transformers lets a row that was stopped go on until all are: how far depends on the slowest.
        complaint = "a batch with stopping criteria and no end-of-sequence token ends as one"
    if support.shape == "none" or complaint:
        warnings.warn(f"{complaint}; it is decoded plainly", stacklevel=2)
        return PlainLoop(sample, input_ids, lengths, stopping)
    experience = experience_of(model)
    is_chain = support.shape == "chains"
    warp = warp_of(logits_processor) if generation_config.do_sample else None
    call = call_of(model, lookahead_tokenizer, batch_size, stopping, config, is_chain=is_chain, warp=warp)
    branch = _branch_of(config, experience, is_chain=is_chain)
    proposers = make_proposers(config, experience.proposers, pool, call, branch)
    # Room for what short outputs need; the cache grows when an output turns out long.
    capacity = longest + min(stopping.max_length - longest, 256) + config.node_budget + 1
    target = Target(
        model,
        rows=batch_size,
        capacity=capacity,
        device=input_ids.device,
        shape=support.shape,
        prefill_chunk=longest if prefills_at_once(model) else PREFILL_CHUNK,
        hidden_layers=sorted({layer for proposer in proposers for layer in proposer.hidden_layers}),
        compiles=config.compile,
        captures=config.cuda_graphs,
        most_nodes=config.node_budget + 1,
    )
    is_continued = past is not None and past.get_seq_length() > 0
    is_given = getattr(past, "_is_user_defined", False)
    if is_continued:
        refuse_past(past, input_ids, generation_config, model_kwargs.get("attention_mask"))
        adopt(cast(DynamicCache, past), target.cache, longest - lengths)
    pacing = None
    if config.proposers and config.draft == "auto":
        cost, switch, padded = (
            experience.costs[config.passes],
            experience.switches[config.passes],
            config.has_fixed_shapes,
        )
        pacing = Pacing(cost, switch, branch, is_padded=padded, runs_to_limit=stopping.is_only_length)
    return Engine(
        target,
        proposers,
        pacing,
        config,
        TokenChooser(
            logits_processor,
            do_sample=bool(generation_config.do_sample),
            batch_size=batch_size,
            keep=bool(generation_config.output_scores or generation_config.output_logits),
        ),
        stopping,
        input_ids,
        lengths,
        keep_cache=bool(generation_config.return_dict_in_generate or is_continued or is_given),
        is_chain=is_chain,
        by_rejection=call.by_rejection,
        by_typicality=config.acceptance == "typical" and call.warp is not None,
    )


def _branch_of(config: LookaheadConfig, experience: ModelExperience, *, is_chain: bool) -> Branch:
    """Whether the lookahead branch runs, where costs decide that; elsewhere it is always off for them."""
    return Branch(
        config.branch_sizes if config.decides_branch and not is_chain else (),
        experience.branch[tuple(name for name in config.proposers if isinstance(name, str))],
        max_nodes=config.max_nodes or MAX_NODES_LIMIT,
        teaches="recycled" in config.proposers,
    )


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
    """Tokenize, left-pad, and let `model.generate` resolve its options into an engine."""
    refuse_model(model)
    _check_lengths(generate_kwargs)
    if config is not None and config.pool is not None:
        open_pool(os.fspath(config.pool), fingerprint=fingerprint_of(tokenizer))
    encoded = [tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"] for prompt in prompts]
    for i, ids in enumerate(encoded):
        if not ids:
            raise PromptError(f"prompt {i} has no tokens: {prompts[i]!r}; a prompt needs at least one")
    longest = max(map(len, encoded))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    padded = [[pad] * (longest - len(ids)) + ids for ids in encoded]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in encoded]
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


def _check_lengths(generate_kwargs: dict[str, Any]) -> None:
    """Refuse a limit that leaves no room for a token, and a streamer, which no one would feed."""
    if generate_kwargs.get("streamer") is not None:
        raise ConfigError("streamer is not taken here; use stream, or model.generate under lookahead.enable")
    for name in ("max_new_tokens", "max_length"):
        value = generate_kwargs.get(name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


def _collect(engine: Engine | PlainLoop, streamer: Any = None, pad: Tensor | None = None) -> list[list[int]]:
    """Run to the end; the new tokens of every row, shown to a streamer a column at a time as transformers does."""
    outputs: list[list[int]] = [[] for _ in engine.stats]
    running = set(range(len(outputs)))
    shown = 0
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
    if streamer is not None:
        streamer.end()
    return outputs
