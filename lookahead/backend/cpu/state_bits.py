"""How recurrent layers run in passes over trees: by kernels that agree with them, or with how many nodes per call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lookahead.backend.cpu.exact_attention import MAX_ROWS
from lookahead.backend.protocol import Backend, BitPolicy
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.utils.kept_values import truth

_NODES = (2, 3, 5, 8, 16, MAX_ROWS)
_PROMPT = 8  # tokens
_CHAIN = 8  # nodes of the chain in a compared tree, more than the taps of a convolution; others branch off in turn
# Trees, by their parents, and the paths that are committed, one after the other. Small trees may run by other code
# than large ones.
_LARGE = [*np.arange(-1, _CHAIN - 1).clip(0), *(np.arange(_CHAIN, MAX_ROWS) % _CHAIN)]
_PASSES = (_LARGE, range(_CHAIN)), ([0, 0, 1], (0,)), ([0, 0, 0], (0, 2)), (_LARGE, (0, 1, 2, _CHAIN + 2))
_TOLERANCE = 1e-4  # of logits and states in float32, relative to their norm


class Mixing(NamedTuple):
    """How the recurrent layers of a model run in passes over trees."""

    by_kernels: bool = False  # those that kernels can compute
    most: int = 1  # nodes per call of any other, if half-precision bits are kept

    @classmethod
    def of(cls, value: Any) -> Mixing:
        """Parse a stored value; TypeError or ValueError for anything else."""
        by_kernels, most = value
        if type(most) is not int or not 1 <= most <= MAX_ROWS:
            raise TypeError(f"it must be a whole number from 1 to {MAX_ROWS}, got {most!r}")
        return cls(truth(by_kernels), most)


@torch.inference_mode()
def mixing_of(make: Callable[[Mixing, bool], Backend], vocabulary: int, *, has_kernels: bool, is_half: bool) -> Mixing:
    """How recurrent layers run fastest with the states of single-node calls: in half precision with the same bits.

    Args:
        make: Makes a backend of one row, and takes whether one layer of every kind runs its own code beside kernels.
        vocabulary: Number of token ids.
        has_kernels: Whether kernels can compute some of the layers.
        is_half: Whether bits must be the same.
    """
    if has_kernels and _kernels_agree(make, vocabulary, is_half):
        return Mixing(by_kernels=True)
    return Mixing(most=_nodes_of_call(make, vocabulary) if is_half else 1)


def _kernels_agree(make: Callable[[Mixing, bool], Backend], vocabulary: int, is_half: bool) -> bool:
    """Whether kernels give the logits of trees, and the states after their commits, that calls of the layers give.

    Own code takes as long for a tree as for its nodes one after the other. Layers of a kind are alike, so only one of
    every kind runs it. Both runs continue from one reading of the prompt.
    """
    results, backends = [], [make(Mixing(by_kernels=True), has_samples) for has_samples in (True, False)]
    begun, cache = _begun(backends[0], vocabulary).cache.extract_row(0), backends[1].cache
    cache.copy_prefix_from(0, [begun.kv.get(at) for at in range(max(begun.kv, default=-1) + 1)], begun.tokens)
    for at, states in begun.states.items():
        cache.layers[at].committed[0] = states
    for backend in backends:
        made = list[Tensor]()
        for parents, path in _PASSES:
            tree = TokenTree.from_parents(_tokens(len(parents), vocabulary), parents)
            with backend.serving():
                made.append(backend.score([tree], BitPolicy.SOLO))
                backend.cache.commit(0, np.array(path, np.int32))
            made += [states.clone() for layer in backend.cache.states for states in layer.committed[0].values()]
        results.append(made)
    return all(_agree(*pair, is_half=is_half) for pair in zip(*results, strict=True))


def _agree(own: Tensor, other: Tensor, *, is_half: bool) -> bool:
    """Whether tensors have equal bits, or in float32 are equal up to rounding."""
    return torch.equal(own, other) if is_half else bool((own - other).norm() <= _TOLERANCE * own.norm())


def _nodes_of_call(make: Callable[[Mixing, bool], Backend], vocabulary: int) -> int:
    """The most siblings per call whose logits and states are bit for bit those of single-node calls; at least 1.

    States are mostly float32, which shows another order of sums at once.
    """
    backends = [_begun(make(Mixing(most=most), False), vocabulary) for most in (1, MAX_ROWS)]
    most = 1
    for nodes in _NODES:
        tree = TokenTree.from_parents(_tokens(nodes + 1, vocabulary), [0] * (nodes + 1))
        alone, together = (_scored(backend, tree) for backend in backends)
        if not all(map(torch.equal, alone, together)):
            break
        most = nodes
    return most


def _tokens(count: int, vocabulary: int) -> IntArray:
    """Different tokens, if the vocabulary has so many."""
    return np.arange(count, dtype=np.int32) * max(1, vocabulary // count) % vocabulary


def _begun(backend: Backend, vocabulary: int) -> Backend:
    """The backend, after a prompt."""
    with backend.serving():
        backend.read([(np.arange(_PROMPT, dtype=np.int32) * 7 + 1) % vocabulary])
        backend.cache.commit(0, np.zeros(1, np.int32))
    return backend


def _scored(backend: Backend, tree: TokenTree) -> list[Tensor]:
    """The logits of a tree, and the states of the root's children."""
    with backend.serving():
        logits = backend.score([tree], BitPolicy.SOLO)
    states = [each for layer in backend.cache.states for each in layer.level(1).values()]
    return [logits, *states]
