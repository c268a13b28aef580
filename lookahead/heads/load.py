"""Heads of any kind: read from a folder, and put to work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from lookahead.errors import HeadsError
from lookahead.heads import eagle_files as eaglefile
from lookahead.heads import medusa, mtp
from lookahead.heads import native_mtp as native
from lookahead.heads.base_model import lm_head
from lookahead.heads.eagle import EagleHead
from lookahead.heads.eagle_drafter import DEPTH, EagleDrafter
from lookahead.heads.guess_tree import HeadDrafter, Warp
from lookahead.heads.head_files import head_errors, read_config
from lookahead.heads.hit_rates import HeadRates
from lookahead.heads.medusa import MedusaHeads
from lookahead.heads.mtp import MtpDrafter, MtpHeads
from lookahead.heads.parallel_heads import MedusaDrafter

NATIVE = "native"
"""In place of a folder: the MTP layer that the model's own checkpoint brings along."""

Network = MedusaHeads | MtpHeads | EagleHead | PreTrainedModel


def open_heads(folder: str | os.PathLike[str], model: PreTrainedModel) -> tuple[str, Network]:
    """Read heads of a folder for a model.

    Args:
        folder: The folder, or `NATIVE`.
        model: The model they belong to.

    Returns:
        Their kind, and the heads.

    Raises:
        HeadsError: There are none, they are damaged, or they belong to another model; or the model takes none.
    """
    lm_head(model)  # refuses models that take no heads, whatever is in the folder
    if folder == NATIVE:  # whatever folders there are
        return native.KIND, native.open_native(model)
    if Path(folder).name == str(folder) and not Path(folder).exists():
        raise HeadsError(f"{folder}: neither a folder of heads nor {NATIVE!r}, the model's own")
    kind = read_config(folder).kind or _published_kind(Path(folder))
    with head_errors(folder):
        if kind == medusa.KIND:
            return kind, MedusaHeads.load(folder, model)
        if kind == mtp.KIND:
            return kind, MtpHeads.load(folder, model)
        if kind == eaglefile.KIND:
            return kind, eaglefile.load_eagle(folder, model)
    raise HeadsError(f"{folder}: heads of an unknown kind, {kind!r}")


def fresh_rates(network: Network) -> HeadRates:
    """Rates of guesses that nothing is known of yet."""
    if isinstance(network, PreTrainedModel):
        return HeadRates(native.DEPTH)
    return HeadRates(DEPTH if isinstance(network, EagleHead) else len(network))


def put_to_work(
    network: Network, model: PreTrainedModel, rates: HeadRates, rows: int, warp: Warp | None
) -> HeadDrafter:
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
    if isinstance(network, MtpHeads):
        return MtpDrafter(network, model, rates, rows, warp)
    if isinstance(network, PreTrainedModel):
        return native.NativeDrafter(cast(Any, network), model, rates, warp)
    return EagleDrafter(network, model, rates, rows, warp)


def _published_kind(folder: Path) -> str:
    """What a checkpoint is that does not say: Medusa's have a name of their own."""
    return medusa.KIND if any(folder.glob("medusa_lm_head.*")) else eaglefile.KIND
