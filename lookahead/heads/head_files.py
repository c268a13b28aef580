"""Files of heads: a folder with weights in safetensors and a `config.json` that says what model they are of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.errors import HeadsError
from lookahead.heads.base_model import body_of
from lookahead.ngram.replacing import replacing
from lookahead.utils.atomic import read_json, write_atomically
from lookahead.utils.fingerprints import model_fingerprint

CONFIG = "config.json"
_PICKLES = (".pt", ".bin", ".pth", ".pkl")


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """What `config.json` says of heads.

    Attributes:
        kind: `"medusa"`, `"eagle"` or `"mtp"`; None in a published checkpoint, which does not say.
        base: Where the model was loaded from when they were trained; for people to read.
        fingerprint: Of that model; None in a published checkpoint.
        sizes: Everything else.
    """

    kind: str | None
    base: str
    fingerprint: str | None
    sizes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: str, model: PreTrainedModel, sizes: Mapping[str, Any]) -> HeadsConfig:
        """The configuration of heads trained for a model."""
        base = Path(model.config.name_or_path).name if model.config.name_or_path else type(model).__name__
        return cls(kind, base, model_fingerprint(model, body_of(model)), dict(sizes))

    def to_json(self) -> str:
        """As it stands in the file."""
        own = {"lookahead_heads": self.kind, "base_model_name_or_path": self.base, "fingerprint": self.fingerprint}
        return json.dumps({**own, **self.sizes}, indent=2) + "\n"


def write_heads(folder: str | os.PathLike[str], config: HeadsConfig, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write heads into a folder, which is made; the configuration comes last, so that half of them is none.

    Raises:
        OSError: They cannot be written.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    with replacing(place / name) as file:
        file.write(save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}))
    write_atomically(place / CONFIG, config.to_json())


def read_heads(
    folder: str | os.PathLike[str], kind: str, names: Sequence[str]
) -> tuple[HeadsConfig, dict[str, Tensor]]:
    """Read the configuration and the weights of heads; a pickle is never opened.

    Args:
        folder: Where they are.
        kind: What they must be, where the configuration says.
        names: Files that may hold the weights; the first one that is there is read.

    Raises:
        HeadsError: They are missing, damaged, of another kind, or a pickle.
    """
    place = Path(folder).expanduser()
    config = read_config(place)
    file = next((place / name for name in names if (place / name).is_file()), None)
    if file is None:
        pickled = sorted(each for each in place.iterdir() if each.suffix in _PICKLES)
        raise HeadsError(
            _refuse_file(pickled[0]) if pickled else f"{place}: no {kind} heads: looked for {' and '.join(names)}"
        )
    if config.kind not in (kind, None):
        raise HeadsError(f"{place}: {config.kind} heads, not {kind} heads")
    try:
        return config, load_file(file)
    except (OSError, SafetensorError) as error:
        raise HeadsError(f"{file}: cannot be read: {error}") from error


def check_base(
    folder: str | os.PathLike[str], config: HeadsConfig, model: PreTrainedModel, *, hidden: int, vocab: int
) -> None:
    """Refuse heads of another model.

    Args:
        folder: Where they are.
        config: What it says of them.
        model: The model they are to guess for.
        hidden: Size of the hidden states they read.
        vocab: Tokens they know.

    Raises:
        HeadsError: They do not fit the model, or fit it and were trained for another.
    """
    sizes: Any = model.config.get_text_config()
    if hidden != sizes.hidden_size:
        raise HeadsError(
            f"{folder}: heads of another model ({config.base}): they read hidden states of {hidden}, "
            f"and those of this model have {sizes.hidden_size}"
        )
    known = model.get_output_embeddings().weight.shape[0]
    if vocab != known:
        raise HeadsError(
            f"{folder}: heads of another model ({config.base}): they know {vocab} tokens, and this model {known}"
        )
    if config.fingerprint is not None and config.fingerprint != (own := model_fingerprint(model, body_of(model))):
        raise HeadsError(
            f"{folder}: heads of another model ({config.base}): its fingerprint is {config.fingerprint}, "
            f"and that of this model {own}"
        )


@contextmanager
def head_errors(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever goes wrong while heads are made of a folder into an error that names it.

    Sizes and tensors that do not belong together come to light in many places, most of them of torch and transformers.
    """
    try:
        yield
    except HeadsError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise HeadsError(f"{folder}: heads that cannot be used: {type(error).__name__}: {said}") from error


def read_config(folder: str | os.PathLike[str]) -> HeadsConfig:
    """What `config.json` says.

    Raises:
        HeadsError: There is no such folder, or no such file in it, or it is damaged.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise HeadsError(_refuse_file(place))
    path = place / CONFIG
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise HeadsError(f"{path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise HeadsError(f"{path}: must hold a JSON object, got {type(values).__name__}")
    kind, base = values.pop("lookahead_heads", None), values.pop("base_model_name_or_path", None)
    return HeadsConfig(kind, str(base or "unnamed"), values.pop("fingerprint", None), values)


def _refuse_file(path: Path) -> str:
    """Why a path that is no folder of heads is not opened, and what to do."""
    if path.suffix not in _PICKLES:
        return f"{path}: no folder; name the folder that holds {CONFIG} and the weights"
    target = path.with_suffix(".safetensors").name
    return (
        f"{path}: a pickle, which could run any code and is not opened. If you trust where it is from, convert it once "
        f'in its folder: python -c "import torch; from safetensors.torch import save_file; '
        f"save_file(torch.load('{path.name}', weights_only=True), '{target}')\""
    )
