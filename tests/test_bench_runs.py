"""Every command of `bench/` runs to its figures, on small models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import families

ROOT = Path(__file__).resolve().parent.parent
SUMMARIZER = "tests/models/summarizer"
# Benchmarks with tests of their own run there.
ELSEWHERE = {"ablation", "fuzz", "kernel", "llm", "llm_peers", "tables"}
RUNS = {
    "beams": f"--model {SUMMARIZER} --prompts {{prompts}} --categories qa --limit 1 --max-new-tokens 6",
    "exactness": "--families Llama",
    "exactness --model": f"--model {SUMMARIZER} --prompts {{prompts}} --field text --limit 1 --max-new-tokens 6",
    "job": "--documents 4 --longest 200 --max-new-tokens 40",
    "never_slower": "--prompts {text} --batch-sizes 1 --pairs 1 --prompt-tokens 20 --max-new-tokens 6",
    "passes": f"--model {SUMMARIZER} --contexts 40 --nodes 1,4 --rounds 1",
    "passes --reading": f"--model {SUMMARIZER} --contexts 40 --rounds 1 --reading",
    "propose": f"--tokenizer {SUMMARIZER} --text {{text}} --contexts 64 --steps 20",
    "serve": f"--model {SUMMARIZER} --prompts {{prompts}} --rounds 1",
    "soak": f"--model {SUMMARIZER} --prompts {{prompts}} --minutes 0.1 --clients 2 --variants 1",
}
# Its shapes have half a billion weights. A test runs its steps on a small one.
TOO_LARGE = {"families"}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A text and prompts, of an example document."""
    folder = tmp_path_factory.mktemp("texts")
    words = (ROOT / "examples/sir_charles.txt").read_text(encoding="utf-8")
    text, prompts = folder / "text.txt", folder / "prompts.jsonl"
    text.write_text(words * 3, encoding="utf-8")
    lines = [
        {"category": "qa", "turns": [words[at : at + 200]], "text": words[at : at + 300]} for at in range(0, 6_000, 300)
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return {"text": text, "prompts": prompts}


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs_to_its_figures(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    words = RUNS[name].format(**files).split()
    command = [sys.executable, "-m", f"bench.{name.split()[0]}", *words, "-o", str(output)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2_000:]
    report = json.loads(run.stdout.splitlines()[-1])
    assert report == json.loads(output.read_text(encoding="utf-8"))
    assert report["command"].startswith(f"python -m bench.{name.split()[0]} ") and report["versions"]


def test_the_figures_of_a_family_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 30_000, "tie_word_embeddings": True}
    monkeypatch.setitem(families.FAMILIES, "Qwen3", ("Qwen3", sizes))
    figures = families.measured("Qwen3", torch.float32, 1, (1e10, 1e11))
    assert figures["one_call"] and figures["keeps_bits"]
    assert figures["of_perfect"].keys() == figures["pass_ms"].keys()
    assert min(figures["greedy_ms"], figures["no_drafts_ms"], figures["step_ms"]) > 0


def test_no_benchmark_is_without_a_run() -> None:
    commands = {path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert commands == {name.split()[0] for name in RUNS} | ELSEWHERE | TOO_LARGE
