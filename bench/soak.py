"""A soak of `lookahead serve`: clients and attackers for some minutes, every answer compared with one given alone.

    python -m bench.soak --prompts spec_bench_even.jsonl --minutes 30 --output soak.json

The server has one thread and the last core, the clients have the others. A client draws one request after the other of
`kinds_of`, now read at once, as a stream, slowly, or left in the middle. Beside them a short request (the probe) is
sent every two seconds, and the `ATTACKS` are repeated.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.command import parser_of, publish, setting_of, stay_on_cores
from bench.prompts import read_texts
from bench.serve import Server, chat, serving
from lookahead.loading.loading import DEFAULT_MODEL

CHAT, COMPLETION, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
NAME, PROBE = "soak", "probe"  # of the model, which Messages must name; of the short request
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}}}
PERSON |= {"required": ["name", "age"], "additionalProperties": False}
STREAMED = "chat", "stops", "long", "prediction", "sampled"
Request = tuple[str, dict[str, Any]]  # a path and a body


def kinds_of(texts: list[str]) -> dict[str, Request]:
    """A request of every kind."""
    asked: dict[str, Any] = {"messages": chat(texts[0]), "max_tokens": 48, "temperature": 0}
    prediction = {"prediction": {"type": "content", "content": texts[0]}}
    return {
        "chat": (CHAT, asked),
        "sampled": (CHAT, asked | {"temperature": 0.8, "seed": 7}),
        "choices": (CHAT, asked | {"temperature": 1, "seed": 5, "n": 3}),
        "stops": (CHAT, asked | {"stop": [". "]}),
        "logprobs": (CHAT, asked | {"logprobs": True}),
        "schema": (CHAT, asked | {"structured_outputs": {"json": PERSON}}),
        "prediction": (CHAT, asked | {"messages": chat(f"Repeat: {texts[0]}")} | prediction),
        "long": (CHAT, asked | {"messages": chat(" ".join(texts * 9)[:6000])}),
        "completion": (COMPLETION, {"prompt": texts[:2], "max_tokens": 24, "temperature": 0, "echo": True}),
        "responses": (RESPONSES, {"input": texts[0], "max_output_tokens": 32, "temperature": 0}),
        "messages": (MESSAGES, asked | {"model": NAME}),
    }


def texts_of(answer: dict[str, Any]) -> list[str]:
    """The texts of an answer, or of an event of a stream of chats."""
    choices = [choice.get("message") or choice.get("delta") or choice for choice in answer.get("choices", ())]
    blocks = answer.get("content", ()), *(item.get("content", ()) for item in answer.get("output", ()))
    parts = [part.get("text", "") for block in blocks for part in block]
    return [choice.get("content") or choice.get("text") or "" for choice in choices] or ["".join(parts)]


class Soak:
    """Clients and attackers of one server, and what they got.

    Args:
        server: The server.
        requests: Requests by name, each with the texts that a server alone answers.
        seconds: How long new requests are sent.
    """

    def __init__(self, server: Server, requests: dict[str, tuple[Request, list[str]]], seconds: float) -> None:
        self.port, self.pid, self.requests, self._end = server.port, server.pid, requests, time.monotonic() + seconds
        self.counts, self.attacks, self.wrong = Counter[str](), Counter[str](), list[str]()
        self.probes, self.memory = list[float](), list[float]()

    def is_over(self) -> bool:
        """Whether no new request is sent."""
        return time.monotonic() > self._end

    def send(self, path: str, body: bytes, address: str) -> http.client.HTTPConnection:
        """A connection from an address of this machine, with a request sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600, source_address=(address, 0))
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection

    def ask(self, name: str, address: str, pause: float = 0, events: float = float("inf"), *, streams: bool) -> None:
        """Send a request, and compare its answer: after so many events of a stream what it begins with."""
        (path, body), expected = self.requests[name]
        body = body | {"stream": True} if streams else body
        connection = self.send(path, json.dumps(body).encode(), address)
        answer, texts = connection.getresponse(), [""]
        self.counts[f"status {answer.status}"] += 1
        if answer.status != 200:
            time.sleep(1.0)
        elif streams:
            for number, line in enumerate(line for line in answer if line.startswith(b"data: {")):
                texts[0] += "".join(texts_of(json.loads(line[6:])))
                time.sleep(pause)
                if number >= events:
                    self.counts["left"] += 1
                    expected, texts = [expected[0][: len(texts[0])]], [texts[0][: len(expected[0])]]
                    break
        else:
            texts = texts_of(json.loads(answer.read()))
        connection.close()
        if answer.status == 200:
            self.counts["compared"] += 1
            self.wrong += [name] if texts != expected else []

    def client(self, number: int) -> None:
        """Send one request after the other."""
        rng, address = random.Random(number), f"127.0.1.{number + 1}"
        while not self.is_over():
            name = rng.choice([*self.requests])
            streams = name.startswith(STREAMED) and rng.random() < 0.6
            pause, events = rng.choice([(0, 1e9), (0, 1e9), (0.2, 1e9), (0, rng.randrange(1, 12))])
            try:
                self.ask(name, address, pause, events, streams=streams)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.counts[f"broken: {type(error).__name__}"] += 1

    def probe(self) -> None:
        """Ask for a short answer every two seconds."""
        while not self.is_over():
            begin = time.monotonic()
            with suppress(OSError):
                self.ask(PROBE, "127.0.0.2", streams=False)
                self.probes.append(time.monotonic() - begin)
            time.sleep(max(0.0, begin + 2 - time.monotonic()))

    def watch(self) -> None:
        """Note the memory of the server every minute, in MiB."""
        while not self.is_over():
            status = Path(f"/proc/{self.pid}/status").read_text("utf-8")
            self.memory.append(round(int(status.partition("VmRSS:")[2].split()[0]) / 1024))
            print(f"minute {len(self.memory)}: {dict(self.counts)}, {self.memory[-1]} MiB", file=sys.stderr, flush=True)
            time.sleep(60)

    def attack(self, name: str) -> None:
        """Repeat an attack; without bodies it is headers that never end."""
        bodies = ATTACKS[name]
        while not self.is_over():
            with ThreadPoolExecutor(200) as pool:
                self.attacks.update(pool.map(partial(self._attacked, name), bodies or [None] * 200))
            time.sleep(20)

    def _attacked(self, name: str, body: dict[str, Any] | None) -> str:
        address = f"127.0.2.{[*ATTACKS].index(name) + 1}"
        try:
            if body is None:
                with socket.create_connection(("127.0.0.1", self.port), 9, (address, 0)) as half:
                    half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nX-")
                    time.sleep(12)
                return f"{name}: sent"
            connection = self.send(CHAT, json.dumps({"max_tokens": 20} | body).encode(), address)
            if name == "predictions":
                time.sleep(1)
                connection.close()
                return f"{name}: left"
            return f"{name}: {connection.getresponse().status}"
        except (OSError, http.client.HTTPException) as error:
            return f"{name}: {type(error).__name__}"


