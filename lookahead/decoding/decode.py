"""Decoding inside `model.generate`: `decode`, a custom generation method for any call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lookahead.config import LookaheadConfig
from lookahead.decoding import validation
from lookahead.decoding.hf_outputs import collect, return_cache, scores_by_step
from lookahead.decoding.plan import plan_request
from lookahead.decoding.prediction_reading import Predictions, read_predictions
from lookahead.engine.engine import Engine
from lookahead.errors import warn
from lookahead.model.calls import GenerateOutput, ResolvedCall, generate_output, own_loop
from lookahead.proposers.ngram import Memory


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig | None = None,
    lookahead_streamer: BaseStreamer | None = None,
    lookahead_tokenizer: PreTrainedTokenizerBase | None = None,
    lookahead_memory: Memory | None = None,
    lookahead_prediction: Predictions = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateOutput:
    """Decode speculatively inside `model.generate`, without changing a token.

    Example:
        `model.generate(**inputs, max_new_tokens=256, custom_generate=lookahead.decode)`; options are passed as
        `lookahead_config=LookaheadConfig(...)`.

    Args:
        model: The model `generate` was called on.
        input_ids: int64 `[batch, tokens]`, left-padded.
        logits_processor: Prepared by `generate`.
        stopping_criteria: Prepared by `generate`.
        generation_config: Resolved by `generate`.
        lookahead_config: How to draft; the defaults when None.
        lookahead_streamer: Gets the new tokens of a single prompt as they are verified; transformers does not pass its
            `streamer` argument to custom methods.
        lookahead_tokenizer: The model's tokenizer, for proposers that compare it with their own; `generate` does not
            pass its `tokenizer` argument either.
        lookahead_memory: The store of `memory="request"` if one request makes several calls, as Whisper does for the
            segments of an audio; `lookahead.enable` passes it.
        lookahead_prediction: The expected output, as in `lookahead.generate`; text needs the tokenizer. Several outputs
            of one prompt share it. Beam search and plain decoding ignore it.
        inputs_tensor: The input of the encoder of an encoder-decoder model; passed by `generate`.
        **model_kwargs: The inputs that `generate` would pass to the model.

    Returns:
        int64 `[batch, tokens + new]`, or with `return_dict_in_generate` the output class of transformers with these
        `sequences`, the requested scores and logits, and the cache. A filled cache is continued and grows in place.
        After the end of a row of a batch, scores and logits are 0 for the padding token and -inf for all others, so
        `compute_transition_scores` gives 0 there; transformers gives the scores of padding.

    Raises:
        PoolError: The pool or the memory file of the configuration cannot be opened, or belongs to another model.
        PromptError: A prediction is neither text nor token ids, or is text without a tokenizer.
        UnsupportedModelError: The generation mode or an input cannot be served; the message names it.
    """
    validation.check_config("lookahead_config", lookahead_config)
    call = ResolvedCall(
        model, input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor, model_kwargs
    )
    if torch.is_grad_enabled() and (loop := own_loop(model, generation_config)) is not None:
        warn("decoded by transformers alone: gradients are recorded, and passes over drafts record none")
        arguments: Any = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        arguments |= {"generation_config": generation_config, "streamer": lookahead_streamer, **model_kwargs}
        return cast(Tensor | GenerateOutput, loop(model, input_ids, **arguments))
    copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    predictions = read_predictions(model, lookahead_tokenizer, lookahead_prediction, len(input_ids) // copies)
    plan = plan_request(call, lookahead_config, lookahead_tokenizer, memory=lookahead_memory)
    engine = replace(plan, predictions=predictions).begin()
    if lookahead_streamer is not None and (isinstance(engine, Engine) or engine.takes_streamer):
        lookahead_streamer.put(input_ids.cpu())
    if not isinstance(engine, Engine):
        return cast(Tensor | GenerateOutput, engine.sample(streamer=lookahead_streamer))
    pad, past = call.pad_token, plan.cache.past
    tokens = collect(engine, lookahead_streamer, pad)
    new = pad_sequence(
        [torch.tensor(row, device="cpu") for row in tokens], batch_first=True, padding_value=int(pad or 0)
    )
    sequences = torch.cat([input_ids, new.to(input_ids.device)], -1)
    for row in engine.batch:
        if row.is_edited:  # the prompt may be edited too
            sequences[row.place] = torch.from_numpy(row.ids[: row.length])
    return_cache(engine, past)
    if not generation_config.return_dict_in_generate:
        return sequences
    is_kept = isinstance(past, DynamicCache | StaticCache | EncoderDecoderCache)
    chooser = engine.batch[0].chooser
    shown = {
        name: scores_by_step(rows, int(pad or 0))
        for name, rows in {"scores": chooser.scores, "logits": chooser.logits}.items()
        if getattr(generation_config, f"output_{name}")
    }
    return generate_output(model, sequences, past if is_kept else None, **shown)
