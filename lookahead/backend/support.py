"""What a model can verify in one pass, found by probing it rather than by a list of names, and models to refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from lookahead.backend.chain_backend import ChainBackend
from lookahead.backend.choice import backend_for
from lookahead.backend.protocol import BitPolicy, Shape
from lookahead.backend.torch_backend import TorchBackend
from lookahead.drafting.sizes import MAX_NODES_LIMIT
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.errors import is_out_of_memory, named, with_place
from lookahead.hf.calls import changed_loop
from lookahead.hf.facts import (
    cache_input,
    calls_registered_attention,
    decoder_vocabulary,
    input_device,
    inputs_of,
    is_sequential,
    may_keep_states,
    other_layers,
    processes_of,
    rope_parameters_of,
    vocabulary_size,
)
from lookahead.hf.model_code import attention_code, changed_attention, changed_caches, odd_window, pre_hooks_of
from lookahead.hf.model_inputs import EncoderInputs, encode
from lookahead.hf.model_state import state_of
from lookahead.hf.quantized import QuantizedLinear
from lookahead.hf.state_layers import has_states, states_in
from lookahead.hf.state_scope import mixers_of
from lookahead.utils.kept_values import truth
from lookahead.utils.shipped import is_shipped

TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02}  # rounding error, relative to the norm of the logits
_TOLERANCE_FP32 = 1e-3
# Ninths of the vocabulary: the first tokens are often special, and the outliers of their activations magnify rounding.
# In half precision rounding may change the routing to experts, so one correct probe of three is enough.
PROBES = ((1, 2, 3, 4, 5, 6), (7, 3, 1, 6, 2, 5), (4, 8, 5, 1, 7, 2))
_PADDING = 3  # tokens before a text that is compared with the text alone
_PROMPT, _DEEPEST, _WIDE = 24, 5, 40  # tokens and nodes of what is decoded where a user's code runs

TREE = (0, 0, 1, 2, 0)
CHAIN = (0, 0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Support:
    """What a model can verify in one pass: trees, chains only, or nothing but its next token."""

    shape: Shape | Literal["none"]
    reason: str = ""  # why it is not trees
    ropes: tuple[tuple[str, int], ...] = ()  # embeddings of positions that change beyond some length: kind, limit
    by_node: bool = False  # whether trees are right too where every node attends alone, by the model's own function

    @classmethod
    def of(cls, values: Any) -> Support:
        """What was kept as a value of JSON; KeyError, TypeError or ValueError if that is none."""
        made = cls(values["shape"], values["reason"], tuple((kind, limit) for kind, limit in values["ropes"]))
        ropes = all(type(kind) is str and type(limit) is int for kind, limit in made.ropes)
        if made.shape not in ("trees", "chains", "none") or type(made.reason) is not str or not ropes:
            raise ValueError(f"it is no verdict on what a model can verify: {values!r}")
        return replace(made, by_node=truth(values["by_node"]))


class ProbeError(Exception):
    """A probe failed for a temporary reason, such as a lack of memory; the message says which."""


def support_of(model: PreTrainedModel, *, shortest: int, max_length: int) -> Support:
    """What a model, or its decoder, can verify, with rows from `shortest` prompt tokens to `max_length` tokens.

    The first call for a model probes it with a few tokens. A probe that runs out of memory, or meets a model that
    cannot run at all, says "none" and is repeated at the next call.
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
        return Support("none", "its experts take so many tokens of a pass and no more")
    windows, longest, what = [getattr(config, "keep_window_size", None)], max_length, "its own attention code"
    if model.config.is_encoder_decoder:  # whose cache is that of transformers
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
        verdict = state.probed("support", model, partial(_probe, model, config), Support.of)
    except ProbeError as error:
        return Support("none", str(error))
    for kind, limit in verdict.ropes:
        # A dynamic base depends on the longest position of each pass, longrope only on the side of the limit it is on.
        if max_length > limit and (kind == "dynamic" or shortest <= limit):
            return Support("none", f"its {kind} position embeddings change beyond {limit} tokens")
    scale = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None
    if scale is not None and max_length + MAX_NODES_LIMIT >= scale and verdict.shape == "trees":
        verdict = Support("chains", f"its attention temperature depends on cache slots from {scale} tokens on")
    if verdict.shape != "none" and not has_encoder and state.newest is not None and state.newest.users:
        name = f"{verdict.shape} by a user's code, {torch.get_num_threads()} threads"
        if not state.probed(name, model, partial(_decodes_alike, model, verdict)):
            return Support("none", "code that is not of transformers treats several tokens otherwise than one")
    return verdict


