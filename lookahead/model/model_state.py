"""What is kept of a model between calls: its plan, valid for one stamp, and what was measured while decoding."""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import RLock, local
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import numpy as np
import torch

from lookahead.drafting.branch import BranchState
from lookahead.drafting.budget import DraftingBudget
from lookahead.drafting.cost_model import StepCost
from lookahead.model import facts
from lookahead.model.known_code import is_ours, users_code
from lookahead.model.stamp import STANDARD, Stamp, modules_of, stamp_of
from lookahead.model.verdict_files import verdict_file
from lookahead.utils.kept_values import Parse, find_kept, keep

T = TypeVar("T")
L = TypeVar("L", bound=local)
_MAX_PLANS = 4  # of a model, as adapters or hooks come and go around calls
_SMALL_BUFFER = 1 << 20  # bytes of a buffer that a pass may change, such as the frequencies of positions
_log = logging.getLogger(__name__)


class LearnedState:
    """Measurements of a model while decoding. They are kept when the weights change, as in training."""

    def __init__(self) -> None:
        self.lock = RLock()  # held while anything is read or changed
        self.cost = StepCost()
        self.budget = DraftingBudget()  # the savings of drafting
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


def _asked(fact: Callable[[Any], T]) -> cached_property[T]:
    """An attribute of a plan that is asked of its model once."""
    return cached_property(lambda plan: fact(plan.model()))


class ModelPlan:
    """What is known about a model, valid as long as its stamp is: whose code it runs, verdicts, and kept prefixes.

    Attributes:
        stamp: The stamp that the plan was made for.
        form: The number of the model's form as it was last recognised.
        user_code: The first code of a user's own on the way of a pass, and where it hangs; empty if there is none.
        trusted: Whether the user states that this code treats every token by itself and keeps no state.
        prefixes: The `PrefixStore` of this plan.
        reported: Whether the paths of its passes over trees, or over chains, were logged.
        own_read: The transformers cache of what a probe let the model read, until a later probe continues from it.
    """

    def __init__(self, model: Any, stamp: Stamp) -> None:
        self.stamp, self.user_code, self.trusted = stamp, users_code(model), False
        self.prefixes: Any = None
        self.own_read: Any = None
        self.reported: set[bool] = set()
        self.form = stamp.form
        self.model = ref(model)  # the state of a model must not keep it alive
        self._parts: dict[Hashable, tuple[int, Any]] = {}
        self._verdicts: dict[str, Any] = {}

    device = _asked(facts.input_device)
    vocabulary = _asked(facts.decoder_vocabulary)
    embeddings = _asked(facts.vocabulary_size)
    positions = _asked(facts.position_limit)
    inputs = _asked(facts.inputs_of)
    cache_input = _asked(facts.cache_input)
    windows = _asked(facts.windows_of)
    attention = _asked(lambda model: facts.attention_name(model.config.get_text_config()))
    registers_attention = _asked(facts.calls_registered_attention)
    may_keep_states = _asked(facts.may_keep_states)
    reads_at_once = _asked(facts.prefills_at_once)
    processes = _asked(facts.processes_of)
    trains = _asked(lambda model: any(module.training for module in modules_of(model)))

    def part(self, name: Hashable, form: int, make: Callable[[], T]) -> T:
        """What is made once of the modules of the model, such as their packed layers, valid for a `Form` of theirs.

        It must not hold the model itself, whose state would keep it alive.
        """
        entry = self._parts.get(name)
        if entry is None or entry[0] != form:
            entry = self._parts[name] = form, make()
        part: T = entry[1]
        return part

    def rest(self) -> None:
        """Drop what is of these weights alone, as another plan becomes the newest."""
        self.prefixes = self.own_read = None
        self._parts.clear()

    def verdict(self, name: str, make: Callable[[], T], parse: Parse[T] | None) -> T:
        """The verdict of a name, made at the first request, or read from the file of an earlier process."""
        if name not in self._verdicts:
            file = self._file if parse is not None else None
            value = find_kept(file, name, parse) if file is not None and parse is not None else None
            if value is None:
                model: Any = self.model()
                state = state_of(model)
                noted = state.noted
                with leaving_nothing(model):
                    value = make()
                if file is not None and parse is not None and noted == state.noted:
                    value = keep(file, name, value, parse)
            self._verdicts[name] = value
        result: T = self._verdicts[name]
        return result

    @cached_property
    def _file(self) -> Path | None:
        """The file of the verdicts; None if another process could not know that the model is the same."""
        return None if self.user_code else verdict_file(self.model())


