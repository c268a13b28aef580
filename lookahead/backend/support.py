"""Support for a model, found by probing it instead of listing names, and reasons to refuse one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead.backend.layer_probes import layers_with_solo_bits, unfit_reason
from lookahead.backend.probes import (
    PROBES,
    TOLERANCE,
    attends_ahead,
    decodes_alike,
    own_logits,
    picking_few,
    scores_like_the_model,
)
from lookahead.backend.protocol import Shape
from lookahead.drafting.sizes import MAX_NODES_LIMIT
from lookahead.errors import is_out_of_memory, named, with_place
from lookahead.hf.cache_code import changed_caches
from lookahead.hf.calls import changed_loop
from lookahead.hf.facts import (
    calls_registered_attention,
    decoder_vocabulary,
    input_device,
    is_sequential,
    may_keep_states,
    other_layers,
    picks_keys,
    processes_of,
    rope_parameters_of,
    vocabulary_size,
)
from lookahead.hf.foreign_layers import foreign_layers
from lookahead.hf.model_code import attention_code, changed_attention, odd_window, pre_hooks_of
from lookahead.hf.model_state import state_of
from lookahead.hf.state_scope import mixers_of
from lookahead.utils.kept_values import truth
from lookahead.utils.shipped import is_shipped


@dataclass(frozen=True, slots=True)
class Support:
    """What a model can verify in one pass: trees, only chains, or only its next token."""

    shape: Shape | Literal["none"]
    reason: str = ""  # why it is not trees
    ropes: tuple[tuple[str, int], ...] = ()  # position embeddings that change beyond a length: kind, limit
    by_node: bool = False  # trees are also right if every node attends alone, by the model's own function
    behind_own: bool = False  # trees are right only after a prompt that the model itself has read
    is_foreign: bool = False  # third-party layers compute a part of it

    @classmethod
    def of(cls, values: Any) -> Support:
        """Parse a JSON value; raises KeyError, TypeError or ValueError if it is not a verdict."""
        made = cls(values["shape"], values["reason"], tuple((kind, limit) for kind, limit in values["ropes"]))
        ropes = all(type(kind) is str and type(limit) is int for kind, limit in made.ropes)
        if made.shape not in ("trees", "chains", "none") or type(made.reason) is not str or not ropes:
            raise ValueError(f"it is no verdict on what a model can verify: {values!r}")
        by_node, behind_own, is_foreign = (truth(values[name]) for name in ("by_node", "behind_own", "is_foreign"))
        return replace(made, by_node=by_node, behind_own=behind_own, is_foreign=is_foreign)


class ProbeError(Exception):
    """A probe failed for a temporary reason, such as a lack of memory; the message says which."""


def support_of(model: PreTrainedModel, *, shortest: int, max_length: int) -> Support:
    """The support for a model, or its decoder, with rows of `shortest` prompt tokens up to `max_length` tokens.

    The first call for a model probes it with a few tokens. If a probe runs out of memory or the model cannot run at
    all, the answer is "none", and the next call probes again.
    """
    config: Any = model.config.get_text_config(decoder=True)
    has_encoder = model.config.is_encoder_decoder
    others = other_layers(config)
    if processes_of(model) > 1 and may_keep_states(model):
        return Support("none", "its layers keep states, and it is spread over several processes")
    if is_sequential(model) and not mixers_of(model):
        return Support("none", "its state is sequential, so a rejected draft could not be undone")
    if others and not mixers_of(model):
        return Support("none", f"its {' and '.join(sorted(others))} layers depend on more than positions and masks")
    if getattr(config, "expert_capacity", None) is not None:
        return Support("none", "its experts take a limited number of tokens of a pass")
    windows, longest, what = [getattr(config, "keep_window_size", None)], max_length, "its own attention code"
    if model.config.is_encoder_decoder:  # its cache comes from transformers
        longest, what = max_length + MAX_NODES_LIMIT + 1, "the cache of its decoder"
    if model.config.is_encoder_decoder or not calls_registered_attention(model):
        windows.append(getattr(config, "sliding_window", None))
    for window in windows:
        if window is not None and longest > window:
            return Support("none", f"{what} drops tokens beyond {window}")
    reason = unsupported_reason(model)
    if reason:
        return Support("none", reason)
    state = state_of(model)
    try:
        # The form of an audio or image encoder's outputs is guessed before the first call.
        name = "support" if state.encoding is None else "support by what its encoder gave"
        verdict = state.probed(name, model, partial(_probe, model, config), Support.of)
    except ProbeError as error:
        return Support("none", str(error))
    for kind, limit in verdict.ropes:
        # A dynamic base depends on the longest position of each pass; longrope depends only on the side of the limit.
        if max_length > limit and (kind == "dynamic" or shortest <= limit):
            return Support("none", f"its {kind} position embeddings change beyond {limit} tokens")
    scale = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None
    if scale is not None and max_length + MAX_NODES_LIMIT >= scale and verdict.shape == "trees":
        verdict = Support("chains", f"its attention temperature depends on cache slots from {scale} tokens on")
    has_users = verdict.is_foreign or (state.newest is not None and bool(state.newest.users))
    has_users = has_users and not has_encoder
    if has_users and verdict.behind_own:  # the comparison would read the prompt in a pass of ours
        return replace(verdict, behind_own=False)
    if has_users and verdict.shape != "none":
        name = f"{verdict.shape} by a user's code, {torch.get_num_threads()} threads"
        if not state.probed(name, model, partial(_treats_tokens_alike, model, verdict, verdict.shape)):
            return Support("none", "code from outside transformers treats several tokens differently from one")
    return verdict


def unsupported_reason(model: PreTrainedModel) -> str:
    """Why a pass depends on more than its tokens, or decoding on more than passes; an empty string if neither."""
    model_class: Any = type(model)
    prepare = vars(model).get("prepare_inputs_for_generation")
    if getattr(prepare, "__func__", prepare) not in (None, model_class.prepare_inputs_for_generation):
        return "its inputs are prepared by another object, as prompt tuning does"
    if changed := changed_loop(model):
        return f"its {changed} is not that of transformers"
    if changed := changed_caches():
        return f"{changed} has taken the place of a cache's own code"
    for module in model.modules():
        # An adapter added to a model in evaluation mode is itself in training mode.
        if module.training and (module is model or (isinstance(module, nn.Dropout) and module.p)):
            return "it is in training mode; call its eval() first"
        for hook in pre_hooks_of(module):
            # One adapter per row, or one that starts at a token: drafted rows have other indices.
            for name in ("adapter_names", "alora_offsets"):
                if name in getattr(hook, "keywords", ()):
                    return f"its adapters take {name}, which are places in the batch"
    return ""


def _probe(model: PreTrainedModel, config: Any) -> Support:
    """Try trees, then chains."""
    if changed := changed_attention(model):  # it may treat tokens differently from some length on
        return Support("none", f"the forward of {changed} is not that of transformers")
    decoder: Any = model.get_decoder() if model.config.is_encoder_decoder else model
    if odd := odd_window(model, decoder.modules()):
        return Support("none", odd)
    try:
        unfit = unfit_reason(model, decoder)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ProbeError("there was too little memory to probe it") from error
    if unfit:
        return Support("none", unfit)
    probed = picking_few(model) if picks_keys(model) else model
    if probed is None:
        return Support("none", "its attention sees keys that an indexer picks, which could not be tried with few")
    is_foreign = bool(foreign_layers(decoder))
    return replace(_probed_shape(probed, config), ropes=_growing_ropes(model, config), is_foreign=is_foreign)


def _treats_tokens_alike(model: PreTrainedModel, verdict: Support, shape: Shape) -> bool:
    """Whether third-party code treats several tokens as one after the other: bit for bit in half precision on a CPU."""
    compares_bits = model.dtype in TOLERANCE and input_device(model).type == "cpu"
    if verdict.is_foreign and compares_bits and layers_with_solo_bits(model) is None:
        return False
    return decodes_alike(model, shape, verdict.by_node)


def _growing_ropes(model: PreTrainedModel, config: Any) -> tuple[tuple[str, int], ...]:
    """The position embeddings that change with the length, from the configuration and from attributes of modules."""
    ropes = [
        (each.get("rope_type"), each.get("original_max_position_embeddings")) for each in rope_parameters_of(config)
    ]
    for module in model.modules():
        if isinstance(kind := module.__dict__.get("rope_type"), str):
            ropes.append((kind, module.__dict__.get("original_max_seq_len")))
    growing = [
        (kind, limit or config.max_position_embeddings) for kind, limit in ropes if kind in ("dynamic", "longrope")
    ]
    return tuple(dict.fromkeys(growing))


def _probed_shape(model: PreTrainedModel, config: Any) -> Support:
    by_node, users = False, list[Any]()
    # A probe is too short to show the effect of a window or a slope over cache slots.
    if "local" in getattr(config, "attention_layers", ()):
        reason = "its attention windows count slots of the cache"
    elif getattr(config, "alibi", False) or getattr(getattr(config, "attn_config", None), "alibi", False):
        reason = "its attention bias depends on cache slots (ALiBi)"
    else:
        attention, masks = attention_code(model, list(model.modules()))
        users = [each for each in (*masks, *attention) if not is_shipped(each)]
        if users:
            reason = f"its attention calls {getattr(users[0], '__qualname__', users[0])}, which is not of transformers"
            by_node = all(map(is_shipped, masks))
        else:
            reason = _mismatch_of(model, "trees")
    if not reason:
        return Support("trees")
    mismatch = _mismatch_of(model, "chains")
    if not mismatch:
        return Support("chains", reason, by_node=by_node)
    behind_own = not (users or model.config.is_encoder_decoder or _mismatch_of(model, "trees", behind_own=True))
    return Support("none", mismatch, behind_own=behind_own)


def _mismatch_of(model: PreTrainedModel, shape: Shape, *, behind_own: bool = False) -> str:
    """Why passes over a few trees or chains differ from the model's passes; an empty string if they agree.

    With `behind_own` they are compared with the model's passes over single tokens, because in a pass over a whole text
    all tokens may attend to each other.

    Raises:
        ProbeError: A pass ran out of memory, or the model cannot run at all.
    """
    vocabulary, raised = min(vocabulary_size(model), decoder_vocabulary(model)), None
    probes = [[token * vocabulary // 9 for token in probe] for probe in PROBES]
    is_tree, agrees = shape == "trees", False
    # Decoder attention that looks at single tokens may hide a wrong relative bias in some probes.
    needs_all = is_tree and model.config.is_encoder_decoder and model.dtype == torch.float32
    for tokens in probes:
        try:
            agrees = not behind_own or attends_ahead(model, tokens)
            agrees = agrees and scores_like_the_model(model, shape, tokens, behind_own=behind_own)
        except Exception as error:  # a model without prepared masks may raise anything
            if is_out_of_memory(error):
                raise ProbeError("there was too little memory to probe it") from error
            agrees, raised = False, error
        if agrees != needs_all:
            break
    if agrees:
        return ""
    if raised is None:
        ignored = "its attention ignores prepared masks and positions"
        return ignored if is_tree else "it does not read several tokens as it reads one after the other"
    state_of(model).note_problem(f"{type(model).__name__} verifies no {shape}", with_place(raised))
    try:
        with torch.inference_mode():
            own_logits(model, probes[:1], probes[0])
    except Exception as error:
        raise ProbeError(f"it cannot run ({named(error)})") from error
    failure = "its attention takes no prepared masks" if is_tree else "it does not continue from a truncated cache"
    return f"{failure} ({named(raised)})"
