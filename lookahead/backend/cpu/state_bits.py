"""How many nodes a recurrent layer may take per half-precision call so that each keeps the bits it has alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lookahead.backend.cpu.exact_attention import MAX_ROWS
from lookahead.backend.protocol import Backend, BitPolicy
from lookahead.drafting.tree import TokenTree

_NODES = (2, 3, 5, 8, 16, MAX_ROWS)
_PROMPT = 8  # tokens


@torch.inference_mode()
def nodes_of_call(make: Callable[[int], Backend], vocabulary: int) -> int:
    """The most siblings per call whose logits and states are bit for bit those of single-node calls; at least 1.

    States are mostly float32, which shows another order of sums at once.

    Args:
        make: Makes a backend of one row that calls recurrent layers with at most the given number of nodes.
        vocabulary: Number of token ids.
    """
    prompt = (np.arange(_PROMPT, dtype=np.int32) * 7 + 1) % vocabulary
    backends = [make(1), make(MAX_ROWS)]
    for backend in backends:
        with backend.serving():
            backend.read([prompt])
            backend.commit(0, np.zeros(1, np.int32))
    most = 1
    for nodes in _NODES:
        tokens = (np.arange(nodes + 1, dtype=np.int32) * 5 + 2) % vocabulary
        tree = TokenTree.from_parents(tokens, [0] * (nodes + 1))
        alone, together = (_scored(backend, tree) for backend in backends)
        if not all(map(torch.equal, alone, together)):
            break
        most = nodes
    return most


def _scored(backend: Backend, tree: TokenTree) -> list[Any]:
    """The logits of a tree, and the states of the root's children."""
    with backend.serving():
        logits = backend.score([tree], BitPolicy.SOLO)
    states = [each for layer in backend.cache.states for each in layer.level(1).values()]
    return [logits, *states]


def count_of(value: Any) -> int:
    """Parse a stored number of nodes; TypeError for anything else."""
    if type(value) is not int or not 1 <= value <= MAX_ROWS:
        raise TypeError(f"it must be a whole number from 1 to {MAX_ROWS}, got {value!r}")
    return value
