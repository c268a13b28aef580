"""Draft heads as a proposer."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial

from transformers import PreTrainedModel

from lookahead.backend.cpu.product_bits import FEWEST_WEIGHTS
from lookahead.drafting.budget import PassTimes
from lookahead.drafting.proposal import Call, Proposer
from lookahead.loading.quantized import quantize_linears
from lookahead.model.model_state import state_of
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.plugins.heads.head_files import Network, drafter_of, fresh_rates, open_heads
from lookahead.plugins.heads.target import lm_head


class Heads:
    """Drafts from heads trained for the model, see `lookahead train`.

    They are loaded at the first call for a model, and their hit rates are kept for later calls. On a CPU their larger
    layers are rounded to 8 bits, which changes guesses but no token.

    Example:
        `LookaheadConfig(proposers=("prompt", "recycled", lookahead.Heads("heads/")))`

    Args:
        folder: The output of `lookahead train`, a published checkpoint of Medusa, EAGLE-3 or one of Gemma 4's
            assistants in safetensors, or `"native"` for the MTP layer of the model's own checkpoint.
        name: Name of the source in the stats; the kind of heads when None.

    Raises:
        HeadsError: When called: the folder has no heads, or they belong to another model.
    """

    def __init__(self, folder: str | os.PathLike[str], *, name: str | None = None) -> None:
        self._folder = os.fspath(folder)
        self._name = name

    def __call__(self, call: Call) -> Proposer:
        """The proposer of one call."""
        kind, network, rates, times = state_of(call.model).learned.of(self, partial(self._open, call.model))
        own = times[(call.rows - 1).bit_length()] if call.is_timed else None
        return drafter_of(network)(network, call.model, rates, call.warp, self._name or kind, own)

    def _open(self, model: PreTrainedModel) -> tuple[str, Network, AcceptanceTable, defaultdict[int, PassTimes]]:
        kind, network = open_heads(self._folder, model)
        if not isinstance(network, PreTrainedModel) and lm_head(model).weight.device.type == "cpu":
            # A pass over few guesses is bound by reading weights, and rounded weights guess as well.
            quantize_linears(network, lambda layer: "int8" if layer.weight.numel() >= FEWEST_WEIGHTS else "")
        return kind, network, fresh_rates(network), defaultdict(PassTimes)
