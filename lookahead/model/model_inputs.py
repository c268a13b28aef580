"""The inputs of a transformers model in a pass: tokens and positions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lookahead.model.cache import TreeCache
from lookahead.model.model_state import plan_of


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

    def join(self, encoded: Any) -> None:
        """Set what an encoder has read for the rows of the next prompts."""

    def joining(self) -> AbstractContextManager[None]:
        """A block whose passes are only over the rows of new prompts."""
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