def unsupported_reason(model: PreTrainedModel) -> str:
    """What makes a pass depend on more than its tokens, or decoding on more than passes, or an empty string."""
    model_class: Any = type(model)
    prepare = vars(model).get("prepare_inputs_for_generation")
    if getattr(prepare, "__func__", prepare) not in (None, model_class.prepare_inputs_for_generation):
        return "its inputs are prepared by another object, as prompt tuning does"
    if changed := changed_loop(model):
        return f"its {changed} is not that of transformers"
    if changed := changed_caches():
        return f"{changed} has taken the place of a cache's own code"
    for module in model.modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            return "its activations are quantized by one scale for all tokens of a pass, so drafts would change it"
        if isinstance(module, QuantizedLinear) and model.dtype == torch.float32:
            return "its inputs are rounded, which enlarges the rounding of several tokens; load it with dtype='bf16'"
        # An adapter that is added to a model in evaluation mode is itself in training mode.
        if module.training and (module is model or (isinstance(module, nn.Dropout) and module.p)):
            return "it is in training mode; call its eval() first"
        for hook in pre_hooks_of(module):
            # One adapter per row, or one that begins at a token: drafted rows have other places.
            for name in ("adapter_names", "alora_offsets"):
                if name in getattr(hook, "keywords", ()):
                    return f"its adapters take {name}, which are places in the batch"
    return ""


def _probe(model: PreTrainedModel, config: Any) -> Support:
    """Try trees, then chains."""
    if changed := changed_attention(model):  # it may treat tokens otherwise from some length on
        return Support("none", f"the forward of {changed} is not that of transformers")
    decoder: Any = model.get_decoder() if model.config.is_encoder_decoder else model
    if odd := odd_window(model, decoder.modules()):
        return Support("none", odd)
    return replace(_probed_shape(model, config), ropes=_growing_ropes(model, config))


def _growing_ropes(model: PreTrainedModel, config: Any) -> tuple[tuple[str, int], ...]:
    """The embeddings of positions that change with the length, by the configuration, or by that of a module's own."""
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
    by_node = False
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
    return Support("none", mismatch) if mismatch else Support("chains", reason, by_node=by_node)


