"""The model's own copy with weights of 4 bits as its draft model: the proposer "self"."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain

from torch import nn
from transformers import PreTrainedModel

from lookahead.backend.choice import backend_for
from lookahead.backend.protocol import Backend
from lookahead.drafting.proposal import Call, IntArray
from lookahead.errors import ConfigError, ProposerError, UnsupportedModelError
from lookahead.kernels.block_formats import FORMATS
from lookahead.loading.quantized import QUANTIZED, QUANTIZED_LAYERS, quantize_linears, resolve_quantize
from lookahead.model.cache import TreeCache
from lookahead.model.calls import ModelInputs, kind_of
from lookahead.model.model_state import plan_of, state_of
from lookahead.model.state_scope import mixers_of
from lookahead.plugins.draft_models.draft_model import DraftModel, DraftModelState, DraftRow, ModelProposer
from lookahead.utils.seams import register

_KIND = QUANTIZED["int4"].kind  # of a large LM head too: 8 bits would agree a little oftener, and take longer
_MOST_READ = 0.75  # bytes of the copy's weights, as a share of the model's, above which it is not worth its passes
_DEPTH, _CHILDREN, _WIDTH = 8, 3, 1
_SHARPNESS = 4  # the copy agrees with the model's choice far more often than its probability says
_log = logging.getLogger(__name__)


class SelfDraft(DraftModel):
    """A copy of a model with linear layers of 4 bits, that shares its other weights, and drafts for it.

    The copy names the token that the model chooses in most places of any text, where n-grams find nothing. It reads the
    model's own keys and values, so it never reads a text itself.

    Source: Tiwari et al. 2025, "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache"; Georganas
        et al. 2025, "ML-SpecQD: Multi-Level Speculative Decoding with Quantized Drafts" (n-grams draft for the draft).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        begin = time.perf_counter()
        super().__init__(_copy_of(model), name="self", depth=_DEPTH, children=_CHILDREN, width=_WIDTH)
        self.sharpness = _SHARPNESS
        _log.info("made the copy of %s in %.1f s", type(model).__name__, time.perf_counter() - begin)

    @classmethod
    def of(cls, model: PreTrainedModel) -> SelfDraft:
        """The draft model of a model, kept while its weights stay as they are; ProposerError says why there is none."""
        plan = plan_of(model)
        return plan.part("self draft", plan.form, partial(cls, model))

    @classmethod
    def bytes_for(cls, model: PreTrainedModel) -> int:
        """The memory of the copy in bytes, beside the weights that it shares; ProposerError says why there is none."""
        _check(model)
        weights = {id(layer.weight): layer.weight for layer in model.modules() if type(layer) is nn.Linear}
        kind = FORMATS[_KIND]
        return sum(weight.numel() * kind.nbytes // kind.inputs for weight in weights.values())

    def __call__(self, call: Call) -> SelfProposer:
        """Make the proposer of one call; what the model can read in one pass, its copy can."""
        state = state_of(call.model).learned.of(self, DraftModelState)
        return SelfProposer(self, call, state, call.vocab_size, "chains" if call.is_chain else "trees")


class SelfProposer(ModelProposer):
    """The proposer of one call, in whose cache the copy writes its nodes; the model's next pass overwrites them."""

    shares_cache = is_judge = True

    def share_cache(self, cache: TreeCache) -> None:
        """Draft behind the committed tokens of the model's own cache."""
        options = {"rows": cache.slots.rows, "capacity": 1, "shape": self._shape, "is_draft": True}
        self._backend = backend_for(self._model, **options, make_inputs=lambda model, _: ModelInputs(model, cache))

    def start(self, row: int, prompt: IntArray) -> None:
        self._rows[row] = DraftRow(prompt[-1:])

    def _ready(self, rows: Sequence[int]) -> Backend | None:
        self._slots = list(rows)  # as in the cache
        return self._backend

    def _most_passes(self, backend: Backend) -> int:
        read = backend.cache.slots.lengths[: len(self._slots)]
        left = self._max_length - int(read.min()) - 2
        return min(
            self._depth, left if backend.positions is None else min(left, backend.positions - int(read.max()) - 1)
        )

    def _unread(self, backend: Backend) -> list[IntArray]:
        return [self._rows[row].ids for row in self._slots]

    def _keep(self, row: int, path: IntArray) -> None:
        """Nothing: the model's own pass has written the accepted nodes."""

    def _add(self, state: DraftRow, tokens: IntArray) -> None:
        state.ids = tokens[-1:]

    def _leave(self, row: int) -> None:
        """Nothing: the engine takes the row out of the cache."""


def _refused(model: PreTrainedModel, reason: str) -> ProposerError:
    return ProposerError(f"the proposer 'self' cannot draft for {type(model).__name__}: {reason}; leave it out")


def _check(model: PreTrainedModel) -> None:
    """Raise ProposerError if a model can have no copy."""
    plan, layers = plan_of(model), [*model.modules()]
    reasons = {
        f"your own code, {plan.user_code}, would run in its copy too": plan.user_code,
        "its weights are already quantized": getattr(model, "is_quantized", False)
        or any(isinstance(layer, QUANTIZED_LAYERS) for layer in layers),
        "its weights are not all on the CPU": any(weight.device.type != "cpu" for weight in model.parameters()),
        "it has an encoder": kind_of(model).has_encoder,
        "it is spread over several processes": plan.processes > 1,
        "its layers keep states": mixers_of(model),
    }
    for reason, holds in reasons.items():
        if holds:
            raise _refused(model, reason)
    try:
        resolve_quantize("int4", plan.device)
    except ConfigError as error:
        raise _refused(model, str(error)) from error


def _copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same modules and weights, whose linear layers are then rounded."""
    _check(model)
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    copied = copy.deepcopy(model, shared).requires_grad_(False)
    try:
        layers = _layers_of_transformers(copied)
        quantize_linears(copied, lambda layer: _KIND if layer in layers else "")
    except UnsupportedModelError as error:
        raise _refused(model, str(error)) from error
    own, copies = map(_bytes_read, (model, copied))
    if copies > _MOST_READ * own:
        reason = f"its copy reads {copies / own:.0%} of the model's bytes, since few of them are in linear layers"
        raise _refused(model, reason)
    return copied


def _layers_of_transformers(model: nn.Module) -> set[nn.Module]:
    """The layers that code of transformers or of the checkpoint calls. Adapters may ask for the dtype of a weight."""
    callers = (module for module in model.modules() if type(module).__module__.startswith("transformers"))
    return {layer for module in callers for layer in module.children() if type(layer) is nn.Linear}


def _bytes_read(model: nn.Module) -> int:
    """Bytes of weights that a pass reads: all but embeddings whose rows are looked up."""
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    weights = {id(weight): weight.nbytes for weight in model.parameters()}
    return sum(size for key, size in weights.items() if key not in looked_up or key in heads)


register("proposer", "self", SelfDraft)
