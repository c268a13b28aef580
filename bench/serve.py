"""How a server of this package serves several clients: `lookahead serve` in a process of its own, over real sockets.

    python -m bench.serve --prompts spec_bench_even.jsonl --field turns --output serve.json
    python -m bench.serve --prompts spec_bench_even.jsonl --field turns --peer llama-server=http://localhost:9001

The first server decodes one output at a time, with drafts, and keeps no prefix (`alone`). The second one has the
default options (`together`). Peers are other OpenAI servers that already run, with the same model and threads. Each
server gets the same greedy requests:

- `clients`: four clients at once, each with its own prompts. Every answer is compared with the answer of `alone`.
- `document`: a first client asks about a document, and seven more at once after its first token.
- `turns`: a chat of six turns; for every prompt the number of tokens that were read.
- `one`: a single client, compared with `lookahead.stream` in this process.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import lookahead
from bench.command import parser_of, publish, setting_of, stay_on_cores
from bench.prompts import begin_of, read_texts
from lookahead.loading.loading import DEFAULT_MODEL

NEW_TOKENS = 100
QUESTIONS = (
    "Summarize the text in one sentence.", "Who is the main person in the text?", "Where does the text take place?",
    "What happens first?", "What happens last?", "Write a title for the text.", "List three facts of the text.",
    "Is the text sad or funny? Say why.",
)  # fmt: skip
TURNS = "Tell me about rivers.", "And lakes?", "Which is the longest?", "Why?", "Name three fish.", "Thank you. Sum up."
DOCUMENT_TOKENS = 1500
WARM = "What is the capital of France?"


class Answered(NamedTuple):
    """An answer: its text and usage, and seconds to its first token and its end."""

    text: str
    usage: dict[str, Any]
    first_s: float
    whole_s: float


class Server:
    """A server that already runs, at a port of this machine; `pid` is its process, if it is ours."""

    def __init__(self, port: int, model: str | None = None, pid: int = 0) -> None:
        self.port, self.pid, self._named = port, pid, {} if model is None else {"model": model}
        self.ask([{"role": "user", "content": WARM}])

    def ask(self, messages: Sequence[dict[str, str]], on_first: Callable[[], None] = lambda: None) -> Answered:
        """A streamed answer. `on_first` is called at the first token."""
        begin, first, pieces, usage = time.perf_counter(), 0.0, list[str](), dict[str, Any]()
        body = {"messages": list(messages), "temperature": 0, "max_tokens": NEW_TOKENS, "stream": True, **self._named}
        connection = http.client.HTTPConnection("localhost", self.port, timeout=600)
        body |= {"stream_options": {"include_usage": True}}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                sys.exit(f"the server failed: {chunk['error']['message']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                pieces.append(choice["delta"].get("content") or "")
                if pieces[-1] and not first:
                    first = time.perf_counter() - begin
                    on_first()
        connection.close()
        usage = usage or {"completion_tokens": sum(map(bool, pieces)), "prompt_tokens": 0}  # not every peer sends it
        return Answered("".join(pieces), usage, first, time.perf_counter() - begin)


@contextmanager
def serving(arguments: argparse.Namespace, *options: str) -> Iterator[Server]:
    """A `lookahead serve` in its own process."""
    command = [sys.executable, "-m", "lookahead", "serve", "--port", "0", "--device", "cpu", *options]
    command += ["--dtype", arguments.dtype, "--threads", str(arguments.threads), arguments.model]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "/v1" in line)
        yield Server(int(line.partition("/v1")[0].rpartition(":")[2]), pid=process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=60)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def at_once(server: Server, chats: Sequence[Sequence[dict[str, str]]]) -> tuple[float, list[Answered]]:
    """Seconds until all chats that are sent at once are answered."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(chats)) as pool:
        answers = list(pool.map(server.ask, chats))
    return time.perf_counter() - begin, answers


def figures_of(seconds: float, answers: Sequence[Answered]) -> dict[str, Any]:
    tokens = sum(each.usage["completion_tokens"] for each in answers)
    passes = sum(each.usage.get("lookahead", {}).get("passes", 0) for each in answers)
    figures: dict[str, Any] = {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}
    if passes:  # not of peers
        figures["tokens_a_pass"] = tokens / passes
    return figures | {"first_s": [round(each.first_s, 3) for each in answers]}


