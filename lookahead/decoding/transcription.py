"""Transcription of sound by Whisper: the text, segments and times of transformers, with drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.config import LookaheadConfig
from lookahead.decoding.enable import enable
from lookahead.errors import ConfigError, UnsupportedModelError, first_line


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a transcript, a sentence or so.

    Attributes:
        start: Where it begins, in seconds.
        end: Where it ends, in seconds.
        text: What is said.
    """

    start: float
    end: float
    text: str


def check_speech(model: Any, name: str) -> None:
    """UnsupportedModelError if a model is not Whisper; `name` is what the user called it."""
    if model.config.model_type != "whisper":
        raise UnsupportedModelError(
            f"model {name!r} is not Whisper, the speech model that is transcribed here, but {type(model).__name__}"
        )


def transcribe(
    model: Any,
    processor: Any,
    samples: NDArray[np.float32],
    *,
    config: LookaheadConfig | None = None,
    language: str | None = None,
    task: str | None = None,
    prediction: str | None = None,
    times_of_words: bool = False,
) -> list[Segment]:
    """Transcribe a sound of any length, greedily, with the tokens and times of `model.generate`.

    Args:
        model: A Whisper model.
        processor: Its processor.
        samples: float32 `[samples]` at the rate of the processor's feature extractor.
        config: How to draft; None for the defaults.
        language: The language that is spoken, such as `"en"`; None to detect it.
        task: `"transcribe"`, or `"translate"` into English; None for the model's own.
        prediction: A text close to the transcript, such as a former one, to draft from.
        times_of_words: Whether every segment is a word. Its times are read from attentions, so transformers decodes.

    Returns:
        The segments in order.

    Raises:
        ConfigError: The model does not take the language or the task.
    """
    extractor, tokenizer = processor.feature_extractor, processor.tokenizer
    asked: dict[str, Any] = {"language": language, "task": task}
    options = {name: value for name, value in asked.items() if value is not None}
    try:
        if times_of_words:
            return _words(model, processor, samples, options)
        is_long = len(samples) > extractor.n_samples
        padding = {"truncation": False, "padding": "longest"} if is_long else {}
        inputs = extractor(
            samples, sampling_rate=extractor.sampling_rate, return_attention_mask=True, return_tensors="pt", **padding
        )
        if prediction is not None:  # Whisper's words begin with their space
            ids = tokenizer(f" {prediction.strip()}", add_special_tokens=False)["input_ids"]
            options["lookahead_prediction"] = torch.tensor(ids)
        features = inputs["input_features"].to(model.device, model.dtype)
        with enable(model, config), torch.inference_mode():
            heard = model.generate(
                features, attention_mask=inputs["attention_mask"].to(model.device), return_timestamps=True,
                return_segments=True, **options,
            )  # fmt: skip
    except ValueError as error:  # of transformers, about the language and the task
        raise ConfigError(f"the model cannot transcribe this: {first_line(error)}") from error
    return [
        Segment(round(float(part["start"]), 3), round(float(part["end"]), 3), text.strip())
        for part in heard["segments"][0]
        if (text := tokenizer.decode(part["tokens"], skip_special_tokens=True)).strip()
    ]


def _words(model: Any, processor: Any, samples: NDArray[np.float32], options: dict[str, Any]) -> list[Segment]:
    from transformers import pipeline

    recognize: Any = pipeline(
        "automatic-speech-recognition", model=model, tokenizer=processor.tokenizer,
        feature_extractor=processor.feature_extractor,
    )  # fmt: skip
    heard = recognize(samples.copy(), return_timestamps="word", generate_kwargs={"num_beams": 1, **options})
    length = len(samples) / processor.feature_extractor.sampling_rate
    words = ((*word["timestamp"], word["text"].strip()) for word in heard["chunks"])
    return [Segment(float(start), float(length if end is None else end), text) for start, end, text in words]


def subtitles(segments: Sequence[Segment], kind: Literal["srt", "vtt"]) -> str:
    """Segments as a file of subtitles."""
    point = "," if kind == "srt" else "."
    blocks = [
        f"{i}\n{_clock(segment.start, point)} --> {_clock(segment.end, point)}\n{segment.text}\n"
        for i, segment in enumerate(segments, start=1)
    ]
    return ("" if kind == "srt" else "WEBVTT\n\n") + "\n".join(blocks)


def _clock(seconds: float, point: str) -> str:
    """Seconds as subtitles have them: `00:01:02,500`."""
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
