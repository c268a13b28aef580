"""Copies of objects that keep addresses: each has memory of its own, or there is no copy."""

from __future__ import annotations

import ast
import copy
import gc
import pickle
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead.drafting.proposal import Feedback
from lookahead.ngram.chain_proposer import ChainProposer, ChainRequest
from lookahead.ngram.chains import ChainIndex, Chains
from lookahead.ngram.hit_rates import HitRates
from lookahead.ngram.pool_file import Pool, write_pool
from lookahead.ngram.search import Search
from lookahead.ngram.successors import SuccessorTable
from lookahead.proposers.ngram import NgramProposer
from lookahead.utils.addresses import KeepsAddresses, addresses_of

ROOT = Path(__file__).resolve().parent.parent
TEXT = np.array([5, 6, 7, 8, 9, 5, 6], np.int32)
OTHER = np.array([7, 1, 2, 3, 7, 1], np.int32)
LONG = np.arange(5000, dtype=np.int32)  # makes the arrays of an index grow, so that they move


def pickled(protocol: int) -> Callable[[Any], Any]:
    return lambda original: pickle.loads(pickle.dumps(original, protocol))  # our own bytes


def read_only(original: Any) -> Any:
    """A copy whose arrays stay in the bytes that were received, as between processes that share memory."""
    parts: list[pickle.PickleBuffer] = []
    whole = pickle.dumps(original, 5, buffer_callback=parts.append)
    return pickle.loads(whole, buffers=[bytes(part) for part in parts])


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {protocol}": pickled(protocol) for protocol in (2, pickle.HIGHEST_PROTOCOL)},
}


def index() -> ChainIndex:
    made = ChainIndex()
    made.append(TEXT)
    return made


def chains() -> Chains:
    arena, heads, links, length = index().state
    return Chains(arena, heads, links, length)


def search() -> Search:
    return Search([index()], HitRates(), SuccessorTable(64), (1, 16, 32))


def request() -> tuple[ChainProposer, ChainRequest]:
    proposer = ChainProposer(4, memory_tokens=1 << 12)
    return proposer, proposer.start(TEXT)


def continuations(state: Any) -> list[int]:
    """What is found behind the newest tokens of a text."""
    if isinstance(state, Chains):
        state = Search([state], HitRates(), None, (1, 16, 32))
    if isinstance(state, Search):
        return state.grow(8).tokens.tolist()
    proposer, known = state
    return [*proposer.draft(known, 4)[0].tolist(), len(known)]


def change(state: Any) -> None:
    """Grow a text until its arrays move, and then end it in another way."""
    if isinstance(state, tuple):
        proposer, known = state
        for tokens in (LONG, OTHER):
            proposer.observe(known, tokens)
            proposer.finish(known)
        return
    if isinstance(state, Search):
        state = state._texts[0]
    if isinstance(state, ChainIndex):
        state.append(LONG)
        state.append(OTHER)
    else:
        state.tokens[:] = 3  # a view of memory that it owns


MADE: dict[type, Callable[[], Any]] = {Chains: chains, ChainIndex: index, Search: search, ChainRequest: request}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_a_copy_and_its_original_change_without_each_other(kind: type, way: str) -> None:
    # What is made of two objects is copied as a whole: a shallow copy of a tuple is the tuple itself.
    make = WAYS["deepcopy"] if (kind, way) == (ChainRequest, "copy") else WAYS[way]
    original = MADE[kind]()
    twin, expected = make(original), continuations(original)
    assert continuations(twin) == expected
    change(twin)
    assert continuations(original) == expected
    third = make(original)
    change(original)
    assert continuations(third) == expected
    changed, again = continuations(original), MADE[kind]()
    change(again)
    assert changed == continuations(twin) == continuations(again)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_a_copy_outlives_its_original(kind: type, way: str) -> None:
    original = MADE[kind]()
    expected = continuations(original)
    twin = copy.deepcopy(original) if isinstance(original, tuple) else WAYS[way](original)
    del original
    gc.collect()
    litter = [np.full(1 << 12, -7, np.int32) for _ in range(64)]  # takes the memory that became free
    assert continuations(twin) == expected
    del litter


def test_a_request_alone_is_copied_with_what_it_searches() -> None:
    proposer, known = request()
    twin = copy.copy(known)
    proposer.observe(known, OTHER)
    assert (len(twin), len(known)) == (TEXT.size, TEXT.size + OTHER.size)
    assert proposer.draft(twin, 2)[0].tolist() == [7, 8]


def test_a_copied_index_keeps_its_limit() -> None:
    capped = ChainIndex(max_tokens=1024)
    twin = copy.deepcopy(capped)
    twin.append(LONG)
    assert len(twin) <= 1024 and len(capped) == 1
    assert twin.tokens[-500:].tolist() == LONG[-500:].tolist()