def run(server: Server, rounds: Sequence[Sequence[str]], document: str) -> tuple[dict[str, Any], list[str]]:
    """The figures of one server, and its answers to the four clients."""
    texts, seconds, answers = list[str](), 0.0, list[Answered]()
    for prompts in rounds:
        took, found = at_once(server, [chat(each) for each in prompts])
        seconds, answers = seconds + took, answers + found
        texts += [each.text for each in found]
    about = [chat(f"{document}\n\n{question}") for question in QUESTIONS]
    begin, is_read = time.perf_counter(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked_first = pool.submit(server.ask, about[0], on_first=is_read.set)
        is_read.wait()
        _, later = at_once(server, about[1:])
        first = asked_first.result()
    whole = time.perf_counter() - begin
    read, messages = list[dict[str, float]](), list[dict[str, str]]()
    for turn in TURNS:
        messages += chat(turn)
        answer = server.ask(messages)
        messages.append({"role": "assistant", "content": answer.text})
        details = answer.usage.get("prompt_tokens_details") or {}
        tokens, kept = answer.usage["prompt_tokens"], details.get("cached_tokens") or 0
        read.append({"prompt": tokens, "read": tokens - kept, "first_s": round(answer.first_s, 3)})
    about_figures = figures_of(whole, [first, *later])
    about_figures["later_over_first"] = mean(each.first_s for each in later) / first.first_s
    return {"clients": figures_of(seconds, answers), "document": about_figures, "turns": read}, texts


def one_client(server: Server, arguments: argparse.Namespace, prompts: Sequence[str]) -> dict[str, float]:
    """Seconds of a single client, and of `lookahead.stream` here, prompt by prompt in turn."""
    model, tokenizer = lookahead.load(arguments.model, dtype=arguments.dtype, device="cpu")
    spent = {"served": 0.0, "streamed": 0.0}
    for i, prompt in enumerate([WARM, *prompts]):
        begin = time.perf_counter()
        pieces = list(lookahead.stream(model, tokenizer, chat(prompt), max_new_tokens=NEW_TOKENS, do_sample=False))
        streamed, answer = time.perf_counter() - begin, server.ask(chat(prompt))
        if i:
            spent["streamed"], spent["served"] = spent["streamed"] + streamed, spent["served"] + answer.whole_s
            if answer.text != "".join(pieces):
                print(f"prompt {i}: another text than of lookahead.stream", file=sys.stderr)
    return spent | {"ratio": spent["served"] / spent["streamed"]}


def main() -> None:
    parser = parser_of(__doc__, model=DEFAULT_MODEL, dtype="fp32", threads=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a prompt each")
    parser.add_argument("--field", default="turns", help="the field of a prompt, or of a list that begins with it")
    parser.add_argument("--document", type=Path, default=Path("examples/sir_charles.txt"), help="what is asked about")
    parser.add_argument("--rounds", type=int, default=4, help="prompts of each of the four clients")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="another server; repeatable")
    parser.add_argument("--peer-model", metavar="NAME", help="the model that requests to peers name")
    arguments = parser.parse_args()
    stay_on_cores(None, arguments.threads)
    tokenizer = lookahead.load(arguments.model, dtype=arguments.dtype, device="cpu").tokenizer
    texts = [each for each in read_texts(arguments.prompts, arguments.field) if len(each) < 2000]
    chosen = random.Random(0).sample(texts, 4 * arguments.rounds + 4)
    report: dict[str, Any] = setting_of(arguments)
    rounds = [chosen[4 * i : 4 * i + 4] for i in range(arguments.rounds)]
    document = begin_of(arguments.document.read_text("utf-8"), tokenizer, DOCUMENT_TOKENS)
    ways = {"alone": ("--rows", "1", "--prefix-cache-mb", "0"), "together": ()}
    found: dict[str, list[str]] = {}

    def measure(way: str, server: Server) -> None:
        report[way], found[way] = run(server, rounds, document)
        print(way, json.dumps(report[way]), file=sys.stderr, flush=True)

    for way, options in ways.items():
        with serving(arguments, *options) as server:
            measure(way, server)
            if way == "together":
                report["one"] = one_client(server, arguments, chosen[4 * arguments.rounds :])
    for peer in arguments.peer:
        way, _, url = peer.partition("=")
        measure(way, Server(urlsplit(url).port, arguments.peer_model))
    same = [ours == alone for ours, alone in zip(found["together"], found["alone"], strict=True)]
    report["identical"] = f"{sum(same)} of {len(same)}"
    for part in ("clients", "document"):
        alone, together = (report[way][part]["tokens_per_s"] for way in ways)
        report[f"{part}_times_as_fast"] = together / alone
    publish(report, arguments.output)


if __name__ == "__main__":
    main()
