"""Pool files: searched as an index is, written whole or not at all, and refused unless every byte is in order."""

from __future__ import annotations

import os
import signal
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lookahead.ngram.chains import LEVELS, SEPARATOR, ChainIndex, find_matches
from lookahead.ngram.hit_rates import HitRates
from lookahead.ngram.pool_file import Pool, PoolHeader, write_pool
from lookahead.proposers.ngram import NgramProposer
from lookahead.proposers.pool_files import open_pool
from lookahead.utils.atomic import replacing
from tests.support.forked import status_of
from tests.support.index_queries import find, grow_trie
from tests.support.naive_index import find_by_scan

NO_LIMIT = {"max_links": 1 << 16}
HEADER = 128
TOKENS = np.array([5, 6, 7, 8, SEPARATOR, 5, 6, 9, SEPARATOR, 2], np.int32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small pool."""
    write_pool(tmp_path / "pool.lkp", TOKENS, 77)
    return tmp_path / "pool.lkp"


def forged(data: bytes) -> bytes:
    """A file with both checksums made to fit what it holds, as one who means harm would make it."""
    body = data[HEADER:]
    header = data[:64] + struct.pack("=Q", xxhash.xxh3_64_intdigest(body)) + data[72 : HEADER - 8]
    return header + xxhash.xxh3_64_digest(header) + body


# Searching


@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2, 2**31 - 1]), max_size=40), min_size=1, max_size=4),
    st.lists(st.sampled_from([0, 1, 2, 2**31 - 1, 5]), max_size=20),
)
def test_a_pool_finds_what_a_scan_finds_and_grows_the_trees_of_an_index(tmp_path_factory, documents, context):
    tokens = [token for document in documents if document for token in (*document, SEPARATOR)][:-1] or [1]
    path = tmp_path_factory.mktemp("pool") / "pool.lkp"
    write_pool(path, np.array(tokens, np.int32), 1)
    pool, index = Pool.open(path), ChainIndex()
    index.append_documents(np.array(tokens, np.int32))
    assert pool.tokens.tolist() == index.tokens.tolist() == [SEPARATOR, *tokens]
    assert find(pool, context, **NO_LIMIT) == find_by_scan(pool.tokens.tolist(), context)
    ours, theirs = (grow_trie([each], HitRates(), 12, context=context) for each in (pool, index))
    assert (ours is None) == (theirs is None)
    if ours is not None:
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.parents.tolist() == theirs.parents.tolist()


def test_one_compiled_core_serves_a_pool_and_an_index(path):
    index = ChainIndex()
    index.append([1, 2, 1])
    find(index)
    compiled = len(find_matches.signatures)
    assert find(Pool.open(path), [5, 6]) == [(8, 2), (3, 2)]
    assert len(find_matches.signatures) == compiled


def test_the_header_counts_what_is_in_the_file(path):
    header = PoolHeader.read(path)
    assert (header.tokens, header.documents, header.largest_token) == (8, 3, 9)
    assert (header.fingerprint, header.length) == (77, 11)
    assert header.file_bytes == path.stat().st_size
    assert Pool.open(path).header == header


@pytest.mark.parametrize("tokens", [np.zeros(70_000, np.int32), np.arange(66_000, dtype=np.int32)], ids=["same", "new"])
def test_a_token_takes_at_most_56_bytes_whatever_the_content(tmp_path, tokens):
    header = write_pool(tmp_path / "pool.lkp", tokens, 1)
    assert header.file_bytes <= 56 * tokens.size


def test_what_is_written_to_the_arrays_of_a_pool_never_reaches_the_file(path):
    before = path.read_bytes()
    Pool.open(path).tokens[:] = 3
    assert path.read_bytes() == before
    assert Pool.open(path).tokens.tolist() == [SEPARATOR, *TOKENS.tolist()]


# Writing


def test_a_new_pool_takes_the_place_of_the_old_one_and_who_has_that_open_keeps_it(path):
    old = Pool.open(path)
    write_pool(path, np.array([1, 2, 3], np.int32), 78)
    assert find(old, [5, 6]) == [(8, 2), (3, 2)]
    assert Pool.open(path, 78).tokens.tolist() == [SEPARATOR, 1, 2, 3]
    assert os.listdir(path.parent) == ["pool.lkp"]


def test_a_link_stays_a_link_to_the_file_that_is_replaced(path):
    link = path.with_name("link.lkp")
    link.symlink_to(path.name)
    write_pool(link, np.array([1, 2, 3], np.int32), 78)
    assert link.is_symlink()
    assert PoolHeader.read(path).fingerprint == 78


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("failure", [full, interrupted])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_fails_half_way_leaves_the_old_file_and_nothing_else(path, monkeypatch, call, failure):
    before = path.read_bytes()
    monkeypatch.setattr(f"lookahead.ngram.pool_file.os.{call}", failure)
    with pytest.raises((OSError, KeyboardInterrupt)):
        write_pool(path, np.array([1, 2, 3], np.int32), 78)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["pool.lkp"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file_whole(path, call):
    before = path.read_bytes()

    def killed():
        setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write_pool(path, np.array([1, 2, 3], np.int32), 78)

    assert status_of(killed) == -signal.SIGKILL
    assert path.read_bytes() == before
    assert Pool.open(path, 77).tokens.tolist() == [SEPARATOR, *TOKENS.tolist()]
    assert len(os.listdir(path.parent)) == 2
    with replacing(path) as file:  # a writer that lives
        write_pool(path, TOKENS, 77)  # and the next one
        assert sorted(os.listdir(path.parent)) == sorted([Path(file.name).name, path.name])
        file.write(before)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (np.array([], np.int32), ValueError),
        (np.array([SEPARATOR], np.int32), ValueError),
        (np.array([1, -2], np.int32), ValueError),
        (np.array([[1, 2]], np.int32), ValueError),
        (np.array([1, 2]), TypeError),
        ([1, 2], TypeError),
    ],
)
def test_what_makes_no_pool_is_refused_before_a_file_is_made(tmp_path, tokens, error):
    with pytest.raises(error, match="tokens must"):
        write_pool(tmp_path / "pool.lkp", tokens, 1)
    assert os.listdir(tmp_path) == []


# Opening what is no pool, or no longer one


def refused(path: Path, data: bytes) -> str:
    """Why a file that holds `data` is not opened."""
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"pool\.lkp: ") as error:
        Pool.open(path, 77)
    return str(error.value)


def test_a_pool_of_another_tokenizer_is_refused_by_its_fingerprint(path):
    with pytest.raises(ValueError, match=r"another tokenizer: .*0{14}4d, that of this tokenizer is 0{14}4e"):
        Pool.open(path, 78)


def test_a_file_cut_short_anywhere_is_refused(path):
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 127, 128, 129, len(whole) // 2, len(whole) - 4, len(whole) - 1]:
        assert ("cut short" if size >= 8 else "not a pool file") in refused(path, whole[:size])
    assert "longer than it should be" in refused(path, whole + b"\0")


def test_a_byte_changed_anywhere_is_found(path):
    whole = path.read_bytes()
    for at in [*range(HEADER), *range(HEADER, len(whole), 251), len(whole) - 1]:
        changed = bytearray(whole)
        changed[at] ^= 1 << (at % 8)
        assert refused(path, bytes(changed))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a pool file"),
        (b"PK\x03\x04" + bytes(5000), "not a pool file"),
        (b"LKPOOL\n\n" + bytes(5000), "not a pool file"),
        (b"LKPOOL\r\n", "cut short"),
        (b"LKPOOL\r\n" + bytes(5000), "another byte order"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, data, reason):
    assert reason in refused(tmp_path / "pool.lkp", data)


def test_another_version_and_another_byte_order_are_told(path):
    whole = path.read_bytes()
    assert "version 2 of the format; this release reads version 1" in refused(
        path, whole[:12] + struct.pack("=I", 2) + whole[16:]
    )
    assert "another byte order" in refused(path, whole[:8] + whole[8:12][::-1] + whole[12:])


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.lkp")
    for name in ("pipe.lkp", "."):
        with pytest.raises(ValueError, match="not a file"):
            Pool.open(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Pool.open(tmp_path / "gone.lkp")


def lengthen(path):
    with path.open("ab") as file:
        file.write(bytes(4))


def write_over(path):
    with path.open("r+b") as file:
        file.seek(128)
        file.write(b"\x7f" * 4096)


CHANGES = {"cut short": lambda path: os.truncate(path, 0), "made longer": lengthen, "written over": write_over}


@pytest.mark.parametrize("change", CHANGES)
def test_a_pool_changed_while_it_is_drafted_from_is_told_and_ends_nothing(path, change):
    def draft():
        proposer = NgramProposer(("corpus",), pool=Pool.open(path))
        proposer.start(0, np.array([1, 5, 6], np.int32))
        assert 7 in proposer.propose(0, 4).tokens
        CHANGES[change](path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            proposer.start(1, np.array([1, 5, 6], np.int32))
            assert proposer.propose(0, 4) is None and proposer.propose(1, 4) is None
        said = f"{path}: changed while it was in use; no more is drafted from it"
        assert [str(each.message) for each in caught] == [said]

    assert status_of(draft) == 0


def test_a_pool_that_was_changed_and_made_good_again_is_opened_anew(path):
    data, status = path.read_bytes(), path.stat()
    first = open_pool(str(path))
    os.truncate(path, 200)
    assert not first.is_intact
    assert len(first) == 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_pool(str(path)).tokens.tolist() == [SEPARATOR, *TOKENS.tolist()]


def hostile_numbers() -> list[tuple[str, int, int]]:
    """A section, a place in it and a number that would lead out of the memory of a pool."""
    return [
        (section, place, number)
        for section in ("heads", "links", "arena")
        for place in (0, 7)
        for number in (-2, -(2**31), 11, 2**31 - 1)
    ]


@pytest.mark.parametrize(("section", "place", "number"), hostile_numbers())
def test_a_file_made_to_lead_out_of_its_memory_is_refused(path, section, place, number):
    data = bytearray(path.read_bytes())
    header = PoolHeader.read(path)
    heads, links = 16 * header.slots, 16 * header.length
    start = HEADER + {"heads": 0, "links": heads, "arena": heads + links}[section]
    struct.pack_into("=i", data, start + 4 * place, number)
    assert "it holds positions or tokens out of range" in refused(path, forged(bytes(data)))


def test_a_file_made_without_a_separator_in_front_is_refused(path):
    data = bytearray(path.read_bytes())
    struct.pack_into("=i", data, len(data) - 4 * PoolHeader.read(path).length, 5)
    assert "it holds positions or tokens out of range" in refused(path, forged(bytes(data)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"slots": 0}, "impossible sizes"),
        ({"slots": 1000}, "impossible sizes"),
        ({"slots": 1 << 40}, "cut short"),
        ({"length": 0}, "impossible sizes"),
        ({"length": 1 << 31}, "impossible sizes"),
        ({"length": 1 << 60}, "impossible sizes"),
        ({"length": 12}, "cut short"),
        ({"slots": 512}, "longer than it should be"),
        ({"tokens": 0}, "impossible sizes"),
        ({"tokens": 1 << 63}, "impossible sizes"),
        ({"largest_token": 1 << 31}, "impossible sizes"),
        ({"largest_token": 8}, "it holds positions or tokens out of range"),
    ],
    ids=str,
)
def test_a_header_made_to_lie_is_refused(path, change, reason):
    told = replace(PoolHeader.read(path), **change)
    assert reason in refused(path, told.pack() + path.read_bytes()[HEADER:])


def test_chains_that_run_in_a_circle_end(path):
    data = bytearray(path.read_bytes())
    header = PoolHeader.read(path)
    links = HEADER + 16 * header.slots
    for place in range(header.length * LEVELS):
        struct.pack_into("=i", data, links + 4 * place, 3)
    path.write_bytes(forged(bytes(data)))
    assert set(find(Pool.open(path), [5, 6], max_links=50)) == {(3, 2), (8, 2)}
