"""Shared prompts of token ids, and their decoding with and without lookahead."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import LookaheadConfig

IDS = torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])
_SHORT = torch.tensor([[0] * 5 + [41, 42, 41, 42, 41, 42, 41]])
_MASK = torch.tensor([[0] * 5 + [1] * 7, [1] * 12, [1] * 12])
RAGGED: dict[str, Any] = {"input_ids": torch.cat([_SHORT, IDS]), "attention_mask": _MASK[:2]}
INPUTS: dict[str, dict[str, Any]] = {
    "one": {"input_ids": IDS},
    "ragged": {"input_ids": torch.cat([_SHORT, IDS, IDS.flip(1)]), "attention_mask": _MASK},
}
# Verifies every draft that fits, at any cost, so that outcomes do not depend on time.
DRAFTING = LookaheadConfig(draft="fixed", min_probability=0.0)


def both(model: PreTrainedModel, config: LookaheadConfig, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of transformers and of ours from the same seed."""
    kwargs = {"max_new_tokens": 40, "pad_token_id": 0, **kwargs}
    torch.manual_seed(0)
    expected = model.generate(**kwargs)
    torch.manual_seed(0)
    return expected, model.generate(**kwargs, custom_generate=lookahead.decode, lookahead_config=config)
