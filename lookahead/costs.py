"""What the steps of a model cost, kept from one process to the next.

The library learns costs from the steps it takes anyway and writes no file unasked: a program that wants the first
call to know them loads them, and one that has learned them saves them. The command line loads them, and
`lookahead calibrate` saves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from lookahead.calibration import CONTEXTS, Calibration, calibrate
from lookahead.costfile import read_costs, write_costs
from lookahead.experience import experience_of


def load_costs(model: PreTrainedModel, folder: Path | str | None = None) -> bool:
    """Let a model's drafts be sized by the costs a file holds, from the first step on.

    Costs belong to a model of one shape, dtype, device and number of threads, under one version of PyTorch; those
    of another are never used. A file that cannot be read is ignored with a warning.

    Args:
        model: The model; costs go on being refined by its steps.
        folder: Where the file is; the platform's cache folder when None.

    Returns:
        Whether there was a file.
    """
    return read_costs(model, experience_of(model).cost, _as_path(folder))


def save_costs(model: PreTrainedModel, folder: Path | str | None = None) -> Path:
    """Write what the steps of a model were measured to cost, over a file that is there; returns its path.

    Raises:
        OSError: It cannot be written; an older file is still whole then.
    """
    return write_costs(model, experience_of(model).cost, _as_path(folder))


def calibrate_costs(model: PreTrainedModel, contexts: Sequence[int] = CONTEXTS) -> Calibration:
    """Measure what steps of every size cost, at some lengths of context, instead of learning it bit by bit.

    Raises:
        ConfigError: A context is out of its range.
        UnsupportedModelError: The model cannot verify drafts.
    """
    return calibrate(model, experience_of(model).cost, contexts=contexts)


def _as_path(folder: Path | str | None) -> Path | None:
    """A folder by its path."""
    return None if folder is None else Path(folder)
