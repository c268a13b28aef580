"""The page of the server: its script runs against a server, with the elements of a browser that it uses."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import browsing, path_of_browser
from tests.support.running_server import Running, folder, server

__all__ = ["folder", "server"]  # fixtures
pytest.importorskip("openai")
BROWSER = """
const base = process.argv[2], script = require("fs").readFileSync(process.argv[3], "utf-8"), shown = [];
class Element {
  constructor(tag) { this.tag = tag; this.children = []; this.listeners = {}; this.options = []; this.value = ""; }
  set textContent(text) { this.text = text; } get textContent() { return this.text ?? ""; }
  append(...more) { this.children.push(...more); shown.push(...more); }
  add(option) { this.options.push(option); this.value ||= option.value; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  requestSubmit() { this.listeners.submit({ preventDefault() {} }); }
  scrollIntoView() {}
}
const elements = {};
const querySelector = name => elements[name] ??= new Element(name), createElement = tag => new Element(tag);
globalThis.document = { querySelector, createElement };
globalThis.sessionStorage = { getItem: () => process.argv[4] ?? null, setItem() {} };
globalThis.Option = class { constructor(text, value) { this.value = value; } };
const fetched = globalThis.fetch;
globalThis.fetch = (path, options) => fetched(base + path, options);
globalThis.setInterval = look => { globalThis.look = look; };
(0, eval)(script);
const later = ms => new Promise(done => setTimeout(done, ms));
(async () => {
  for (let i = 0; i < 100 && !elements["#state"].textContent; i++) await later(50);
  elements.textarea.value = "abc";
  elements.form.requestSubmit();
  for (let i = 0; i < 600 && elements.button.textContent !== "Send"; i++) await later(50);
  await look();
  const told = each => [each.className, each.textContent, ...each.children.map(child => child.textContent)];
  const log = elements["#log"].children.map(told);
  console.log(JSON.stringify({ log, state: elements["#state"].textContent, model: elements.select.value }));
  process.exit(0);
})();
"""


@contextmanager
def ending(running: Running) -> Iterator[None]:
    try:
        yield
    finally:
        running.end()


def fetched(running: Running) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    connection.request("GET", "/")
    answer = connection.getresponse()
    told = answer.status, dict(answer.headers), answer.read().decode()
    connection.close()
    return told


def test_the_page_needs_nothing_from_elsewhere_and_its_policy_allows_nothing_else(server):
    status, headers, page = fetched(server)
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert status == 200 and policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for name in ("script", "style"):
        (text,) = re.findall(f"<{name}>(.*?)</{name}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"https?:|//[a-z]|\bsrc=|\bhref=|\sstyle=|\son[a-z]+=|innerHTML", page)


def test_written_tokens_are_counted_before_the_answer_ends(server):
    def count() -> float:
        _, metrics = server.raw("GET", "/metrics")
        return float(re.findall(rb"lookahead_completion_tokens_total ([\d.]+)", metrics)[0])

    before, counts = count(), list[float]()
    for _ in server.ask("abc", stream=True, extra_body={"lookahead": {"draft": False}}, max_tokens=60):
        counts.append(count() - before)
    assert counts[-1] == 60 and 0 < counts[len(counts) // 2] <= 60


def test_there_may_be_no_page(folder):
    running = Running(folder, has_page=False)
    try:
        assert fetched(running)[0] == 404
    finally:
        running.end()


@pytest.mark.parametrize("keys", [[], ["secret"]])
def test_the_page_shows_an_answer_and_the_figures_of_the_server(folder, tmp_path, keys):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    running: Any = Running(folder, api_keys=keys, max_new_tokens=60)
    try:
        _, _, page = fetched(running)
        script, browser = Path(tmp_path / "page.js"), Path(tmp_path / "browser.js")
        script.write_text(re.findall("<script>(.*?)</script>", page, re.DOTALL)[0])
        browser.write_text(BROWSER)
        command = [node, str(browser), f"http://127.0.0.1:{running.port}/", str(script), *keys]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

        told = json.loads(done.stdout)
        (who, asked), (other, answer, note) = told["log"]
        assert (who, asked, other, told["model"]) == ("user", "abc", "assistant", running.name)
        assert len(answer) > 10 and re.match(r"\d+ tokens in [\d.]+ s, [\d.]+ a pass; from drafts: ", note), told
        state = r"0 of 3 rows run, 0 wait; [\d.]+ tokens/s; \d+ tokens drafted, \d+ accepted"
        assert re.fullmatch(state, told["state"]), told["state"]
        written, accepted = int(note.split()[0]), int(told["state"].split()[-2])
        assert accepted < written  # though a token that two sources drafted is one of each
    finally:
        running.end()


@pytest.mark.skipif(path_of_browser() is None, reason="no Chromium is installed")
def test_a_browser_shows_the_answer_as_text_and_asks_nothing_of_others(folder, tmp_path):
    server = Running(folder, max_new_tokens=60)
    asked = "<b>abc</b>"
    options: dict[str, Any] = {"messages": [{"role": "user", "content": asked}], "model": server.name}
    with ending(server), browsing(tmp_path / "browser") as page:
        page.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
        page.wait_for("document.querySelector('#state')?.textContent.includes('rows run')")
        page.value("document.querySelector('textarea').focus()")
        page.call("Input.insertText", text=asked)
        for kind in ("keyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13)
        page.wait_for("document.querySelector('#log small')")
        said, answer = page.value("[...document.querySelectorAll('#log > div')].map(each => each.firstChild.data)")
        assert said == asked and page.value("document.querySelector('#log b')") is None
        assert answer == server.client.chat.completions.create(**options).choices[0].message.content
        width, space = page.value("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= space
        picture = base64.b64decode(page.call("Page.captureScreenshot")["data"])
        (tmp_path / "page.png").write_bytes(picture)
        events = page.events
    addresses = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
    assert addresses and all(each.startswith(f"http://127.0.0.1:{server.port}/") for each in addresses)
    errors = "Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled", "Network.loadingFailed"
    assert not [each for each in events if each["method"] in errors]
