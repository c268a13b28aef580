"""Draw the package's folders and their imports: `python -m tools.house_picture` writes `docs/house.svg`.

A folder stands on the floor above the highest folder it imports from. Edges that other edges imply are left out.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "house.svg"
_WIDTH, _HEIGHT, _GAP, _FLOOR = 132, 30, 18, 66  # of a box, between boxes, and from floor to floor, in pixels
_SOURCES = (("lookahead", "lookahead"), ("ngram", "lookahead.ngram"), ("kernels", "lookahead.kernels"))


def imports_by_room() -> dict[str, set[str]]:
    """For every folder or single module of the package the others that it imports, local imports included."""
    edges: dict[str, set[str]] = {}
    for folder, package in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() != path:
                continue  # the links lookahead/ngram and lookahead/kernels
            name = f"{package}.{'.'.join(path.relative_to(ROOT / folder).with_suffix('').parts)}"
            names = edges.setdefault(_room(name.removesuffix(".__init__")), set())
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module:
                    names |= {_room(f"{node.module}.{alias.name}") for alias in node.names if _is_ours(node.module)}
                elif isinstance(node, ast.Import):
                    names |= {_room(alias.name) for alias in node.names if _is_ours(alias.name)}
    return {room: {each for each in targets if each != room} for room, targets in edges.items()}


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "lookahead"


def _room(name: str) -> str:
    """`models` for `lookahead.model.cache`; `public names` for names of `lookahead` itself."""
    parts = name.split(".")
    if len(parts) == 1 or (not (ROOT / "lookahead" / parts[1]).exists() and not _is_module(parts[1])):
        return "public names"
    return parts[1]


def _is_module(name: str) -> bool:
    return (ROOT / "lookahead" / f"{name}.py").exists()


def floors_of(edges: dict[str, set[str]]) -> list[list[str]]:
    """Rooms by floor, the lowest floor first.

    Raises:
        ValueError: Rooms import each other in a circle.
    """
    floors: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(edges):
        floor = sorted(room for room, targets in edges.items() if room not in placed and targets <= placed)
        if not floor:
            raise ValueError(f"these import each other in a circle: {sorted(set(edges) - placed)}")
        floors.append(floor)
        placed |= set(floor)
    return floors


def _direct(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Edges that no longer path implies."""

    def reachable(room: str) -> set[str]:
        return edges[room].union(*(reachable(each) for each in edges[room]))

    return sorted(
        (room, target)
        for room, targets in edges.items()
        for target in targets
        if not any(target in reachable(other) for other in targets - {target})
    )


def draw(edges: dict[str, set[str]]) -> str:
    """The picture as SVG, the highest floor on top."""
    floors = floors_of(edges)
    width = max(len(floor) for floor in floors) * (_WIDTH + _GAP) + _GAP
    height = len(floors) * _FLOOR + _GAP
    boxes: dict[str, tuple[float, float]] = {}
    for level, floor in enumerate(reversed(floors)):
        left = (width - len(floor) * (_WIDTH + _GAP) + _GAP) / 2
        for i, room in enumerate(floor):
            boxes[room] = (left + i * (_WIDTH + _GAP), _GAP + level * _FLOOR)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<title>Folders of lookahead and their imports</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for room, target in _direct(edges):
        (x, y), (to_x, to_y) = boxes[room], boxes[target]
        start, end, bend = y + _HEIGHT, to_y, (to_y - y - _HEIGHT) / 2
        x, to_x = x + _WIDTH / 2, to_x + _WIDTH / 2
        curve = f"M{x:g},{start:g} C{x:g},{start + bend:g} {to_x:g},{end - bend:g} {to_x:g},{end:g}"
        lines.append(f'<path d="{curve}" fill="none" stroke="#8a94a6"/>')
    for room, (x, y) in boxes.items():
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="#eef2f8" stroke="#4a5a78"/>'
            f'<text x="{x + _WIDTH / 2:g}" y="{y + _HEIGHT / 2 + 5:g}" text-anchor="middle" font-size="14" '
            f'font-family="sans-serif" fill="#1c2536">{escape(room)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(imports_by_room()), encoding="utf-8")
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)} written\n")
