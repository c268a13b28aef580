"""`lookahead transcribe`: the transcript of transformers, in four formats, from sound files and folders of them."""

from __future__ import annotations

import json
import re
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperProcessor
from typer.testing import CliRunner, Result

import lookahead
from lookahead.cli.app import app
from lookahead.decoding import transcription
from lookahead.decoding.transcription import Segment
from lookahead.documents.sound_files import read_sound
from lookahead.errors import DocumentError
from tests.support.pass_recorder import counted_passes
from tests.support.speech import tiny_recognizer, tiny_whisper

soundfile = pytest.importorskip("soundfile")
RATE = 6000  # of the tiny model, whose windows are one second


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Whisper in `whisper`, a sound of one window, a longer one in stereo at another rate, and no sound."""
    place = tmp_path_factory.mktemp("speech")
    model = tiny_whisper()
    parts = tiny_recognizer(model)
    model.generation_config._from_model_config = False  # it would be read from the model's own configuration
    model.save_pretrained(place / "whisper")
    WhisperProcessor(parts.feature_extractor, parts.tokenizer).save_pretrained(place / "whisper")
    random = np.random.default_rng(5)
    soundfile.write(place / "short.wav", random.uniform(-0.5, 0.5, RATE - 500), RATE)
    (place / "talks").mkdir()
    soundfile.write(place / "talks" / "long.flac", random.uniform(-0.5, 0.5, (3 * 8000, 2)), 8000)
    soundfile.write(place / "talks" / "short.ogg", random.uniform(-0.5, 0.5, 8000), 8000)
    (place / "broken.wav").write_text("no sound")
    (place / "notes.txt").write_text("no sound either")
    return place


@pytest.fixture
def transcribe(folder: Path, workplace: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command in the folder."""
    monkeypatch.chdir(folder)

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, ["transcribe", *words, "-m", "whisper", "--device", "cpu", "--dtype", "fp32"])

    return run


def expected(folder: Path, file: str, **options: Any) -> list[Segment]:
    """What the model's own `generate` hears."""
    model, processor = lookahead.load(folder / "whisper", device="cpu", dtype="fp32")
    samples = read_sound(folder / file, RATE)
    padding: dict[str, Any] = {"truncation": False, "padding": "longest"} if len(samples) > RATE else {}
    inputs = processor.feature_extractor(
        samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **padding
    )
    heard = model.generate(**inputs, return_timestamps=True, return_segments=True, **options)
    texts = [processor.tokenizer.decode(each["tokens"], skip_special_tokens=True) for each in heard["segments"][0]]
    times = [(round(float(each["start"]), 3), round(float(each["end"]), 3)) for each in heard["segments"][0]]
    return [Segment(*time, text.strip()) for time, text in zip(times, texts, strict=True) if text.strip()]


@pytest.mark.parametrize("file", ["short.wav", "talks/long.flac"])
@pytest.mark.parametrize("words", [(), ("--language", "en", "--task", "translate")], ids=["detected", "translated"])
def test_the_transcript_has_the_text_and_times_of_generate(
    folder: Path, transcribe: Any, file: str, words: tuple[str, ...]
) -> None:
    options = {"language": "en", "task": "translate"} if words else {}
    wanted = expected(folder, file, **options)
    assert wanted
    result = transcribe(file, "--format", "json", *words)
    assert result.exit_code == 0, result.output
    got = json.loads(result.stdout)
    assert [Segment(**each) for each in got["segments"]] == wanted
    assert got["text"] == " ".join(each.text for each in wanted) and got["file"] == file
    assert re.search(r"s of sound in [\d.]+ s, [\d.]+ times real time", result.stderr)
    assert transcribe(file, *words).stdout.split("\n")[:-1] == [each.text for each in wanted]


def test_drafts_are_used_and_a_former_transcript_makes_fewer_passes(folder: Path) -> None:
    model, processor = lookahead.load(folder / "whisper", device="cpu", dtype="fp32")
    samples = read_sound(folder / "talks" / "long.flac", RATE)
    fixed: Any = {"draft": "fixed", "min_probability": 0.0, "trust_user_code": True}
    config = lookahead.LookaheadConfig(memory="request", proposers=("prompt",), **fixed)
    wanted = expected(folder, "talks/long.flac")
    passes = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(decoded plainly|by transformers alone)")
        for prediction in (None, " ".join(each.text for each in wanted)):
            with counted_passes(model) as counted:
                got = transcription.transcribe(model, processor, samples, config=config, prediction=prediction)
            assert got == wanted
            passes.append(len(counted))
    assert passes[1] < passes[0]


def test_subtitles_have_the_times_of_the_segments(folder: Path, transcribe: Any) -> None:
    first, *_ = wanted = expected(folder, "talks/long.flac")
    srt, vtt = (transcribe("talks/long.flac", "--format", name).stdout for name in ("srt", "vtt"))
    times = f"00:00:{first.start:06.3f} --> 00:00:{first.end:06.3f}"
    assert srt.startswith(f"1\n{times.replace('.', ',')}\n{first.text}\n")
    assert vtt.startswith(f"WEBVTT\n\n1\n{times}\n")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(wanted)
    (folder / "former.srt").write_text(srt)
    again = transcribe("talks/long.flac", "--format", "srt", "--prediction", "former.srt")
    assert again.stdout == srt and again.exit_code == 0
    assert transcribe("talks", "--prediction", "former.srt").exit_code == 2


