"""What is found in a text as it grows: calls of tools, in the common formats, and the texts that end it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

_TAGS = "<tool_call>", "[TOOL_CALLS]"  # Hermes and Qwen; Mistral
_PYTHON = "<|python_tag|>"  # Llama 3, or nothing
_TAG = re.compile("|".join(map(re.escape, _TAGS)))
_BARE = re.compile(rf"\s*(?:{re.escape(_PYTHON)}|(?=\{{|\[(?!T)))")
_AFTER = re.compile(r"(?:[\s}\],;]|</?tool_call>|\[TOOL_CALLS\])*")
_NAME = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS = re.compile(r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_OBJECT = re.compile(r'\s*\[?\s*(?=\{\s*"(?:name|arguments|parameters|type|id)")')
_BEGINNING = re.compile(r'\s*\[?\s*(?:\{\s*(?:"[a-z]*)?)?')
_DATA = frozenset(("const", "default", "enum", "examples"))  # keywords whose values are no schemas


def schema_of_call(tools: Sequence[Any]) -> dict[str, Any]:
    """The JSON schema of a call of one of the tools, as `CallReader` reads it."""
    return {"anyOf": [_schema_of(tool.function, f"#/anyOf/{i}/properties/arguments") for i, tool in enumerate(tools)]}


def _schema_of(function: Any, place: str) -> dict[str, Any]:
    parameters = _moved(function.parameters or {"type": "object"}, place)
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself hold at another place of a document."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: value if name in _DATA else _moved(value, place) for name, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


class CallReader:
    """Reads the text before the first call, and calls, from an output as it grows; text after a call is dropped.

    Args:
        names: Names of the tools; what looks like a call of others is text, and without names all is.
        is_forced: Whether the output can only be a call.

    Attributes:
        text: The text.
        calls: The calls in the format for clients.
    """

    def __init__(self, names: Sequence[str], *, is_forced: bool = False) -> None:
        self._names, self._is_forced, self._rest = names, is_forced, ""
        self._depth, self._in_string, self._is_escaped = 0, False, False  # of arguments that are being read
        self.text, self.calls = "", list[dict[str, Any]]()

    @property
    def is_cut(self) -> bool:
        """Whether the last call is not complete, at the end."""
        return self._depth > 0 or (self._is_forced and not (self.calls and self.calls[-1]["function"]["arguments"]))

    def put(self, piece: str, *, is_last: bool = False) -> list[dict[str, Any]]:
        """Add text; returns what is certain as deltas of a message."""
        self._rest += piece
        deltas = list[dict[str, Any]]()
        while self._rest and (delta := self._next(is_last)) is not None:
            deltas.append(delta)
        if is_last and self._is_forced and not self.calls and len(self._names) == 1:  # cut before its arguments
            deltas.append(self._begin(self._names[0], ""))
        return deltas

    def _next(self, is_last: bool) -> dict[str, Any] | None:
        """The delta that is next in the text; None if that depends on more text, or nothing is."""
        if self._depth:
            return self._more_arguments()
        rest, before, start = self._rest, "", 0
        if not self._names:
            return self._say(len(rest))
        if self.calls:
            rest = self._rest = _AFTER.sub("", rest, count=1)
            if not is_last and any(tag.startswith(rest) for tag in (*_TAGS, "</tool_call>")):
                return None
        elif not self.text and (bare := _BARE.match(rest)):
            start = bare.end()
        elif tag := _TAG.search(rest):
            before, start = rest[: tag.start()].rstrip(), tag.end()
        elif is_last:
            return self._say(len(rest))
        else:
            possible = _TAGS if self.text else (*_TAGS, _PYTHON)
            before = rest[: len(rest) - max(overlap(rest, tag) for tag in possible)].rstrip()
            return self._say(len(before))
        if before:
            return self._say(len(before))
        rest = rest[start:]
        named = _NAME.match(rest)
        if named is None or _decoded(named[1])[0] in self._names:
            if named and (arguments := _ARGUMENTS.match(rest, named.end())):
                self._rest, self._depth = rest[arguments.end() + 1 :], 1
                return self._begin(_decoded(named[1])[0], "{")
            if match := _OBJECT.match(rest):
                content, size = _decoded(rest[match.end() :])
                if isinstance(content, dict) and content.get("name") in self._names:
                    self._rest = rest[match.end() + size :]
                    values = content.get("arguments", content.get("parameters", {}))
                    text = values if isinstance(values, str) else json.dumps(values, ensure_ascii=False)
                    # Halves of surrogate pairs stay escaped: UTF-8 does not encode them.
                    return self._begin(content["name"], text.encode("utf-8", "backslashreplace").decode())
                if not size and not is_last:
                    return None
            elif not is_last and _BEGINNING.fullmatch(rest):
                return None
        return None if self.calls else self._say(max(1, start))

    def _say(self, size: int) -> dict[str, Any] | None:
        """The beginning of the rest, as text."""
        said, self._rest = self._rest[:size], self._rest[size:]
        if self._is_forced or not said:
            return None
        self.text += said
        return {"content": said}

    def _begin(self, name: str, arguments: str) -> dict[str, Any]:
        """A call with the beginning of its arguments."""
        function = {"name": name, "arguments": arguments}
        self.calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1], "function": {**function}}]}

    def _more_arguments(self) -> dict[str, Any]:
        """More of the arguments of the last call."""
        end = len(self._rest)
        for at, character in enumerate(self._rest):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{}[]":
                self._depth += 1 if character in "{[" else -1
                if not self._depth:
                    end = at + 1
                    break
        more, self._rest = self._rest[:end], self._rest[end:]
        self.calls[-1]["function"]["arguments"] += more
        return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": more}}]}


def _decoded(text: str) -> tuple[Any, int]:
    """The JSON value at the beginning of a text, and its characters; None and 0 if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


class StopTexts:
    """Cuts a stream of text at the first stop text; a possible beginning of one is held back.

    Args:
        stops: The stop texts.
        keeps: Whether the stop text is part of the output.

    Attributes:
        stop: The one that was found.
    """

    def __init__(self, stops: Sequence[str], *, keeps: bool = False) -> None:
        self._stops, self._keeps, self._held = stops, keeps, ""
        self.stop: str | None = None

    def put(self, piece: str, *, is_last: bool = False) -> str:
        """Add a piece; returns the text that is final."""
        if self.stop is not None:
            return ""
        self._held += piece
        ends = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            end, self.stop = min(ends)
            return self._held[: end + len(self.stop) * self._keeps]
        keep = 0 if is_last else max((overlap(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that a stop text starts with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
