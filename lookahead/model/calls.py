"""Calls of models: resolved arguments of `generate`, transformers' own loops, and what differs by kind of model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
)
from transformers.generation import utils
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.utils.generic import ModelOutput

from lookahead.errors import UnsupportedModelError
from lookahead.model.cache import TreeCache
from lookahead.model.facts import CACHE, MARKS_CACHES, cache_in, context_limit, decoder_of, position_limit, tokens_in
from lookahead.model.known_code import CRITERIA, changed_cache, is_known, is_known_class
from lookahead.model.model_state import plan_of
from lookahead.utils.seams import plugin_for

GenerateOutput = utils.GenerateOutput


class ResolvedCall(NamedTuple):
    """The arguments that `model.generate` passes to its loop."""

    model: PreTrainedModel
    input_ids: Tensor  # int64 `[batch, tokens]`, left-padded; of an encoder-decoder model the decoder's prompt
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    inputs_tensor: Tensor | None  # the encoder's inputs
    model_kwargs: dict[str, Any]  # inputs of the model, including the encoder's outputs

    @classmethod
    def resolve(cls, model: PreTrainedModel, prompts: Tensor, **options: Any) -> ResolvedCall:
        """What `model.generate(prompts, **options)` passes to its loop, which does not run.

        Args:
            model: The model.
            prompts: int64 `[batch, tokens]`.
            **options: As for `generate`.

        Raises:
            UnsupportedModelError: The model's own `generate` takes no loop of others.
        """
        resolved = list[ResolvedCall]()

        # transformers passes `inputs_tensor` only to loops with a parameter of that name. A `generate` of the model's
        # own may go on with what the loop returns.
        def keep(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            inputs_tensor: Tensor | None = None,
            **model_kwargs: Any,
        ) -> Tensor:
            arguments = model, input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor
            resolved.append(cls(*arguments, model_kwargs))
            return input_ids.clone()

        generate: Any = model.generate
        generate(prompts, custom_generate=keep, **options)
        if not resolved:
            name = type(model).__name__
            raise UnsupportedModelError(f"{name}.generate ignores custom_generate, by which lookahead decodes")
        return resolved[0]

    @property
    def pad_token(self) -> Tensor | None:
        """The padding token as a tensor, or None."""
        config: Any = self.generation_config
        token: Tensor | None = getattr(config, "_pad_token_tensor", None)
        if token is None and isinstance(config.pad_token_id, int):
            token = torch.tensor(config.pad_token_id, device="cpu")
        return token


class CallCache(NamedTuple):
    """The cache of a call.

    Attributes:
        past: The cache; None without one.
        is_callers: Whether it may be the caller's, which rules out a named cache implementation.
        is_returned: Whether the caller sees it.
        tokens: Tokens in the caller's cache.
        is_static: Whether transformers masks its empty slots.
        reads_otherwise: Whether `generate` reads the whole text again for each token, or a prompt in parts.
        obstacle: Why it holds no drafts, or an empty string.
    """

    past: Any = None
    is_callers: bool = False
    is_returned: bool = False
    tokens: int = 0
    is_static: bool = False
    reads_otherwise: bool = False
    obstacle: str = ""


NO_CACHE = CallCache()
SERVED = frozenset(("attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "cache_params"))
"""Inputs of a model that passes set themselves, or do not need since they have their own cache and positions."""


class ModelInputs:
    """The inputs of a causal model.

    Args:
        model: The model.
        cache: The cache of its passes.
        encoded: What an encoder has read of the rows, for a subclass; None without one.
    """

    prefix = ""  # of input names
    counts_nodes = False
    joins_alone = False  # whether rows join one at a time
    has_cross = False  # whether nodes attend to more than their text, all in one call
    shifts: Tensor | None = None  # int64 `[rows, 1]`, position after a prompt minus its tokens; None for zeros

    def __init__(self, model: PreTrainedModel, cache: TreeCache, encoded: Any = None) -> None:
        plan = plan_of(model)
        names = plan.inputs
        self.model, self.cache, self.cache_name = model, cache, plan.cache_input
        self.takes_positions = f"{self.prefix}position_ids" in names
        self.keeps_logits = "logits_to_keep" in names
        self.positions = plan.positions
        self.cross: Any = None  # attention of the running pass to what an encoder has read

    def reading(self, encoded: Any) -> AbstractContextManager[Tensor | None]:
        """A block whose passes read new prompts, for which an encoder has read `encoded`.

        Yields None, or the logits `[rows, 1, vocab]` after prompts that the model has read into the cache by itself.
        """
        return nullcontext()

    def retire(self, row: int, last: int) -> None:
        """Remove a row; row `last` takes its place."""

    def of_pass(self, tokens: Tensor, positions: Tensor) -> AbstractContextManager[dict[str, Any]]:
        """The arguments of one call of the model, valid within a block.

        Args:
            tokens: int64 `[rows, width]`.
            positions: int64 `[rows, width]`.
        """
        options = {self.cache_name: self.cache, f"{self.prefix}input_ids": tokens}
        if self.takes_positions:
            options[f"{self.prefix}position_ids"] = positions
        return nullcontext(options)


MakeInputs = Callable[[PreTrainedModel, TreeCache], ModelInputs]


class Probe(NamedTuple):
    """What a probe of a model passes to it."""

    make_inputs: MakeInputs  # of a backend
    past: Any  # an empty cache for the model's own passes
    inputs: dict[str, Any]  # of these passes, beside tokens, positions and the cache


class ModelKind:
    """A causal model, which reads its prompt by itself. A plug-in overrides what differs for another kind."""

    has_encoder = False
    make_inputs: type[ModelInputs] = ModelInputs  # of a backend, for `encoded` rows or for rows that join later
    output: type[Any] = utils.GenerateDecoderOnlyOutput
    served = SERVED
    mask = "attention_mask"  # the input that masks the padding of the text that is continued
    text = "text"  # the argument of a tokenizer for an output
    nouns = "prompt", "model"  # what is read, and what reads it

    def probe(self, model: PreTrainedModel, tokens: Sequence[int], rows: int) -> Probe:
        """What a probe over `rows` equal prompts passes to the model; an encoder reads `tokens`."""
        return Probe(self.make_inputs, DynamicCache(config=model.config.get_text_config()), {})

    def inputs_of_text(self, model: PreTrainedModel, ids: Tensor, tokens: Sequence[int]) -> dict[str, Any]:
        """The inputs of the model's own pass over texts, int64 `[rows, tokens]`; an encoder reads `tokens`."""
        return {"input_ids": ids}

    def heeds_padding(self, model: PreTrainedModel) -> bool | None:
        """Whether a padded prompt is read as it is alone; None if a probe of causal models tells."""
        return None

    def prompt_limit(self, model: PreTrainedModel) -> int | None:
        """Maximum tokens of a prompt; None for no limit."""
        return context_limit(model)

    def positions(self, model: PreTrainedModel) -> int | None:
        """Maximum tokens of the text that is continued; None if positions are computed."""
        return position_limit(model)

    def cache_of(self, call: ResolvedCall) -> CallCache:
        """The cache of a call; asked before the model is probed.

        Raises:
            UnsupportedModelError: The cache cannot be served.
        """
        past, config = cache_in(call.model_kwargs), call.generation_config
        # Before transformers 5.17 none is marked.
        is_unmarked = not MARKS_CACHES and config.cache_implementation is None
        is_callers = past is not None and getattr(past, "_is_user_defined", is_unmarked)
        return CallCache(
            past,
            is_callers,
            is_returned=is_callers or bool(config.return_dict_in_generate),
            tokens=tokens_in(past) if is_callers else 0,
            is_static=isinstance(getattr(past, "self_attention_cache", past), StaticCache),
            reads_otherwise=config.use_cache is False or config.prefill_chunk_size is not None,
        )

    def encoded(self, call: ResolvedCall, cache: CallCache) -> Any:
        """What the encoder has read of a call; None without an encoder."""
        return None

    def encode_for_drafts(
        self, model: PreTrainedModel, call: Any, rows: Sequence[int], *, is_shared: bool
    ) -> tuple[list[int], Any]:
        """Let a draft model's encoder read what the target's has read.

        Args:
            model: The draft model.
            call: The `Call` of the target.
            rows: The rows to encode.
            is_shared: Whether `shares_encoder` is true.

        Returns:
            The rows whose inputs the draft model can read, and what its encoder made of them.
        """
        return list(rows), None

    def shares_encoder(self, model: PreTrainedModel, target: PreTrainedModel) -> bool:
        """Whether a draft model can take the outputs of the target's encoder, which is not one of text."""
        return False

    def trees_reason(self, model: PreTrainedModel, *, rows: int, is_padded: bool, is_rounded: bool) -> str:
        """Why a batch cannot verify trees, though its model can; or an empty string. As in `plan.shape_of`."""
        return ""

    def modules_beside(self, model: PreTrainedModel) -> list[nn.Module]:
        """Modules that read no drafts."""
        return []