FIELDS = {f"field {i}": {"type": "string", "pattern": "(a|b)*a(a|b){30}"} for i in range(900)}
REGEX = "|".join(f"[a-z]{{{i},{i + 900}}}x" for i in range(60))
# Bodies that are sent at once, besides `max_tokens`.
ATTACKS: dict[str, list[dict[str, Any]]] = {
    "predictions": [
        {"messages": chat("Hi"), "n": 16, "prediction": {"type": "content", "content": "a word " * 450_000}}
    ] * 7,
    "emoji": [{"messages": chat("\U0001f600" * 290_000)}] * 8,
    "headers": [],
    "choices": [{"messages": chat("Hi"), "n": 128}],
    "words": [{"messages": chat("some words and " * 2_000)}] * 3,
    "schema": [{"messages": chat("Hi"), "structured_outputs": {"json": {"type": "object", "properties": FIELDS}}}],
    "regex": [{"messages": chat("Hi"), "structured_outputs": {"regex": REGEX}}],
    "bias": [{"messages": chat("Hi"), "logit_bias": {"9" * 4_400: 1}}],
}  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, model=DEFAULT_MODEL, dtype="bf16", threads=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a prompt each")
    parser.add_argument("--field", default="turns", help="the field of a prompt, or of a list that begins with it")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--variants", type=int, default=4, help="requests of each kind")
    arguments = parser.parse_args()
    cores = os.sched_getaffinity(0)
    stay_on_cores(None, arguments.threads)
    texts = [text for text in read_texts(arguments.prompts, arguments.field) if 20 < len(text) < 900]
    random.Random(0).shuffle(texts)
    bodies = {PROBE: (CHAT, {"messages": chat("Hello"), "max_tokens": 3, "temperature": 0})}
    for at in range(arguments.variants):
        bodies |= {f"{kind} {at}": request for kind, request in kinds_of(texts[at:] + texts[:at]).items()}
    named = "--served-model-name", NAME
    with serving(arguments, *named, "--rows", "1", "--prefix-cache-mb", "0") as server:
        soak, requests = Soak(server, {}, 0), dict[str, tuple[Request, list[str]]]()
        for name, (path, body) in bodies.items():
            answer = soak.send(path, json.dumps(body).encode(), "127.0.0.1").getresponse()
            if answer.status != 200:
                sys.exit(f"{name} got {answer.status}: {answer.read()!r}")
            requests[name] = (path, body), texts_of(json.loads(answer.read()))
    with serving(arguments, *named) as server:
        os.sched_setaffinity(0, cores - os.sched_getaffinity(0) or cores)
        soak = Soak(server, requests, arguments.minutes * 60)
        works = [*(partial(soak.client, number) for number in range(arguments.clients)), soak.probe, soak.watch]
        works += [partial(soak.attack, name) for name in ATTACKS]
        with ThreadPoolExecutor(len(works)) as pool:
            for work in [pool.submit(work) for work in works]:
                work.result()
    report = setting_of(arguments, "minutes", "clients") | {"counts": dict(soak.counts), "wrong": soak.wrong}
    probe = {"median": median(soak.probes), "p99": float(np.quantile(soak.probes, 0.99)), "worst": max(soak.probes)}
    publish(report | {"attacks": dict(soak.attacks), "probe_s": probe, "memory_mib": soak.memory}, arguments.output)


if __name__ == "__main__":
    main()
