"""Commands at a pseudo terminal: typed input, including Ctrl-C, and shown output."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator

from lookahead.cli.app import main

_FORK = multiprocessing.get_context("fork")
CTRL_C, CTRL_D = "\x03", "\x04"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")
_MOST_S = 60.0
_AGAIN_S = 5.0


class PseudoTerminal:
    """The user's end of a pseudo terminal.

    Attributes:
        process: The command at the other end.
    """

    def __init__(self, words: tuple[str, ...], columns: int) -> None:
        self._master, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

        def work() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # earlier tests or a shell may have changed it
            os.setsid()
            fcntl.ioctl(other, termios.TIOCSCTTY, 0)
            for number in (0, 1, 2):
                os.dup2(other, number)
            sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", 1, closefd=False)
            sys.argv = ["lookahead", *words]
            main()

        self.process = _FORK.Process(target=work)
        self.process.start()
        os.close(other)
        self._bytes = b""

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._master, text.encode())

    def enter(self, line: str) -> None:
        """Type a line once the prompt is shown."""
        self.until(lambda shown: shown.endswith(("\n> ", "\n... ")))
        self._bytes = b""
        self.type(line + "\r")

    def until(self, expected: str | Callable[[str], object]) -> str:
        """Wait until the output since the last line has a text or fits a function, and return this output."""
        happened = expected if callable(expected) else lambda shown: expected in shown
        deadline = time.monotonic() + _MOST_S
        while not happened(self.shown):
            assert time.monotonic() < deadline and self._read(), self.shown
        return self.shown

    def interrupt_prompt(self, expected: Callable[[str], object]) -> str:
        """Press Ctrl-C at a prompt until it works: Python's readline may miss a key right after the prompt."""
        deadline = time.monotonic() + _MOST_S
        while not expected(self.shown):
            assert time.monotonic() < deadline, self.shown
            self.type(CTRL_C)
            pressed = time.monotonic()
            while time.monotonic() < pressed + _AGAIN_S and not expected(self.shown):
                assert self._read(), self.shown
        return self.shown

    def wait(self) -> int | None:
        """The exit status after all output has been read."""
        deadline = time.monotonic() + _MOST_S
        while self._read():
            assert time.monotonic() < deadline, self.shown
        self.process.join(_MOST_S)
        return self.process.exitcode

    def close(self) -> None:
        """End the command and close the terminal."""
        self.process.kill()
        self.process.join()
        os.close(self._master)

    @property
    def shown(self) -> str:
        """The output since the last line was entered, without colours."""
        return _ESCAPES.sub("", self._bytes.decode(errors="replace")).replace("\r", "")

    def _read(self) -> bool:
        """Read the output of up to a second; False at the end."""
        try:
            if select.select([self._master], [], [], 1.0)[0]:
                self._bytes += (read := os.read(self._master, 1 << 16))
                return bool(read)
        except OSError:  # the other end is closed
            return False
        return True


@contextlib.contextmanager
def at_terminal(*words: str, columns: int = 80) -> Iterator[PseudoTerminal]:
    """A command line at a pseudo terminal. It ends with the block."""
    terminal = PseudoTerminal(words, columns)
    try:
        yield terminal
    finally:
        terminal.close()
