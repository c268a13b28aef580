"""State of a model that is kept between calls, one `ModelState` per model, and what its modules hold meanwhile."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import RLock, local
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch

from lookahead.drafting.branch import BranchState
from lookahead.drafting.budget import DraftingBudget
from lookahead.drafting.cost_model import StepCost
from lookahead.hf.model_code import Version, is_ours, version_of
from lookahead.hf.verdict_files import verdict_file
from lookahead.utils.kept_values import Parse, find_kept, keep

T = TypeVar("T")
_MAX_VERSIONS = 4  # of a model, whose verdicts are kept
_log = logging.getLogger(__name__)


class LearnedState:
    """What decoding measures about a model. It is kept when the weights change, as in training."""

    def __init__(self) -> None:
        self.lock = RLock()  # held while any of it is read or changed
        # Step costs and savings of drafting, by how the model is run (`LookaheadConfig.passes`).
        self.costs: defaultdict[str, StepCost] = defaultdict(StepCost)
        self.budgets: defaultdict[str, DraftingBudget] = defaultdict(DraftingBudget)
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
        self.threads: dict[int, int] = {}  # that share a pass on a CPU, by how many torch is set to
        self.tokenizers: WeakSet[Any] = WeakSet()  # that were compared with the model
        self.prefixes: Any = None  # a version, and the `PrefixStore` of texts that were read with it
        self.encoding: Any = None  # the class and the sizes of what its encoder gave last (`lookahead.hf.encoding`)
        self.problems: dict[str, str] = {}  # what turned a faster path off, by path
        self._noted = 0  # problems, repeated ones too
        self._reported: set[Hashable] = set()
        self._probed: defaultdict[str, dict[int, tuple[Version, Any]]] = defaultdict(dict)  # by name and version
        self._file: tuple[int, Path | None] | None = None  # of the verdicts of a version
        self.newest: Version | None = None  # of the last verdict that was asked for
        self._probing = RLock()  # a signal handler may decode while its thread probes

    def note_problem(self, path: str, problem: str) -> None:
        """Keep what turned a faster path off, and log it once."""
        self._noted += 1
        if self.problems.get(path) != problem:
            self.problems[path] = problem
            _log.warning("%s: %s", path, problem)

    def log_once(self, kind: Hashable, report: object) -> None:
        """Log what a report says of the model's code as it is, once for a kind."""
        kind = kind, None if self.newest is None else self.newest.number
        if kind not in self._reported:
            self._reported.add(kind)
            _log.info("%s", report)

    def probed(self, name: str, model: Any, probe: Callable[[], T], parse: Parse[T] | None = None) -> T:
        """The result of a probe for the weights and the code of a pass as they are; other threads wait for it.

        The newest results are kept: hooks may come and go around every call. With `parse`, which makes a result of a
        value of JSON, a later process finds the result in a file, unless a problem came with it, which it would not
        tell again.
        """
        with self._probing:
            known, self.newest = self._probed[name], version_of(model)
            number = self.newest.number
            if number not in known:
                file = self._file_of(model, number) if parse is not None and len(known) < _MAX_VERSIONS else None
                value = find_kept(file, name, parse) if file is not None and parse is not None else None
                if value is None:
                    noted = self._noted
                    with outside_passes(), torch.random.fork_rng():  # hooks may draw random numbers
                        value = probe()
                    if file is not None and parse is not None and noted == self._noted:
                        value = keep(file, name, value, parse)
                version = version_of(model)
                number = version.number
                known[number] = version, value
                while len(known) > _MAX_VERSIONS:
                    del known[next(iter(known))]
            result: T = known[number][1]
            return result

    def _file_of(self, model: Any, number: int) -> Path | None:
        """The file of verdicts for a version of the model; reading all weights for it takes longer than a pass."""
        if self._file is None or self._file[0] != number:
            self._file = number, verdict_file(model)
        return self._file[1]


_guard = RLock()
_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_locals: list[local] = []
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


def pass_local() -> local:
    """What a thread knows of the pass that it runs, for one of those who take the place of a model's code in it."""
    _locals.append(local())
    return _locals[-1]


@contextmanager
def outside_passes() -> Iterator[None]:
    """Let models on this thread run their own code until the block ends: a signal handler may run within a pass."""
    outer = [dict(each.__dict__) for each in _locals]
    for each in _locals:
        each.__dict__.clear()
    try:
        yield
    finally:
        for each, values in zip(_locals, outer, strict=True):
            each.__dict__.clear()
            each.__dict__.update(values)


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Use fresh measurements of a model where this thread is just changing them: a signal handler may run meanwhile."""
    is_changing = state_of(model).learned.lock._is_owned()  # type: ignore[attr-defined] # as `threading.Condition` asks
    with use_learned(model, LearnedState()) if is_changing else nullcontext():
        yield


@contextmanager
def use_learned(model: Any, learned: LearnedState) -> Iterator[None]:
    """Use other measurements for a model until the block ends."""
    state = state_of(model)
    own, state.learned = state.learned, learned
    try:
        yield
    finally:
        state.learned = own


@contextmanager
def patched_attribute(name: str, values: Collection[tuple[Any, Any, Any]]) -> Iterator[None]:
    """Set an attribute of modules until the last open block of any thread ends.

    Each module comes with its own value, None for that of its class, and the one that takes its place.
    """
    with _guard:
        # What a user has set since the value was looked at stays, and is what runs.
        values = [each for each in values if _uses[id(each[0]), name] or each[0].__dict__.get(name) is each[1]]
        for module, _, value in values:
            _uses[id(module), name] += 1
            module.__dict__[name] = value
    try:
        yield
    finally:
        with _guard:
            for module, own, value in values:
                key = id(module), name
                _uses[key] -= 1
                if _uses[key]:
                    continue
                del _uses[key]
                current = module.__dict__.get(name)
                if current is not value and not (is_ours(current) or hasattr(type(current), "_viewed")):
                    continue  # a user's, set meanwhile
                if own is None:
                    module.__dict__.pop(name, None)
                else:  # in one assignment: another thread may be reading it
                    module.__dict__[name] = own
