"""What is learned of a model from one call to the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock

from transformers import PreTrainedModel

from lookahead.drafting.budget import Switch
from lookahead.drafting.cost_model import StepCost
from lookahead.drafting.lookahead_branch import Lane
from lookahead.models.per_model import PerModel
from lookahead.proposers import ProposerState


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
        self.proposers = ProposerState()
        self.costs: defaultdict[str, StepCost] = defaultdict(StepCost)
        self.switches: defaultdict[str, Switch] = defaultdict(Switch)
        self.branch: defaultdict[tuple[str, ...], dict[int, Lane]] = defaultdict(dict)


_guard = Lock()
_experiences: PerModel[ModelExperience] = PerModel()


def experience_of(model: PreTrainedModel) -> ModelExperience:
    """What was learned of a model so far; nothing, once its vocabulary, its dtype or a module became another."""
    with _guard:
        return _experiences.get(model) or _experiences.set(model, ModelExperience())


@contextmanager
def lent_experience(model: PreTrainedModel, experience: ModelExperience) -> Iterator[None]:
    """Let a model draft by another experience until the block ends, so that measurements do not learn of each other."""
    own = experience_of(model)
    _experiences.set(model, experience)
    try:
        yield
    finally:
        _experiences.set(model, own)
