"""Step costs on disk: one JSON file for each model, device, dtype and version of PyTorch."""

from __future__ import annotations

import hashlib
import json
import platform
import warnings
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from torch import nn

from lookahead.config import PASSES
from lookahead.drafting.cost_model import StepCost
from lookahead.errors import ConfigError
from lookahead.utils.atomic import read_json, write_atomically

_VERSION = 2


def cache_folder() -> Path:
    """Where the platform keeps what programs can make again, and there the folder for step costs."""
    return user_cache_path("lookahead", appauthor=False) / "costs"


def identity(model: nn.Module, passes: str = PASSES[0]) -> dict[str, Any]:
    """What the cost of a step depends on: the shape of the model, its dtype, its device, threads, PyTorch, its passes.

    Args:
        model: The model.
        passes: How it is run, one of `PASSES`.
    """
    parameter = next(model.parameters())
    shapes = ",".join(f"{name}{tuple(each.shape)}" for name, each in model.named_parameters())
    device = parameter.device
    on_gpu = device.type == "cuda"
    known = {
        "model": type(model).__name__,
        "shapes": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine() or device.type,
        "threads": 0 if on_gpu else torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return known if passes == PASSES[0] else {**known, "passes": passes}


def cost_path(model: nn.Module, folder: Path | str | None = None, passes: str = PASSES[0]) -> Path:
    """The file of a model's step costs in a folder, that of the platform when None."""
    known = identity(model, passes)
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
    return (Path(folder) if folder is not None else cache_folder()) / f"{known['model']}-{known['dtype']}-{digest}.json"


def read_costs(model: nn.Module, cost: StepCost, folder: Path | str | None = None, passes: str = PASSES[0]) -> bool:
    """Take over the costs a file holds; False where there is none for this model here.

    A file that cannot be read, or holds something else, is left alone with a warning; `write_costs` replaces it.
    """
    path = cost_path(model, folder, passes)
    known = identity(model, passes)
    try:
        content = read_json(path)
        if not isinstance(content, dict) or content.get("version") != _VERSION or content.get("for") != known:
            raise ConfigError("it is not of this version or for this model")
        cost.update(content["costs"])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, OverflowError, ConfigError) as error:
        reason = " ".join(str(error).split())
        warnings.warn(f"the step costs in {path} are ignored, they will be measured: {reason}", stacklevel=2)
        return False
    return True


def write_costs(model: nn.Module, cost: StepCost, folder: Path | str | None = None, passes: str = PASSES[0]) -> Path:
    """Write the costs known, all at once or not at all, over a file that is there; returns its path.

    Raises:
        OSError: The folder cannot be made or written to.
    """
    path = cost_path(model, folder, passes)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"version": _VERSION, "for": identity(model, passes), "costs": cost.to_dict()}
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return path
