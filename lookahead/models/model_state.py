"""State of a model that is kept between calls, one `ModelState` per model, and what its modules hold meanwhile."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch

from lookahead.drafting.budget import BranchState, EnableRule
from lookahead.drafting.cost_model import StepCost

T = TypeVar("T")


class LearnedState:
    """What decoding measures about a model. It is kept when the weights change, as in training."""

    def __init__(self) -> None:
        self.lock = RLock()  # held while any of it is read or changed
        # Step costs and savings of drafting, by how the model is run (`LookaheadConfig.passes`).
        self.costs: defaultdict[str, StepCost] = defaultdict(StepCost)
        self.rules: defaultdict[str, EnableRule] = defaultdict(EnableRule)
        # Savings of the lookahead branch, by its size and the other proposers.
        self.branch: defaultdict[Hashable, dict[int, BranchState]] = defaultdict(dict)
        self._owned: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def of(self, owner: object, make: Callable[[], T]) -> T:
        """State that a proposer keeps about the model: made at its first call, dropped with the proposer."""
        with self.lock:
            value: T | None = self._owned.get(owner)
            if value is None:
                value = self._owned[owner] = make()
            return value


class ModelState:
    """State of one model. It is dropped with the model, and a copy of the model starts with a new one."""

    def __init__(self, structure: Hashable = None) -> None:
        self.structure = structure
        self.learned = LearnedState()
        self.has_failed_capture = False  # whether recording CUDA graphs failed; it is not tried again
        self.graphs: Any = None  # `KeptGraphs` that no call uses
        self.linears: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # packed weights by layer
        self.tokenizers: WeakSet[Any] = WeakSet()  # that were compared with the model
        self._probed: dict[str, tuple[Version, Any]] = {}
        self._probing = Lock()

    def probed(self, name: str, model: Any, probe: Callable[[], T]) -> T:
        """The result of a probe, cached until a weight or the code of a pass changes; other threads wait for it."""
        with self._probing:
            version, known = version_of(model), self._probed.get(name)
            if known is not None and known[0].number == version.number:
                value: T = known[1]
                return value
            value = probe()
            self._probed[name] = version_of(model), value
            return value


_guard = Lock()
_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_uses: Counter[tuple[int, str]] = Counter()  # open blocks by attribute; they keep the module of an id alive


def state_of(model: Any) -> ModelState:
    """The state of a model; a new one once its vocabulary, its dtype or the class of one of its modules changed."""
    modules = [(type(module), module.__dict__.get("num_embeddings")) for module in model.modules()]
    structure = getattr(model, "dtype", None), hash(tuple(modules))
    with _guard:
        state = _states.get(model)
        if state is None or state.structure != structure:
            state = _states[model] = ModelState(structure)
        return state


@contextmanager
def use_learned(model: Any, learned: LearnedState) -> Iterator[None]:
    """Use other measurements for a model until the block ends."""
    state = state_of(model)
    own, state.learned = state.learned, learned
    try:
        yield
    finally:
        state.learned = own


class Version(NamedTuple):
    """A number for the weights and the code of a pass, and the references to them that it was made of.

    While these are kept, no other object gets their ids, although the weights and the code may go.
    """

    number: int
    references: list[Any]


def _reference(value: Any) -> Any:
    try:
        return weakref.ref(value)  # the same while one is kept
    except TypeError:
        return value


def version_of(model: Any) -> Version:
    """What changes with the weights and with the code of a pass: attention, hooks, `forward`, autocast.

    Every in-place operation increments the version of a tensor.
    """
    modules = list(model.modules())
    weights = [each for module in modules for each in module._parameters.values() if each is not None]
    # Offloaded weights are other objects after every pass, and inference tensors have no version.
    weights = [each for each in weights if not each.is_meta and not each.is_inference()]
    with _guard:  # while another thread decodes, some have a `forward` of ours, which takes the place of none
        owns = [None if (id(each), "forward") in _uses else each.__dict__.get("forward") for each in modules]
    codes = *owns, *(module._compiled_call_impl for module in modules)
    references = [_reference(each) for each in (*weights, *codes)]
    # Those of the model itself stand around its passes, and ours are there during some passes of other threads.
    hooked = [each for module in modules[1:] for each in (module._forward_hooks, module._forward_pre_hooks)]
    named = [(key, str(getattr(hook, "__module__", ""))) for each in hooked for key, hook in list(each.items())]
    hooks = [key for key, name in named if not name.startswith("lookahead.")]
    attention = model.config.get_text_config()._attn_implementation
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    versions = [each._version for each in weights]
    return Version(hash((*map(id, references), *versions, *hooks, attention, *autocast)), references)


@contextmanager
def replaced(name: str, values: Collection[tuple[Any, Any, Any]]) -> Iterator[None]:
    """Set an attribute of modules until the last open block of any thread ends.

    Each module comes with its own value, None for that of its class, and the one that takes its place.
    """
    with _guard:
        for module, _, value in values:
            _uses[id(module), name] += 1
            module.__dict__[name] = value
    try:
        yield
    finally:
        with _guard:
            for module, own, _ in values:
                key = id(module), name
                _uses[key] -= 1
                if _uses[key]:
                    continue
                del _uses[key]
                module.__dict__.pop(name, None)
                if own is not None:
                    module.__dict__[name] = own