class ModelState:
    """State of one model. It is dropped with the model, and a copy of the model starts with a new one."""

    def __init__(self) -> None:
        self.plan: ModelPlan | None = None  # of the newest recognition
        self.learned = LearnedState()
        self.has_failed_capture = False  # recording CUDA graphs failed, and is not tried again
        self.unserved: frozenset[str] | None = None  # `TreePass.unserved` of the newest pass over drafts on a GPU
        self.graphs: Any = None  # `KeptGraphs` that no call uses
        self.linears: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # packed weights by layer
        self.threads: dict[int, int] = {}  # threads per pass on a CPU, by torch's number of threads
        self.tokenizers: WeakSet[Any] = WeakSet()  # checked against the model
        self.encoding: Any = None  # class and sizes of its newest encoder outputs (of the encoder-decoder plug-in)
        self.problems: dict[str, str] = {}  # why a faster path is off, by path
        self.noted = 0  # problems, including repeated ones
        self.plans: dict[int, ModelPlan] = {}  # the newest plans, by the number of their stamps
        self.probing = RLock()  # reentrant: a signal handler may decode while its thread probes

    def note_problem(self, path: str, problem: str) -> None:
        """Record why a faster path is off, and log it once."""
        self.noted += 1
        if self.problems.get(path) != problem:
            self.problems[path] = problem
            _log.warning("%s: %s", path, problem)

    @property
    def stamp_number(self) -> int:
        """The number of the newest stamp; 0 before the first."""
        return 0 if self.plan is None else self.plan.stamp.number

    def probed(self, name: str, model: Any, probe: Callable[[], T], parse: Parse[T] | None = None) -> T:
        """A verdict about the model as it was last recognised; other threads wait for it.

        With `parse`, which parses a JSON value, the verdict is also saved for later processes, unless the probe noted a
        problem: a later process would not report it.
        """
        with self.probing:
            plan = self.plan or recognise(model)
            return plan.verdict(name, probe, parse)


def recognise(model: Any, *, trusted: bool = False) -> ModelPlan:
    """What a model is, decided once for its stamp: every call of the user's begins with it.

    Args:
        model: The model.
        trusted: Whether the user states that his code treats every token by itself and keeps no state.
    """
    state, stamp = state_of(model), stamp_of(model)
    if state.plan is not None and state.plan.stamp.structure != stamp.structure:
        with _guard:  # another vocabulary, dtype or class of a module: what was measured does not count either
            state = _states[model] = ModelState()
    with state.probing:
        plan = state.plans.pop(stamp.number, None)
        if plan is None or (plan.user_code and plan.trusted is not trusted):
            plan = ModelPlan(model, stamp)
        plan.trusted, plan.form = trusted, stamp.form
        if state.plan is not None and state.plan is not plan:
            state.plan.rest()
        state.plans[stamp.number] = state.plan = plan
        while len(state.plans) > _MAX_PLANS:
            del state.plans[next(iter(state.plans))]
        return plan


def plan_of(model: Any) -> ModelPlan:
    """The plan of a model as it was last recognised, or as it is now if it never was."""
    return state_of(model).plan or recognise(model)


def checkpointed(model: Any) -> list[tuple[Any, Any, Any]]:
    """The modules that drop the cache in training mode for gradient checkpointing, for `patched_attribute`.

    No gradient is computed in our passes, and no token depends on it.
    """
    modules = [module for module in modules_of(model) if module.training and module.__dict__.get(CHECKPOINTING)]
    return [(module, True, False) for module in modules]


def _attributes_of(module: Any) -> dict[str, Any]:
    """What a pass may set on a module; not what our passes set, in any thread."""
    return {name: value for name, value in vars(module).items() if name not in STANDARD and not _is_set_by_us(value)}


def _is_set_by_us(value: Any) -> bool:
    return is_ours(value) or hasattr(type(value), "_viewed")


CHECKPOINTING = "gradient_checkpointing"


@contextmanager
def leaving_nothing(model: Any) -> Iterator[None]:
    """A block for passes that leave nothing behind: random state, buffers, and attributes of modules."""
    modules = modules_of(model)
    attributes = [(vars(module), _attributes_of(module)) for module in modules]
    attributes += [(module._buffers, dict(module._buffers)) for module in modules if isinstance(module._buffers, dict)]
    small = [buffer for part in modules for buffer in part._buffers.values() if buffer is not None]
    small = [
        buffer for buffer in small if not (buffer.is_meta or buffer.is_inference()) and buffer.nbytes <= _SMALL_BUFFER
    ]
    contents, versions = [buffer.clone() for buffer in small], [buffer._version for buffer in small]
    drawn = random.getstate(), np.random.get_state()
    weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
    gpus = {weight.device for weight in weights if weight.device.type == "cuda"}  # torch warns if it has to guess them
    try:
        with outside_passes(), torch.random.fork_rng(gpus), patched_attribute(CHECKPOINTING, checkpointed(model)):
            yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        for values, before in attributes:
            changed = {name for name, value in before.items() if values.get(name) is not value}
            values.update({name: before[name] for name in changed if not _is_set_by_us(values.get(name))})
        with torch.no_grad():
            for buffer, content, version in zip(small, contents, versions, strict=True):
                if buffer._version != version:
                    buffer.copy_(content)


_guard = RLock()
_states: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
_locals: list[local] = []
_uses: Counter[tuple[int, str]] = Counter()  # open blocks by attribute; the blocks keep the modules alive


def state_of(model: Any) -> ModelState:
    """The state of a model."""
    with _guard:
        state = _states.get(model)
        if state is None:
            state = _states[model] = ModelState()
        return state


def pass_local(kind: type[L]) -> L:
    """Thread-local data about the running pass, for code that replaces a model's code in it."""
    _locals.append(data := kind())
    return data


@contextmanager
def outside_passes() -> Iterator[None]:
    """Let models on this thread run their own code in a block, since a signal handler may run within a pass."""
    outer = [dict(data.__dict__) for data in _locals]
    for data in _locals:
        data.__dict__.clear()
    try:
        yield
    finally:
        for data, values in zip(_locals, outer, strict=True):
            data.__dict__.clear()
            data.__dict__.update(values)


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
        values = [value for value in values if _uses[id(value[0]), name] or value[0].__dict__.get(name) is value[1]]
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
