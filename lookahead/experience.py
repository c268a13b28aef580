"""What is learned of a model from one call to the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from lookahead.branch import Lane
from lookahead.cost import StepCost
from lookahead.proposers import Experience
from lookahead.switch import Switch


class ModelExperience:
    """What is learned of a model and worth keeping from one call to the next.

    Attributes:
        proposers: By the sources of drafts.
        costs: Of steps, by how the model is run (`lookahead.config.PASSES`).
        switches: What drafting was measured to save, likewise.
        branch: What the lookahead branch was measured to save, by the sources beside it.
        lock: To be held by whoever learns or drafts by any of it.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.proposers = Experience()
        self.costs: defaultdict[str, StepCost] = defaultdict(StepCost)
        self.switches: defaultdict[str, Switch] = defaultdict(Switch)
        self.branch: defaultdict[tuple[str, ...], dict[int, Lane]] = defaultdict(dict)


_guard = Lock()
_experiences: WeakKeyDictionary[PreTrainedModel, ModelExperience] = WeakKeyDictionary()


def experience_of(model: PreTrainedModel) -> ModelExperience:
    """What was learned of a model so far."""
    with _guard:
        if model not in _experiences:
            _experiences[model] = ModelExperience()
        return _experiences[model]


@contextmanager
def lent_experience(model: PreTrainedModel, experience: ModelExperience) -> Iterator[None]:
    """Let a model draft by another experience until the block ends, so that measurements do not learn of each other."""
    own = experience_of(model)
    _experiences[model] = experience
    try:
        yield
    finally:
        _experiences[model] = own
