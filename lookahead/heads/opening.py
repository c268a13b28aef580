"""Heads of any kind: read from a folder, and put to work."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedModel

from lookahead.errors import HeadsError
from lookahead.heads import eaglefile, medusa
from lookahead.heads.dynamic import DEPTH, EagleDrafter
from lookahead.heads.eagle import EagleHead
from lookahead.heads.guesses import Drafter, Warp
from lookahead.heads.headfile import read_config
from lookahead.heads.medusa import MedusaHeads
from lookahead.heads.parallel import MedusaDrafter
from lookahead.heads.rates import HeadRates

Network = MedusaHeads | EagleHead


def open_heads(folder: str | os.PathLike[str], model: PreTrainedModel) -> tuple[str, Network]:
    """Read heads of a folder for a model.

    Returns:
        Their kind, and the heads.

    Raises:
        HeadsError: There are none, they are damaged, or they belong to another model.
    """
    kind = read_config(folder).kind or _published_kind(Path(folder))
    if kind == medusa.KIND:
        return kind, MedusaHeads.load(folder, model)
    if kind == eaglefile.KIND:
        return kind, eaglefile.load_eagle(folder, model)
    raise HeadsError(f"{folder}: heads of an unknown kind, {kind!r}")


def fresh_rates(network: Network) -> HeadRates:
    """Rates of guesses that nothing is known of yet."""
    return HeadRates(len(network) if isinstance(network, MedusaHeads) else DEPTH)


def put_to_work(network: Network, model: PreTrainedModel, rates: HeadRates, rows: int, warp: Warp | None) -> Drafter:
    """What drafts for the rows of one call.

    Args:
        network: The heads.
        model: Their model.
        rates: How far their guesses can be trusted.
        rows: How many rows there may be.
        warp: What sampling does to logits; None where the likeliest token is taken.
    """
    if isinstance(network, MedusaHeads):
        return MedusaDrafter(network, rates, warp)
    return EagleDrafter(network, model, rates, rows, warp)


def _published_kind(folder: Path) -> str:
    """What a checkpoint is that does not say: Medusa's have a name of their own."""
    return medusa.KIND if any(folder.glob("medusa_lm_head.*")) else eaglefile.KIND
