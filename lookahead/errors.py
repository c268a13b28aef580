"""The exceptions of this package.

    LookaheadError
    ├── ConfigError            an option is out of its range (also a ValueError)
    ├── UnsupportedModelError  a model or generation mode is not supported (also a ValueError)
    ├── PromptError            a prompt is empty or leaves no room for output (also a ValueError)
    │   └── PromptTooLongError a prompt has more tokens than the model has positions
    ├── SessionError           a file holds no conversation, or cannot be written (also a ValueError)
    ├── LogitsError            logits, or scores to sample by, are not a number (also a RuntimeError)
    ├── DocumentError          a document cannot be read or summarized (also a ValueError)
    ├── ProposerError          a custom proposer breaks its interface (also a ValueError)
    ├── PoolError              a pool or memory file cannot be read, written or used here (also a ValueError)
    ├── HeadsError             trained heads cannot be read or used with this model (also a ValueError)
    ├── ResultsError           another program changed the files of a job while it ran (also a RuntimeError)
    ├── ClusterError           a Ray cluster cannot be reached, or its workers fail (also a RuntimeError)
    └── TrainingError          training data or a training job is unusable (also a ValueError)

Every message names the field or file, the allowed range if there is one, and the value received.
"""

import inspect
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBER = re.compile(r"\[Errno -?\d+\] ")
_INNER = ("lookahead", "torch", "transformers")


class LookaheadError(Exception):
    """Base class of the errors of this package."""


class ConfigError(LookaheadError, ValueError):
    """An option is out of its range."""


class UnsupportedModelError(LookaheadError, ValueError):
    """The model or the generation mode is not supported."""


class PromptError(LookaheadError, ValueError):
    """A prompt is empty, or leaves no room for a new token."""


class PromptTooLongError(PromptError):
    """A prompt has more tokens than the model has positions.

    Args:
        lengths: What is too long, with both numbers.
        remedy: How to shorten it.
    """

    def __init__(
        self,
        lengths: str,
        remedy: str = "shorten it, or pass truncate='left' to leave out its beginning or truncate='right' its end",
    ) -> None:
        super().__init__(lengths, remedy)
        self.lengths, self.remedy = lengths, remedy

    def __str__(self) -> str:
        return f"{self.lengths}; {self.remedy}"


class SessionError(LookaheadError, ValueError):
    """A file holds no conversation, cannot be read or written, or was changed by another process."""


class LogitsError(LookaheadError, RuntimeError):
    """The logits of the model, or the scores to sample a token from, are not a number."""


class DocumentError(LookaheadError, ValueError):
    """A document cannot be read or summarized."""


class ProposerError(LookaheadError, ValueError):
    """A custom proposer breaks its interface, or its draft is not a tree of known tokens."""


class PoolError(LookaheadError, ValueError):
    """A pool or memory file cannot be read or written, is damaged, or belongs to another tokenizer or model."""


@contextmanager
def pool_errors(path: str) -> Iterator[None]:
    """Turn the errors of a pool or memory file into a `PoolError` that names it."""
    try:
        yield
    except OSError as error:
        raise PoolError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PoolError(str(error)) from error


class HeadsError(LookaheadError, ValueError):
    """Trained heads cannot be read, or belong to another model."""


class TrainingError(LookaheadError, ValueError):
    """Training data or a training job is unusable."""


class ResultsError(LookaheadError, RuntimeError):
    """Another program changed or removed the results or the rejects of a job while it ran."""


class ClusterError(LookaheadError, RuntimeError):
    """A Ray cluster cannot be reached, or its workers fail."""


def _message(error: BaseException) -> str:
    """The message of an error, without the number that an error of the system has in front of its words."""
    return _NUMBER.sub("", str(error))


def one_line(error: BaseException) -> str:
    """The message of an error in one line, or the name of its type if it has no message."""
    return " ".join(_message(error).split()) or type(error).__name__


def named(error: BaseException) -> str:
    """The type of an error and its message, in one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def with_place(error: BaseException) -> str:
    """`named`, and where the error was raised: the file, the line and the function."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{named(error)}{place}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has no message."""
    return next((line.strip() for line in _message(error).splitlines() if line.strip()), type(error).__name__)


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 document`, `2 documents`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports a lack of memory; torch raises a RuntimeError for it on a CPU."""
    return isinstance(error, MemoryError) or bool(re.search("(out of|enough|allocate) memory", str(error)))


def warn(message: str) -> None:
    """Warn with the location of the user's line: frames of this package, transformers and torch are skipped."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
