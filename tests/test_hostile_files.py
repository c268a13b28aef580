"""Files that somebody made to fill the memory or the disk, or to let a job wait for ever."""

from __future__ import annotations

import importlib
import io
import os
import socket
import threading

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

import lookahead
from lookahead.backend.step_costs import cost_path
from lookahead.cli.options import read_prompt_file
from lookahead.documents import byte_sources as opening
from lookahead.documents.decode_text import Reject
from lookahead.documents.inputs import find_inputs
from lookahead.documents.readers import read_documents
from lookahead.errors import DocumentError
from lookahead.reporting.report_page import write_report

BOMBS = {
    "large values": ([8_000_000] * 16, {"use_dictionary": False}),
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
    monkeypatch.setattr("lookahead.documents.readers._UNPACKED", 1000)
    path = tmp_path / "a.parquet"
    texts = [os.urandom(500).hex() for _ in range(30)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    assert [each.text for each in read_documents(find_inputs([str(path)]))] == texts


def test_of_a_remote_parquet_file_no_more_is_copied_than_there_is_room_for(monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.pipe("/hostile/large.parquet", b"PAR1" + bytes(5 << 20))
    monkeypatch.setattr(opening, "MAX_COPIED_BYTES", 2 << 20)
    (reject,) = read_documents(find_inputs(["memory://hostile/large.parquet"]))
    assert "cannot copy more than 0.00195 GiB to a temporary file; download it" in reject.error


@pytest.fixture
def soon(monkeypatch):
    """Whoever says nothing is given up at once."""
    monkeypatch.setattr(opening, "TIMEOUT_S", 0.2)


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.jsonl", "pipe.csv", "pipe.parquet", "pipe.html"])
def test_a_pipe_without_a_writer_is_given_up(tmp_path, soon, name):
    os.mkfifo(tmp_path / name)
    (reject,) = read_documents(find_inputs([str(tmp_path / name)]))
    assert reject.error == f"{tmp_path / name}: no data came through this pipe within 0.2 s"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet", "a.html"])
def test_a_device_is_refused_before_a_byte_of_it_is_read(tmp_path, name):
    (tmp_path / name).symlink_to("/dev/zero")
    (reject,) = read_documents(find_inputs([str(tmp_path / name)]))
    assert reject.error == f"{tmp_path / name}: a device, not a file; - reads standard input"


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.parquet"])
def test_what_comes_through_a_pipe_is_read(tmp_path, name):
    os.mkfifo(tmp_path / name)
    data = io.BytesIO(b"One.")
    if name == "pipe.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["One."]}), data)
    threading.Thread(target=(tmp_path / name).write_bytes, args=[data.getvalue()], daemon=True).start()
    assert [each.text for each in read_documents(find_inputs([str(tmp_path / name)]))] == ["One."]


def test_a_pipe_in_a_folder_is_left_out_and_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").write_text("One.")
    skipped = []
    assert [each.path for each in find_inputs([str(tmp_path)], on_skip=skipped.append)] == [str(tmp_path / "a.txt")]
    assert skipped == [f"{tmp_path / 'pipe.txt'}: not a regular file, or a broken link"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.jsonl.rejects.jsonl"])
def test_a_pipe_is_no_file_of_results(tmp_path, name):
    (tmp_path / "a.jsonl").write_text('{"id": "a", "summary": "A."}\n')
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(DocumentError, match=f"{name}: not a regular file"):
        write_report(tmp_path / name.replace(".rejects.jsonl", ""))


def test_a_pipe_is_no_file_of_costs(tmp_path, tiny_llama):
    os.mkfifo(cost_path(tiny_llama, tmp_path))
    with pytest.warns(UserWarning, match=r"cannot be used, and are measured again: .*not a regular file"):
        assert not lookahead.load_costs(tiny_llama, tmp_path)


def test_a_prompt_may_come_through_a_pipe_and_is_not_waited_for_without_end(tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    os.mkfifo(path)
    threading.Thread(target=path.write_text, args=["Once."], daemon=True).start()
    assert read_prompt_file(str(path)) == "Once."
    monkeypatch.setattr(opening, "TIMEOUT_S", 0.2)
    with pytest.raises(DocumentError, match="no data came through this pipe"):
        read_prompt_file(str(path))


def test_a_server_that_takes_a_connection_and_says_nothing_is_given_up(monkeypatch):
    importlib.import_module("fsspec.implementations.http")  # what is loaded takes its time
    monkeypatch.setattr(opening, "TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/a.txt"
        (reject,) = read_documents(find_inputs([url]))
    assert reject.error == f"{url}: cannot be read: no answer within 1 s"
