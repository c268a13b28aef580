"""Exact beam search: transformers' own loop, over one token tree per prompt.

`model.generate` keeps a copy of the prompt's keys and values for every beam and reorders all of them at every step.
Here the beams of a prompt are nodes of one tree after one copy of the prompt, and a pass scores the tips of all beams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList

from lookahead.backend.choice import backend_for
from lookahead.backend.cpu.cpu_backend import CpuBackend, packed_products
from lookahead.backend.cpu.product_bits import has_bits_of_copies
from lookahead.backend.protocol import BitPolicy
from lookahead.backend.self_check import kernels_agree, may_keep_bits
from lookahead.backend.support import support_of, users_reason
from lookahead.config import LookaheadConfig
from lookahead.decoding import validation
from lookahead.decoding.hf_outputs import append_states, copy_prefix_from
from lookahead.drafting.tree import TokenTree
from lookahead.engine.fallback import PlainLoop
from lookahead.engine.row import StepOutput
from lookahead.errors import PromptError, UnsupportedModelError, warn, with_place
from lookahead.model.cache import TreeCache
from lookahead.model.calls import ResolvedCall, is_left_padded, kind_of, own_beam_search, read_prompt
from lookahead.model.facts import (
    CACHE,
    attention_name,
    cache_in,
    empty_cache,
    is_callers,
    processes_of,
    tokens_in,
    vocabulary_size,
)
from lookahead.model.model_state import plan_of, state_of
from lookahead.model.state_scope import mixers_of
from lookahead.plugins.beams.beam_tree import DEAD_NODES, BeamModel, BeamTree
from lookahead.plugins.encoder_decoder.encoded_rows import held_layers, rows_of
from lookahead.utils.kept_values import truth
from lookahead.utils.seams import register
from lookahead.verification.per_row import is_per_row
from lookahead.verification.rules import FinishReason, reason_of

LONG_PROMPT = 64
"""Minimum prompt tokens for which it pays to check whether one copy of the prompt gives the same bits."""
BEAM_MODES = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


def has_bits_of_beams(model: PreTrainedModel, beams: int) -> bool:
    """Whether passes over tips have transformers' bits, in half precision on a CPU; the first call compares them."""
    if not may_keep_bits(model):
        return False
    name, vocabulary = f"bits of {beams} beams, {torch.get_num_threads()} threads", vocabulary_size(model)
    return state_of(model).probed(name, model, partial(_compare_bits, model, beams, vocabulary), truth)


@torch.inference_mode()
def _compare_bits(model: Any, beams: int, vocabulary: int) -> bool:
    """Compare two passes over the tips of a tree with transformers' passes, after three prompts."""
    try:
        for stride in (7, 8, 9):
            prompt = (torch.arange(8, device="cpu")[None] * stride + 1) % vocabulary
            past = DynamicCache(config=model.config.get_text_config(decoder=True))
            model(input_ids=prompt.expand(beams, -1), **{CACHE: past}, use_cache=True)
            backend = CpuBackend(model, rows=1, capacity=64)
            copy_prefix_from(past, backend.cache, np.zeros(1, np.int64))
            backend.cache.hold_root(0)
            tree = BeamTree(int(prompt[0, -1]), prompt.new_zeros(0), beams)
            with backend.serving():
                for step in range(2):
                    tokens = (torch.arange(beams, device="cpu") * stride + step) % vocabulary
                    tree.advance(range(beams), tokens.tolist())
                    ours = backend.score([tree.tree()], BitPolicy.BATCH, np.array([tree.scored]))
                    tree.learn(ours[0])
                    theirs = model(input_ids=tokens[:, None], **{CACHE: past}, use_cache=True).logits
                    if not torch.equal(ours[0], theirs[:, 0]):
                        return False
    except Exception as error:  # custom attention may raise anything here; masks still work
        state_of(model).note_problem(f"{type(model).__name__} has no beams bit for bit", with_place(error))
        return False
    return True


