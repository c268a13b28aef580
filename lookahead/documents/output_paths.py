"""Where a job may write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lookahead.documents.inputs import Input
from lookahead.errors import ConfigError


def check_output(path: Path, inputs: Sequence[Input], *, overwrite: bool) -> None:
    """Refuse a path that cannot be written or would destroy a file, before any work is done.

    Args:
        path: Where a file is to be made.
        inputs: What is read for it.
        overwrite: Whether a file that exists may be replaced.

    Raises:
        ConfigError: With the path and what is wrong about it.
    """
    for source in inputs:
        local = source.path.removeprefix("file://")
        if not source.is_stdin and os.path.exists(local) and path.exists() and path.samefile(local):
            raise ConfigError(f"output {path} is an input as well")
    if path.is_dir():
        raise ConfigError(f"output {path} is a directory")
    if path.is_file() and not overwrite:
        raise ConfigError(f"output {path} exists; pass --overwrite to replace it")
    if not path.parent.is_dir():
        raise ConfigError(f"output {path} cannot be written: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"output {path} cannot be written: permission denied")