def _mismatch_of(model: PreTrainedModel, shape: Shape) -> str:
    """Why passes over a few trees or chains are not those of the model; an empty string if they are.

    Raises:
        ProbeError: A pass ran out of memory, or the model cannot run at all.
    """
    vocabulary, raised = min(vocabulary_size(model), decoder_vocabulary(model)), None
    probes = [[token * vocabulary // 9 for token in probe] for probe in PROBES]
    is_tree, agrees = shape == "trees", False
    # Where the attention of a decoder looks at single tokens, a wrong relative bias may not show in every probe.
    needs_all = is_tree and model.config.is_encoder_decoder and model.dtype == torch.float32
    for tokens in probes:
        try:
            agrees = _scores_like_the_model(model, shape, tokens)
        except Exception as error:  # a model that takes no prepared mask may raise anything
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
        own_logits(model, probes[:1], probes[0])
    except Exception as error:
        raise ProbeError(f"it cannot run ({named(error)})") from error
    failure = "its attention takes no prepared masks" if is_tree else "it does not continue from a truncated cache"
    return f"{failure} ({named(raised)})"


@torch.inference_mode()
def own_logits(model: Any, texts: Sequence[Sequence[int]], read: Sequence[int]) -> Tensor:
    """The model's logits, in one pass of its own, whose encoder reads `read`; no text sees what pads it behind its end.

    `[texts, tokens of the longest, vocab]`.
    """
    longest, device = max(map(len, texts)), input_device(model)
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs = {"input_ids": torch.tensor([read] * len(texts), device=device), "decoder_input_ids": ids}
    logits: Tensor = model(**inputs).logits
    return logits


def own_pass(model: Any, tokens: IntArray, past: Any, begin: int, inputs: Mapping[str, Any] | None = None) -> Tensor:
    """The logits, `[vocab]`, after the last of some tokens, by the model's own pass, as `generate` makes it.

    Args:
        model: The model.
        tokens: int32 `[tokens]`.
        past: A cache of transformers, of `begin` tokens.
        begin: The position of the first token.
        inputs: What a decoder takes of its encoder.
    """
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(input_device(model))
    given = {**(inputs or {}), ("decoder_input_ids" if inputs else "input_ids"): ids, cache_input(model): past}
    if not inputs and "position_ids" in inputs_of(model):
        given["position_ids"] = torch.arange(begin, begin + len(tokens), device=ids.device)[None]
    logits: Tensor = model(use_cache=True, **given).logits
    return logits[0, -1]


@torch.inference_mode()
def step_logits(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """The logits, `[vocab]`, after tokens that the model reads one by one, as `generate` does, behind a prompt."""
    past: Any = DynamicCache(config=model.config.get_text_config())
    logits = own_pass(model, np.array(prompt, np.int32), past, 0)
    for at, token in enumerate(tokens):
        logits = own_pass(model, np.array([token], np.int32), past, len(prompt) + at)
    return logits


def heeds_padding(model: PreTrainedModel) -> bool:
    """Whether a model with states reads a prompt behind padding as it reads it alone; the first call probes it."""
    return state_of(model).probed("padding", model, partial(_heeds_padding, model), truth)


@torch.inference_mode()
def _heeds_padding(model: Any) -> bool:
    vocabulary, device, config = decoder_vocabulary(model), input_device(model), model.config.get_text_config()
    text = np.array([token * vocabulary // 9 for token in PROBES[0]], np.int32)
    mask = torch.tensor([[0] * _PADDING + [1] * len(text)], device=device)
    padded, alone = (DynamicCache(config=config) for _ in range(2))
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(0)}
    given = {name: each for name, each in given.items() if name in inputs_of(model)}
    ids = torch.tensor([[0] * _PADDING + text.tolist()], device=device)
    logits = model(input_ids=ids, **given, **{cache_input(model): padded}, use_cache=True).logits[0, -1]
    own = own_pass(model, text, alone, 0)
    for at, layer in enumerate(padded.layers):
        if has_states(layer):
            kept = states_in(alone.layers[at])
            if not all(agree(model, states, kept[key]) for key, states in states_in(layer).items()):
                return False
    return agree(model, logits, own)


@torch.inference_mode()
def _scores_like_the_model(model: PreTrainedModel, shape: Shape, tokens: Sequence[int]) -> bool:
    """Whether two drafted passes, with a commit between them, give the logits of the model's own passes."""
    drafted, pad = list(tokens[2:]), getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    if model.config.is_encoder_decoder and shape == "trees" and pad is not None:
        drafted[0] = pad  # behind padding some decoders count positions anew, which chains are split for
    tree = TokenTree.from_parents([tokens[2], *drafted], TREE if shape == "trees" else CHAIN)
    path = np.array([0, 4] if shape == "trees" else [0, 1], np.int32)
    paths: list[list[int]] = []  # tokens from the root to every node
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if paths else []), token])
    is_batch = shape == "trees" and (not model.config.is_encoder_decoder or calls_registered_attention(model))
    texts = [list(tokens[:2]), list(tokens[1:2])][: 2 if is_batch else 1]
    rows = len(texts)
    backend: TorchBackend
    # Weights packed for the rows of a batch are of no use to later passes over one row.
    if not model.config.is_encoder_decoder:
        backend = backend_for(model, rows=rows, capacity=16, shape=shape, packs=False)
    else:
        encoded = encode(model, [np.array(tokens, np.int32)] * rows)
        if shape == "trees":
            make_inputs = partial(EncoderInputs, encoded=encoded)
            backend = backend_for(model, rows=rows, capacity=256, packs=False, make_inputs=make_inputs)
        else:
            backend = ChainBackend(model, encoded, rows, packs=False)
    with backend.serving():
        backend.read([np.array(text, np.int32) for text in texts])
        for row in range(rows):
            backend.commit(row, path[:1])  # the end of the prompt
        first = backend.score([tree] * rows)
        for row in range(rows):
            backend.commit(row, path)
        second = backend.score([TokenTree.root(tokens[0])] * rows)
        backend.commit(0, path[:1])
        if rows > 1:
            backend.retire(1)
        third = backend.score([TokenTree.root(tokens[3])])  # as the model itself would take it, in half precision
    checks = [
        (text, tail, logits)
        for row, text in enumerate(texts)
        for tail, logits in (
            (paths[-1], first[row, -1]),
            (paths[-2], first[row, -2]),
            ([*tree.tokens[path].tolist(), tokens[0]], second[row, 0]),
        )
    ]
    checks.append((texts[0], [*tree.tokens[path].tolist(), tokens[0], tokens[3]], third[0, 0]))
    if backend.cache.states:  # a pass over a whole text may compute otherwise than tokens that are read one by one
        return all(agree(model, logits, step_logits(model, text, tail)) for text, tail, logits in checks)
    own = own_logits(model, [text + tail for text, tail, _ in checks], tokens)
    ends = (len(text + tail) - 1 for text, tail, _ in checks)
    return all(agree(model, check[2], own[row, end]) for row, (check, end) in enumerate(zip(checks, ends, strict=True)))


def _decodes_alike(model: PreTrainedModel, verdict: Support) -> bool:
    """Compare every node of a wide pass with decoding it token by token, where a user's code may tell them apart.

    In half precision on a CPU bits are compared: what a small edit changes is less than rounding.
    """
    is_half = model.dtype in TOLERANCE and input_device(model).type == "cpu"
    policy = BitPolicy.SOLO if is_half else BitPolicy.ROUNDED
    shape: Shape = "trees" if verdict.shape == "trees" or (verdict.by_node and is_half) else "chains"
    if is_half and shape == "chains":  # whose bits are others
        return False
    try:
        return _compare_nodes(model, shape, policy)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        state_of(model).note_problem(f"{type(model).__name__} verifies no {shape}", with_place(error))
        return False


@torch.inference_mode()
def _compare_nodes(model: PreTrainedModel, shape: Shape, policy: BitPolicy) -> bool:
    vocabulary = decoder_vocabulary(model)
    prompt = (np.arange(_PROMPT, dtype=np.int32) * 7 + 1) % vocabulary
    chain = np.arange(-1, _DEEPEST).clip(0)
    parents = [*chain, *(np.arange(_DEEPEST + 1, _WIDE) % (_DEEPEST + 1))] if shape == "trees" else [*chain]
    tree = TokenTree.from_parents((np.arange(len(parents)) + prompt[-1]) % vocabulary, parents)
    backend = backend_for(model, rows=1, capacity=128, shape=shape, packs=False)
    with backend.serving():
        backend.read([prompt])
        backend.commit(0, np.zeros(1, np.int32))
        scores = backend.score([tree], policy)[0]
    past: Any = DynamicCache(config=model.config.get_text_config())
    own_pass(model, prompt, past, 0)
    for parent in range(_DEEPEST + 1):  # the chain, and behind each of its nodes the branches
        branches = [node for node in range(parent + 2, len(parents)) if parents[node] == parent]
        for node in (parent, *branches):
            held = past if node == parent else deepcopy(past)
            own = own_pass(model, tree.tokens[node : node + 1], held, _PROMPT + int(tree.depths[node]))
            if not (torch.equal(own, scores[node]) if policy is BitPolicy.SOLO else agree(model, scores[node], own)):
                return False
    return True


def agree(model: PreTrainedModel, logits: Tensor, expected: Tensor) -> bool:
    """Whether logits, `[vocab]`, are those expected but for rounding."""
    tolerance = max(TOLERANCE.get(dtype, _TOLERANCE_FP32) for dtype in (model.dtype, logits.dtype))
    return bool((logits - expected).norm() <= tolerance * expected.norm())
