"""The plot of the results page; needs matplotlib."""

from __future__ import annotations

import json
from pathlib import Path

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


def draw_replay(results: Path, path: Path) -> None:
    """Tokens a step on recorded outputs, by the draft nodes of a step; texts that were not measured are left out."""
    texts = [name for name in TEXTS if (results / name).exists()]
    # Text stays text, and names inside the file do not change from run to run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lookahead", "font.size": 9}):
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        panels = figure.subplots(1, len(texts), sharey=True, squeeze=False)
        for name, axes in zip(texts, panels[0], strict=True):
            methods = json.loads((results / name).read_text(encoding="utf-8"))["methods"]
            for ours, label in OURS.items():
                figures = [each for method, each in methods.items() if method.split("@")[0] == ours]
                places = sorted((each["drafted_per_step"], each["tokens_per_step"]) for each in figures)
                axes.plot(*zip(*places, strict=True), marker="o", label=label)
            for peer, label in PEERS.items():
                axes.plot(
                    methods[peer]["drafted_per_step"], methods[peer]["tokens_per_step"], "x", markersize=7, label=label
                )
            axes.set_title(TEXTS[name])
            axes.set_xlabel("draft nodes a step")
            axes.grid(alpha=0.3)
        panels[0][0].set_ylabel("tokens a step")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
