"""The private names of transformers and torch that this package uses, and the effect if one is missing.

If a name that every call needs is missing, all calls use transformers' loop, and a warning names it.
`make test-newest` runs the suite with the newest releases.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

_PLAIN = "every call goes to the loop of transformers, with a warning"


class PrivateName(NamedTuple):
    """A private name of a library, which may disappear."""

    place: str  # its module and class; empty if only some objects have it
    since: str  # the release that introduced it, or the first one checked
    without: str = _PLAIN  # the effect if it is missing


_LOOP = "transformers.generation.utils.GenerationMixin"
_MODULE = "torch.nn.Module"
_NOTHING = "nothing is lost"

TRANSFORMERS: dict[str, PrivateName] = {
    "_attn_implementation": PrivateName("transformers.PretrainedConfig", "4.36"),
    "_beam_search": PrivateName(_LOOP, "4.30"),
    "_can_set_attn_implementation": PrivateName("transformers.PreTrainedModel", "4.54"),
    "_experts_implementation": PrivateName("", "5.0", "experts replaced in the registry of transformers are unseen"),
    "_is_hf_initialized": PrivateName("", "4.30", _NOTHING),
    "_is_stateful": PrivateName("transformers.PreTrainedModel", "4.42"),
    "_is_user_defined": PrivateName("", "5.17", "any cache may be the caller's, and is filled as his"),
    "_keys_to_ignore_on_load_unexpected": PrivateName(
        "transformers.PreTrainedModel", "4.30", "Qwen's MTP layers are refused"
    ),
    "_mask_length": PrivateName("", "5.19", "the length of the ids counts"),
    "_pad_token_tensor": PrivateName("", "4.43", "the configuration's own token of padding counts"),
    "_prefill": PrivateName(_LOOP, "5.0"),
    "_process_model_after_weight_loading": PrivateName(
        "transformers.quantizers.base.HfQuantizer", "4.38", "`quantize` leaves the weights as they are"
    ),
    "_reorder_cache": PrivateName("", "4.30", _NOTHING),
    "_sample": PrivateName(_LOOP, "4.30", "calls end with an error that names it"),
    "_update_model_kwargs_for_generation": PrivateName(_LOOP, "4.30"),
}
"""Private names of transformers. All are used in `lookahead.model`, except by a subclass of `Trainer`."""

TORCH: dict[str, PrivateName] = {
    "_C": PrivateName("torch", "2.0"),
    "_call_impl": PrivateName(_MODULE, "2.0"),
    "_compiled_call_impl": PrivateName(_MODULE, "2.0"),
    "_forward_hooks": PrivateName(_MODULE, "2.0"),
    "_forward_pre_hooks": PrivateName(_MODULE, "2.0"),
    "_get_dispatch_stack_at": PrivateName("torch._C", "2.0"),
    "_get_function_stack_at": PrivateName("torch._C", "2.0"),
    "_global_forward_hooks": PrivateName("torch.nn.modules.module", "2.0"),
    "_global_forward_pre_hooks": PrivateName("torch.nn.modules.module", "2.0"),
    "_len_torch_dispatch_stack": PrivateName("torch._C", "2.0"),
    "_len_torch_function_stack": PrivateName("torch._C", "2.0"),
    "_linear_pointwise": PrivateName("", "2.0", "products are torch's own"),  # only where oneDNN was built in
    "_modules": PrivateName(_MODULE, "2.0"),
    "_orig_mod": PrivateName("", "2.0", "a compiled model is taken as it is"),
    "_nn": PrivateName("torch._C", "2.0"),
    "_parameters": PrivateName(_MODULE, "2.0"),
    "_reorder_linear_weight": PrivateName("", "2.0", "products are torch's own"),
    "_scaled_dot_product_flash_attention": PrivateName("torch.ops.aten", "2.0"),
    "_scaled_dot_product_flash_attention_for_cpu": PrivateName("torch.ops.aten", "2.2"),
    "_to_copy": PrivateName("torch.ops.aten", "2.0"),
    "_version": PrivateName("torch.Tensor", "2.0"),
}
"""Private names of torch: to identify a pass's code in `lookahead.model`, and for calls in backends and kernels."""

OTHERS: dict[str, PrivateName] = {
    "_old_forward": PrivateName("", "accelerate 1.10", "an offloaded model is decoded plainly"),
    "_original_forward_func": PrivateName("", "compressed-tensors 0.15", "an offloaded model is decoded plainly"),
    "_exit": PrivateName("os", "Python 3", "an interrupted command ends some seconds later"),
    "_hf_hook": PrivateName("", "accelerate 1.10", "an offloaded model is taken to be on the meta device, and refused"),
    "_impl": PrivateName("numba.core.caching.Cache", "Numba 0.61", "AttributeError when the package is imported"),
    "_is_owned": PrivateName("", "Python 3", "AttributeError at the first call"),
    "_run_exitfuncs": PrivateName("atexit", "Python 3", "AttributeError where Ctrl-C ends a command"),
    "_save_data": PrivateName(
        "numba.core.caching.IndexDataCacheFile", "Numba 0.61", "AttributeError at the first call"
    ),
    "_save_index": PrivateName(
        "numba.core.caching.IndexDataCacheFile", "Numba 0.61", "AttributeError at the first call"
    ),
}
"""Private names of accelerate, compressed-tensors, Numba and Python."""


@cache
def missing_names() -> tuple[str, ...]:
    """Names needed for drafting that the installed transformers or torch lack."""
    named = (*TRANSFORMERS.items(), *TORCH.items())
    needed = [(name, entry.place) for name, entry in named if entry.without == _PLAIN]
    return tuple(f"{place}.{name}" for name, place in needed if not _has(place, name))


def _has(place: str, name: str) -> bool:
    """Whether a module, a class, or an instance of `nn.Module` has a name."""
    library, *parts = place.split(".")
    owner: Any = import_module(library)
    for part in parts:
        owner = getattr(owner, part, None)
    return hasattr(nn.Module() if owner is nn.Module else owner, name)
