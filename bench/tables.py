"""What was measured, as tables: `bench/RESULTS.md`, and the one of the README, from the files in `bench/results`.

    python -m bench.tables

Every result file is a table, with the command that made it, what it was measured on, what was to be reached where that
was set, and the figures as they stand in the file. What no file holds was not measured yet, and the table says so. The
same files give the same page. With matplotlib (the extra `plot`) the plot is drawn too; without it the page refers to
the one that is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.sheet import Row, Sheet
from bench.sheets import SHEETS

BENCH = Path(__file__).resolve().parent
PLOTS = Path("results/plots")
PLOT = PLOTS / "replay.svg"
LLM_PLOT = PLOTS / "llm.svg"
BEGIN, END = "<!-- figures: python -m bench.tables -->\n", "<!-- end of figures -->\n"
MISSING = "not measured yet"
UNKNOWN = "not recorded"
_VERSIONS = ("python", "torch", "cuda", "transformers", "numba", "numpy")


def value_at(result: Any, path: str) -> Any:
    """What stands at `a/b/c` of a result, a number being a place in a list; None where nothing does."""
    for key in path.split("/"):
        if isinstance(result, Mapping):
            result = result.get(key)
        elif isinstance(result, list) and key.isdecimal() and int(key) < len(result):
            result = result[int(key)]
        else:
            return None
    return result


def in_words(value: Any) -> str:
    """A figure as the file holds it, to four digits behind the point."""
    if value is None:
        return UNKNOWN
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
    """The versions that a result was made with."""
    known = {**result, **(result.get("versions") or {})}
    return ", ".join(f"{name} {known[name]}" for name in _VERSIONS if known.get(name)) or UNKNOWN


def setting(sheet: Sheet, result: Mapping[str, Any]) -> list[str]:
    """What a result was measured on: as it says itself, and else what its command always uses."""
    model = result.get("shape", result.get("model", sheet.model))
    return [
        f"- model: {model or UNKNOWN}{', random weights' if 'shape' in result else ''}",
        f"- dtype: {result.get('dtype', sheet.dtype) or UNKNOWN}",
        f"- device: {result.get('device', sheet.device) or UNKNOWN}",
        f"- versions: {versions_of(result)}",
    ]


def plot_of(file: str) -> Path:
    """Where the plot of a result file is, seen from the page."""
    return PLOTS / Path(file).with_suffix(".svg")


def own_rows(result: Mapping[str, Any]) -> list[Row]:
    """The figures of a result that no sheet describes: those at the top."""
    return [Row(key, key) for key, value in result.items() if isinstance(value, int | float | str)]


def expand(rows: Sequence[Row], result: Mapping[str, Any] | None) -> Iterator[Row]:
    """The rows, those of a list once for every place of it."""
    for row in rows:
        if result is None or "*" not in row.path:
            yield row
            continue
        places = value_at(result, row.path.split("/*")[0]) or []
        for i, place in enumerate(places):
            yield Row(f"{row.each.format(**place)}: {row.what}", row.path.replace("*", str(i)), row.target)


def section(sheet: Sheet, result: Mapping[str, Any] | None) -> list[str]:
    """One table."""
    lines = [f"## {sheet.title}", "", f"`{sheet.command}`", ""]
    if result is not None:
        lines += [*setting(sheet, result), ""]
        if sheet.plot:
            lines += [f"![{sheet.plot}]({plot_of(sheet.file).as_posix()})", ""]
    lines += ["| figure | target | measured |", "|---|---|---|"]
    for row in expand(sheet.rows or own_rows(result or {}), result):
        value = None if result is None else value_at(result, row.path)
        is_missing = result is None or (row.is_optional and value is None)
        lines.append(f"| {row.what} | {row.target} | {MISSING if is_missing else in_words(value)} |")
    return [*lines, *(["", sheet.note] if sheet.note else []), ""]


def page(folder: Path) -> str:
    """The whole page of the results in a folder."""
    results = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    described = {sheet.file for sheet in SHEETS}
    others = [Sheet(name, name, UNKNOWN) for name in results if name not in described]
    lines = [
        "# Results",
        "",
        "`python -m bench.tables` writes this page from the files in `bench/results`; nothing here is written by hand.",
        f"`{UNKNOWN}`: the file does not say. Models and files of prompts that commands name do not all come along.",
        "",
        f"![Tokens a step on recorded outputs, by draft nodes]({PLOT.as_posix()})",
        "",
    ]
    for sheet in [*SHEETS, *others]:
        lines += section(sheet, results.get(sheet.file))
    return "\n".join(lines)


def llm_results(folder: Path) -> list[dict[str, Any]]:
    """What `bench.llm` measured, in fp32 and in bf16, as far as it did."""
    paths = [folder / f"llm_{dtype}.json" for dtype in ("fp32", "bf16")]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def llm_table(results: Sequence[Mapping[str, Any]]) -> str:
    """The table of the README: a real model, a column for every dtype."""
    lookup, ours, count = "prompt_lookup", "lookahead", "{prompts}"
    rows = {
        "transformers, greedy, ms a token": "{methods[greedy][ms_per_token][cpu]:.1f}",
        "transformers, prompt lookup, the best of 3, 10 and 20 tokens": f"{{{lookup}[speedup]:.2f}}x",
        "**lookahead**": f"**{{{ours}[speedup]:.2f}}x**",
        "where no output loops: prompt lookup / lookahead": f"{{{lookup}[without_loops]:.2f}}x / "
        f"{{{ours}[without_loops]:.2f}}x",
        "end to end, prompts read too: prompt lookup / lookahead": f"{{{lookup}[end_to_end]:.2f}}x / "
        f"{{{ours}[end_to_end]:.2f}}x",
        "the slowest prompt: prompt lookup / lookahead": f"{{{lookup}[lowest]:.2f}}x / {{{ours}[lowest]:.2f}}x",
        "tokens a pass: prompt lookup / lookahead": f"{{{lookup}[tokens_per_pass]:.2f}} / "
        f"{{{ours}[tokens_per_pass]:.2f}}",
        "outputs identical to greedy: prompt lookup / lookahead": f"{{{lookup}[identical]}} / {{{ours}[identical]}} "
        f"of {count}",
    }
    if all("cold" in result for result in results):
        rows["the first request of a fresh process: lookahead"] = "{cold[cold][speedup][cpu]:.2f}x"
    peers = [name for result in results for name in result["methods"] if name.startswith(("vLLM", "llama.cpp"))]
    for name in dict.fromkeys(peers):
        rows[name] = f"{{methods[{name}][speedup][cpu]:.2f}}x"
    lines = [f"| | {' | '.join(result['dtype'] for result in results)} |", "|---|" + "---|" * len(results)]
    for what, form in rows.items():
        is_there = [what not in peers or what in result["methods"] for result in results]
        cells = (form.format(**each) if there else "" for each, there in zip(results, is_there, strict=True))
        lines.append(f"| {what} | {' | '.join(cells)} |")
    first = results[0]
    lines += ["", f"{first['model']}, {first['prompts']} prompts, at most {first['max_new_tokens']} new tokens each; "]
    lines[-1] += f"{first['device']}, {first['threads']} thread; {versions_of(first)}."
    return "\n".join(lines) + "\n"


def with_table(page: str, results: Sequence[Mapping[str, Any]]) -> str:
    """A page with the plot and the table between its marks; nothing where nothing was measured."""
    plot = f"![Decode speed over greedy decoding by category](bench/{LLM_PLOT.as_posix()})\n"
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    shown = f"\n{plot}\n{llm_table(results)}\n" if results else ""
    return f"{before}{BEGIN}{shown}{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, and the plot where it can be drawn."""
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=BENCH, help="holds results/, and gets RESULTS.md")
    folder: Path = parser.parse_args(argv).folder
    (folder / "RESULTS.md").write_text(page(folder / "results"), encoding="utf-8")
    print(f"wrote {folder / 'RESULTS.md'}")
    measured = llm_results(folder / "results")
    readme = folder.parent / "README.md"
    if readme.exists():
        readme.write_text(with_table(readme.read_text(encoding="utf-8"), measured), encoding="utf-8")
        print(f"wrote {readme}")
    try:
        from bench import plots
    except ImportError:
        print("matplotlib is missing, so nothing was plotted: pip install 'lookahead-decoding[plot]'")
        return 0
    (folder / PLOTS).mkdir(parents=True, exist_ok=True)
    drawn = {PLOT: plots.draw_replay}
    drawn |= {plot_of(file): draw for file, draw in plots.PLOTS.items() if (folder / "results" / file).exists()}
    for path, draw in drawn.items():
        draw(folder / "results", folder / path)
        print(f"wrote {folder / path}")
    if measured:
        plots.draw_llm(measured, folder / LLM_PLOT)
        print(f"wrote {folder / LLM_PLOT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
