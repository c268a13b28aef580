"""Probes: passes over a few tokens, compared with the model's own passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lookahead.backend.choice import backend_for
from lookahead.backend.protocol import Shape
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.errors import is_out_of_memory, with_place
from lookahead.model.calls import kind_of
from lookahead.model.facts import (
    cache_input,
    calls_registered_attention,
    decoder_vocabulary,
    input_device,
    inputs_of,
)
from lookahead.model.model_state import state_of
from lookahead.model.state_layers import has_states, states_in
from lookahead.utils.kept_values import truth

TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02}  # rounding error, relative to the norm of the logits
_TOLERANCE_FP32 = 1e-3
# Ninths of the vocabulary: the first tokens are often special, and the outliers of their activations magnify rounding.
# In half precision rounding may change the routing to experts, so one correct probe of three is enough.
PROBES = ((1, 2, 3, 4, 5, 6), (7, 3, 1, 6, 2, 5), (4, 8, 5, 1, 7, 2))
PADDING = 3  # tokens before a text that is compared with the text alone

TREE = (0, 0, 1, 2, 0)
CHAIN = (0, 0, 1, 2, 3)


def own_logits(model: Any, texts: Sequence[Sequence[int]], read: Sequence[int]) -> Tensor:
    """The model's logits in one pass; its encoder reads `read`. Texts are padded at the end, and do not see padding.

    `[texts, tokens of the longest, vocab]`.
    """
    longest, device = max(map(len, texts)), input_device(model)
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    logits: Tensor = model(**kind_of(model).inputs_of_text(model, ids, read)).logits
    return logits


def attends_ahead(model: PreTrainedModel, tokens: Sequence[int]) -> bool:
    """Whether tokens see later ones if the model reads a text in one pass."""
    own = own_logits(model, [tokens, [tokens[0], *reversed(tokens[1:])]], tokens)
    return not agree(model, own[0, 0], own[1, 0])


def own_pass(model: Any, tokens: IntArray, past: Any, begin: int, inputs: Mapping[str, Any] | None = None) -> Tensor:
    """The logits, `[vocab]`, after the last of some tokens, by the model's own pass, as in `generate`.

    Args:
        model: The model.
        tokens: int32 `[tokens]`.
        past: A transformers cache of `begin` tokens.
        begin: The position of the first token.
        inputs: Encoder inputs of a decoder.
    """
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(input_device(model))
    inputs_of_pass = {**(inputs or {}), ("decoder_input_ids" if inputs else "input_ids"): ids, cache_input(model): past}
    if not inputs and "position_ids" in inputs_of(model):
        inputs_of_pass["position_ids"] = torch.arange(begin, begin + len(tokens), device=ids.device)[None]
    logits: Tensor = model(use_cache=True, **inputs_of_pass).logits
    return logits[0, -1]


@torch.inference_mode()
def step_logits(model: PreTrainedModel, prompt: Sequence[int], *tails: Sequence[int]) -> list[Tensor]:
    """The logits, `[vocab]`, after a prompt and each of some tails, whose tokens the model reads as `generate` does.

    Tails share the passes over their common beginnings.
    """
    past: Any = DynamicCache(config=model.config.get_text_config())
    passes: dict[tuple[int, ...], tuple[Tensor, Any]] = {}
    passes[()] = own_pass(model, np.array(prompt, np.int32), past, 0), past
    for tail in map(tuple, tails):
        for at, token in enumerate(tail):
            if tail[: at + 1] not in passes:
                past = deepcopy(passes[tail[:at]][1])
                logits = own_pass(model, np.array([token], np.int32), past, len(prompt) + at)
                passes[tail[: at + 1]] = logits, past
    return [passes[tuple(tail)][0] for tail in tails]


def heeds_padding(model: PreTrainedModel) -> bool:
    """Whether a decoder, or a model with recurrent states, reads a left-padded prompt as it reads it alone.

    The first call probes it.
    """
    return state_of(model).probed("padding", model, partial(_heeds_padding, model), truth)


def _heeds_padding(model: PreTrainedModel) -> bool:
    if (answer := kind_of(model).heeds_padding(model)) is not None:
        return answer
    return all(_reads_behind_padding(model, probe) for probe in (PROBES[0], PROBES[0][:2]))


@torch.inference_mode()
def _reads_behind_padding(model: Any, probe: Sequence[int]) -> bool:
    vocabulary, device, config = decoder_vocabulary(model), input_device(model), model.config.get_text_config()
    text = np.array([token * vocabulary // 9 for token in probe], np.int32)
    mask = torch.tensor([[0] * PADDING + [1] * len(text)], device=device)
    padded, alone = (DynamicCache(config=config) for _ in range(2))
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(0)}
    options = {name: value for name, value in options.items() if name in inputs_of(model)}
    ids = torch.tensor([[0] * PADDING + text.tolist()], device=device)
    logits = model(input_ids=ids, **options, **{cache_input(model): padded}, use_cache=True).logits[0, -1]
    own = own_pass(model, text, alone, 0)
    for at, layer in enumerate(padded.layers):
        if has_states(layer):
            kept = states_in(alone.layers[at])
            if not all(agree(model, states, kept[key]) for key, states in states_in(layer).items()):
                return False
    return agree(model, logits, own)


def continues_texts(model: PreTrainedModel) -> bool:
    """Whether a model with recurrent states can read a text in two passes with the result of one.

    Some models reset their states in every pass over several tokens. The first call probes it.
    """
    return state_of(model).probed("continuing", model, partial(_continues_texts, model), truth)


@torch.inference_mode()
def _continues_texts(model: Any) -> bool:
    config, vocabulary = model.config.get_text_config(), decoder_vocabulary(model)
    text = np.array([token * vocabulary // 9 for token in PROBES[0] + PROBES[1]], np.int32)
    try:
        past, half = DynamicCache(config=config), len(text) // 2
        own_pass(model, text[:half], past, 0)
        continued = own_pass(model, text[half:], past, half)
        return agree(model, continued, own_pass(model, text, DynamicCache(config=config), 0))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        state_of(model).note_problem(f"{type(model).__name__} continues no text", with_place(error))
        return False


@torch.inference_mode()
def scores_like_the_model(
    model: PreTrainedModel, shape: Shape, tokens: Sequence[int], *, behind_own: bool = False
) -> bool:
    """Whether two drafted passes, with a commit between them, give the logits of the model's own passes.

    With `behind_own` the model's passes are over single tokens, after a prompt of one token.
    """
    drafted, pad = list(tokens[2:]), getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    kind = kind_of(model)
    if kind.has_encoder and pad is not None:
        drafted[0] = pad  # some decoders restart positions after padding
    tree = TokenTree.from_parents([tokens[2], *drafted], TREE if shape == "trees" else CHAIN)
    path = np.array([0, 4] if shape == "trees" else [0, 1], np.int32)
    paths: list[list[int]] = []  # tokens from the root to every node
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if paths else []), token])
    is_batch = shape == "trees" and (not kind.has_encoder or calls_registered_attention(model))
    texts = [list(tokens[: 1 if behind_own else 2]), list(tokens[1:2])][: 2 if is_batch else 1]
    rows = len(texts)
    # Weights packed for a batch are useless for later passes over one row.
    make_inputs = kind.probe(model, tokens, rows).make_inputs
    options: dict[str, Any] = {"shape": shape, "packs": False, "make_inputs": make_inputs}
    backend = backend_for(model, rows=rows, capacity=256, **options)
    with backend.serving():
        backend.read([np.array(text, np.int32) for text in texts])
        for row in range(rows):
            backend.cache.commit(row, path[:1])  # the last token of the prompt
        first = backend.score([tree] * rows)
        for row in range(rows):
            backend.cache.commit(row, path)
        second = backend.score([TokenTree.root(tokens[0])] * rows)
        backend.cache.commit(0, path[:1])
        if rows > 1:
            backend.retire(1)
        third = backend.score([TokenTree.root(tokens[3])])  # in half precision the model's own pass
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
    # A pass over a whole text may compute differently from single tokens.
    if backend.cache.states or behind_own:
        for text in texts:
            of_text = [(tail, logits) for own, tail, logits in checks if own is text]
            expected = step_logits(model, text, *(tail for tail, _ in of_text))
            if not all(agree(model, logits, own) for (_, logits), own in zip(of_text, expected, strict=True)):
                return False
        return True
    own = own_logits(model, [text + tail for text, tail, _ in checks], tokens)
    ends = (len(text + tail) - 1 for text, tail, _ in checks)
    return all(agree(model, check[2], own[row, end]) for row, (check, end) in enumerate(zip(checks, ends, strict=True)))


def agree(model: PreTrainedModel, logits: Tensor, expected: Tensor) -> bool:
    """Whether logits, `[vocab]`, equal the expected ones up to rounding."""
    tolerance = max(TOLERANCE.get(dtype, _TOLERANCE_FP32) for dtype in (model.dtype, logits.dtype))
    return bool((logits - expected).norm() <= tolerance * expected.norm())
