"""Sound files, and folders of them, as samples for a speech model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lookahead.documents.byte_sources import STDIN, is_url
from lookahead.errors import DocumentError, one_line

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".au", ".caf", ".w64")
"""Formats of libsndfile. `ffmpeg -i FILE out.flac` makes one of any other sound or film."""

_PART = 1 << 16  # samples of a channel that are read at once
_EXTRA = "reading sound needs soundfile and soxr: pip install 'lookahead-decoding[speech]'"


def find_sounds(arguments: Sequence[str]) -> list[Path]:
    """The files of arguments and the sounds in folders and below, each once; DocumentError for one that is missing."""
    paths: dict[Path, None] = {}
    for argument in arguments:
        path = Path(os.path.expanduser(argument))
        sounds = [path]
        if path.is_dir():
            sounds = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
            if not sounds:
                raise DocumentError(f"{argument}: no sound in this folder; known suffixes are {' '.join(SUFFIXES)}")
        elif not path.is_file():
            is_other = argument == STDIN or is_url(argument) or not {*"*?["}.isdisjoint(argument)
            hint = "; sounds are named by files and folders, not by URLs, patterns or a pipe" if is_other else ""
            raise DocumentError(f"{argument}: no such file{hint}")
        paths |= dict.fromkeys(sounds)
    return list(paths)


def read_sound(path: Path | IO[bytes], rate: int, most_s: float = math.inf) -> NDArray[np.float32]:
    """The samples of a sound, float32 `[samples]` at `rate` samples per second; channels are averaged.

    DocumentError if the file cannot be read as sound, is empty, longer than `most_s` seconds or not finite, or a
    package is missing.
    """
    try:
        import soundfile
        import soxr
    except ImportError as error:
        raise DocumentError(_EXTRA) from error
    name = path if isinstance(path, Path) else "the sound"
    # soundfile does not encode names that are not UTF-8.
    if isinstance(path, Path) and path.is_file() and not path.stat().st_size:
        raise DocumentError(f"{name}: the file is empty")
    source = os.fsencode(path) if isinstance(path, Path) and os.name == "posix" else path
    try:
        with soundfile.SoundFile(source) as sound:
            length = len(sound) / sound.samplerate
            if length > most_s:
                raise DocumentError(f"{name}: has {length:.0f} s, more than {most_s:.0f}")
            stream, parts = soxr.ResampleStream(sound.samplerate, rate, 1, dtype="float32"), list[Any]()
            # In parts: a few megabytes may be gigabytes of silence, of many channels at a high rate.
            while len(part := sound.read(_PART, dtype="float32", always_2d=True)):
                parts.append(stream.resample_chunk(part.mean(axis=1)))
            parts.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    except soundfile.LibsndfileError as error:
        what = one_line(error).rpartition(": ")[2].rstrip(".")
        raise DocumentError(
            f"{name}: cannot be read as sound: {what}; 'ffmpeg -i FILE out.flac' converts it"
        ) from error
    mono: NDArray[np.float32] = np.concatenate(parts)
    if not len(mono):
        raise DocumentError(f"{name}: the sound is empty")
    if not np.isfinite(mono).all():
        raise DocumentError(f"{name}: holds samples that are not finite numbers")
    return mono
