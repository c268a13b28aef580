"""Memory files of a model: saved after decoding, or built from texts or the vocabulary by prefill alone."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from lookahead.backend.support import support_of
from lookahead.decoding.assembly import ProposerState
from lookahead.errors import PoolError, pool_errors
from lookahead.kernels.topk import read_scores
from lookahead.model.facts import cache_input, input_device, validate_causal_lm
from lookahead.model.model_state import state_of
from lookahead.ngram.chains import IntArray
from lookahead.ngram.memory_file import (
    MemoryHeader,
    merge_records,
    read_memory,
    records_of,
    table_of,
    write_memory,
)
from lookahead.ngram.successors import ORDERS, TOP, SuccessorTable
from lookahead.proposers.memory_files import EMPTY, header_of, merge_into, open_memory_file
from lookahead.proposers.pool_files import TokenSource, changing

_PASS_TOKENS = 512  # tokens of a pass over a text, without earlier context
_ROOT: IntArray = np.zeros(1, np.int32)
_PASS_ROWS = 256  # rows of a pass over the vocabulary


def open_memory(model: PreTrainedModel, path: str | os.PathLike[str]) -> None:
    """Open a memory file ahead of the first call with `LookaheadConfig(memory=path)`; a missing file is empty."""
    learned = state_of(model).learned
    with learned.lock:
        open_memory_file(os.fspath(path), model, learned.of(ProposerState, ProposerState).files)


def save_memory(model: PreTrainedModel, path: str | os.PathLike[str]) -> bool:
    """Merge the memory of the calls with `LookaheadConfig(memory=path)` into that file.

    Contexts written by other processes are kept, up to the limit of the file: 262,144 contexts (10 MiB) unless it was
    built with another. Beyond it, the least recently learned contexts are dropped. The file is locked, and replaced as
    a whole.

    Args:
        model: The model.
        path: The file, created if missing.

    Returns:
        Whether there was anything to write.

    Raises:
        PoolError: No call of this model used the file, or it cannot be read or written; it is unchanged.
    """
    name, learned = os.fspath(path), state_of(model).learned
    with learned.lock:
        opened = learned.of(ProposerState, ProposerState).files.get(os.path.realpath(name))
        if opened is None:
            raise PoolError(f"{name}: cannot be saved: no call of this model used this memory")
        memory, header = opened
        new, old = records_of(memory.recycled, header.vocabulary)
    if len(new):
        merge_into(name, header, new, old)
    return len(new) > 0


def learn(table: SuccessorTable, model: PreTrainedModel, ids: IntArray) -> None:
    """Store the most likely successors of every context in a text, int32 `[tokens]`, by passes of the model over it."""
    forward: Any = model
    for begin in range(0, ids.size, _PASS_TOKENS):
        tokens = ids[begin : begin + _PASS_TOKENS]
        with torch.no_grad():
            inputs = torch.from_numpy(tokens[None].astype(np.int64)).to(input_device(model))
            scores = read_scores(forward(input_ids=inputs, use_cache=False).logits, TOP)
        assert scores.top is not None and scores.probabilities is not None
        parents = np.maximum(np.arange(tokens.size, dtype=np.int32) - 1, 0)
        before = ids[max(0, begin + 1 - ORDERS) : begin + 1]
        table.store(before, parents, tokens, scores.top[0], scores.probabilities[0])


def learn_vocabulary(
    table: SuccessorTable, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: int
) -> Iterator[int]:
    """Store the most likely successors of the tokens below `size`, each after a full stop; yields the number so far."""
    forward, before = cast(Any, model), cast(Any, tokenizer(".", return_tensors="pt"))["input_ids"]
    past, name = DynamicCache(config=model.config), cache_input(model)
    with torch.no_grad():
        forward(input_ids=before.to(input_device(model)), use_cache=True, **{name: past})
    for first in range(0, size, _PASS_ROWS):
        tokens = np.arange(first, min(first + _PASS_ROWS, size), dtype=np.int32)[:, None]
        cache = copy.deepcopy(past)
        cache.reorder_cache(cast(Any, torch.zeros(len(tokens)).long()))  # layers with states support it too
        with torch.no_grad():
            inputs = torch.from_numpy(tokens).long().to(input_device(model))
            scores = read_scores(forward(input_ids=inputs, use_cache=True, **{name: cache}).logits, TOP)
        assert scores.top is not None and scores.probabilities is not None
        for i, token in enumerate(tokens):
            table.store(token, _ROOT, token, scores.top[i], scores.probabilities[i])
        yield first + len(tokens)


def build_memory(
    path: str, source: TokenSource, model: PreTrainedModel, *, max_contexts: int | None = None
) -> MemoryHeader:
    """Build a memory from documents, or add them to one. The model reads them and generates nothing.

    Without inputs it reads its vocabulary, token by token. With `max_contexts=None` contexts are added to an existing
    file, up to its limit. On an error an existing file is unchanged.

    Raises:
        PoolError: No document could be used, the model is decoded without drafts, or the file cannot be read or
            written, or belongs to another model.
        UnsupportedModelError: The model is not a causal LM.
    """
    validate_causal_lm(model, "read texts for a memory")
    adds = max_contexts is None
    header = header_of(model) if max_contexts is None else header_of(model, max_contexts)
    if adds:
        with pool_errors(path):
            header, _ = read_memory(path, header)
    table = table_of(EMPTY, header.max_contexts)
    totals = source.totals
    if source.inputs:
        for ids in source:
            learn(table, model, ids)
        if not totals.documents:
            raise PoolError(f"{path}: no document to learn from, {totals.rejected} could not be used")
    else:
        if (support := support_of(model, shortest=1, max_length=2)).shape == "none":
            raise PoolError(f"{path}: useless for this model, which is decoded without drafts: {support.reason}")
        size = header.vocabulary if source.max_tokens is None else min(source.max_tokens, header.vocabulary)
        for totals.tokens in learn_vocabulary(table, model, source.tokenizer, size):
            source.observer(totals, None)
    new, _ = records_of(table, header.vocabulary)
    if adds:
        return merge_into(path, header, new)
    with changing(path):
        return write_memory(path, header, merge_records([new], header.max_contexts))
