"""The way of a call through the package: `python -m tests.support.path` prints it as an indented tree.

A model is called twice, so that nothing has to be recognised, compared or compiled any more. Of the third call two
parts are traced: from `lookahead.generate` to the first token, and a step of the engine after it, when the first steps
have laid out the table of a pass.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from numba.core.dispatcher import Dispatcher
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lookahead
from lookahead.engine.engine import Engine
from tests.test_layering import FLOORS, _is_in

ROOT = Path(__file__).resolve().parent.parent.parent
_FOLDERS = tuple(str(ROOT / name) + "/" for name in ("lookahead", "ngram", "kernels"))
PROMPTS = "one fine day a cat saw one fine day", "the sea, the sea", "a dog sat by the door. the dog sat"
ENGINE = "lookahead/engine/engine.py"
_NEW = 256  # tokens of an output: more than three drafts of 64 nodes hold
_STEPS = range(3, 20)  # of the last call; the first steps lay out the table of a pass
_SIZE, _TOKENS = 256, 320  # the smallest layers that are packed


@dataclass
class Node:
    """A function in the tree of calls, with the functions that it calls, in order of their first calls."""

    name: str
    file: str
    children: dict[tuple[str, str], Node] = field(default_factory=dict)


@dataclass
class Trace:
    """Counts of a part of the way.

    Attributes:
        functions: Calls by file and name; comprehensions and lambdas belong to the function that holds them.
        climbs: Pairs of functions of which the first calls the second from a lower floor of `FLOORS`.
        root: The tree of calls.
    """

    functions: Counter[tuple[str, str]] = field(default_factory=Counter)
    climbs: set[tuple[str, str]] = field(default_factory=set)
    root: Node = field(default_factory=lambda: Node("", ""))

    @property
    def files(self) -> set[str]:
        """The files of the functions."""
        return {file for file, _ in self.functions}

    @property
    def calls(self) -> int:
        """Calls of all functions."""
        return self.functions.total()

    def __str__(self) -> str:
        """The tree, and a line with the counts; a function stands below the first that calls it."""
        places = dict[tuple[str, str], int]()
        _place(self.root, -1, places)
        lines = [f"{'  ' * depth + name:<56} {file}" for (file, name), depth in places.items()]
        counts = f"{len(self.functions)} functions in {len(self.files)} files, {self.calls:,} calls"
        return "\n".join([*lines, "", f"{counts}, {len(self.climbs)} to a higher floor"])


def _place(node: Node, depth: int, places: dict[tuple[str, str], int]) -> None:
    """The depths of the functions below a node, in the order of the tree."""
    for key, child in node.children.items():
        if key not in places:
            places[key] = depth + 1
            _place(child, depth + 1, places)


def _room_of(file: str) -> tuple[str, int]:
    """The room of a file, and its floor."""
    module = ".".join(Path(file).with_suffix("").parts).removeprefix("lookahead.")
    rooms = [(room, floor) for floor, rooms in enumerate(FLOORS) for room in rooms if _is_in(module, {room})]
    return max(rooms, key=lambda room: len(room[0]))


class _Tracer:
    """Follows the calls of one thread between `start` and `stop`."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._stack = list[tuple[FrameType, Node]]()
        self._places = dict[CodeType, tuple[str, str] | None]()
        modules = [module for name, module in sys.modules.items() if name.startswith("lookahead.")]
        values = [value for module in modules for value in vars(module).values()]
        compiled = [value.py_func.__code__ for value in values if isinstance(value, Dispatcher)]
        self._compiled = {(code.co_filename, code.co_name) for code in compiled}

    def start(self) -> None:
        """Begin to follow the calls of this thread."""
        sys.setprofile(self._follow)

    def stop(self) -> None:
        """End."""
        sys.setprofile(None)

    def _place_of(self, frame: FrameType) -> tuple[str, str] | None:
        """The file and name of a function of the package; None for others, and for compiled ones."""
        code = frame.f_code
        if code not in self._places:
            file, name = str(Path(code.co_filename).resolve()), code.co_qualname
            while name.endswith(">"):  # a comprehension or a lambda
                name = name.rpartition(".")[0].removesuffix(".<locals>")
            is_own = file.startswith(_FOLDERS) and (code.co_filename, name) not in self._compiled
            self._places[code] = (str(Path(file).relative_to(ROOT)), name) if is_own else None
        return self._places[code]

    def _follow(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "return" and self._stack and self._stack[-1][0] is frame:
            self._stack.pop()
        place = self._place_of(frame) if event == "call" else None
        if place is None:
            return
        caller = self._stack[-1][1] if self._stack else self.trace.root
        if frame.f_code.co_name[0] == "<" and (caller.file, caller.name) == place:
            return
        self.trace.functions[place] += 1
        if caller is not self.trace.root:
            (above, high), (below, low) = _room_of(place[0]), _room_of(caller.file)
            if above != below and high > low:
                self.trace.climbs.add((f"{caller.file} {caller.name}", f"{place[0]} {place[1]}"))
        self._stack.append((frame, caller.children.setdefault(place, Node(place[1], place[0]))))


def model_of(dtype: torch.dtype) -> LlamaForCausalLM:
    """A random Llama with as many layers as SmolLM2-135M, the default model, and layers as small as can be packed."""
    config = LlamaConfig(
        vocab_size=_TOKENS,
        hidden_size=_SIZE,
        intermediate_size=_SIZE,
        num_hidden_layers=30,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(20)
        return LlamaForCausalLM(config).to(dtype).eval()


def tokenizer_of_characters() -> PreTrainedTokenizerFast:
    """A tokenizer of the first characters of Unicode, as many as the model has tokens."""
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(_TOKENS)}, unk_token="\0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="\0", unk_token="\0")


def trace_paths(dtype: torch.dtype) -> tuple[Trace, Trace]:
    """The way of a call to its first token, and the longest of some steps after it that end no row.

    Args:
        dtype: Of the weights.
    """
    model, tokenizer = model_of(dtype), tokenizer_of_characters()
    for prompt in PROMPTS[:-1]:
        lookahead.generate(model, tokenizer, [prompt], max_new_tokens=_NEW)
    beginning, steps = _Tracer(), dict[int, _Tracer | None].fromkeys(_STEPS)
    with _traced(Engine, "admit", {1: beginning}), _traced(Engine, "step", steps):
        beginning.start()
        lookahead.generate(model, tokenizer, [PROMPTS[-1]], max_new_tokens=_NEW)
    traces = [tracer.trace for tracer in steps.values() if tracer is not None]
    traces = [trace for trace in traces if (ENGINE, "Engine._remove") not in trace.functions]
    return beginning.trace, max(traces, key=lambda trace: len(trace.functions))


@contextmanager
def _traced(owner: type, name: str, tracers: dict[int, _Tracer | None]) -> Iterator[None]:
    """Follow calls of a method by their numbers, each to its end; None stands for a new tracer."""
    own, calls = getattr(owner, name), count(1)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        if number not in tracers:
            return own(*args, **kwargs)
        tracer = tracers[number]
        if tracer is None:
            tracer = tracers[number] = _Tracer()
            tracer.start()
        try:
            return own(*args, **kwargs)
        finally:
            tracer.stop()

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, own)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for title, trace in zip(("To the first token", "A step"), trace_paths(torch.bfloat16), strict=True):
        print(f"{title}\n\n{trace}\n")
