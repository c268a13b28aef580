"""Files that somebody made to fill the memory or the disk, or to let a job wait for ever."""

from __future__ import annotations

import os

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from lookahead.errors import DocumentError
from lookahead.files import opening
from lookahead.files.documents import read_documents
from lookahead.files.inputs import find_inputs
from lookahead.files.text import Reject
from lookahead.report.files import write_report

BOMBS = {
    "large values": ([20_000_000] * 16, {"use_dictionary": False}),
    "a value repeated from a dictionary": ([4_000_000] * 64, {"dictionary_pagesize_limit": 1 << 26}),
    "values that differ in nothing": (
        [4_000_000] * 64,
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    ),
}

@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_parquet_file_that_stands_for_much_takes_little_memory(tmp_path, kind):
    lengths, options = BOMBS[kind]
    path = tmp_path / "bomb.parquet"
    table = pyarrow.table({"text": ["a" * length for length in lengths]})
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)
    assert path.stat().st_size < 20_000
    usual = pyarrow.default_memory_pool()
    counted = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(counted)
    try:
        assert all(isinstance(each, Reject) for each in read_documents(find_inputs([str(path)]), limit=1 << 20))
    finally:
        pyarrow.set_memory_pool(usual)
    assert counted.max_memory() < 100 << 20


def test_rows_beside_a_group_that_unpacks_too_far_are_read(tmp_path):
    path = tmp_path / "a.parquet"
    schema = pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        for text in ("One.", "a" * 70_000_000, "Three."):
            writer.write_table(pyarrow.table({"text": [text, text]}))
    one, _, bomb, three, _ = read_documents(find_inputs([str(path)]), limit=1 << 20)
    assert (one.text, three.text, three.id) == ("One.", "Three.", f"{path}:5")
    assert isinstance(bomb, Reject) and bomb.error.startswith(f"{path}:3-4: a group of rows that unpacks to more than")
    with pytest.raises(DocumentError, match="a group of rows that unpacks"):
        write_report(path)


def test_a_large_group_that_is_no_smaller_in_the_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("lookahead.files.tables._UNPACKED", 1000)
    path = tmp_path / "a.parquet"
    texts = [os.urandom(500).hex() for _ in range(30)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    assert [each.text for each in read_documents(find_inputs([str(path)]))] == texts


def test_of_a_remote_parquet_file_no_more_is_copied_than_there_is_room_for(monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.pipe("/hostile/large.parquet", b"PAR1" + bytes(5 << 20))
    monkeypatch.setattr(opening, "MOST_COPIED", 2 << 20)
    (reject,) = read_documents(find_inputs(["memory://hostile/large.parquet"]))
    assert "more than 0.00195 GiB to copy to a temporary file first; download it" in reject.error
