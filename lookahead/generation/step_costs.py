"""Step costs of a model, saved from one process to the next.

The library learns costs from the steps it takes, and writes no file unasked: a program prepares or loads them for its
first call, and saves what it learned. The command line prepares them; `lookahead calibrate` measures more of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from lookahead.config import PASSES
from lookahead.errors import ConfigError
from lookahead.generation.validation import context_limit
from lookahead.models import calibration
from lookahead.models.model_state import state_of
from lookahead.models.support import validate_causal_lm


def load_costs(model: PreTrainedModel, folder: Path | str | None = None) -> bool:
    """Load the step costs of a model from a file, to size drafts from the first step on.

    The first step scales them to the current speed of the machine, and further steps refine them.

    Costs belong to a model of one shape, dtype, device and number of threads, under one version of PyTorch; those
    of another are never used. Steps of compiled and recorded passes have files of their own. A file that cannot be
    read is ignored with a warning.

    Args:
        model: The model; costs go on being refined by its steps.
        folder: Where the file is; the platform's cache folder when None.

    Returns:
        Whether there was a file.
    """
    costs = state_of(model).learned.costs
    found = [calibration.read_costs(model, costs[passes], folder, passes) for passes in PASSES]
    return any(found)


def prepare_costs(model: PreTrainedModel, folder: Path | str | None = None) -> bool:
    """`load_costs`, and where there is no file a quick sweep of about 3 seconds or 30 plain steps, which is then saved.

    Args:
        model: A causal language model; one that would take over 30 seconds, or that cannot verify drafts, is not
            measured.
        folder: Where the file is or will be; the platform's cache folder when None.

    Returns:
        Whether costs are known now.

    Raises:
        OSError: The file cannot be written; the costs are known all the same.
    """
    if load_costs(model, folder):
        return True
    if not calibration.calibrate_quickly(model, state_of(model).learned.costs[PASSES[0]]):
        return False
    save_costs(model, folder)
    return True


def save_costs(model: PreTrainedModel, folder: Path | str | None = None, *, compile: bool = False) -> Path:
    """Write the measured step costs of a model to a file, replacing an older one; returns its path.

    Args:
        model: The model.
        folder: Where to write; the platform's cache folder when None.
        compile: Whether to save the costs of compiled steps.

    Raises:
        OSError: It cannot be written; an older file is still whole then.
    """
    passes = PASSES[compile]
    return calibration.write_costs(model, state_of(model).learned.costs[passes], folder, passes)


def calibrate_costs(
    model: PreTrainedModel, contexts: Sequence[int] = calibration.CONTEXTS, *, compile: bool = False
) -> calibration.Calibration:
    """Measure the costs of steps of every size at some lengths of context, instead of learning them while decoding.

    Args:
        model: A causal language model.
        contexts: Tokens in the cache.
        compile: Whether to measure compiled steps; that compiles them.

    Raises:
        ConfigError: A context is out of its range.
        UnsupportedModelError: The model cannot verify drafts.
    """
    validate_causal_lm(model, "be calibrated; it learns its costs while it decodes")
    cost = state_of(model).learned.costs[PASSES[compile]]
    nodes, limit = calibration.NODES, context_limit(model)
    most, span = math.inf, "at least 1 token"
    if limit is not None:
        most = limit - max(nodes) - 1
        span = f"from 1 to {most} tokens, which with {max(nodes)} nodes fill the model's context"
    for context in contexts:
        if not 1 <= context <= most:
            raise ConfigError(f"context must be {span}, got {context}")
    return calibration.calibrate(model, cost, contexts=contexts, nodes=nodes, compiles=compile)
