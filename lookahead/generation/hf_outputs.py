"""What passes between transformers and a decoded batch: a filled cache in, sequences, scores and a cache out."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig, StaticCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from lookahead.engine.engine import Engine
from lookahead.models.cache import RowStates, TreeCache
from lookahead.verification.sampling import TokenChooser


def adopt(past: DynamicCache, cache: TreeCache, padding: NDArray[np.int64]) -> None:
    """Start every row of an empty tree cache with what a transformers cache holds of it.

    Args:
        past: Keys and values `[batch, heads, held, dim]` per layer, left-padded as the prompts are.
        cache: Filled; its rows then hold `past.get_seq_length() - padding` tokens, or none.
        padding: int64 `[batch]`, padding tokens before each prompt.
    """
    width = past.get_seq_length()
    for row, pad in enumerate(padding.tolist()):
        states: list[RowStates] = []
        for layer in cast(Any, past.layers):
            held = layer.keys.shape[2]  # a sliding window holds fewer than all
            begin = max(0, pad - (width - held))
            states.append((layer.keys[row, :, begin:], layer.values[row, :, begin:]))
        cache.adopt(row, states, max(0, width - pad))


def hand_back(
    past: DynamicCache | StaticCache, rows: list[list[RowStates]], padding: NDArray[np.int64], width: int
) -> None:
    """Append to a transformers cache what the rows hold beyond it, padded left and right with zeros.

    Args:
        past: Grows to `width` tokens.
        rows: For every row and layer keys and values, `[heads, length, dim]`.
        padding: int64 `[batch]`, padding tokens before each prompt.
        width: Tokens of the padded batch that have keys and values: all but the last.
    """
    begin = int(past.get_seq_length())
    for index in range(len(rows[0])):
        new: list[Tensor] = []
        for which in (0, 1):
            shape = rows[0][index][which].shape
            filled = rows[0][index][which].new_zeros(len(rows), shape[0], width - begin, shape[2])
            for row, pad in enumerate(padding.tolist()):
                states = rows[row][index][which]
                first = max(0, begin - pad)
                at = pad + first - begin
                filled[row, :, at : at + states.shape[1] - first] = states[:, first:]
            new.append(filled)
        past.update(new[0], new[1], index)


def return_cache(engine: object, past: object) -> None:
    """Let a cache that was passed in hold what a finished engine read and wrote, all but the last token of a row.

    A loop of transformers has filled it already.
    """
    if isinstance(engine, Engine) and engine.kept and isinstance(past, DynamicCache | StaticCache):
        rows = [engine.kept[row.index] for row in engine.batch]
        padding = np.array([row.padding for row in engine.batch])
        hand_back(past, rows, padding, max(row.length for row in engine.batch) - 1)


def padded_sequences(input_ids: Tensor, outputs: list[list[int]], config: GenerationConfig) -> Tensor:
    """The prompts and their outputs, right-padded to the longest as `model.generate` does."""
    longest = max(map(len, outputs))
    pad = config._pad_token_tensor
    filled = [out + [int(pad) if pad is not None else 0] * (longest - len(out)) for out in outputs]
    return torch.cat([input_ids, torch.tensor(filled, dtype=torch.long, device=input_ids.device)], -1)


def output_dict(
    sequences: Tensor,
    chooser: TokenChooser,
    config: GenerationConfig,
    past: Cache | None,
    *,
    is_encoder_decoder: bool = False,
) -> GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """What `return_dict_in_generate` asks for.

    Scores and logits of a row that ended before the others are zeros from there on; transformers computes
    them from padding.
    """
    scores = _by_step(chooser.scores) if config.output_scores else None
    logits = _by_step(chooser.logits) if config.output_logits else None
    kind = GenerateEncoderDecoderOutput if is_encoder_decoder else GenerateDecoderOnlyOutput
    return kind(
        sequences=cast(torch.LongTensor, sequences),
        scores=cast(Any, scores),
        logits=cast(Any, logits),
        past_key_values=cast(Any, past),
    )


def _by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Turn lists of `[vocab]` per row into one `[batch, vocab]` per step."""
    nothing = torch.zeros_like(rows[0][0])
    steps = range(max(map(len, rows)))
    return tuple(torch.stack([row[step] if step < len(row) else nothing for row in rows]) for step in steps)
