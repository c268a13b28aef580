"""Memory files: what a model expects after contexts lives on, whole or not at all, and never changes a token."""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app
from lookahead.config import LookaheadConfig
from lookahead.errors import ConfigError, PoolError
from lookahead.model.model_state import LearnedState, use_learned
from lookahead.ngram.memory_file import (
    MemoryHeader,
    merge_records,
    read_memory,
    records_of,
    table_of,
    write_memory,
)
from lookahead.proposers.memory_files import header_of, merge_into
from tests.support.families import FAMILIES, build
from tests.support.index_queries import find_recycled
from tests.support.memories import HEADER, MODEL, forged, learned

TEXT = torch.tensor([[5, 9, 40, 41, 42, 5, 9]])
GREEDY = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture
def path(tmp_path):
    """A small memory."""
    write_memory(tmp_path / "small.lkm", MODEL, learned([1, 2, 3], [4]))
    return tmp_path / "small.lkm"


# The file


def test_a_context_and_its_shorter_ends_come_back_with_their_successors(path):
    table = table_of(read_memory(path)[1])
    order, tokens, chances = find_recycled(table, [9, 1, 2, 3])
    assert (order, tokens) == (3, list(range(10, 18)))
    np.testing.assert_allclose(chances, [0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 0.0], rtol=0.05, atol=2e-5)
    assert [find_recycled(table, context)[0] for context in ([3], [2, 3], [4], [2])] == [1, 2, 1, 0]


def test_a_context_takes_40_bytes(path):
    header = MemoryHeader.read(path)
    assert header.contexts == 4
    assert header.file_bytes == path.stat().st_size == HEADER + 4 * 40


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6), max_size=12))
def test_what_is_read_and_written_again_has_the_same_bytes(contexts):
    records = merge_records([learned(*contexts)], 1000)
    new, old = records_of(table_of(records), MODEL.vocabulary)
    assert len(new) == 0
    assert merge_records([old], 1000).tobytes() == records.tobytes()


def test_places_without_a_token_stay_empty():
    records = learned([1], first=97)  # of the successors 97 to 104 the vocabulary has four
    assert find_recycled(table_of(records), [1])[1] == [97, 98, 99, 100, -1, -1, -1, -1]


