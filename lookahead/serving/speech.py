"""`/v1/audio/transcriptions` and `/v1/audio/translations`: sound in, text out, for Whisper models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse, PlainTextResponse, Response

from lookahead.decoding.transcription import subtitles, transcribe
from lookahead.documents.sound_files import read_sound
from lookahead.serving.api_errors import invalid
from lookahead.serving.parsing import Body, parsed
from lookahead.serving.served_models import HearingModel

MOST_FIELDS = 16
_MOST_S = 1800.0  # seconds of a sound


class SpeechBody(Body):
    """The fields of a request beside its file."""

    ignores = frozenset(("stream",))  # as with OpenAI's Whisper
    model: str | None = None
    language: str | None = Field(None, max_length=40)
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Literal["0", "0.0"] | None = None
    timestamp_granularities: Literal["segment", "word"] = "segment"
    prediction: str | None = None


def speech_of(form: FormData) -> tuple[SpeechBody, UploadFile]:
    """The fields and the file of a form."""
    fields: dict[str, Any] = {name.removesuffix("[]"): value for name, value in form.multi_items()}
    file = fields.pop("file", None)
    if not isinstance(file, UploadFile):
        raise invalid("file", "must be the file of a sound")
    body: SpeechBody = parsed(SpeechBody, fields)
    return body, file


def heard(served: HearingModel, body: SpeechBody, file: UploadFile, task: str) -> Response:
    """What is said in a sound."""
    rate = served.processor.feature_extractor.sampling_rate
    samples, by_words = read_sound(file.file, rate, _MOST_S), body.timestamp_granularities == "word"
    segments = transcribe(
        served.model, served.processor, samples, config=served.config, language=body.language, task=task,
        prediction=body.prediction, times_of_words=by_words,
    )  # fmt: skip
    text, form = " ".join(segment.text for segment in segments), body.response_format
    if form == "json":
        return JSONResponse({"text": text})
    if form == "verbose_json":
        words = [{"word": word.text, "start": word.start, "end": word.end} for word in segments]
        parts = {"words": words} if by_words else {"segments": [{"id": i, **asdict(s)} for i, s in enumerate(segments)]}
        told = {"task": task, "language": body.language or "unknown", "duration": len(samples) / rate}
        return JSONResponse({**told, "text": text, **parts})
    return PlainTextResponse(f"{text}\n" if form == "text" else subtitles(segments, form))
