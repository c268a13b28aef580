"""Outputs as transformers returns them: tokens, scores and a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from lookahead.engine.engine import Engine
from lookahead.engine.fallback import PlainLoop
from lookahead.model.cache import TreeCache
from lookahead.model.slots import RowCopy, RowStates
from lookahead.model.state_layers import has_states, load_states, states_in


def collect(engine: Engine | PlainLoop, streamer: Any = None, pad: Tensor | None = None) -> list[list[int]]:
    """Run an engine to its end and return the new tokens of every row; a streamer gets columns."""
    outputs: list[list[int]] = [[] for _ in engine.stats]
    running = set(range(len(outputs)))
    shown = 0
    try:
        with engine.serving(is_alone=streamer is None):
            for step_outputs in engine.run():
                for step_output in step_outputs:
                    outputs[step_output.row].extend(step_output.tokens.tolist())
                    if step_output.finish_reason is not None:
                        running.discard(step_output.row)
                whole = min(map(len, (outputs[row] for row in running))) if running else max(map(len, outputs))
                for step in range(shown, whole if streamer is not None else shown):
                    column = [row[step] if step < len(row) else int(pad or 0) for row in outputs]
                    streamer.put(torch.tensor(column, device="cpu"))
                shown = whole
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration):  # raised by a processor or criterion inside a generator
            raise error.__cause__ from None
        raise
    if streamer is not None:
        streamer.end()
    for row in engine.batch if isinstance(engine, Engine) else ():
        if row.is_edited:
            outputs[row.place] = row.ids[row.length - row.emitted : row.length].tolist()
    return outputs


def scores_by_step(rows: Sequence[Sequence[Tensor]], pad: int) -> tuple[Tensor, ...]:
    """The scores `[vocab]` of every token of each row, as `[batch, vocab]` per step.

    After the end of a row the padding token has log-probability 0, so a sum over all steps is the sum over the row's
    tokens.
    """
    ended = torch.full_like(rows[0][0], -torch.inf)
    ended[pad : pad + 1] = 0.0  # it may be outside the vocabulary
    steps = max(map(len, rows))
    return tuple(torch.stack([row[step] if step < len(row) else ended for row in rows]) for step in range(steps))


def copy_prefix_from(past: DynamicCache, cache: TreeCache, padding: NDArray[np.int64], *, drops: bool = False) -> None:
    """Copy the keys and values of a transformers cache, left-padded by int64 `[batch]`, into an empty tree cache.

    `drops` removes each layer from `past` once it is copied, so at most one layer is held twice.
    """
    width = past.get_seq_length()

    def states(row: int, pad: int) -> Iterator[RowStates | None]:
        for layer in cast(Any, past.layers):
            if getattr(layer, "keys", None) is None:  # it reads another layer's
                yield None
                continue
            count = layer.keys.shape[2]  # fewer than `width` with a sliding window
            begin = max(0, pad - (width - count))
            yield layer.keys[row, :, begin:], layer.values[row, :, begin:]
            if drops and row == len(padding) - 1:
                layer.keys = layer.values = layer.keys.new_empty(0)

    for row, pad in enumerate(padding.tolist()):
        cache.copy_prefix_from(row, states(row, pad), max(0, width - pad))
        for own, layer in zip(cache.layers, past.layers, strict=False):
            if has_states(layer):
                own.committed[row] = {key: state[row].clone() for key, state in states_in(layer).items()}


def return_cache(engine: Engine | PlainLoop, past: object) -> None:
    """Append the new keys and values of a finished engine to the transformers cache that was passed in.

    It then holds all tokens but the last of the longest row. transformers' loop fills its cache itself.
    """
    past = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
    if not (isinstance(engine, Engine) and engine.kept and isinstance(past, DynamicCache | StaticCache)):
        return
    rows, padding = [engine.kept[row.index] for row in engine.batch], [row.padding for row in engine.batch]
    append_states(past, rows, padding)


def append_states(past: DynamicCache | StaticCache, rows: Sequence[RowCopy], padding: Sequence[int]) -> None:
    """Append keys and values of rows to a cache that may hold their beginning, and replace its states.

    It then holds the tokens of the longest row including its `padding`; padding is zeros.
    """
    begin = int(past.get_seq_length())
    width = max(pad + next(iter(row.kv.values()))[0].shape[1] for pad, row in zip(padding, rows, strict=True))
    for index in rows[0].states:
        of_rows = [row.states[index] for row in rows]
        load_states(past.layers[index], {key: torch.stack([states[key] for states in of_rows]) for key in of_rows[0]})
    for index in rows[0].kv:
        new: list[list[Tensor]] = [[], []]
        for pad, row in zip(padding, rows, strict=True):
            for filled, states in zip(new, row.kv[index], strict=True):
                states = states[:, max(0, begin - pad) :]
                before = max(pad, begin) - begin
                filled.append(nn.functional.pad(states, (0, 0, before, width - begin - before - states.shape[1])))
        past.update(torch.stack(new[0]), torch.stack(new[1]), index)
