"""Drafts of a smaller model that shares the target's vocabulary."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.drafting.proposal import Call, Proposer
from lookahead.errors import ConfigError, ProposerError
from lookahead.models.model_state import state_of
from lookahead.models.support import support_of
from lookahead.models.timing import pass_seconds
from lookahead.models.validate import refuse_encoder_decoder, refuse_model, vocabulary_size
from lookahead.proposers.model_proposer import DraftModelState, ModelProposer
from lookahead.utils.fingerprints import tokenizer_fingerprint

_SHAPE = 8, 4  # children of a node, nodes that a pass extends
_DRAWN_SHAPE = 3, 2
_COST_ROUNDS = 5  # passes timed of a draft model that is larger than its target


def _warn_of_cost(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Say what passes of a draft model take that is larger than its target."""
    own, others = (sum(parameter.numel() for parameter in model.parameters()) for model in (draft, target))
    if own <= others:
        return
    with torch.inference_mode():
        pass_s, target_s = (pass_seconds(model, _COST_ROUNDS) for model in (draft, target))
    warnings.warn(
        f"the draft model has {own:,} parameters and the target {others:,}: a pass of it takes {1e3 * pass_s:.2f} ms, "
        f"{pass_s / target_s:.1f} times one of the target, so that drafting with it will hardly pay",
        stacklevel=3,
    )


class DraftModel:
    """A smaller causal LM that drafts for a target, to stand in `LookaheadConfig.proposers`.

    It continues the text with its own KV cache. From the likeliest tokens after the newest one it grows a tree, best
    first: every pass extends the candidates that are likeliest to be reached. Under `draft="auto"` it stops where a
    further pass was measured to take longer than the tokens it would gain. How far its probabilities can be trusted
    is learned online. Several of them in one configuration draft one tree together, as in SpecInfer.

    Example:
        >>> config = LookaheadConfig(proposers=("prompt", DraftModel(small)))  # doctest: +SKIP
        >>> lookahead.generate(large, tokenizer, "Once upon a time", config=config)  # doctest: +SKIP

    Args:
        model: Any HuggingFace causal LM with the tokenizer of the target, on any device and in any dtype.
        tokenizer: Its tokenizer. Where the target's is known too, the two are compared; where both are the same,
            the models' tables of tokens may differ in size.
        name: What it is called in the stats.
        depth: Most passes of the draft model a step, and so the deepest node, 1 to 64.
        children: Candidates after every node, 1 to 16; 1 drafts chains. None decides: 8, and 3 under
            `acceptance="rejection"`, where all that is drawn takes room.
        width: Candidates that one pass extends, 1 to 64. None decides: 4, and 2.

    Raises:
        ConfigError: An option is out of its range.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Chen et al. 2023,
        "Accelerating Large Language Model Decoding with Speculative Sampling"; Miao et al. 2024, "SpecInfer", §3
        (several small models, one tree); Li et al. 2024, "EAGLE-2", §4 (growing the likeliest nodes).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "draft",
        depth: int = 8,
        children: int | None = None,
        width: int | None = None,
    ) -> None:
        model = getattr(model, "_orig_mod", model)
        if not hasattr(model, "get_input_embeddings"):
            raise ConfigError(
                f"DraftModel takes a loaded causal LM, got {model!r}: load it with AutoModelForCausalLM.from_pretrained"
            )
        for option, value, most in (("depth", depth, 64), ("children", children, 16), ("width", width, 64)):
            if value is None and option != "depth":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{option} must be a whole number from 1 to {most}, got {value!r}")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"name must be a string that is not empty, got {name!r}")
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.depth = depth
        self.children = children
        self.width = width

    def __call__(self, call: Call) -> Proposer:
        """Make the proposer of one call.

        Raises:
            ProposerError: The model cannot draft for the target: other tokens, or a state that goes one way only.
            UnsupportedModelError: It is no causal LM.
        """
        refuse_encoder_decoder(self.model, "draft for another")
        refuse_model(self.model)
        vocabulary = self._shared_vocabulary(call)
        support = support_of(self.model, shortest=1, max_length=call.max_length)
        name = type(self.model).__name__
        if support.shape == "none":
            raise ProposerError(f"{name} cannot draft: {support.reason}; choose another draft model")
        if support.shape == "chains" and call.rows > 1:
            raise ProposerError(f"{name} cannot draft for {call.rows} prompts at once: {support.reason}")
        children, width = _DRAWN_SHAPE if call.by_rejection else _SHAPE
        return ModelProposer(
            self.model,
            call,
            state_of(call.model).learned.of(self, partial(self._begin, call.model)),
            name=self.name,
            vocabulary=vocabulary,
            shape=support.shape,
            depth=self.depth,
            children=self.children if self.children is not None else children,
            width=self.width if self.width is not None else width,
        )

    def _begin(self, target: PreTrainedModel) -> DraftModelState:
        _warn_of_cost(self.model, target)
        return DraftModelState()

    def _shared_vocabulary(self, call: Call) -> int:
        """How many token ids, from 0 on, both models know."""
        own = vocabulary_size(self.model)
        if self.tokenizer is not None and call.tokenizer is not None:
            if tokenizer_fingerprint(self.tokenizer) != tokenizer_fingerprint(call.tokenizer):
                raise ProposerError(
                    f"the tokenizer of the draft model {self.name!r} gives other ids than the target's: choose a draft "
                    "model of the target's family, or train one with its tokenizer"
                )
        elif own != call.vocab_size:
            raise ProposerError(
                f"the draft model {self.name!r} knows {own} token ids and the target {call.vocab_size}: choose a draft "
                "model with the target's tokenizer. If it has that, and only the size of its table differs, say so: "
                "DraftModel(model, tokenizer=...), and lookahead.generate, or lookahead_tokenizer=... in model.generate"
            )
        return min(own, call.vocab_size)
