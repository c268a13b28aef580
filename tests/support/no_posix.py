"""A pytest plugin, and a script that imports every module: the package finds no modules of POSIX, as on Windows.

`python -m tests.support.no_posix` imports the package; `pytest -p tests.support.no_posix FILE` runs tests. The
libraries below the package see Linux.
"""

from __future__ import annotations

import builtins
import importlib
import pkgutil
from typing import Any

MISSING = "fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"
_import = builtins.__import__


def _import_there(name: str, globals: Any = None, *arguments: Any, **options: Any) -> Any:
    if name in MISSING and str((globals or {}).get("__name__")).startswith("lookahead"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _import(name, globals, *arguments, **options)


builtins.__import__ = _import_there

if __name__ == "__main__":
    import lookahead

    names = [each.name for each in pkgutil.walk_packages(lookahead.__path__, "lookahead.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    print(len(names))
