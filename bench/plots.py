"""The plots of the results page. Needs matplotlib."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

TEXTS = {
    "replay_spec_bench_summaries.json": "Spec-Bench summaries",
    "replay_vicuna.json": "chat, Vicuna 7B",
    "replay_llama3.json": "chat, Llama-3-8B-Instruct",
}
OURS = {"ours_shared": "ours, memory shared", "ours": "ours", "outputs": "ours, earlier outputs alone"}
PEERS = {
    "hf_prompt_lookup": "prompt lookup",
    "longest_suffix": "longest suffix",
    "first_occurrence": "first occurrence",
}

# Text is not converted to paths, and ids in the file are reproducible.
UNDATED = {"Date": None, "Creator": None}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "lookahead", "font.size": 9}


def draw_replay(results: Path, path: Path) -> None:
    """Tokens per step on recorded outputs, by draft nodes per step. Texts without measurements are left out."""
    texts = [name for name in TEXTS if (results / name).exists()]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        panels = figure.subplots(1, len(texts), sharey=True, squeeze=False)
        for name, axes in zip(texts, panels[0], strict=True):
            methods = json.loads((results / name).read_text(encoding="utf-8"))["methods"]
            for ours, label in OURS.items():
                figures = [each for method, each in methods.items() if method.split("@")[0] == ours]
                places = sorted((each["drafted_per_step"], each["tokens_per_step"]) for each in figures)
                axes.plot(*zip(*places, strict=True), marker="o", label=label)
            for peer, label in PEERS.items():
                place = methods[peer]["drafted_per_step"], methods[peer]["tokens_per_step"]
                axes.plot(*place, "x", markersize=7, label=label)
            axes.set_title(TEXTS[name])
            axes.set_xlabel("draft nodes a step")
            axes.grid(alpha=0.3)
        panels[0][0].set_ylabel("tokens a step")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center")
        figure.savefig(path, metadata=UNDATED)


def draw_llm(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Decode speed over greedy decoding by category and method on a real model, with a panel for every result."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 2.9 * len(reports)), layout="constrained")
        panels = figure.subplots(len(reports), 1, sharex=True, squeeze=False)[:, 0]
        for report, axes in zip(reports, panels, strict=True):
            methods = {"prompt lookup, best size": report["best_prompt_lookup"], "lookahead": "lookahead"}
            methods |= {name: name for name in report["methods"] if name.startswith(("vLLM", "llama.cpp"))}
            shown = {label: report["methods"][name] for label, name in methods.items() if name in report["methods"]}
            categories = ["all", *report["categories"]]
            width = 0.8 / max(1, len(shown))
            for i, (label, each) in enumerate(shown.items()):
                heights = [each["speedup"]["cpu"], *(c["speedup"]["cpu"] or 0 for c in each["by_category"].values())]
                places = [place + (i - (len(shown) - 1) / 2) * width for place in range(len(categories))]
                bars = axes.bar(places, heights, width, label=label, color=f"C{i}")
                axes.bar_label(bars, fmt="%.2f", fontsize=7)
            axes.axhline(1.0, color="grey", linewidth=1)
            axes.set_xticks(range(len(categories)), [name.replace("_", " ") for name in categories])
            axes.set_ylabel(f"{report['dtype']}: times greedy")
            axes.margins(y=0.12)
        handles = {
            label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False)
        figure.savefig(path, metadata=UNDATED)