_CAUSAL = ModelKind()


def kind_of(model: Any) -> ModelKind:
    """The kind of a model."""
    kind: ModelKind = _CAUSAL if decoder_of(model) is model else plugin_for("kind", "encoder-decoder")()
    return kind


# The methods of a model that `generate` decodes with, besides its passes.
_LOOP = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


def changed_loop(model: Any) -> str:
    """The name of a method of the loop of `model.generate` that transformers does not ship, or an empty string."""
    for name in _LOOP:
        own = vars(model).get(name) if name != "prepare_inputs_for_generation" else None
        if not is_known(own or getattr(type(model), name, None)):
            return name
    kinds = LogitsProcessorList, StoppingCriteriaList, *CRITERIA
    return next((f"{kind.__name__}.__call__" for kind in kinds if not is_known(kind.__call__)), "")


def mask_length(config: GenerationConfig, default: int) -> int:
    """Length of a call's mask in tokens, if its configuration has one."""
    length: int = getattr(config, "_mask_length", default)
    return length


def unserved_reason(call: ResolvedCall, cache: CallCache) -> str:
    """Why passes over drafts cannot follow the mask or the cache of a call, or an empty string.

    `generate` infers a mask of its own if a prompt holds the padding token.
    """
    past, mask = cache.past, call.model_kwargs.get("attention_mask")
    tensors = [call.input_ids, *call.model_kwargs.values()]
    tensors += [value for layer in getattr(past, "layers", None) or () for value in vars(layer).values()]
    kinds = dict.fromkeys(type(tensor) for tensor in tensors if isinstance(tensor, Tensor))
    own = next((kind for kind in kinds if kind is not Tensor and not is_known_class(kind)), None)
    if own is not None:
        return f"{own.__qualname__}, the class of an input, is your own code"
    if mask is not None and mask.shape == call.input_ids.shape and not is_left_padded(mask):
        return "its attention_mask has zeros after ones"
    if cache.is_callers:
        if not isinstance(past, DynamicCache | EncoderDecoderCache):
            return f"its cache is a {type(past).__name__}"
        if changed := changed_cache(past):
            return f"its cache has its own code, {changed}"
    layers: Any = past.layers if isinstance(past, DynamicCache) else ()
    lengths = {int(layer.get_seq_length()) for layer in layers if getattr(layer, "keys", None) is not None}
    return "the layers of its cache hold different numbers of tokens" if len(lengths) > 1 else ""


