"""The running pass of a thread on a CPU, as packed weights and fused layers see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import NamedTuple

import torch

from lookahead.backend.protocol import BitPolicy
from lookahead.model.model_state import pass_local

_MAX_FUSED_ELEMENTS = 1 << 17  # elements of the hidden states, up to which layers are fused
_MAX_SHARED_ELEMENTS = 1 << 15  # above it torch would use several threads; the kernels run on one


class CpuPass(NamedTuple):
    """The settings that decide how layers compute in a pass."""

    policy: BitPolicy  # of rows of half precision
    is_prompt: bool = False  # it reads a part of a prompt, of any number of rows, as torch does
    packs: bool = False  # weights may be packed
    packs_experts: bool = False  # so may those of mixtures
    fewest: int = 1  # float32 rows from which packed weights are faster
    last_rows: int = 0  # packed prompts, whose last tokens the output layer multiplies as it does each alone
    most_elements: int = 0  # elements of hidden states, up to which layers are fused
    most_in_call: int = 0  # elements of hidden states, up to which a pass is one call and threads share its products


class _Thread(local):
    """What a thread runs.

    Attributes:
        running: Its `CpuPass`; None outside of passes.
        is_cold: Whether the pass took longer than later ones will: it packed a weight, or tried several numbers of
            threads.
    """

    running: CpuPass | None = None
    is_cold = False


thread = pass_local(_Thread)


@contextmanager
def running(cpu_pass: CpuPass, *, fuses: bool = True) -> Iterator[CpuPass | None]:
    """Run a pass on this thread until the block ends; yields the pass as the layers see it.

    The model's own code runs under autocast, which chooses the dtype of products, and under a torch mode that sees
    every operator. With `fuses=False` layers are not fused.
    """
    outer, thread.is_cold = thread.running, False
    modes = [torch._C._get_function_stack_at(at) for at in range(torch._C._len_torch_function_stack())]
    # A default device changes no values.
    is_seen = bool(modes) and any(type(mode).__name__ != "DeviceContext" for mode in modes)
    is_left = torch.is_autocast_enabled("cpu") or is_seen or torch._C._len_torch_dispatch_stack() > 0
    if fuses and not torch.is_grad_enabled():
        most = _MAX_FUSED_ELEMENTS if torch.get_num_threads() == 1 else _MAX_SHARED_ELEMENTS
        cpu_pass = cpu_pass._replace(most_elements=most, most_in_call=_MAX_FUSED_ELEMENTS)
    thread.running = None if is_left else cpu_pass
    try:
        yield thread.running
    finally:
        thread.running = outer
