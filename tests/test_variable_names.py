"""Variables are named by nouns that say what a thing is, not by what happened to it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTICIPLES = {"each", "found", "given", "held", "known"}


def bound_names(source: str) -> set[str]:
    """The arguments and local variables of the functions of a file, and its own variables."""
    nodes, fields = list(ast.walk(ast.parse(source))), set[int]()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            fields |= {id(line.target) for line in node.body if isinstance(line, ast.AnnAssign)}
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
             and id(node) not in fields}  # fmt: skip
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def test_variables_are_not_named_by_participles() -> None:
    files = [path for room in ("lookahead", "ngram", "kernels") for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 100
    named = {str(path.relative_to(ROOT)): bound_names(path.read_text("utf-8")) & PARTICIPLES for path in files}
    assert {path: names for path, names in named.items() if names} == {}


def test_a_variable_of_any_kind_is_seen() -> None:
    for line in ("found = 1", "for found in (): pass", "[found for found in ()]", "lambda found: 0", "(found := 1)"):
        assert bound_names(line) == {"found"}
    assert bound_names("class Box:\n    held: int\n    def take(self, given: int = 0) -> None: ...") == {
        "self",
        "given",
    }
