"""Choice of the backend for a model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from lookahead.backend.cpu.cpu_backend import CpuBackend
from lookahead.backend.gpu import cuda_graphs
from lookahead.backend.gpu.gpu_backend import GpuBackend
from lookahead.backend.torch_backend import TorchBackend
from lookahead.model.facts import decoder_of
from lookahead.model.model_state import plan_of

_KINDS: dict[str, type[TorchBackend]] = {"cpu": CpuBackend, "cuda": GpuBackend}
_OPTIONS = {
    **dict.fromkeys(("packs", "has_kernels", "is_draft", "packs_prompts", "shares_beginnings"), CpuBackend),
    **dict.fromkeys(("captures", "most_nodes"), GpuBackend),
}


def backend_for(model: PreTrainedModel, **options: Any) -> TorchBackend:
    """The backend for a model's device; options of other backends are ignored.

    Args:
        model: The model.
        **options: Options of `TorchBackend`; `packs`, `has_kernels`, `is_draft`, `packs_prompts` and
            `shares_beginnings` of `CpuBackend`; `captures` and `most_nodes` of `GpuBackend`.
    """
    kind = GpuBackend if options.get("captures") else _KINDS.get(plan_of(model).device.type, TorchBackend)
    return kind(model, **{name: value for name, value in options.items() if issubclass(kind, _OPTIONS.get(name, kind))})


def records_graphs(model: PreTrainedModel) -> bool:
    """Whether passes over drafts of a model are recorded as CUDA graphs: on one GPU, until a recording fails."""
    device = plan_of(model).device
    if device.type != "cuda" or decoder_of(model) is not model:
        return False
    return cuda_graphs.graphs_unsupported_reason(model, device) is None
