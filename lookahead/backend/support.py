"""Support for a model, found by probing it instead of listing names, and reasons to refuse one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead.backend.layer_probes import unfit_reason
from lookahead.backend.probes import (
    PROBES,
    attends_ahead,
    own_logits,
    scores_like_the_model,
)
from lookahead.backend.protocol import Shape
from lookahead.backend.self_check import keeps_solo_bits, may_keep_bits, serves_experts
from lookahead.drafting.sizes import MAX_NODES_LIMIT
from lookahead.errors import is_out_of_memory, named, with_place
from lookahead.model.calls import changed_loop, kind_of
from lookahead.model.facts import (
    calls_registered_attention,
    decoder_of,
    decoder_vocabulary,
    is_sequential,
    may_keep_states,
    other_layers,
    processes_of,
    rope_parameters_of,
    vocabulary_size,
)
from lookahead.model.known_code import attention_code, changed_caches, hooks_of, is_known, name_of
from lookahead.model.model_state import ModelPlan, plan_of, recognise, state_of
from lookahead.model.stamp import version_of
from lookahead.model.state_scope import mixers_of
from lookahead.utils.kept_values import truth


@dataclass(frozen=True, slots=True)
class Support:
    """What a model can verify in one pass: trees, only chains, or only its next token."""

    shape: Shape | Literal["none"]
    reason: str = ""  # why it is not trees
    ropes: tuple[tuple[str, int], ...] = ()  # position embeddings that change beyond a length: kind, limit
    behind_own: bool = False  # trees are right only after a prompt that the model itself has read

    @classmethod
    def of(cls, values: Any) -> Support:
        """Parse a JSON value; raises KeyError, TypeError or ValueError if it is not a verdict."""
        made = cls(values["shape"], values["reason"], tuple((kind, limit) for kind, limit in values["ropes"]))
        ropes = all(type(kind) is str and type(limit) is int for kind, limit in made.ropes)
        if made.shape not in ("trees", "chains", "none") or type(made.reason) is not str or not ropes:
            raise ValueError(f"it is not a verdict on what a model can verify: {values!r}")
        return replace(made, behind_own=truth(values["behind_own"]))


_TRUST = "if it treats every token by itself and keeps no state, say so with LookaheadConfig(trust_user_code=True)"


class ProbeError(Exception):
    """A probe failed for a temporary reason, such as a lack of memory; the message says which."""


def support_of(
    model: PreTrainedModel,
    *,
    shortest: int,
    max_length: int,
    trusted: bool = False,
    is_alone: bool = False,
    plan: ModelPlan | None = None,
) -> Support:
    """The support for a model, or its decoder, with rows of `shortest` prompt tokens up to `max_length` tokens.

    The first call for a model probes it with a few tokens. If a probe runs out of memory or the model cannot run at
    all, the answer is "none", and the next call probes again. A user's own code is not probed, unless it is trusted.

    Args:
        model: The model.
        shortest: Tokens of the shortest prompt.
        max_length: Tokens of the longest row at its end.
        trusted: Whether the user states that his code treats every token by itself and keeps no state.
        is_alone: Whether passes keep the bits that every row has alone, token by token, if they can.
        plan: The plan of the model as it is now; recognised if None.
    """
    plan = plan or recognise(model, trusted=trusted)
    if plan.user_code and not trusted:
        return Support("none", f"{plan.user_code}, is your own code; {_TRUST}")
    if reason := plan.part("why no drafts", plan.form, partial(_standing_reason, model)):
        return Support("none", reason)
    for what, window, ahead in plan.part("windows", plan.form, partial(_windows_in_the_way, model)):
        if max_length + ahead > window:
            return Support("none", f"{what} drops tokens beyond {window}")
    # The form of an audio or image encoder's outputs is guessed before the first call.
    name = "support" if state_of(model).encoding is None else "support by what its encoder gave"
    # The passes of these models are compared with single tokens in any case, and bits show more than roundings.
    is_alone = is_alone and plan.part("may keep bits", plan.form, partial(may_keep_bits, model))
    is_alone = is_alone and not (plan.user_code or kind_of(model).has_encoder)
    if is_alone:
        name = f"{name} for a row alone, {torch.get_num_threads()} threads"
    try:
        probe = partial(state_of(model).probed, name, model, partial(_probe, model, is_alone), Support.of)
        verdict = plan.part(name, plan.form, probe)
    except ProbeError as error:
        return Support("none", str(error))
    finally:
        plan.own_read = None
    for kind, limit in verdict.ropes:
        # A dynamic base depends on the longest position of each pass; longrope depends only on the side of the limit.
        if max_length > limit and (kind == "dynamic" or shortest <= limit):
            return Support("none", f"its {kind} position embeddings change beyond {limit} tokens")
    scale = plan.part("scale", plan.form, partial(_growing_scale, model))
    if scale is not None and max_length + MAX_NODES_LIMIT >= scale and verdict.shape == "trees":
        verdict = Support("chains", f"its attention temperature depends on cache slots from {scale} tokens on")
    return verdict


def _standing_reason(model: PreTrainedModel) -> str:
    """Why no drafts can be verified, whatever the lengths and without a pass; an empty string if they may."""
    config: Any = model.config.get_text_config(decoder=True)
    others = other_layers(config)
    if processes_of(model) > 1 and may_keep_states(model):
        return "its layers keep states, and it is spread over several processes"
    if is_sequential(model) and not mixers_of(model):
        return "its state is sequential, so a rejected draft could not be undone"
    if others and not mixers_of(model):
        return f"its {' and '.join(sorted(others))} layers depend on more than positions and masks"
    if getattr(config, "expert_capacity", None) is not None:
        return "its experts take a limited number of tokens of a pass"
    if 1 in plan_of(model).windows:
        return "transformers' cache keeps all tokens for its window of 1"
    return unsupported_reason(model)


def _windows_in_the_way(model: PreTrainedModel) -> list[tuple[str, int, int]]:
    """What drops tokens beyond a window, the window, and tokens that it counts before they are drafted."""
    config: Any = model.config.get_text_config(decoder=True)
    windows, ahead, what = [getattr(config, "keep_window_size", None)], 0, "its own attention code"
    if kind_of(model).has_encoder:  # its cache comes from transformers
        ahead, what = MAX_NODES_LIMIT + 1, "the cache of its decoder"
    if kind_of(model).has_encoder or not calls_registered_attention(model):
        windows.append(getattr(config, "sliding_window", None))
    return [(what, window, ahead) for window in windows if window is not None]


def _growing_scale(model: PreTrainedModel) -> int | None:
    """Tokens from which the temperature of its attention depends on positions, or None."""
    config: Any = model.config.get_text_config(decoder=True)
    return getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None


def users_reason(model: PreTrainedModel, *, trusted: bool) -> str:
    """Why only transformers' own loop may run a recognised model: a user's code is on its way; empty if not."""
    plan = plan_of(model)
    return "" if trusted or not plan.user_code else f"{plan.user_code}, is your own code; {_TRUST}"


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
        for hook in hooks_of(module):
            # One adapter per row, or one that starts at a token: drafted rows have other indices.
            for name in ("adapter_names", "alora_offsets"):
                if name in getattr(hook, "keywords", ()):
                    return f"its adapters take {name}, which are places in the batch"
    return ""


def _probe(model: PreTrainedModel, is_alone: bool) -> Support:
    """Try trees, then chains."""
    decoder, config = decoder_of(model), model.config.get_text_config(decoder=True)
    if any(module.training for module in decoder.modules()) and (reason := _training_reason(model)):
        return Support("none", f"it is in training mode, and {reason}; call its eval() first")
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
    return replace(_probed_shape(model, config, is_alone), ropes=_growing_ropes(model, config))


@torch.inference_mode()
def _training_reason(model: PreTrainedModel) -> str:
    """Why passes in training mode differ from each other, or an empty string: a pass over some tokens tells."""
    drawn, versions = torch.get_rng_state(), [*map(version_of, model.buffers())]
    with suppress(Exception):  # the next probe reports it
        own_logits(model, [[0] * len(PROBES[0])], PROBES[0])
    if not torch.equal(drawn, torch.get_rng_state()):
        return "its passes draw random numbers, as dropout does"
    return "its passes change buffers" if versions != [*map(version_of, model.buffers())] else ""


def odd_window(model: Any, modules: Iterable[nn.Module]) -> str:
    """A layer whose window differs from the configuration's, which masks follow, as text; or an empty string."""
    config = model.config.get_text_config(decoder=True)
    common, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    for module in modules:
        at = module.__dict__.get("layer_idx")
        if "sliding_window" not in module.__dict__ or not isinstance(at, int):
            continue
        expected = common if kinds is None or "sliding" in kinds[at] else None
        window = module.__dict__["sliding_window"] if module.__dict__.get("is_sliding", True) else None
        if window != expected:
            return f"layer {at} has a sliding_window of {window} instead of {expected}"
    return ""


