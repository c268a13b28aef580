"""The command `lookahead transcribe`."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from rich.rule import Rule
from rich.text import Text

from lookahead.cli.options import DraftingOptions, ModelOptions, model_option, option, read_prompt_file
from lookahead.cli.terminal import console, harmless, load, memory_file_saved_at_exit, say, show_line
from lookahead.documents.inputs import check_output
from lookahead.documents.sound_files import SUFFIXES, find_sounds, read_sound
from lookahead.errors import ConfigError, DocumentError
from lookahead.utils.atomic import write_atomically

if TYPE_CHECKING:
    from lookahead.decoding.transcription import Segment

_TIMES = re.compile(r"WEBVTT.*|\d+|.*-->.*")  # the lines of subtitles that are not spoken


@dataclass(frozen=True, kw_only=True)
class TranscribeOptions(DraftingOptions, ModelOptions):
    inputs: list[str] = option(
        help=f"Sound files ({' '.join(SUFFIXES)}), and folders of them.", argument=True, metavar="INPUTS"
    )
    model: str = model_option(help="A Whisper model: a folder, or a name on the Hub such as openai/whisper-small.")
    output: Path | None = option(
        None, "Folder for the transcripts, a file each. (default: stdout)", "--output", "-o", metavar="DIR"
    )
    format: Literal["text", "json", "srt", "vtt"] = option("text", "Text, JSON with times, or subtitles.")
    language: str | None = option(None, "Language that is spoken, such as en. (default: detected)")
    task: Literal["transcribe", "translate"] | None = option(None, "translate: into English.")
    prediction: str | None = option(
        None, "File with a former transcript or subtitles of the sound, to draft from.", metavar="FILE"
    )
    words: bool = option(False, "Times of words; transformers decodes alone, without drafts.")
    overwrite: bool = option(False, "Replace transcripts that exist.")


def transcribe(options: TranscribeOptions) -> None:
    """Transcribe speech with Whisper: text, JSON with times, or subtitles, with the tokens of transformers.

    Sounds of any length and rate are read. Other formats, and films, become one by 'ffmpeg -i FILE out.flac'.

    For example:

      lookahead transcribe talk.wav -m openai/whisper-small
      lookahead transcribe talk.mp3 -m ./whisper --format srt > talk.srt
      lookahead transcribe interviews/ -m ./whisper -o transcripts --format json
      lookahead transcribe talk.wav -m ./whisper --prediction earlier.srt

    Exit status: 0 all sounds are transcribed; 1 one could not be read; 2 an argument is wrong.
    """
    sounds = find_sounds(options.inputs)
    outputs = [None] * len(sounds) if options.output is None else _outputs(sounds, options.output, options)
    prediction = None
    if options.prediction is not None:
        if len(sounds) > 1:
            raise ConfigError(f"--prediction is a transcript of one sound, got {len(sounds)} sounds")
        lines = read_prompt_file(options.prediction).splitlines()
        prediction = " ".join(line.strip() for line in lines if not _TIMES.fullmatch(line.strip()))
    config = options.config()
    loaded = load(options, measures_costs=False, reads="sound")
    from lookahead.decoding import transcription

    transcription.check_speech(loaded.model, options.model)
    if options.words:
        say("note", "times of words are read from attentions: transformers decodes alone")
    rate, failed = loaded.tokenizer.feature_extractor.sampling_rate, False
    with memory_file_saved_at_exit(options, loaded.model):
        for sound, output in zip(sounds, outputs, strict=True):
            started = time.monotonic()
            try:
                samples = read_sound(sound, rate)
            except DocumentError as error:
                say("error", str(error))
                failed = True
                continue
            with console(sys.stderr).status(f"listening to {harmless(sound.name)}"):
                segments = transcription.transcribe(
                    *loaded, samples, config=config, language=options.language, task=options.task,
                    prediction=prediction, times_of_words=options.words,
                )  # fmt: skip
            text = _shown(segments, options.format, str(sound))
            if output is not None:
                write_atomically(output, text)
            else:
                if len(sounds) > 1 and options.format == "text":
                    console(sys.stdout).print(Rule(Text(harmless(str(sound)), "bold"), align="left"))
                print(harmless(text), end="", flush=True)
            length, seconds = len(samples) / rate, time.monotonic() - started
            speed = f"{length:.1f} s of sound in {seconds:.1f} s, {length / seconds:.1f} times real time"
            show_line(sys.stderr, Text(harmless(f"{sound.name}: {speed}"), "dim"))
    if failed:
        raise typer.Exit(1)


def _outputs(sounds: Sequence[Path], folder: Path, options: TranscribeOptions) -> list[Path]:
    """The file of each sound in the folder, which is made; ConfigError if one exists, or two sounds have one name."""
    suffix = {"text": "txt"}.get(options.format, options.format)
    outputs = [folder / f"{sound.stem}.{suffix}" for sound in sounds]
    if len({*outputs}) < len(outputs):
        raise ConfigError("two sounds have one name: transcribe them into two folders")
    folder.mkdir(parents=True, exist_ok=True)
    for output in outputs:
        check_output(output, [], overwrite=options.overwrite)
    return outputs


def _shown(segments: Sequence[Segment], format: Literal["text", "json", "srt", "vtt"], name: str) -> str:
    """A transcript in a format."""
    if format == "text":
        return "".join(f"{segment.text}\n" for segment in segments)
    if format == "json":
        text = " ".join(segment.text for segment in segments)
        parts = [asdict(segment) for segment in segments]
        told = json.dumps({"file": name, "text": text, "segments": parts}, ensure_ascii=False)
        return told.encode("utf-8", "backslashreplace").decode() + "\n"  # names may not be UTF-8
    from lookahead.decoding.transcription import subtitles

    return subtitles(segments, format)
