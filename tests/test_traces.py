"""Traffic that repeats itself: what is recorded, and how it is replayed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import traces
from bench.replay import ours, replay, replay_batches

KINDS = ("agent", "chat", "document", "reasoning", "retries")


def test_a_model_records_all_kinds_of_traffic_and_every_method_replays_them(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "chats": [{"turns": [f"Tell me of {i}.", "Shorter."]} for i in range(10)],
        "stories": [{"document": "A man. " * 9, "questions": [{"question_text": "Who?"}, {"question_text": "How?"}]}],
        "problems": [{"question": "How many are 1 and 1?"}],
    }
    options: list[str] = []
    for name, lines in files.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        options += [f"--{name}", str(tmp_path / name)]
    path, output = tmp_path / "traces.jsonl", tmp_path / "figures.json"
    sizes = ["--groups", "1", "--samples", "3", "--max-new-tokens", "4", "--longest", "20", "--nodes", "4,8"]
    given = ["--record", "--model", str(model_folder), "--dtype", "fp32", *options, *sizes, "-o", str(output)]
    assert traces.main([str(path), *given]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads(output.read_text(encoding="utf-8"))
    requests = [each["requests"] for each in result["traces"].values()]
    assert tuple(result["traces"]) == KINDS and requests == [6, 6, 2, 2, 3]
    batches = traces.read_traces(path)
    assert [len(rows) for rows in batches["retries"]] == [3] and len(batches["document"]) == 2
    for rates in result["nodes"].values():
        assert {"lookahead", "prompt lookup", "longest suffix"} <= set(rates)
        assert all(1.0 <= rate <= 4.0 for name, each in rates.items() for rate in each.values() if name != "ratio")
    first, second = (batches["chat"][turn][0] for turn in (0, 1))
    assert len(second[0]) > len(first[0]) + len(first[1]), "a turn follows the model's answer"


def test_rows_of_a_batch_step_together_and_draft_from_each_other() -> None:
    prompt, rng = np.array([1, 2], np.int32), np.random.default_rng(0)
    text = rng.permutation(np.arange(3, 203)).astype(np.int32)
    late = np.concatenate((text[100:], text[:100])).astype(np.int32)
    pairs = [(prompt, text), (prompt, late)]
    alone = replay(ours(["prompt", "outputs"], shared=False), pairs, 16)
    together = replay_batches(ours(["prompt", "outputs"], shared=False), [pairs], 16)
    assert alone["tokens"] == together["tokens"] == 400
    assert alone["steps"] == 400, "nothing in a text repeats"
    assert together["steps"] < 230, "the second half of each is the first half of the other"
