"""Commands in child processes, forked from the test process so that they import nothing again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lookahead.cli.app import main

_FORK = multiprocessing.get_context("fork")


class Forked:
    """A process that runs a function, with its standard error in a file.

    Args:
        run: The function. The exit status is 0, the code of `SystemExit`, or 1 after an exception.
        stderr: The file for its standard error.
        stdout: A file descriptor for its standard output; None uses the standard output of the tests.
        closes: A file descriptor that it closes: the other end of the pipe `stdout`.

    Attributes:
        process: The process.
    """

    def __init__(
        self, run: Callable[[], object], stderr: Path, stdout: int | None = None, closes: int | None = None
    ) -> None:
        def work() -> None:
            if closes is not None:
                os.close(closes)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with stderr.open("w") as errors:
                os.dup2(errors.fileno(), 2)
            if stdout is not None:
                os.dup2(stdout, 1)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
            try:
                run()
            finally:
                try:
                    sys.stdout.flush()  # as the interpreter does at exit
                except OSError as error:
                    print(f"Exception ignored: {error}", file=sys.stderr)

        self._stderr = stderr
        stderr.touch()  # it may be read before the process writes
        self.process = _FORK.Process(target=work)
        self.process.start()

    def until(self, happened: Callable[[], object]) -> None:
        """Wait until `happened` is true; fail if the process ends before."""
        deadline = time.monotonic() + 120
        while not happened():
            assert self.process.is_alive(), self.stderr
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)

    def wait(self) -> int | None:
        """The exit status, negative after a signal."""
        self.process.join(120)
        return self.process.exitcode

    @property
    def stderr(self) -> str:
        """The standard error so far."""
        return self._stderr.read_text()


def status_of(run: Callable[[], object]) -> int | None:
    """Run a function in a process, print its standard error, and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        forked = Forked(run, Path(folder, "stderr"))
        status = forked.wait()
        print(forked.stderr)
    return status


def heed_ctrl_c() -> None:
    """In a new process: Ctrl-C interrupts it, even if a shell runs the tests in the background and ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def command(*words: str, folder: Path, stdout: int | None = None, closes: int | None = None) -> Iterator[Forked]:
    """Run a command line in a process that ends with the block."""

    def run() -> None:
        sys.argv = ["lookahead", *words]
        main()

    forked = Forked(run, folder / "stderr", stdout, closes)
    try:
        yield forked
    finally:
        forked.process.kill()
        forked.process.join()