# Files that cannot be used


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda data: b"", "not a memory file"),
        (lambda data: b"LKPOOL\r\n" + data[8:], "not a memory file"),
        (lambda data: data[:100], "cut short: 100 bytes, less than a header"),
        (lambda data: data[:-1], "cut short: 287 bytes of 288"),
        (lambda data: data + b"\0", "longer than it should be: 289 bytes of 288"),
        (lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:], "the checksum of its header is wrong"),
        (lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "damaged: its checksum is"),
        (lambda data: data[:12] + b"\2" + data[13:], "version 2 of the format; this release reads version 1"),
        (lambda data: forged(data[:32] + b"\xff" * 8 + data[40:]), "its header holds impossible sizes"),
        (lambda data: forged(data[:HEADER] + b"\x65\0\0".join((data[HEADER:-32], data[-29:]))), "must be below 101"),
    ],
    ids=["empty", "pool", "header", "truncated", "longer", "header-bit", "bit", "version", "sizes", "token"],
)
def test_a_damaged_or_hostile_file_is_refused_by_name_and_left_as_it_is(path, tiny_llama, harm, complaint):
    path.write_bytes(harm(path.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=complaint) as caught:
        read_memory(path)
    assert str(caught.value).startswith(str(path))
    with pytest.raises(PoolError, match=complaint):
        merge_into(str(path), MODEL, learned([8]))
    with pytest.raises(PoolError, match=path.name), use_learned(tiny_llama, LearnedState()):
        config = LookaheadConfig(memory=path)
        tiny_llama.generate(TEXT, **GREEDY, custom_generate=lookahead.decode, lookahead_config=config)
    assert path.read_bytes() == before


def test_a_folder_or_a_pipe_is_no_memory(tmp_path):
    os.mkfifo(tmp_path / "pipe.lkm")
    for place in (tmp_path / "pipe.lkm", tmp_path):
        with pytest.raises(ValueError, match="not a file"):
            read_memory(place)


def test_the_memory_of_another_model_is_refused_with_both_fingerprints(path, tiny_llama):
    own = header_of(tiny_llama).fingerprint
    with pytest.raises(
        PoolError, match=f"learned from another model: its fingerprint must be {own:016x}, got {77:016x}"
    ):
        tiny_llama.generate(
            TEXT, **GREEDY, custom_generate=lookahead.decode, lookahead_config=LookaheadConfig(memory=path)
        )


@pytest.mark.parametrize("seed", range(4))
def test_a_forged_memory_of_any_contents_changes_no_token(tmp_path, tiny_llama, seed):
    """Random records for the contexts of the text, with random tokens of the vocabulary and random chances."""
    rng = np.random.default_rng(seed)
    header, contexts = header_of(tiny_llama), [[token] for token in range(101)]
    records = learned(*contexts)
    data = records.view(np.uint8).reshape(-1, 40)
    data[:, 8:] = 0
    data[:, 8:32:3] = rng.integers(0, 101, (len(records), 8))
    data[:, 32:] = rng.integers(0, 256, (len(records), 8))
    records = np.concatenate([records[rng.permutation(len(records))], records[:5]])  # neither sorted nor unique
    write_memory(tmp_path / "forged.lkm", header, records)
    expected = tiny_llama.generate(TEXT, **GREEDY)
    config = LookaheadConfig(memory=tmp_path / "forged.lkm", draft="fixed", max_nodes=16)
    with use_learned(tiny_llama, LearnedState()):
        got = tiny_llama.generate(TEXT, **GREEDY, custom_generate=lookahead.decode, lookahead_config=config)
    assert got.tolist() == expected.tolist()


# Merging


def test_of_two_records_of_a_context_the_first_counts_and_the_youngest_stay():
    merged = merge_records([learned([1], first=20), learned([1], [2], first=10)], 10)
    assert [find_recycled(table_of(merged), context)[1][0] for context in ([1], [2])] == [20, 10]
    old = merge_records([learned([token]) for token in range(40)], 100)
    old[:, 0] += np.uint64(3)  # merges ago
    merged = merge_records([old, learned([50], [51])], 12)
    kept = [token for token in range(60) if find_recycled(table_of(merged), [token])[0]]
    assert len(merged) == 12
    assert {50, 51} <= {*kept}


def test_a_merge_replaces_what_it_learned_and_keeps_the_rest(path):
    merge_into(str(path), MODEL, learned([4], [5], first=30), old=learned([3], [6], first=50))
    table = table_of(read_memory(path)[1])
    assert [find_recycled(table, [token])[1][0] for token in (3, 4, 5, 6)] == [10, 30, 30, 50]


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    path, rounds = str(tmp_path / "shared.lkm"), 6
    header = MemoryHeader(77, 101, 0, 1000)

    def write(first: int) -> None:
        for token in range(first, first + rounds):
            merge_into(path, header, learned([token]))

    processes = [multiprocessing.get_context("fork").Process(target=write, args=(at,)) for at in (0, 20, 40)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(write, (60, 80, 10)))
    table = table_of(read_memory(path)[1])
    known = [token for token in range(101) if find_recycled(table, [token])[0]]
    assert known == [token for first in (0, 10, 20, 40, 60, 80) for token in range(first, first + rounds)]


def test_a_process_that_dies_while_it_writes_leaves_the_file_as_it_was(path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr("lookahead.utils.atomic.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(PoolError, match="full"):
        merge_into(str(path), MODEL, learned([8]))
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.tmp"))


# Decoding


def test_a_memory_lives_on_in_another_process_and_drafts_from_the_first_step(tmp_path, tiny_llama):
    path = tmp_path / "new.lkm"
    config = LookaheadConfig(trust_user_code=True, proposers=("recycled",), memory=path, draft="fixed", max_nodes=8)
    expected = tiny_llama.generate(TEXT, **GREEDY)

    def passes() -> int:
        """Passes of a process of its own, as it begins with nothing learned."""
        with use_learned(tiny_llama, LearnedState()):
            calls.clear()
            got = tiny_llama.generate(TEXT, **GREEDY, custom_generate=lookahead.decode, lookahead_config=config)
            assert got.tolist() == expected.tolist()
            count = len(calls)
            assert lookahead.save_memory(tiny_llama, path)
            return count

    calls: list[int] = []
    handle = tiny_llama.register_forward_pre_hook(lambda *_: calls.append(1))
    first, second = passes(), passes()
    handle.remove()
    assert second < first


def test_calls_with_a_memory_file_share_it_and_leave_the_shared_memory_alone(tmp_path, tiny_llama):
    from lookahead.decoding.assembly import ProposerState
    from lookahead.model.model_state import state_of

    with use_learned(tiny_llama, LearnedState()):
        for _ in range(2):
            config = LookaheadConfig(memory=tmp_path / "a.lkm")
            tiny_llama.generate(TEXT, **GREEDY, custom_generate=lookahead.decode, lookahead_config=config)
        state = state_of(tiny_llama).learned.of(ProposerState, ProposerState)
        assert len(state.files) == 1
        assert not state.memory.recycled.entries["key"].any()
        assert not (tmp_path / "a.lkm").exists()
        assert lookahead.save_memory(tiny_llama, tmp_path / "a.lkm")
        with pytest.raises(PoolError, match=r"b\.lkm: cannot be saved: no call of this model used this memory"):
            lookahead.save_memory(tiny_llama, tmp_path / "b.lkm")


def test_a_file_is_read_once_and_later_calls_do_not_touch_it(tmp_path, tiny_llama):
    path = tmp_path / "a.lkm"
    write_memory(path, header_of(tiny_llama), learned([5]))
    options = {**GREEDY, "custom_generate": lookahead.decode, "lookahead_config": LookaheadConfig(memory=path)}
    with use_learned(tiny_llama, LearnedState()):
        tiny_llama.generate(TEXT, **options)
        path.unlink()
        tiny_llama.generate(TEXT, **options)
        assert lookahead.save_memory(tiny_llama, path)
    assert MemoryHeader.read(path).contexts > 1


def test_a_model_with_other_weights_has_another_fingerprint(tiny_llama):
    other = copy.deepcopy(tiny_llama)
    assert header_of(other) == header_of(tiny_llama)
    with torch.no_grad():
        other.model.norm.weight.add_(1.0)
    assert header_of(other).fingerprint != header_of(tiny_llama).fingerprint


@pytest.mark.parametrize("memory", ["Shared", "", b"a.lkm", 3, None, "a.lkp"])
def test_a_memory_is_shared_of_a_request_or_a_file(memory):
    with pytest.raises(ConfigError, match=r"memory must be shared, request or the path of a file \*.lkm, got"):
        LookaheadConfig(memory=memory)


def test_a_memory_file_that_no_source_would_use_is_refused():
    with pytest.raises(ConfigError, match="needs the proposer 'recycled'"):
        LookaheadConfig(proposers=("prompt",), memory="a.lkm")


# The commands


@pytest.fixture
def command(tmp_path, monkeypatch, tiny_llama, chat_tokenizer):
    """Runs `lookahead` in a folder with documents and a tiny model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    tiny_llama.save_pretrained("model")
    chat_tokenizer.save_pretrained("model")
    (tmp_path / "a.txt").write_text("The cat sat on the mat. " * 30)
    (tmp_path / "docs.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    return lambda *words, stdin=None: CliRunner().invoke(app, [*words], input=stdin)


def test_a_memory_is_built_added_to_and_shown(command):
    result = command("memory", "build", "a.txt", "docs.jsonl", "--model", "model", "-o", "m.lkm")
    assert (result.exit_code, result.stdout) == (0, "")
    contexts = MemoryHeader.read("m.lkm").contexts
    assert result.stderr == f"728 tokens of 3 documents taken\nm.lkm: {contexts} contexts\n"
    result = command("memory", "add", "m.lkm", "docs.jsonl", "--field", "text", "--model", "model")
    assert result.stderr == f"8 tokens of 2 documents taken\nm.lkm: {contexts} contexts\n"
    shown = command("memory", "info", "m.lkm", "--model", "model").stdout
    assert re.search(rf"^contexts +{contexts}\s*$", shown, re.M)
    assert re.search(r"^vocabulary +101\s*$", shown, re.M)
    assert "exists" in command("memory", "build", "a.txt", "--model", "model", "-o", "m.lkm").stderr


def test_a_memory_whose_name_no_command_takes_is_not_built(command):
    result = command("memory", "build", "a.txt", "--model", "model", "-o", "m.txt")
    assert (result.exit_code, result.stderr) == (2, "error: output must be a file *.lkm, got 'm.txt'\n")
    assert not Path("m.txt").exists()


def test_a_memory_built_by_reading_expects_what_the_model_does(command, tiny_llama):
    command(
        "memory", "build", "a.txt", "--model", "model", "-o", "m.lkm", "--max-contexts", "1024", "--max-tokens", "20"
    )
    text = torch.tensor([[ord(letter) - 26 for letter in "The cat sat on the m"]])
    with torch.no_grad():
        expected = tiny_llama(text).logits[0].argmax(-1).tolist()
    table = table_of(read_memory("m.lkm")[1])
    for end in range(4, 20):
        assert find_recycled(table, text[0, :end].tolist())[:2][1][0] == expected[end - 1]


def test_without_inputs_a_memory_holds_what_the_model_expects_after_every_token(command, tiny_llama, chat_tokenizer):
    result = command("memory", "build", "--model", "model", "-o", "m.lkm")
    assert (result.exit_code, result.stderr) == (0, "101 tokens taken\nm.lkm: 101 contexts\n")
    stop, every = chat_tokenizer(".", return_tensors="pt")["input_ids"], torch.arange(101)[:, None]
    with torch.no_grad():
        expected = tiny_llama(torch.cat((stop.repeat(101, 1), every), 1)).logits[:, -1].topk(8).indices.tolist()
    table = table_of(read_memory("m.lkm")[1])
    assert [find_recycled(table, [token])[:2] for token in range(101)] == [(1, each) for each in expected]

    command("memory", "add", "m.lkm", "a.txt", "--model", "model")
    assert MemoryHeader.read("m.lkm").contexts > 101
    command("memory", "build", "--model", "model", "-o", "few.lkm", "--max-tokens", "9")
    assert MemoryHeader.read("few.lkm").contexts == 9


def test_a_model_that_is_decoded_without_drafts_gets_no_memory_of_its_vocabulary(command, chat_tokenizer):
    build(FAMILIES["RecurrentGemma"]).save_pretrained("recurrent")
    chat_tokenizer.save_pretrained("recurrent")
    result = command("memory", "build", "--model", "recurrent", "-o", "m.lkm")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "m.lkm: useless for this model, which is decoded without drafts: its state is sequential" in result.stderr
    assert not Path("m.lkm").exists()


def test_a_command_draws_on_a_memory_and_adds_to_it(command):
    plain = command("generate", "The cat", "--model", "model", "--raw")
    first = command("generate", "The cat", "--model", "model", "--raw", "--memory", "m.lkm", "--proposers", "recycled")
    contexts = MemoryHeader.read("m.lkm").contexts
    assert (first.exit_code, first.stdout) == (0, plain.stdout)
    assert contexts > 0
    again = command("generate", "The dog", "--model", "model", "--raw", "--memory", "m.lkm")
    assert again.exit_code == 0
    assert MemoryHeader.read("m.lkm").contexts > contexts


def test_a_memory_of_another_model_stops_a_command_before_it_begins(command, tmp_path):
    write_memory(tmp_path / "m.lkm", MODEL, learned([1]))
    of_memories = [("memory", "add", "m.lkm", "a.txt"), ("memory", "info", "m.lkm")]
    for words in (("generate", "The cat"), ("summarize", "a.txt"), *of_memories):
        memory = () if words[0] == "memory" else ("--memory", "m.lkm")
        result = command(*words, "--model", "model", *memory)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.splitlines()[-1].startswith(
            "error: m.lkm: learned from another model: its fingerprint must"
        )


def test_a_bad_memory_file_is_refused_before_the_model_is_loaded(command, tmp_path, monkeypatch):
    monkeypatch.setattr("lookahead.loading.loading.load", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "bad.lkm").write_text("no memory")
    for memory, complaint in (
        ("bad.lkm", "not a memory file"),
        ("none/m.lkm", "cannot be written: there is no folder"),
    ):
        result = command("generate", "The cat", "--model", "model", "--memory", memory)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"error: {memory}: {complaint}")


@pytest.mark.parametrize(
    "words",
    [("explain", "docs.jsonl", "--raw"), ("summarize", "a.txt", "--max-new-tokens", "8"), ("chat",)],
    ids=lambda w: w[0],
)
def test_every_command_that_decodes_keeps_a_memory(command, words):
    result = command(*words, "--model", "model", "--memory", "m.lkm", stdin="The cat\n")
    assert result.exit_code == 0, result.stderr
    assert MemoryHeader.read("m.lkm").contexts > 0


def test_a_dry_run_leaves_the_memory_alone(command, tmp_path):
    assert command("summarize", "a.txt", "--model", "model", "--memory", "m.lkm", "--dry-run").exit_code == 0
    assert not (tmp_path / "m.lkm").exists()


def test_a_server_keeps_the_memory_of_one_model_alone(command):
    result = command("serve", "model", "model", "--memory", "m.lkm")
    assert result.exit_code == 2
    assert "memory m.lkm belongs to one model: serve one model" in result.stderr