class _SharedInput(EncoderDecoderCache):
    """A cache for beams: the beams of an input share its encoder keys and values, which are never reordered."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the keys and values of generated tokens."""
        self.self_attention_cache.reorder_cache(beam_idx)

    def own(self) -> EncoderDecoderCache:
        """The cache as transformers has it, every beam with its own keys and values."""
        for layer in held_layers(self.cross_attention_cache):
            layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()
        return EncoderDecoderCache(self.self_attention_cache, self.cross_attention_cache)


def _with_cache(output: Any, past: Any) -> Any:
    """The output with its cache replaced; a tensor holds no cache."""
    return output if isinstance(output, Tensor) else type(output)(**{**output, CACHE: past})


class BeamLoop(PlainLoop):
    """Runs transformers' beam search, with the interface of `PlainLoop`.

    The call's `input_ids`, int64 `[batch * num_beams, tokens]`, repeat each prompt once per beam. `context` is the
    maximum tokens of a row. If `is_refused`, beams that cannot be nodes of a tree are an error.
    """

    takes_streamer = False

    def __init__(
        self, call: ResolvedCall, config: LookaheadConfig, *, is_refused: bool = False, context: int | None = None
    ) -> None:
        model, input_ids, generation_config, options = (
            call.model, call.input_ids, call.generation_config, call.model_kwargs,
        )  # fmt: skip
        validation.validate_call(model, generation_config, options, modes=BEAM_MODES)
        cache = kind_of(model).cache_of(call)
        if any(map(is_per_row, call.logits_processor)):
            raise UnsupportedModelError("processors per row cannot follow beams, whose rows are copied to each other")
        beams = generation_config.num_beams
        if is_callers(cache.past) or tokens_in(cache.past) > 0:
            raise UnsupportedModelError(f"{CACHE} of your own is not served with beams")
        mask = None if kind_of(model).has_encoder else options.get("attention_mask")
        if mask is not None and not is_left_padded(mask):
            raise UnsupportedModelError("with beams attention_mask must be zeros and then ones in every row")
        room = None if context is None else context + 1
        if room is not None and cast(int, generation_config.max_length) > room:
            raise PromptError(
                f"max_new_tokens must be at most {room - input_ids.shape[1]} with beams, got more: the longest prompt "
                f"has {input_ids.shape[1]} tokens and the model a context of {room - 1}"
            )
        lengths = read = validation.prompt_lengths(model, input_ids, options, beams)
        if kind_of(model).has_encoder and call.inputs_tensor is not None:
            seen = options.get("attention_mask")
            read = lengths + (len(call.inputs_tensor[0]) if seen is None else seen[::beams].sum(1).cpu().numpy())
        sequences = np.repeat(read, cast(int, generation_config.num_return_sequences))
        super().__init__(self._search, input_ids, sequences, call.stopping_criteria)
        self._call, self._model, self._ids = call, cast(Any, model), input_ids
        self._generation, self._model_kwargs, self._beams = generation_config, options, beams
        self._lengths, self._config, self._is_refused = lengths, config, is_refused
        self._returns_cache, self._reads_otherwise = cache.is_returned, cache.reads_otherwise
        self._policy = BitPolicy.ROUNDED

    def run(self) -> Iterator[list[StepOutput]]:
        """Search, and yield the sequences."""
        begin = time.perf_counter()
        self._generation, self._returns_cache = copy(self._generation), False
        self._generation.return_dict_in_generate = True
        output: Any = self.sample()
        seconds = time.perf_counter() - begin
        outputs = []
        counts = (output.beam_indices >= 0).sum(1).tolist()
        for row, (ids, count) in enumerate(zip(output.sequences.cpu(), counts, strict=True)):
            ids, stats = ids[: self._width + count], self.stats[row]
            stats.emitted_tokens, stats.decode_s, stats.ttft_s = count, seconds, seconds
            stats.acceptance_histogram[1] = stats.target_forwards = count - 1
            stats.dtype = str(self._model.dtype).removeprefix("torch.")
            stats.bitwise_forwards = 0 if self._policy is BitPolicy.ROUNDED else stats.target_forwards
            outputs.append(StepOutput(row, ids[self._width :].numpy().astype(np.int32), self._reason(ids)))
        yield outputs

    def _reason(self, ids: Tensor) -> FinishReason:
        """Why a sequence, int64 `[tokens]`, ended; custom criteria may keep a state and are not called."""
        rows = cast(torch.LongTensor, ids[None])
        if any(
            reason_of(criterion) == "stop" and criterion(rows, cast(Any, None)).any() for criterion in self._criteria
        ):
            return "stop"
        return "length" if len(ids) >= cast(int, self._generation.max_length) else "criteria"

    def _search(self, stopping_criteria: StoppingCriteriaList, streamer: object = None) -> Any:
        """Search as the model does, with a cache shared by beams, or over trees."""
        if streamer is not None:
            raise UnsupportedModelError("a streamer is not served with beams")
        model, width, options = self._model, self._ids.shape[1], self._model_kwargs
        search = own_beam_search(self._call._replace(generation_config=self._generation))
        search = partial(search, stopping_criteria=stopping_criteria)
        trusted = self._config.trust_user_code
        if reason := users_reason(model, trusted=trusted):
            return self._search_plainly(search, f"{reason}; the beams are searched as transformers does")
        if kind_of(model).has_encoder:
            if model.dtype != torch.float32:
                self._policy = BitPolicy.BATCH  # transformers runs all passes
            inputs = self._with_shared_input()
            with packed_products(model):
                output = search(model, **inputs)
            past = cache_in(inputs)
            return _with_cache(output, past.own()) if self._returns_cache and isinstance(past, _SharedInput) else output
        lengths = np.repeat(self._lengths, self._beams)
        if not validation.has_usual_positions(options.get("position_ids"), lengths, width):
            raise UnsupportedModelError("position_ids of your own are not served with beams")
        support = support_of(
            model, shortest=int(self._lengths.min()), max_length=self._generation.max_length, trusted=trusted,
            plan=plan_of(model),
        )  # fmt: skip
        apart = "it is spread over several processes" if processes_of(model) > 1 else ""
        apart = apart or ("its layers keep states" if mixers_of(model) else "")
        if support.shape != "trees" or apart:
            reason = support.reason or apart
            reason = f"the beams of {type(model).__name__} are not a token tree: {reason}"
            if self._is_refused:
                raise UnsupportedModelError(
                    f"{reason}; leave out {self._config.demands} to search as transformers does"
                )
            return self._search_plainly(search, f"{reason}; they are searched as transformers does")
        return self._search_trees(search)

    def _search_plainly(self, search: Callable[..., Any], reason: str) -> Any:
        """Search as transformers does, and say why."""
        warn(reason)
        for stats in self.stats:
            stats.fallback_reason = reason
        return search(self._model, **self._model_kwargs)

    def _search_trees(self, search: Callable[..., Any]) -> Any:
        """Search over one token tree per prompt."""
        model, width = self._model, self._ids.shape[1]
        # In a batch transformers masks padding, which changes bits.
        is_one = len(self._lengths) == 1 and self._lengths[0] == width
        is_one = is_one and not self._reads_otherwise
        policy = BitPolicy.ROUNDED
        if is_one and has_bits_of_beams(model, self._beams):
            policy = BitPolicy.BATCH
        rows, capacity = len(self._lengths), min(self._generation.max_length, width + 256) + DEAD_NODES
        has_kernels = policy is BitPolicy.BATCH or kernels_agree(model, "trees")
        backend = backend_for(model, rows=rows, capacity=capacity, has_kernels=has_kernels)
        prompts = self._ids[:: self._beams].cpu().numpy()
        texts = [ids[width - length :] for ids, length in zip(prompts, self._lengths.tolist(), strict=True)]

        def read(input_ids: Tensor, config: GenerationConfig) -> Tensor:
            """Logits `[prompts, vocab]` after the prompts; each is read once unless bits must match transformers."""
            if policy is BitPolicy.BATCH:
                return self._read_as_generate(backend.cache, input_ids, config)
            with torch.inference_mode():
                return backend.read(texts)[:, 0]

        def score(trees: Sequence[TokenTree], scored: NDArray[np.int64]) -> Tensor:
            """Score the tips of the beams, with the bits of a batch if the policy allows."""
            return backend.score(trees, policy if policy is BitPolicy.BATCH else BitPolicy.ROUNDED, scored)

        roots = [int(ids[-1]) for ids in texts]
        trees = BeamModel(model, backend.cache, score, roots, self._beams, read)
        with backend.serving(), torch.inference_mode(False), torch.no_grad():
            output = search(trees, **{CACHE: trees}, use_cache=True)
            past = cache_in(self._model_kwargs)
            past = past if self._returns_cache and isinstance(past, DynamicCache | StaticCache) else None
            if past is not None:
                append_states(past, trees.states(), np.repeat(width - self._lengths, self._beams).tolist())
            output = _with_cache(output, past)
        self._policy = policy
        return output

    def _read_as_generate(self, cache: TreeCache, input_ids: Tensor, config: GenerationConfig) -> Tensor:
        """Read a prompt once per beam, as `model.generate` does, or once if that gives the same bits."""
        model, text_config = self._model, self._model.config.get_text_config()
        past = DynamicCache(config=model.config.get_text_config(decoder=True))
        inputs, (beams, width) = {**self._model_kwargs, CACHE: past}, input_ids.shape
        is_sdpa = attention_name(text_config) == "sdpa"  # it computes each row of a batch alone
        if is_sdpa and width >= LONG_PROMPT and "logits_to_keep" in inputs and has_bits_of_copies(model, width, beams):
            inputs = {name: value[:1] if isinstance(value, Tensor) else value for name, value in inputs.items()}
            input_ids, inputs["logits_to_keep"] = input_ids[:1], beams  # as many rows of logits as beams
        logits = read_prompt(model, input_ids, config, inputs)
        with torch.inference_mode():
            copy_prefix_from(past, cache, np.zeros(1, np.int64), drops=True)
        cache.hold_root(0)
        return logits[:1, -1]

    def _with_shared_input(self) -> dict[str, Any]:
        """Inputs of the model with a cache in which beams share the keys and values of their input.

        In float32 they are computed once per input. In half precision their bits depend on the rows of the pass.
        """
        past, options, beams = cache_in(self._model_kwargs), self._model_kwargs, self._beams
        if not (isinstance(past, EncoderDecoderCache) and isinstance(past.cross_attention_cache, DynamicCache)):
            return options
        cross = past.cross_attention_cache
        if self._model.dtype == torch.float32:
            outputs, mask, own = options["encoder_outputs"], options.get("attention_mask"), empty_cache(self._model)
            outputs, mask = rows_of(outputs, mask, torch.arange(0, len(self._ids), beams))
            self._model(
                encoder_outputs=outputs,
                attention_mask=mask,
                decoder_input_ids=self._ids[::beams, :1],
                use_cache=True,
                **{CACHE: own},
            )
            cross = own.cross_attention_cache
            for layer in held_layers(cross):
                if len(self._ids) > beams:
                    layer.batch_repeat_interleave(beams)
                else:  # one copy for all
                    layer.keys, layer.values = (
                        states.expand(beams, -1, -1, -1) for states in (layer.keys, layer.values)
                    )
        return {**options, CACHE: _SharedInput(past.self_attention_cache, cross)}


for _mode in BEAM_MODES:
    register("loop", _mode.value, BeamLoop)
