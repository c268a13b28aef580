"""State of a model between calls, one `ModelState` per model, and temporary changes of its modules."""

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
_MAX_VERSIONS = 4  # of a model, for which verdicts are kept
_log = logging.getLogger(__name__)


class LearnedState:
    """Measurements of a model while decoding. They are kept when the weights change, as in training."""

    def __init__(self) -> None:
        self.lock = RLock()  # held while anything is read or changed
        # Step costs and savings of drafting, by how the model is run (`LookaheadConfig.passes`).
        self.costs: defaultdict[str, StepCost] = defaultdict(StepCost)
        self.budgets: defaultdict[str, DraftingBudget] = defaultdict(DraftingBudget)
        # Savings of the lookahead branch, by its size and the other proposers.
        self.branch: defaultdict[Hashable, dict[int, BranchState]] = defaultdict(dict)
        self._owned: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def of(self, owner: object, make: Callable[[], T]) -> T:
        """State of a proposer about the model: made at its first call, dropped with the proposer."""
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
        self.has_failed_capture = False  # recording CUDA graphs failed, and is not tried again
        self.graphs: Any = None  # `KeptGraphs` that no call uses
        self.linears: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # packed weights by layer
        self.threads: dict[int, int] = {}  # threads per pass on a CPU, by torch's number of threads
        self.tokenizers: WeakSet[Any] = WeakSet()  # checked against the model
        self.prefixes: Any = None  # a version, and its `PrefixStore`
        self.encoding: Any = None  # class and sizes of its newest encoder outputs (`lookahead.hf.encoding`)
        self.problems: dict[str, str] = {}  # why a faster path is off, by path
        self._noted = 0  # problems, including repeated ones
        self._reported: set[Hashable] = set()
        self._probed: defaultdict[str, dict[int, tuple[Version, Any]]] = defaultdict(dict)  # by name and version
        self._file: tuple[int, Path | None] | None = None  # the verdict file of a version
        self.newest: Version | None = None  # of the last requested verdict
        self._probing = RLock()  # reentrant: a signal handler may decode while its thread probes

    def note_problem(self, path: str, problem: str) -> None:
        """Record why a faster path is off, and log it once."""
        self._noted += 1
        if self.problems.get(path) != problem:
            self.problems[path] = problem
            _log.warning("%s: %s", path, problem)

    def log_once(self, kind: Hashable, report: object) -> None:
        """Log a report once per kind and version of the model's code."""
        kind = kind, None if self.newest is None else self.newest.number
        if kind not in self._reported:
            self._reported.add(kind)
            _log.info("%s", report)

    def probed(self, name: str, model: Any, probe: Callable[[], T], parse: Parse[T] | None = None) -> T:
        """The result of a probe for the current weights and code of a pass; other threads wait for it.

        The newest results are kept, since hooks may come and go around every call. With `parse`, which parses a JSON
        value, the result is also saved to a file for later processes, unless the probe noted a problem: a later process
        would not report it.
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
        """The verdict file for a version of the model. Cached, since hashing all weights takes longer than a pass."""
        if self._file is None or self._file[0] != number:
            self._file = number, verdict_file(model)
        return self._file[1]


_guard = RLock()
_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_locals: list[local] = []
_uses: Counter[tuple[int, str]] = Counter()  # open blocks by attribute; the blocks keep the modules alive


def state_of(model: Any) -> ModelState:
    """The state of a model; a new one if its vocabulary, its dtype or the class of one of its modules changed."""
    modules = [(type(module), module.__dict__.get("num_embeddings")) for module in model.modules()]
    structure = getattr(model, "dtype", None), hash(tuple(modules))
    with _guard:
        state = _states.get(model)
        if state is None or state.structure != structure:
            state = _states[model] = ModelState(structure)
        return state


def pass_local() -> local:
    """Thread-local data about the running pass, for code that replaces a model's code in it."""
    _locals.append(local())
    return _locals[-1]


@contextmanager
def outside_passes() -> Iterator[None]:
    """Let models on this thread run their own code in a block, since a signal handler may run within a pass."""
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
    """Use fresh measurements of a model if this thread is changing them: a signal handler may interrupt it."""
    is_changing = state_of(model).learned.lock._is_owned()  # type: ignore[attr-defined] # as `threading.Condition` asks
    with use_learned(model, LearnedState()) if is_changing else nullcontext():
        yield


@contextmanager
def use_learned(model: Any, learned: LearnedState) -> Iterator[None]:
    """Use `learned` as a model's measurements until the block ends."""
    state = state_of(model)
    own, state.learned = state.learned, learned
    try:
        yield
    finally:
        state.learned = own


@contextmanager
def patched_attribute(name: str, values: Collection[tuple[Any, Any, Any]]) -> Iterator[None]:
    """Set an attribute of modules until the last open block of any thread ends.

    `values` are tuples of a module, its own value (None for the class's attribute), and the replacement.
    """
    with _guard:
        # A value that a user has set since `values` was made stays in place, and is used.
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
                    continue  # set by a user meanwhile
                if own is None:
                    module.__dict__.pop(name, None)
                else:  # one assignment, since another thread may be reading it
                    module.__dict__[name] = own