def _growing_ropes(model: PreTrainedModel, config: Any) -> tuple[tuple[str, int], ...]:
    """The position embeddings that change with the length, from the configuration and from attributes of modules."""
    ropes = [
        (rope.get("rope_type"), rope.get("original_max_position_embeddings")) for rope in rope_parameters_of(config)
    ]
    for module in model.modules():
        if isinstance(kind := module.__dict__.get("rope_type"), str):
            ropes.append((kind, module.__dict__.get("original_max_seq_len")))
    growing = [
        (kind, limit or config.max_position_embeddings) for kind, limit in ropes if kind in ("dynamic", "longrope")
    ]
    return tuple(dict.fromkeys(growing))


def _probed_shape(model: PreTrainedModel, config: Any, is_alone: bool) -> Support:
    users, reason = list[Any](), ""
    # A probe is too short to show the effect of a window or a slope over cache slots.
    if "local" in getattr(config, "attention_layers", ()):
        reason = "its attention windows count slots of the cache"
    elif getattr(config, "alibi", False) or getattr(getattr(config, "attn_config", None), "alibi", False):
        reason = "its attention bias depends on cache slots (ALiBi)"
    else:
        # Passes over trees have an attention function of ours, which would replace a user's.
        users = [function for function in attention_code(model, list(model.modules())) if not is_known(function)]
        if users:
            reason = f"its attention calls {name_of(users[0])}, which is not code of transformers"
        elif not (is_alone and keeps_solo_bits(model)):
            reason = _mismatch_of(model, "trees")
            # Rounding may change the routing to experts in all probes; equal bits prove more.
            reason = "" if reason and serves_experts(model) and keeps_solo_bits(model) else reason
    if not reason:
        return Support("trees")
    if kind_of(model).has_encoder:
        return Support("none", reason)
    mismatch = _mismatch_of(model, "chains")
    if not mismatch:
        return Support("chains", reason)
    behind_own = not (users or _mismatch_of(model, "trees", behind_own=True))
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
    needs_all = is_tree and kind_of(model).has_encoder and model.dtype == torch.float32
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
