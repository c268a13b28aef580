"""The plan of a request: the resolved call of `model.generate` and the way it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from lookahead.backend import probes, support
from lookahead.backend.protocol import Shape
from lookahead.config import DEFAULTS, LookaheadConfig
from lookahead.decoding import validation
from lookahead.decoding.assembly import Common, assemble
from lookahead.decoding.hf_outputs import copy_prefix_from
from lookahead.decoding.prompt_reading import PromptReading, placeholders_of
from lookahead.drafting.proposal import IntArray
from lookahead.engine.engine import Engine
from lookahead.engine.fallback import PlainLoop
from lookahead.engine.row import Row
from lookahead.errors import UnsupportedModelError, warn
from lookahead.model.calls import NO_CACHE, CallCache, ResolvedCall, kind_of, own_sample, unserved_reason
from lookahead.model.facts import calls_registered_attention, input_device
from lookahead.model.model_state import (
    LearnedState,
    ModelPlan,
    checkpointed,
    outside_passes,
    recognise,
    state_of,
    use_learned,
)
from lookahead.model.private_names import missing_names
from lookahead.model.state_layers import takes_states
from lookahead.model.state_scope import mixers_of
from lookahead.proposers.ngram import Memory
from lookahead.utils.seams import plugin_for
from lookahead.verification.acceptance import KINDS, acceptance_of
from lookahead.verification.rules import (
    StoppingRule,
    TokenChooser,
    stateful_name,
    stateful_reason,
    stopping_rule,
    warp_of,
)

Loop = Engine | PlainLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """A resolved call of `model.generate`.

    Attributes:
        call: The call as resolved by transformers.
        common: What its rows have in common: the model and how to draft.
        context: Maximum tokens of a row, which ends there; None for no limit.
        lengths: int64 `[batch]`, tokens of the prompts without padding.
        stopping: Ends the rows.
        shape: The shape of drafts in one pass; "none" for the loop of transformers.
        reading: Reads prompts that are more than tokens; None for token ids.
        reason: Why transformers decodes the call, for a warning; empty if there is nothing to report.
        is_refused: Whether `reason` is an error, since the given configuration names proposers.
        predictions: The expected output of every prompt; empty for none.
        cache: Its cache, which the prompts may continue.
        generator: Draws the tokens of sampled rows; None for torch's global generator, whose draws depend on the order
            of calls, so these rows are decoded alone.
    """

    call: ResolvedCall
    common: Common
    context: int | None = None
    lengths: NDArray[np.int64]
    stopping: StoppingRule
    shape: Shape | Literal["none"] = "none"
    reading: PromptReading | None = None
    reason: str = ""
    is_refused: bool = False
    predictions: Sequence[Sequence[IntArray]] = ()
    cache: CallCache = NO_CACHE
    generator: torch.Generator | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn."""
        return bool(self.call.generation_config.do_sample)

    @property
    def can_join(self) -> bool:
        """Whether its prompt can share a batch, as a request for a single token can, which drafts nothing."""
        if (self.is_sampled and self.generator is None) or self.reason or self.reading is not None:
            return False
        if self.shape == "none":  # a single token
            options: Any = {"shortest": int(self.lengths.min()), "max_length": self.stopping.max_length}
            options["trusted"] = self.common.config.trust_user_code
            return support.support_of(self.call.model, **options).shape == "trees"
        return self.shape == "trees"

    def rows(self) -> tuple[list[Row], Any]:
        """The rows of an engine, one for each prompt, and what an encoder has read of them, or None."""
        call, longest = self.call, self.call.input_ids.shape[1]
        encoded = kind_of(call.model).encoded(call, self.cache)
        config, device = call.generation_config, call.input_ids.device
        is_shown = bool(config.output_scores or config.output_logits)
        batch_size = len(self.lengths)
        sampling: Any = {"do_sample": self.is_sampled, "keep": is_shown, "generator": self.generator}
        has_objects = batch_size == 1 and bool(call.logits_processor or self.stopping.custom)
        is_edited = has_objects and bool(stateful_name(call.logits_processor, call.stopping_criteria, config))
        chooser = TokenChooser(call.logits_processor, batch_size=batch_size, **sampling)
        rows = []
        for i, (ids, length) in enumerate(zip(call.input_ids.cpu().numpy(), self.lengths.tolist(), strict=True)):
            padding = longest - length
            rule = self.stopping
            if self.context is not None:  # one token may follow a full context
                rule = replace(rule, max_length=min(rule.max_length, padding + self.context + 1))
            rows.append(Row(i, ids, chooser, rule, padding=padding, place=i, device=device))
            rows[i].is_edited = is_edited
            if self.predictions:  # several sampled outputs of a prompt stand next to each other
                rows[i].predictions = self.predictions[i * len(self.predictions) // batch_size]
        if self.reading is not None:
            places = np.array(placeholders_of(call.model, call.input_ids), np.int64)
            for row in rows:
                row.placeholders, row.stats.prefill_s = places, self.reading.seconds
        for row, tokens in zip(rows, () if encoded is None else encoded.tokens, strict=False):
            row.read_by_encoder(tokens)
        return rows, encoded

    def begin(self, *, warns: bool = True) -> Loop:
        """The loop that decodes the request; a warning says why if it is the loop of transformers and `warns`.

        Raises:
            UnsupportedModelError: Nothing can be drafted, though the given configuration asks for drafts.
        """
        call = self.call
        is_ours = call.generation_config.get_generation_mode() in validation.LOOPS
        if not is_ours and (loop := _loop_of(call)) is not None:
            return loop(call, self.common.config, is_refused=self.is_refused, context=self.context)
        if self.reason and self.is_refused:
            raise UnsupportedModelError(f"{self.reason}; leave out {self.common.config.demands} to decode it plainly")
        if self.shape == "none":
            if self.reason and warns:
                warn(self.reason)
            sample = outside_passes()(own_sample(call))
            ids, criteria = call.input_ids, call.stopping_criteria
            return PlainLoop(sample, ids, self.lengths, criteria, self.context, self.reason)
        rows, encoded = self.rows()
        warp = warp_of(call.logits_processor) if self.is_sampled else None
        options: Any = {"warp": warp, "encoded": encoded, "reading": self.reading}
        # A signal handler may decode while its thread changes the measurements of the model: then it uses fresh ones.
        is_changing = state_of(call.model).learned.lock._is_owned()  # type: ignore[attr-defined]
        with use_learned(call.model, LearnedState()) if is_changing else nullcontext():
            engine = assemble(self.common, self.stopping, rows, shape=self.shape, **options)
        if encoded is None and self.reading is None and self.cache.tokens:
            past = cast(DynamicCache, self.cache.past)
            copy_prefix_from(past, engine.cache, call.input_ids.shape[1] - self.lengths)
        return engine


def _loop_of(call: ResolvedCall) -> Callable[..., PlainLoop] | None:
    """The plug-in that decodes calls of this generation mode; None for the modes of `Engine`."""
    loop: Callable[..., PlainLoop] | None = plugin_for("loop", call.generation_config.get_generation_mode().value)
    return loop


def generator_for(model: PreTrainedModel, seed: int | None) -> torch.Generator:
    """The random generator of one row, seeded as by `torch.manual_seed`; None means any seed."""
    generator = torch.Generator(input_device(model))
    generator.seed() if seed is None else generator.manual_seed(seed)
    return generator


def plan_request(
    call: ResolvedCall,
    config: LookaheadConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    context: int | None = None,
    memory: Memory | None = None,
    lengths: NDArray[np.int64] | None = None,
    facts: ModelPlan | None = None,
) -> RequestPlan:
    """Check a call of `model.generate` and decide how to decode it.

    Args:
        call: The call as resolved by transformers.
        config: How to draft; the defaults when None.
        tokenizer: The model's tokenizer.
        context: Maximum tokens of a row; None for no limit.
        memory: As in `Common`.
        lengths: int64 `[batch]`, tokens of the prompts without padding, if these have been checked.
        facts: The plan of the model as it is now; recognised if None.

    Raises:
        PromptError: A prompt has no tokens, or is longer than the model's context.
        UnsupportedModelError: The generation mode or an input cannot be served; the message names it.
    """
    model, generation_config, config = call.model, call.generation_config, config or DEFAULTS
    facts = facts or recognise(model, trusted=config.trust_user_code)
    stopping = stopping_rule(call.stopping_criteria, generation_config)
    named = ", ".join(missing_names())
    lacking = f"the installed libraries lack what drafts need, {named}" if named else ""
    is_ours = generation_config.get_generation_mode() in validation.LOOPS
    if not is_ours and _loop_of(call) is not None:
        if lacking:
            raise UnsupportedModelError(lacking)
        parts: Any = {"lengths": np.zeros(0, np.int64), "is_refused": bool(config.demands)}
        common = Common(model=model, config=config)
        return RequestPlan(call=call, common=common, context=context, stopping=stopping, **parts)
    validation.validate_call(model, generation_config, call.model_kwargs)
    cache = kind_of(model).cache_of(call)
    # transformers masks the empty slots of a static cache; without a cache, or with a prefill in parts, its products
    # have other row counts. Either way the bits differ from decoding one token at a time.
    common = Common(
        model=model,
        config=config,
        tokenizer=tokenizer,
        memory=memory,
        keep_cache=cache.is_returned,
        is_rounded=cache.is_static or cache.reads_otherwise,
    )
    if lengths is None:
        lengths = validation.prompt_lengths(model, call.input_ids, call.model_kwargs)
    parts = {"lengths": lengths, "stopping": stopping, "cache": cache}
    plan = RequestPlan(call=call, common=common, context=context, **parts)
    if reason := unserved_reason(call, cache) or lacking:
        return replace(plan, reason=f"{reason}; it is decoded plainly")
    if stopping.max_length <= call.input_ids.shape[1] + 1:
        return plan  # a single token: there is nothing to draft
    has_objects = bool(call.logits_processor or stopping.custom)
    if has_objects and (reason := _reason_of_objects(plan)):
        return replace(plan, reason=reason)
    return _with_drafts(plan, facts)


def _reason_of_objects(plan: RequestPlan) -> str:
    """Why processors or criteria must be called as transformers calls them, or an empty string."""
    call, acceptance = plan.call, acceptance_of(plan.common.config.acceptance, is_sampled=plan.is_sampled)
    arguments = call.logits_processor, call.stopping_criteria, call.generation_config
    if reason := stateful_reason(*arguments, len(plan.lengths), acceptance):
        return reason
    if call.generation_config.use_cache is False and (name := stateful_name(*arguments)):
        return f"{name} may edit a text that is read again for every token; it is decoded plainly"
    return ""


def _with_drafts(plan: RequestPlan, facts: ModelPlan) -> RequestPlan:
    """The plan with the shape of its drafts, or with the reason why it has none."""
    call, common, stopping, (batch_size, longest) = plan.call, plan.common, plan.stopping, plan.call.input_ids.shape
    model, config, shortest = call.model, common.config, int(plan.lengths.min())
    positions, cache = call.model_kwargs.get("position_ids"), plan.cache
    others = validation.other_inputs(model, call.model_kwargs)
    if positions is not None and not validation.has_usual_positions(positions, plan.lengths, longest):
        others = [*others, "position_ids"]
    is_alone = (not others or call.input_ids.shape == (1, shortest)) and not common.is_rounded
    options: Any = {"shortest": shortest, "max_length": stopping.max_length, "is_alone": is_alone, "plan": facts}
    verdict = support.support_of(model, **options, trusted=config.trust_user_code)
    may_drop = verdict.shape != "none" and (facts.trains or facts.may_keep_states)
    if why := cache.obstacle or (_reason_of_layers(plan, facts) if may_drop else ""):
        verdict = support.Support("none", why)
    batch: Any = {"rows": batch_size, "is_padded": shortest < longest, "is_rounded": common.is_rounded}
    shape, reason = shape_of(model, verdict, config, **batch)
    if reason and config.demands:
        return replace(plan, reason=reason, is_refused=True)
    reads_itself = bool(others or verdict.behind_own)
    if reads_itself and call.generation_config.use_cache is False:
        reason = f"{', '.join(others) or 'its prompt'} is read again for every token"
    if batch_size > 1 and stopping.custom and not stopping.eos_tokens:
        # transformers continues a stopped row until all rows are stopped: its length depends on the slowest.
        reason = "a batch with stopping criteria and no end-of-sequence token ends as one"
    if shape == "none" or reason:
        return replace(plan, reason=f"{reason}; it is decoded plainly")
    if cache.tokens:
        mask = call.model_kwargs.get("attention_mask")
        validation.validate_past(model, cache.past, call.input_ids, call.generation_config, mask)
    if not reads_itself:
        return replace(plan, shape=shape)
    reading = PromptReading(call, plan.lengths, keeps_cache=cache.is_returned)
    if reason := reading.unsupported_reason(shape, verdict.ropes, stopping.max_length - longest):
        behind = ", ".join(others) or "a prompt"
        reason = f"{type(model).__name__} cannot be decoded speculatively after {behind}: {reason}"
        return replace(plan, reason=f"{reason}; it is decoded plainly", is_refused=bool(config.demands))
    return replace(plan, shape=shape, reading=reading)


def _reason_of_layers(plan: RequestPlan, facts: ModelPlan) -> str:
    """Why a call cannot keep the cache or the states of its model, or an empty string."""
    model, cache = plan.call.model, plan.cache
    if plan.call.generation_config.use_cache is not False and facts.trains and checkpointed(model):
        return "its layers drop the cache in training mode, for gradient checkpointing; pass use_cache=False"
    if not (facts.may_keep_states and mixers_of(model)):
        return ""
    if cache.is_returned and (len(plan.lengths) > 1 or not takes_states(cache.past)):
        return "its states can be returned for one prompt only, and only with attention"
    if plan.lengths.min() < plan.call.input_ids.shape[1] and not probes.heeds_padding(model):
        return "its layers keep states, which the padding of a batch changes"
    is_read_again = cache.reads_otherwise
    return "its layers keep states, and its texts are read in parts or more than once" if is_read_again else ""


def shape_of(
    model: PreTrainedModel,
    verdict: support.Support,
    config: LookaheadConfig,
    *,
    rows: int = 1,
    is_padded: bool = False,
    is_rounded: bool = False,
) -> tuple[Shape | Literal["none"], str]:
    """The shape of drafts in one pass, and why the model cannot verify the configured drafts, or an empty string.

    Args:
        model: The model.
        verdict: The model's support.
        config: How to draft.
        rows: Prompts that are decoded together.
        is_padded: Whether their lengths differ.
        is_rounded: As in `Common`.
    """
    shape, why = verdict.shape, verdict.reason
    if verdict.behind_own:
        shape = "trees"
    batch: Any = {"rows": rows, "is_padded": is_padded, "is_rounded": is_rounded}
    if shape == "trees" and (reason := kind_of(model).trees_reason(model, **batch)):
        shape, why = "none", reason
    obstacles = {
        f"be decoded speculatively: {why}": shape == "none",
        f"be decoded speculatively for {rows} prompts at once: {why}": rows > 1,
        f"verify the lookahead branch: {why}": "jacobi" in config.proposers and not config.decides_branch,
        f"verify what several proposers draw: {why}": KINDS[config.acceptance].draws and len(config.proposers) > 1,
    }
    met = [obstacle for obstacle, is_met in obstacles.items() if is_met and shape != "trees"]
    return shape, f"{type(model).__name__} cannot {met[0]}" if met else ""


def joins_alone(model: PreTrainedModel, config: LookaheadConfig) -> bool:
    """Whether inputs of an encoder-decoder model join one at a time and keep the tokens of decoding alone.

    On a GPU, reading several inputs takes little more time than one.
    """
    verdict = support.support_of(model, shortest=1, max_length=1, trusted=config.trust_user_code)
    shape, _ = shape_of(model, verdict, config)
    return shape == "trees" and calls_registered_attention(model) and input_device(model).type == "cpu"
