"""Memories of one model are merged into one, and what is none is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lookahead.cli.app import app
from lookahead.ngram.memory_file import aged, read_memory, table_of, write_memory
from lookahead.proposers.memory_files import merge_memories
from tests.support.index_queries import find_recycled
from tests.support.memories import HEADER, MODEL, forged, learned


def test_memories_of_one_model_are_merged_into_one(tmp_path):
    paths = [str(tmp_path / f"{name}.lkm") for name in ("old", "new", "other")]
    old, new = learned([1, 2, 3], [4], first=20), learned([1, 2, 3], [5], first=30)
    for path, records, most in zip(paths, (aged(old), new, learned([5], first=40)), (64, 128, 64), strict=True):
        write_memory(path, replace(MODEL, max_contexts=most), records)
    header = merge_memories(str(tmp_path / "all.lkm"), paths)
    table = table_of(read_memory(tmp_path / "all.lkm", MODEL)[1])
    first = {context: find_recycled(table, context)[1][0] for context in ((1, 2, 3), (4,), (5,))}
    assert first == {(1, 2, 3): 30, (4,): 20, (5,): 30}  # the youngest, and of equal age that of the first file
    assert (header.contexts, header.max_contexts) == (5, 128)
    few = merge_memories(str(tmp_path / "few.lkm"), paths, 4)
    assert (few.contexts, few.max_contexts) == (4, 4)
    kept = table_of(read_memory(tmp_path / "few.lkm", MODEL)[1])
    assert find_recycled(kept, [4])[0] == 0  # the oldest goes


def test_the_command_tells_what_it_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_memory("a.lkm", MODEL, learned([1, 2, 3]))
    write_memory("b.lkm", MODEL, learned([4]))
    result = CliRunner().invoke(app, ["memory", "merge", "a.lkm", "b.lkm", "-o", "all.lkm"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "all.lkm: 4 contexts\n")
    assert CliRunner().invoke(app, ["memory", "info", "all.lkm"]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("good.lkm", "none.lkm", "-o", "all.lkm"), "none.lkm: No such file"),
        (("good.lkm", "text.lkm", "-o", "all.lkm"), "text.lkm: not a memory file"),
        (("good.lkm", "short.lkm", "-o", "all.lkm"), "short.lkm: cut short"),
        (("good.lkm", "harmed.lkm", "-o", "all.lkm"), "harmed.lkm: damaged: its checksum is"),
        (("good.lkm", "forged.lkm", "-o", "all.lkm"), "forged.lkm: damaged: token ids must be below 101"),
        (("good.lkm", "other.lkm", "-o", "all.lkm"), "other.lkm: learned from another model: its fingerprint must be"),
        (("good.lkm", ".", "-o", "all.lkm"), ".: not a file"),
        (("good.lkm", "good.lkm", "-o", "good.lkm", "--overwrite"), "output good.lkm is an input as well"),
        (("good.lkm", "-o", "other.lkm"), "output other.lkm exists; pass --overwrite to replace it"),
        (("good.lkm", "-o", "no/all.lkm"), "output no/all.lkm cannot be written: there is no folder no"),
        (("good.lkm", "-o", "all.txt"), "output must be a file *.lkm, got 'all.txt'"),
    ],
    ids=lambda each: each[1] if isinstance(each, tuple) else "",
)
def test_what_cannot_be_merged_is_refused_by_name_and_leaves_all_files_as_they_were(
    tmp_path, monkeypatch, words, complaint
):
    monkeypatch.chdir(tmp_path)
    write_memory("good.lkm", MODEL, learned([1, 2, 3], [4]))
    write_memory("other.lkm", replace(MODEL, fingerprint=78), learned([1]))
    data = Path("good.lkm").read_bytes()
    Path("text.lkm").write_text("contexts")
    Path("short.lkm").write_bytes(data[:-1])
    Path("harmed.lkm").write_bytes(data[:-1] + b"x")
    Path("forged.lkm").write_bytes(forged(data[:HEADER] + b"\x65\0\0".join((data[HEADER:-32], data[-29:]))))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    result = CliRunner().invoke(app, ["memory", "merge", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_memory_of_the_default_model_that_comes_along_is_whole():
    header, records = read_memory(Path(__file__).parent.parent / "examples" / "smollm2.lkm")
    assert (header.vocabulary, len(records)) == (49_152, header.contexts)
    assert header.file_bytes < 3e6
