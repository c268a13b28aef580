"""`/v1/audio/transcriptions`: what Whisper hears, in the forms of the OpenAI API."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperProcessor

import lookahead
from lookahead.decoding.transcription import subtitles, transcribe
from lookahead.documents.sound_files import read_sound
from lookahead.serving import speech
from tests.support.running_server import Running, save_chatty
from tests.support.speech import tiny_recognizer, tiny_whisper

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("openai")
RATE = 6000  # of the tiny model, whose windows are one second


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("speech") / "whisper"
    model = tiny_whisper()
    parts = tiny_recognizer(model)
    model.generation_config._from_model_config = False  # it would be read from the model's own configuration
    model.save_pretrained(place)
    WhisperProcessor(parts.feature_extractor, parts.tokenizer).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    running = Running(str(folder))
    yield running
    running.end()


def sound(seconds: float, form: str = "wav", rate: int = RATE, channels: int = 1) -> io.BytesIO:
    samples = np.random.default_rng(5).uniform(-0.5, 0.5, (int(seconds * rate), channels))
    file = io.BytesIO()
    file.name = f"talk.{form}"
    soundfile.write(file, samples, rate, format=form)
    file.seek(0)
    return file


def hear(running: Running, file: Any, **options: Any) -> Any:
    return running.client.audio.transcriptions.create(model=running.name, file=file, **options)


@pytest.mark.parametrize("given", [(0.9, "wav", RATE, 1), (3, "flac", 8000, 2)], ids=str)
def test_a_sound_is_heard_as_by_transcribe_in_every_form(server, folder, given):
    model, processor = lookahead.load(folder, device="cpu")
    segments = transcribe(model, processor, read_sound(sound(*given), RATE), language="en")
    text = " ".join(segment.text for segment in segments)
    assert text
    told = {
        form: hear(server, sound(*given), language="en", response_format=form)
        for form in ("json", "text", "srt", "vtt", "verbose_json")
    }
    assert told["json"].text == text and told["text"] == f"{text}\n"
    assert told["srt"] == subtitles(segments, "srt") and told["vtt"] == subtitles(segments, "vtt")
    full = told["verbose_json"]
    assert (full.text, full.language, full.duration) == (text, "en", pytest.approx(given[0], abs=0.01))
    assert [(each.start, each.end, each.text) for each in full.segments] == [
        (each.start, each.end, each.text) for each in segments
    ]


def test_words_have_times_and_a_prediction_changes_nothing(server):
    words = hear(server, sound(0.9), response_format="verbose_json", timestamp_granularities=["word"]).words
    assert words and all(each.start <= each.end for each in words)
    text = hear(server, sound(0.9)).text
    assert hear(server, sound(0.9), extra_body={"prediction": text}).text == text


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_each_task_has_its_path(server, folder, task):
    model, processor = lookahead.load(folder, device="cpu")
    audio = server.client.audio
    path = {"transcribe": audio.transcriptions, "translate": audio.translations}[task]
    heard = path.create(model=server.name, file=sound(3), extra_body={"language": "de"}).text
    segments = transcribe(model, processor, read_sound(sound(3), RATE), language="de", task=task)
    assert heard == " ".join(segment.text for segment in segments)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"file": ("x.wav", b"no sound")}, "cannot be read as sound"),
        ({"file": ("x.wav", b"")}, "cannot be read as sound"),
        ({"temperature": 0.5}, "temperature"),
        ({"language": "klingon"}, "klingon"),
        ({"prompt": "x"}, "prompt: unknown field"),
        ({"response_format": "xml"}, "response_format"),
    ],
    ids=str,
)
def test_what_cannot_be_heard_is_refused_by_name(server, fields, named):
    file = fields.pop("file", None) or sound(0.5)
    with pytest.raises(server.errors) as raised:
        hear(server, file, **fields)
    assert raised.value.status_code == 400 and named in str(raised.value)


def test_the_length_of_a_sound_is_bounded_and_a_file_is_needed(server, monkeypatch):
    monkeypatch.setattr(speech, "_MOST_S", 2.0)
    with pytest.raises(server.errors, match="3 s, more than 2"):
        hear(server, sound(3))
    for kind, body in (("application/json", b"{}"), ("multipart/form-data; boundary=x", b"--x--\r\n")):
        status, answer = server.raw("POST", "/v1/audio/transcriptions", body, content_type=kind)
        assert status == 400 and "file" in answer["error"]["message"]


def test_a_model_that_hears_writes_no_text_and_the_other_way_round(server, tmp_path):
    for path, body in (
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
        ("/tokenize", {"prompt": "abc"}),
    ):
        status, answer = server.raw("POST", path, body)
        assert status == 400 and "transcribes sound" in answer["error"]["message"]
    assert server.raw("GET", "/health")[0] == server.raw("GET", "/metrics")[0] == 200
    writer = Running(save_chatty(tmp_path / "chatty"))
    try:
        with pytest.raises(writer.errors, match="writes text"):
            hear(writer, sound(0.5))
    finally:
        writer.end()