def is_left_padded(mask: Tensor) -> bool:
    """Whether every row of a mask, `[batch, tokens]`, is zeros and then ones."""
    kept = mask.bool().cpu().numpy()
    return bool((kept[:, 1:] >= kept[:, :-1]).all())


def own_sample(call: ResolvedCall) -> Callable[..., Any]:
    """Transformers' own loop for greedy search and sampling; call it with criteria and a streamer."""
    lm: Any = call.model
    return partial(
        lm._sample,
        call.input_ids,
        call.logits_processor,
        generation_config=call.generation_config,
        **call.model_kwargs,
    )


def own_beam_search(call: ResolvedCall) -> Callable[..., Any]:
    """Transformers' own beam search; call it with a stand-in for the model, criteria and inputs."""
    kind: Any = type(call.model)
    return partial(
        kind._beam_search,
        input_ids=call.input_ids,
        logits_processor=call.logits_processor,
        generation_config=call.generation_config,
    )


def own_loop(model: Any, config: GenerationConfig) -> Callable[..., Any] | None:
    """The transformers loop that `model.generate` chooses for a configuration; None if it is on the Hub."""
    name = utils.GENERATION_MODES_MAPPING[config.get_generation_mode()]
    loop: Callable[..., Any] | None = getattr(type(model), name, None)
    return loop


def read_prompt(model: Any, input_ids: Tensor, config: GenerationConfig, inputs: dict[str, Any]) -> Tensor:
    """Read a prompt as transformers' loop does; returns logits `[rows, n, vocab]`."""
    logits: Tensor = model._prefill(input_ids, config, inputs).logits
    return logits


def inputs_of_step(call: ResolvedCall, past: Cache, tokens: Tensor) -> dict[str, Any]:
    """The model inputs for the newest of `tokens` after a prompt, as transformers' loop makes them.

    Args:
        call: The call.
        past: The cache, with the prompt and all tokens but the newest.
        tokens: int64 `[batch, 1 or more]`.
    """
    model: Any = call.model
    inputs, outputs = {**call.model_kwargs, CACHE: past}, ModelOutput({CACHE: past})
    for _ in range(tokens.shape[1]):
        inputs = model._update_model_kwargs_for_generation(outputs, inputs, is_encoder_decoder=False)
    ids = torch.cat([call.input_ids, tokens], -1)
    prepared: dict[str, Any] = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **inputs)
    return prepared


def generate_output(model: PreTrainedModel, sequences: Tensor, past: Any, **others: Any) -> GenerateOutput:
    """The output of `model.generate` for greedy search and sampling."""
    output: GenerateOutput = kind_of(model).output(**{"sequences": sequences, CACHE: past, **others})
    return output
