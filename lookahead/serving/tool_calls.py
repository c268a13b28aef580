"""Tool calls in outputs, in the common formats."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)  # Hermes, Qwen
_LISTED = re.compile(r"\[TOOL_CALLS\]\s*", re.DOTALL)  # Mistral


def schema_of_call(tools: Sequence[Any]) -> dict[str, Any]:
    """The JSON schema of a call of one of the tools, as `calls_in` reads it."""
    return {"anyOf": [_schema_of(tool.function) for tool in tools]}


def _schema_of(function: Any) -> dict[str, Any]:
    parameters = function.parameters or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def calls_in(text: str, names: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """The text before the first call, and the calls of tools in `names`; without a call, the unchanged text."""
    for before, candidates in _candidates(text):
        calls = [call for candidate in candidates if (call := _call_of(candidate, names)) is not None]
        if calls:
            return before.strip(), calls
    return text, []


def _candidates(text: str) -> list[tuple[str, list[Any]]]:
    tagged = _TAGGED.search(text)
    if tagged is not None:
        return [(text[: tagged.start()], [_json(match) for match in _TAGGED.findall(text)])]
    listed = _LISTED.search(text)
    if listed is not None:
        found = _json(text[listed.end() :])
        return [(text[: listed.start()], found if isinstance(found, list) else [found])]
    bare = text.strip().removeprefix("<|python_tag|>")  # Llama 3
    found = _json(bare) if bare.startswith(("{", "[")) else None
    return [("", found if isinstance(found, list) else [found])]


def _json(text: str) -> Any:
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except ValueError:
        return None


def _call_of(found: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """A call in the format for clients; None if it is not a call of a known tool."""
    if not isinstance(found, dict) or found.get("name") not in names:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": found["name"], "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
