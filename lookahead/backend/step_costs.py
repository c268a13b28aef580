"""Step costs of a model, saved between processes.

The library learns costs from its steps, and writes files only on request: a program can prepare or load costs before
its first call, and save what was learned. The command line prepares them.
"""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from torch import nn
from transformers import PreTrainedModel

from lookahead.backend.calibration import calibrate_quickly
from lookahead.config import refuses_removed
from lookahead.drafting.cost_model import StepCost
from lookahead.errors import ConfigError, one_line, warn
from lookahead.loading.quantized import QUANTIZED_LAYERS
from lookahead.model.model_state import state_of
from lookahead.utils.atomic import read_json, write_atomically
from lookahead.utils.locks import locked

_VERSION = 4  # of the files
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError)  # ConfigError is a ValueError


def identity(model: nn.Module) -> dict[str, Any]:
    """The key of step costs: parameter shapes, quantized weight types, dtype, device, threads and PyTorch version."""
    floats = (parameter for parameter in model.parameters() if parameter.is_floating_point())
    parameter = next(floats, next(model.parameters()))
    kinds = [module.kind for module in model.modules() if isinstance(module, QUANTIZED_LAYERS)]
    shapes = ",".join([*(f"{name}{tuple(weight.shape)}" for name, weight in model.named_parameters()), *kinds])
    device = parameter.device
    on_gpu = device.type == "cuda"
    return {
        "model": type(model).__name__,
        "shapes": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine() or device.type,
        "threads": 0 if on_gpu else torch.get_num_threads(),
        "torch": torch.__version__,
    }


def cost_path(model: nn.Module, folder: Path | str | None = None) -> Path:
    """The file of a model's step costs in `folder`, by default in the platform's cache folder."""
    own = identity(model)
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12]
    place = user_cache_path("lookahead", appauthor=False) / "costs" if folder is None else Path(folder)
    return place / f"{own['model']}-{own['dtype']}-{digest}.json"


def load_costs(model: PreTrainedModel, folder: Path | str | None = None) -> bool:
    """Load the step costs of a model from a file, to size drafts from the first step on.

    The first step scales them to the current speed of the machine, and later steps refine them.

    Costs are for one model shape, dtype, device, number of threads and version of PyTorch. An unreadable file is
    ignored with a warning.

    Args:
        model: The model.
        folder: The folder of the file; the platform's cache folder if None.

    Returns:
        Whether costs were loaded.
    """
    path = cost_path(model, folder)
    try:
        state_of(model).learned.cost.update(_read_costs(path, identity(model)))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except _UNREADABLE as error:
        warn(f"the step costs in {path} cannot be used, and are measured again: {one_line(error)}")
        return False
    return True


def prepare_costs(model: PreTrainedModel, folder: Path | str | None = None) -> bool:
    """Call `load_costs`; without a file, run a quick sweep of about 3 seconds or 30 plain steps and save it.

    Args:
        model: A causal language model. It is not measured if that would take over 30 seconds, or if it cannot verify
            drafts.
        folder: The folder of the file; the platform's cache folder if None.

    Returns:
        Whether costs are known now.

    Raises:
        OSError: The file cannot be written; the measured costs are used anyway.
    """
    if load_costs(model, folder):
        return True
    if not calibrate_quickly(model, state_of(model).learned.cost):
        return False
    save_costs(model, folder)
    return True


@refuses_removed
def save_costs(model: PreTrainedModel, folder: Path | str | None = None) -> Path:
    """Write the measured step costs of a model to a file; returns its path.

    An existing file is updated under its lock, and keeps costs of other batch sizes and contexts.

    Args:
        model: The model.
        folder: The folder of the file; the platform's cache folder if None.

    Raises:
        OSError: The file cannot be written; an older file is left intact.
    """
    path, costs = cost_path(model, folder), state_of(model).learned.cost.to_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    own = identity(model)
    with locked(path):
        merged = StepCost()
        with suppress(*_UNREADABLE):  # an unreadable file is replaced
            merged.update(_read_costs(path, own))
        merged.update(costs)
        content = {"version": _VERSION, "for": own, "costs": merged.to_dict()}
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    return path


def _read_costs(path: Path, own: dict[str, Any]) -> Any:
    """The costs in a file; FileNotFoundError also for a file of an older release, other `_UNREADABLE` if malformed."""
    content = read_json(path)
    if isinstance(content, dict) and content.get("version") in range(1, _VERSION):
        raise FileNotFoundError(path)
    if not isinstance(content, dict) or (content.get("version"), content.get("for")) != (_VERSION, own):
        raise ConfigError("it is not of this version or for this model")
    return content["costs"]
