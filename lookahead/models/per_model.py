"""What is remembered of models, for as long as they stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_locks: WeakKeyDictionary[Any, Lock] = WeakKeyDictionary()
_guard = Lock()


class PerModel(Generic[T]):
    """One value per model, forgotten when its vocabulary, its dtype or the class of one of its modules changes.

    Args:
        heeds_weights: Whether to forget it as well when weights change, as training changes them.
    """

    def __init__(self, *, heeds_weights: bool = False) -> None:
        self._heeds_weights = heeds_weights
        self._known: WeakKeyDictionary[Any, tuple[Hashable, T]] = WeakKeyDictionary()

    def get(self, model: Any) -> T | None:
        """The value of a model as it is now; None where there is none."""
        state, value = self._known.get(model, (None, None))
        return value if value is not None and state == self._state_of(model) else None

    def set(self, model: Any, value: T) -> T:
        """Remember a value, and return it."""
        self._known[model] = self._state_of(model), value
        return value

    def _state_of(self, model: Any) -> Hashable:
        """What must stay the same."""
        parts: list[Hashable] = []
        for module in model.modules():
            parts.append((type(module), getattr(module, "num_embeddings", None)))
            for weights in module._parameters.values() if self._heeds_weights else ():
                # Every operation in place counts a version up. Offloaded weights are other objects after every pass,
                # and inference tensors have no version.
                if weights is not None and not weights.is_meta and not weights.is_inference():
                    parts.append((id(weights), weights._version))
        return model.dtype, hash(tuple(parts))


def probed_once(model: Any, known: PerModel[T], probe: Callable[[], T]) -> T:
    """What is known of a model, or is found by a probe; threads that ask while one probes the model wait."""
    with _guard:
        lock = _locks.setdefault(model, Lock())
    with lock:
        value = known.get(model)
        return known.set(model, probe()) if value is None else value
