"""How recurrent layers run in passes over trees: by kernels that agree with them, or with how many nodes per call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lookahead.backend.cpu.exact_attention import MAX_ROWS
from lookahead.backend.cpu.mixer_checks import keeps_last_bits
from lookahead.backend.cpu.tree_mixers import TreeMixer, samples_of
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
_TOLERANCE = 1e-4  # of outputs and states in float32, relative to their norm


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
def mixing_of(make: Callable[[Mixing], Any], mixers: Iterable[TreeMixer], vocabulary: int, *, is_half: bool) -> Mixing:
    """How recurrent layers run fastest with the states of single-node calls: in half precision with the same bits.

    Args:
        make: Makes a `CpuBackend` of one row.
        mixers: The layers that kernels can compute.
        vocabulary: Number of token ids.
        is_half: Whether bits must be the same.
    """
    samples = samples_of(mixers)  # layers of a kind are alike
    if samples:
        backend = make(Mixing(by_kernels=True))
        with backend.serving():
            if all(_kernels_agree(backend, mixer, is_half) for mixer in samples) and (
                not is_half or all(map(keeps_last_bits, samples))
            ):
                return Mixing(by_kernels=True)
    return Mixing(most=_nodes_of_call(make, vocabulary) if is_half else 1)


def _kernels_agree(backend: Any, mixer: TreeMixer, is_half: bool) -> bool:
    """Whether kernels give the outputs of trees, and the states after their commits, that a layer gives node by node.

    The layer runs alone over random inputs, since passes of the whole model would take a hundred times as long.
    """
    cache, layer, results = backend.cache, backend.cache.layers[mixer.at], list[list[Tensor]]()
    source, size, like = torch.Generator().manual_seed(0), mixer.module.out_proj.out_features, mixer.conv.weight
    text, *trees = (
        torch.randn(1, count, size, generator=source, dtype=torch.float32, device="cpu").to(like.dtype)
        for count in (_PROMPT, *(len(parents) for parents, _ in _PASSES))
    )
    cache.begin_prompt(0)
    backend.mix(mixer, text, by_kernels=False)
    layer.read(0)
    begun = layer.committed[0]
    for by_kernels in (False, True):
        layer.committed[0], made = {key: state.clone() for key, state in begun.items()}, list[Tensor]()
        for hidden, (parents, path) in zip(trees, _PASSES, strict=True):
            cache.slots.begin(len(parents))
            cache.begin_trees([TokenTree.from_parents(range(len(parents)), parents)], like.device)
            made.append(backend.mix(mixer, hidden, by_kernels=by_kernels))
            layer.committed[0] = layer.states_after(0, cache.levels, np.array(path, np.int32))
            made += [states.clone() for states in layer.committed[0].values()]
        results.append(made)
    return all(_agree(*pair, is_half=is_half) for pair in zip(*results, strict=True))


def _agree(own: Tensor, other: Tensor, *, is_half: bool) -> bool:
    """Whether tensors have equal bits, or in float32 are equal up to rounding."""
    return torch.equal(own, other) if is_half else bool((own - other).norm() <= _TOLERANCE * own.norm())


def _nodes_of_call(make: Callable[[Mixing], Backend], vocabulary: int) -> int:
    """The most siblings per call whose logits and states are bit for bit those of single-node calls; at least 1.

    States are mostly float32, which shows another order of sums at once.
    """
    backends = [_begun(make(Mixing(most=most)), vocabulary) for most in (1, MAX_ROWS)]
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
    states = [state for layer in backend.cache.states for state in layer.level(1).values()]
    return [logits, *states]
