"""The examples in the docstrings of finished rooms: all hold, and every public function and class has one."""

from __future__ import annotations

import ast
import doctest
from importlib import import_module

import pytest

from tests.test_layering import MODULES

ROOMS = ("ngram", "drafting")  # the finished rooms, in which nothing public lacks an example
FINISHED = [module for module in MODULES if module.room.split(".")[0] in ROOMS]


@pytest.mark.parametrize("name", [module.name for module in FINISHED])
def test_the_examples_in_the_docstrings_hold(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some examples write a file
    assert doctest.testmod(import_module(name)).failed == 0


def test_every_public_function_and_class_of_a_finished_room_has_an_example():
    lacking = [
        f"{module.room}.{node.name}"
        for module in FINISHED
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if ">>>" not in (ast.get_docstring(node) or "")
    ]
    assert not lacking