def test_a_folder_becomes_a_folder_of_transcripts(folder: Path, transcribe: Any, tmp_path: Path) -> None:
    output = str(tmp_path / "texts")
    assert transcribe("talks", "-o", output, "--format", "srt").exit_code == 0
    assert sorted(each.name for each in Path(output).iterdir()) == ["long.srt", "short.srt"]
    result = transcribe("talks", "-o", output, "--format", "srt")
    assert result.exit_code == 2 and "long.srt exists; pass --overwrite to replace it" in result.stderr
    assert transcribe("talks", "-o", output, "--format", "srt", "--overwrite").exit_code == 0
    assert "two sounds have one name" in transcribe("talks", "short.wav", "-o", output).stderr
    shown = transcribe("talks").stdout
    assert "talks/long.flac" in shown and "talks/short.ogg" in shown


def test_a_sound_that_cannot_be_read_is_told_and_the_others_are_transcribed(transcribe: Any) -> None:
    result = transcribe("broken.wav", "short.wav", "--format", "json")
    assert result.exit_code == 1 and json.loads(result.stdout)["file"] == "short.wav"
    assert "error: broken.wav: cannot be read as sound: " in result.stderr and "ffmpeg" in result.stderr
    assert "gone.wav: no such file" in transcribe("gone.wav").stderr
    assert "no sound in this folder" in transcribe("whisper").stderr


def test_times_of_words_are_those_of_transformers_and_a_note_says_who_decodes(folder: Path, transcribe: Any) -> None:
    result = transcribe("short.wav", "--words", "--language", "en", "--format", "json")
    assert "note: times of words are read from attentions: transformers decodes alone" in result.stderr
    model, processor = lookahead.load(folder / "whisper", device="cpu", dtype="fp32")
    samples = read_sound(folder / "short.wav", RATE)
    heard = tiny_recognizer_of(model, processor)(
        samples.copy(), return_timestamps="word", generate_kwargs={"num_beams": 1, "language": "en"}
    )
    words = [each["text"].strip() for each in heard["chunks"]]
    assert [each["text"] for each in json.loads(result.stdout)["segments"]] == words


def tiny_recognizer_of(model: Any, processor: Any) -> Any:
    from transformers import pipeline

    parts = {"tokenizer": processor.tokenizer, "feature_extractor": processor.feature_extractor}
    return pipeline("automatic-speech-recognition", model=model, **parts)


def test_a_sound_is_mixed_and_resampled(tmp_path: Path) -> None:
    time = np.arange(8000) / 8000
    tone = 0.5 * np.sin(2 * np.pi * 440 * time)
    soundfile.write(tmp_path / "a.wav", np.stack([tone, -tone / 2], axis=1), 8000, subtype="FLOAT")
    got = read_sound(tmp_path / "a.wav", 16_000)
    wanted = 0.125 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert got.dtype == np.float32 and got.shape == (16_000,)
    assert np.abs(got - wanted)[500:-500].max() < 0.01
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), 8000)
    with pytest.raises(DocumentError, match="the sound is empty"):
        read_sound(tmp_path / "empty.wav", 16_000)
    (tmp_path / "empty.wav").write_bytes(b"")
    with pytest.raises(DocumentError, match="the file is empty"):
        read_sound(tmp_path / "empty.wav", 16_000)


def test_sounds_of_any_name_are_transcribed_beside_one_of_no_numbers(transcribe: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    name = "\udcff.wav"  # a byte that is not UTF-8
    with (tmp_path / "in" / name).open("wb") as file:
        soundfile.write(file, np.zeros(RATE), RATE, format="WAV")
    soundfile.write(tmp_path / "in" / "a.wav", np.full(RATE, np.nan), RATE, subtype="FLOAT")
    result = transcribe(str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--format", "json")
    assert result.exit_code == 1 and "a.wav: holds samples that are not finite numbers" in result.stderr
    (written,) = (tmp_path / "out").iterdir()
    assert json.loads(written.read_text())["file"].endswith(name)


def test_a_small_file_of_long_silence_takes_little_memory(tmp_path: Path) -> None:
    with soundfile.SoundFile(tmp_path / "a.flac", "w", samplerate=96_000, channels=8) as file:
        for _ in range(20):
            file.write(np.zeros((96_000, 8), np.int16))
    assert (tmp_path / "a.flac").stat().st_size < 1 << 16
    tracemalloc.start()
    try:
        assert len(read_sound(tmp_path / "a.flac", RATE)) == 20 * RATE
        assert tracemalloc.get_traced_memory()[1] < 16 << 20  # the samples of the file are 59 MiB
    finally:
        tracemalloc.stop()


def test_without_its_packages_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DocumentError, match=re.escape("pip install 'lookahead-decoding[speech]'")):
        read_sound(tmp_path / "a.wav", 16_000)


def test_a_language_that_there_is_not_is_told(transcribe: Any) -> None:
    result = transcribe("short.wav", "--language", "klingon")
    assert result.exit_code == 2 and "error: the model cannot transcribe this: " in result.stderr


def test_the_wrong_command_names_the_right_one(transcribe: Any, model_folder: Path) -> None:
    for command in (["generate", "hi"], ["summarize", "notes.txt"], ["chat"]):
        result = CliRunner().invoke(app, [*command, "-m", "whisper", "--device", "cpu"], input="hi\n")
        assert result.exit_code == 2, command
        assert "error: model 'whisper' reads sound: 'lookahead transcribe' transcribes it" in result.stderr
    result = CliRunner().invoke(app, ["transcribe", "short.wav", "-m", str(model_folder)])
    assert result.exit_code == 2 and "reads text: 'lookahead generate' answers a prompt with it" in result.stderr


def test_a_doctor_opens_a_speech_model(transcribe: Any) -> None:
    words = ["doctor", "-m", "whisper", "--device", "cpu", "--dtype", "fp32"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0 and "speed: not measured, as it reads sound" in told.stdout
    facts = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert facts["model"]["speed"] is None and facts["model"]["report"]["model"] == "WhisperForConditionalGeneration"
