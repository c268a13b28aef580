"""What the core asks of a kind of model, and the inputs of its passes: a causal model here, others by plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import utils

from lookahead.model.cache import TreeCache
from lookahead.model.facts import CACHE, context_limit, decoder_of, position_limit
from lookahead.model.model_state import plan_of
from lookahead.utils.seams import plugin_for

SERVED = frozenset(("attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "cache_params"))
"""Inputs of a model that passes set themselves, or do not need since they have their own cache and positions."""


class ModelInputs:
    """The inputs of a causal model.

    Args:
        model: The model.
        cache: The cache of its passes.
    """

    prefix = ""  # of input names
    counts_nodes = False
    joins_alone = False  # whether rows join one at a time
    has_cross = False  # whether nodes attend to more than their text, all in one call
    shifts: Tensor | None = None  # int64 `[rows, 1]`, position after a prompt minus its tokens; None for zeros

    def __init__(self, model: PreTrainedModel, cache: TreeCache) -> None:
        plan = plan_of(model)
        names = plan.inputs
        self.model, self.cache, self.cache_name = model, cache, plan.cache_input
        self.takes_positions = f"{self.prefix}position_ids" in names
        self.keeps_logits = "logits_to_keep" in names
        self.positions = plan.positions
        self.cross: Any = None  # attention of the running pass to what an encoder has read

    def joining(self, encoded: Any) -> AbstractContextManager[None]:
        """A block whose passes are only over the rows of new prompts, for which an encoder has read `encoded`."""
        return nullcontext()

    def read(self) -> Tensor | None:
        """Fill the cache with the prompts; returns logits `[rows, 1, vocab]`, or None if passes must read them."""
        return None

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
    output: type[Any] = utils.GenerateDecoderOnlyOutput
    served = SERVED
    mask = "attention_mask"  # the input that masks the padding of the text that is continued
    text = "text"  # the argument of a tokenizer for an output
    nouns = "prompt", "model"  # what is read, and what reads it

    def make_inputs(self, encoded: Any = None) -> MakeInputs:
        """Makes the inputs of a backend's passes for `encoded` rows, or for rows that join later."""
        return ModelInputs

    def probe(self, model: PreTrainedModel, tokens: Sequence[int], rows: int) -> Probe:
        """What a probe over `rows` equal prompts passes to the model; an encoder reads `tokens`."""
        return Probe(self.make_inputs(), DynamicCache(config=model.config.get_text_config()), {})

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

    def check_cache(self, past: Any, config: GenerationConfig) -> None:
        """Raise UnsupportedModelError if the cache of a call of `model.generate` cannot be served."""

    def encoded(self, call: Any, *, is_returned: bool) -> Any:
        """What the encoder has read of a `ResolvedCall`, whose cache the caller may get; None without an encoder."""
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

    def cache_reason(self, call: Any) -> str:
        """Why the cache of a `ResolvedCall` holds no drafts, or an empty string; asked before the model is probed."""
        return ""

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