def test_a_subclass_of_an_index_keeps_its_own_attributes() -> None:
    class Named(ChainIndex):
        """With a dict, which its base has not."""

    named = Named()
    named.append(TEXT)
    named.name = "a"  # type: ignore[attr-defined]
    twin = copy.deepcopy(named)
    twin.append(OTHER)
    assert vars(twin) == {"name": "a"} and twin.tokens.tolist() == [-1, *TEXT, *OTHER]


def test_an_index_from_read_only_memory_gets_memory_that_it_can_write() -> None:
    original = index()
    twin = read_only(original)
    twin.append(OTHER)
    assert twin.tokens.tolist() == [-1, *TEXT, *OTHER] and original.tokens.tolist() == [-1, *TEXT]


@pytest.mark.parametrize("way", [copy.deepcopy, pickled(pickle.HIGHEST_PROTOCOL)], ids=["deepcopy", "pickle"])
def test_a_copied_proposer_drafts_on_with_memory_of_its_own(way: Callable[[Any], Any]) -> None:
    original = NgramProposer()
    original.start(0, TEXT)
    twin = way(original)
    expected = original.propose(0, 8)
    assert expected is not None and twin.propose(0, 8).tokens.tolist() == expected.tokens.tolist()
    memory = original._memory.outputs.tokens.tolist()
    twin.observe(0, Feedback(OTHER, np.zeros(1, np.int32), np.zeros(0, np.int32)), np.zeros(0, np.int32))
    twin.finish(0)
    twin.start(0, OTHER)  # finds the text that it just finished
    assert original._memory.outputs.tokens.tolist() == memory
    assert original.propose(0, 8).tokens.tolist() == expected.tokens.tolist()  # type: ignore[union-attr]
    assert twin._memory.outputs.tokens.tolist() == [-1, *TEXT, *OTHER]
    assert twin._rows[0].search._texts[1] is twin._memory.outputs


def test_a_copied_pool_is_the_pool_and_a_pickled_one_opens_its_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pool("a.pool", TEXT, fingerprint=1)
    pool = Pool.open("a.pool")
    assert copy.copy(pool) is pool and copy.deepcopy([pool])[0] is pool
    data = pickle.dumps(pool)
    assert len(data) < 1000  # not its chains
    monkeypatch.chdir("/")
    assert continuations(pickle.loads(data)) == continuations(pool)
    write_pool(tmp_path / "a.pool", OTHER, fingerprint=1)
    with pytest.raises(ValueError, match=r"a\.pool: replaced since the pool was pickled"):
        pickle.loads(data)


@cache
def classes_with_addresses() -> list[str]:
    """Every class of the package whose source takes an address, as module and name."""
    mark = re.compile(r"\.ctypes\.data|\.data_ptr\(\)|addresses_of\(|buffer_info\(\)|table_of\(")
    classes = []
    for folder in ("lookahead", "ngram", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            places = [text.count("\n", 0, match.start()) + 1 for match in mark.finditer(text)]
            for node in ast.walk(ast.parse(text)) if places else ():
                if isinstance(node, ast.ClassDef) and any(node.lineno <= at <= (node.end_lineno or 0) for at in places):
                    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                    classes.append(f"lookahead.{module.removeprefix('lookahead.')}:{node.name}")
    return classes


@pytest.mark.parametrize("place", classes_with_addresses())
def test_a_class_that_takes_addresses_says_how_it_is_copied(place: str) -> None:
    if "compaction" in place:
        pytest.importorskip("triton")
    module, _, name = place.partition(":")
    kind = getattr(import_module(module), name)
    assert issubclass(kind, KeepsAddresses)
    if kind not in MADE:
        for way in WAYS.values():
            with pytest.raises(TypeError, match=f"{name} keeps addresses of memory .*cannot be copied"):
                way(kind.__new__(kind))


def test_every_class_that_can_be_copied_is_tested() -> None:
    places = classes_with_addresses()
    assert {"lookahead.ngram.chains:Chains", "lookahead.backend.cpu.pass_table:PassTable"} <= {*places}
    assert {*MADE} >= {kind for kind in every_subclass(KeepsAddresses) if "_readdress" in vars(kind)}


def every_subclass(kind: type) -> set[type]:
    return {kind, *(each for child in kind.__subclasses__() for each in every_subclass(child))} - {KeepsAddresses}


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4))[:, 1:], np.asfortranarray(np.zeros((4, 4))), np.frombuffer(bytes(8), np.int64)]
)
def test_an_array_that_compiled_code_would_misread_has_no_address(array: Any) -> None:
    with pytest.raises(ValueError, match="must be writable, aligned and in C order"):
        addresses_of([array])
