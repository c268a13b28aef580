"""Heads as a proposer, and their folders: weights in safetensors, and a `config.json` that names their model."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lookahead.backend.cpu.product_bits import FEWEST_WEIGHTS
from lookahead.drafting.budget import PassTimes
from lookahead.drafting.proposal import Call, Proposer
from lookahead.errors import HeadsError, LookaheadError, one_line
from lookahead.loading.quantized import quantize_linears
from lookahead.model.model_state import state_of
from lookahead.ngram.hit_rates import AcceptanceTable
from lookahead.plugins.heads.assistant import ASSISTANTS, AssistantDrafter, open_assistant
from lookahead.plugins.heads.eagle import EagleDrafter, EagleHead, fused_layers
from lookahead.plugins.heads.guess_tree import HeadDrafter
from lookahead.plugins.heads.medusa import MedusaDrafter, MedusaHeads
from lookahead.plugins.heads.native_mtp import NATIVE_DEPTH, NativeDrafter, open_native
from lookahead.plugins.heads.target import lm_head
from lookahead.utils.atomic import read_json, replacing, write_atomically
from lookahead.utils.fingerprints import model_fingerprint

NATIVE = "native"  # instead of a folder: the MTP layer of the model's own checkpoint

TrainedHeads = MedusaHeads | EagleHead
Network = TrainedHeads | PreTrainedModel
Maker = Callable[[], TrainedHeads]

_FILES = {  # by kind, the files that may hold the weights; `write_heads` writes the first
    MedusaHeads.kind: ("medusa_lm_head.safetensors", "model.safetensors"),
    EagleHead.kind: ("model.safetensors", "pytorch_model.safetensors"),
}
_NATIVE_KIND, _ASSISTANT_KIND = "mtp", "assistant"  # in the stats
_REMOVED = (
    f"were removed: 'lookahead train' trains Medusa and EAGLE-3, and {NATIVE!r} uses the MTP layer of a checkpoint"
)
_DRAFTERS: dict[str, type[HeadDrafter]] = {MedusaHeads.kind: MedusaDrafter, EagleHead.kind: EagleDrafter}
_MEDUSA_PREFIX = "medusa_head."  # in checkpoints that hold the model too
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_PICKLES = (".pt", ".bin", ".pth", ".pkl")
_LAYER_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("rope_parameters", "rope_scaling", "rope_theta", "vocab_size", "max_position_embeddings", "attention_bias"),
)


def open_heads(folder: str | os.PathLike[str], model: PreTrainedModel) -> tuple[str, Network]:
    """Read heads for a model, in its dtype and on its device, ready to draft; returns their kind too.

    The folder is one of `write_heads`, a published checkpoint of Medusa, EAGLE-3 or an assistant of Gemma 4 in
    safetensors, or `NATIVE`. HeadsError if they are damaged, a pickle, of another architecture or of another model.
    """
    lm_head(model)  # checks first that the model supports heads
    if folder == NATIVE:
        return _NATIVE_KIND, open_native(model)
    if Path(folder).name == str(folder) and not Path(folder).exists():
        raise HeadsError(f"{folder}: neither a folder of heads nor {NATIVE!r}, the layer of the model's own checkpoint")
    place = Path(os.path.expanduser(folder))
    if not place.is_dir():
        raise HeadsError(_not_a_folder(place))
    config = read_object(place / "config.json", HeadsError)
    if config.get("model_type") in ASSISTANTS:
        return _ASSISTANT_KIND, _opened(place, partial(open_assistant, place, model))
    # Among published checkpoints only Medusa's have a distinct file name or size.
    is_medusa = "medusa_num_heads" in config or any(place.glob("medusa_lm_head.*"))
    kind = config.get("lookahead_heads") or (MedusaHeads.kind if is_medusa else EagleHead.kind)
    if kind == "mtp":
        raise HeadsError(f"{place}: heads of the kind 'mtp', which lookahead trained, {_REMOVED}")
    if kind not in list(_FILES):  # a list, since JSON values need not be hashable
        raise HeadsError(f"{place}: heads of an unknown kind, {kind!r}")
    tensors = _read_weights(place, kind)
    return kind, _opened(place, partial(_make, kind, config, tensors, model))


def _opened(place: Path, open_it: Callable[[], Network]) -> Network:
    """The network that `open_it` makes of a folder."""
    try:
        return open_it()
    except Exception as error:  # inconsistent sizes raise many errors in torch
        what = "" if isinstance(error, HeadsError) else f"unusable heads: {type(error).__name__}: "
        raise HeadsError(f"{place}: {what}{one_line(error)}") from error


def write_heads(heads: TrainedHeads, folder: str | os.PathLike[str], model: PreTrainedModel) -> None:
    """Write heads in bfloat16 into a new folder. The configuration is written last, so partial heads are not opened."""
    base = Path(model.config.name_or_path).name if model.config.name_or_path else type(model).__name__
    own = {
        "lookahead_heads": heads.kind,
        "base_model_name_or_path": base,
        "fingerprint": model_fingerprint(model),
        **_sizes_of(heads),
    }
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    tensors = {
        key: (tensor.bfloat16() if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for key, tensor in heads.state_dict().items()
    }
    with replacing(place / _FILES[heads.kind][0]) as file:
        file.write(save(tensors))
    write_atomically(place / "config.json", json.dumps(own, indent=2) + "\n")


def fresh_rates(heads: Network) -> AcceptanceTable:
    """The prior hit rates of guesses."""
    return AcceptanceTable(getattr(heads, "depth", NATIVE_DEPTH))


def drafter_of(heads: Network) -> type[HeadDrafter]:
    """The class of proposers for heads."""
    if isinstance(heads, PreTrainedModel) and heads.config.model_type in ASSISTANTS:
        return AssistantDrafter
    return _DRAFTERS.get(getattr(heads, "kind", NATIVE), NativeDrafter)


def _sizes_of(heads: TrainedHeads) -> dict[str, Any]:
    if isinstance(heads, MedusaHeads):
        return {"medusa_num_heads": heads.depth, "medusa_num_layers": heads.blocks}
    own: dict[str, Any] = heads.config.to_dict()
    sizes = {name: own[name] for name in _LAYER_SIZES if own.get(name) is not None}
    return sizes | {"draft_vocab_size": len(heads.d2t), _AUX_LAYERS: list(heads.hidden_layers)}


def read_object(path: Path, error_type: type[LookaheadError]) -> dict[str, Any]:
    """The JSON object of a file."""
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise error_type(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise error_type(f"{path}: must hold a JSON object, got {type(values).__name__}")
    return values


def _read_weights(place: Path, kind: str) -> dict[str, Tensor]:
    """Read the weights of a folder; a pickle is never opened."""
    names = _FILES[kind]
    file = next((place / name for name in names if (place / name).is_file()), None)
    if file is None:
        pickled = sorted(path for path in place.iterdir() if path.suffix in _PICKLES)
        missing = f"{place}: no {kind} heads: looked for {' and '.join(names)}"
        raise HeadsError(_not_a_folder(pickled[0]) if pickled else missing)
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise HeadsError(f"{file}: cannot be read: {one_line(error)}") from error


def _read_medusa(config: Mapping[str, Any], tensors: dict[str, Tensor], model: PreTrainedModel) -> Maker:
    """Heads with the sizes of their weights; a published configuration may differ from these."""
    if any(name.startswith(_MEDUSA_PREFIX) for name in tensors):
        own = {name.removeprefix(_MEDUSA_PREFIX): t for name, t in tensors.items() if name.startswith(_MEDUSA_PREFIX)}
        tensors.clear()
        tensors.update(own)
    blocks = sum(name.startswith("0.") and name.endswith(".linear.weight") for name in tensors)
    projection = tensors.get(f"0.{blocks}.weight")
    if projection is None or projection.dim() != 2:
        raise HeadsError(f"no Medusa heads; it holds {', '.join(sorted(tensors)[:4])}")
    vocab, hidden = projection.shape
    _check_base(config, model, hidden, vocab)
    heads = len({name.partition(".")[0] for name in tensors})
    return partial(MedusaHeads, hidden, vocab, heads=heads, blocks=blocks)


def _read_eagle(config: Mapping[str, Any], tensors: dict[str, Tensor], model: PreTrainedModel) -> Maker:
    if "fc.weight" in tensors and "midlayer.hidden_norm.weight" not in tensors:
        raise HeadsError(f"heads of EAGLE-1 and EAGLE-2 {_REMOVED}")
    for shared in ("embed_tokens.weight", "t2d"):  # the model's table, and the inverse of d2t
        tensors.pop(shared, None)
    if config.get("hidden_act", "silu") != "silu":
        raise HeadsError(f"hidden_act must be silu, got {config['hidden_act']!r}")
    if config.get("num_hidden_layers", 1) != 1:
        raise HeadsError(f"EAGLE heads of one layer are served, this one has {config['num_hidden_layers']}")
    if config.get("target_hidden_size", config.get("hidden_size")) != config.get("hidden_size"):
        raise HeadsError("EAGLE heads as wide as their model are served, this one differs from it")
    sizes = _layer_sizes({**config, "attention_bias": any(name.endswith("q_proj.bias") for name in tensors)})
    vocab = config.get("vocab_size", model.config.get_text_config().vocab_size)
    _check_base(config, model, sizes.hidden_size, vocab)
    if "lm_head.weight" not in tensors or "d2t" not in tensors:
        raise HeadsError("an EAGLE-3 head needs lm_head.weight and d2t")
    d2t, shape = tensors["d2t"], tensors["lm_head.weight"].shape
    if d2t.dtype not in (torch.int64, torch.int32) or d2t.shape != shape[:1]:
        raise HeadsError(
            f"d2t must hold a whole number for every row of lm_head.weight, got {d2t.dtype} of shape "
            f"{tuple(d2t.shape)} for {tuple(shape)}"
        )
    tokens = d2t + torch.arange(len(d2t))
    if int(tokens.min()) < 0 or int(tokens.max()) >= sizes.vocab_size:
        raise HeadsError(f"d2t names tokens beyond the model's {sizes.vocab_size}")
    named = config.get(_AUX_LAYERS) or (config.get("eagle_config") or {}).get(_AUX_LAYERS)
    most = model.config.get_text_config().num_hidden_layers
    if named and not (isinstance(named, list) and all(type(layer) is int and 0 <= layer <= most for layer in named)):
        raise HeadsError(f"{_AUX_LAYERS} must be a list of the model's layers, 0 to {most}, got {named!r}")
    layers = tuple(named or fused_layers(model))
    return partial(EagleHead, sizes, hidden_layers=layers, draft_vocab=len(d2t))


def _layer_sizes(config: Mapping[str, Any]) -> LlamaConfig:
    try:
        sizes = {name: config[name] for name in _LAYER_SIZES if config.get(name) is not None}
        return LlamaConfig(**sizes, num_hidden_layers=1)
    except Exception as error:  # transformers raises many unrelated types
        raise HeadsError(f"config.json names no sizes of a layer: {error}") from error


def _check_base(config: Mapping[str, Any], model: PreTrainedModel, hidden: int, vocab: int) -> None:
    whose = f"heads of another model ({config.get('base_model_name_or_path') or 'unnamed'}):"
    if hidden != (size := model.config.get_text_config().hidden_size):
        raise HeadsError(f"{whose} they read hidden states of {hidden}, and those of this model have {size}")
    if vocab != (count := len(lm_head(model).weight)):
        raise HeadsError(f"{whose} they know {vocab} tokens, and this model {count}")
    fingerprint = config.get("fingerprint")  # published checkpoints have none
    if fingerprint is not None and fingerprint != (own := model_fingerprint(model)):
        raise HeadsError(f"{whose} its fingerprint is {fingerprint}, and that of this model {own}")


def _make(kind: str, config: Mapping[str, Any], tensors: dict[str, Tensor], model: PreTrainedModel) -> TrainedHeads:
    """Create heads from the weights, and draft once to find inconsistent sizes before decoding."""
    make = (_read_medusa if kind == MedusaHeads.kind else _read_eagle)(config, tensors, model)
    with torch.device("meta"):  # random weights would change the random state of decoding
        heads = make()
    try:
        heads.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise HeadsError(f"no {kind} heads of an architecture that is served: {error}") from error
    if isinstance(heads, EagleHead):
        heads.rotation = LlamaRotaryEmbedding(heads.config)  # its buffers are not weights, and were created on meta
    weight = lm_head(model).weight
    heads = heads.to(weight.device, weight.dtype).eval().requires_grad_(False)
    drafter = drafter_of(heads)(heads, model, fresh_rates(heads))
    states = weight.new_ones(2, weight.shape[1] * len(drafter.hidden_layers))
    with torch.inference_mode():
        drafter.read([0], [torch.zeros(2, dtype=torch.int64, device=weight.device)], [states])
        drafter.draft([0], 1)
    return heads


def _not_a_folder(path: Path) -> str:
    """The message for a path that is not a folder of heads: why it is not opened, and what to do."""
    if path.suffix not in _PICKLES:
        return f"{path}: not a folder; name the folder that holds config.json and the weights"
    target = path.with_suffix(".safetensors").name
    return (
        f"{path}: a pickle, which could run any code and is not opened. If you trust its source, convert it once "
        f'in its folder: python -c "import torch; from safetensors.torch import save_file; '
        f"save_file(torch.load('{path.name}', weights_only=True), '{target}')\""
    )


class Heads:
    """Drafts from heads trained for the model, see `lookahead train`.

    They are loaded at the first call for a model, and their hit rates are kept for later calls. On a CPU their larger
    layers are rounded to 8 bits, which changes guesses but no token.

    Example:
        `LookaheadConfig(proposers=("prompt", "recycled", lookahead.Heads("heads/")))`

    Args:
        folder: The output of `lookahead train`, a published checkpoint of Medusa, EAGLE-3 or one of Gemma 4's
            assistants in safetensors, or `"native"` for the MTP layer of the model's own checkpoint.
        name: Name of the source in the stats; the kind of heads when None.

    Raises:
        HeadsError: When called: the folder has no heads, or they belong to another model.
    """

    def __init__(self, folder: str | os.PathLike[str], *, name: str | None = None) -> None:
        self._folder = os.fspath(folder)
        self._name = name

    def __call__(self, call: Call) -> Proposer:
        """The proposer of one call."""
        kind, network, rates, times = state_of(call.model).learned.of(self, partial(self._open, call.model))
        own = times[(call.rows - 1).bit_length()] if call.is_timed else None
        return drafter_of(network)(network, call.model, rates, call.warp, self._name or kind, own)

    def _open(self, model: PreTrainedModel) -> tuple[str, Network, AcceptanceTable, defaultdict[int, PassTimes]]:
        kind, network = open_heads(self._folder, model)
        if not isinstance(network, PreTrainedModel) and lm_head(model).weight.device.type == "cpu":
            # A pass over few guesses is bound by reading weights, and rounded weights guess as well.
            quantize_linears(network, lambda layer: "int8" if layer.weight.numel() >= FEWEST_WEIGHTS else "")
        return kind, network, fresh_rates(network), defaultdict(PassTimes)
