"""A headless Chromium that shows a page: it speaks the DevTools protocol over two pipes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell"
_OPTIONS = "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"
_WAIT_S = 60.0


def path_of_browser() -> str | None:
    """The browser of this machine, if there is one."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """A page in a browser.

    Attributes:
        events: What the browser told: requests, errors, messages of the console.
    """

    def __init__(self, asking: int, answers: int) -> None:
        self._asking, self._answers, self._numbers = asking, os.fdopen(answers, "rb"), itertools.count(1)
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        number = next(self._numbers)
        asked = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._asking, json.dumps(asked).encode() + b"\0")
        while True:
            told = json.loads(self._next())
            if told.get("id") == number:
                assert "error" not in told, told
                return dict(told["result"])
            self.events.append(told)

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _WAIT_S
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, (expression, self.value("document.body.innerText"))
            time.sleep(0.05)

    def _next(self) -> bytes:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return bytes(message)


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A page in a browser of its own, which keeps its files in a folder."""
    browser = path_of_browser()
    assert browser is not None
    (to_browser, asking), (answers, from_browser) = os.pipe(), os.pipe()

    def take_pipes() -> None:  # the protocol is spoken on the descriptors 3 and 4
        ends = os.dup(to_browser), os.dup(from_browser)
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    command = [browser, *_OPTIONS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(command, preexec_fn=take_pipes, close_fds=False, stderr=subprocess.DEVNULL)
    os.close(to_browser)
    os.close(from_browser)
    page = Page(asking, answers)
    try:
        yield page
    finally:
        os.close(asking)
        process.kill()
        process.wait()
        page._answers.close()
