"""Prints every message of the package with its place, so that somebody reads them: errors, warnings, notes, help texts.

python -m tools.messages [PART OF A PATH]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SAYING = {"say", "warn", "show_line", "_hint", "option", "announce", "status"}


def _text(node: ast.expr) -> str:
    """A text as a user sees it, with `{}` for what is put in; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return _text(node.body) or _text(node.orelse) if isinstance(node, ast.IfExp) else ""


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the text of every message of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in _SAYING or name.endswith(("Error", "Reject", "PathReport")):
                for argument in (*node.args, *(word.value for word in node.keywords)):
                    if " " in (text := _text(argument)):
                        yield argument.lineno, " ".join(text.split())
        elif isinstance(node, ast.Assign) and len((text := _text(node.value)).split()) > 3:
            yield node.lineno, " ".join(text.split())


if __name__ == "__main__":
    for path in sorted(each for folder in ("lookahead", "ngram", "kernels") for each in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not path.is_symlink() and sys.argv[1:2] in ([], [part for part in sys.argv[1:2] if part in name]):
            for line, text in sorted(messages(ast.parse(path.read_text("utf-8")))):
                print(f"{name}:{line}: {text}")
