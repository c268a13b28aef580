"""Grammars in the form of llguidance, checked without torch, which takes seconds to import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lookahead.errors import ConfigError, first_line

# The format of `json.dumps`. With flexible white space a model can emit white space until its limit.
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_library() -> Any:
    """The module llguidance."""
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "grammars need llguidance; it comes with: pip install 'lookahead-decoding[grammar]'"
        ) from error
    return llguidance


def grammar_text(kind: str, value: Any, tokens: Any = None, place: str = "") -> str:
    """A grammar of the kind `"json_schema"`, `"regex"` or `"grammar"` in llguidance's form.

    It must suit the `LLTokenizer` `tokens`, if there is one. `place` is what errors call it: the option and the file.

    Raises:
        ConfigError: It is not valid, or llguidance is not installed.
    """
    place, matcher = place or kind, grammar_library().LLMatcher
    text = _as_text(matcher, kind, value, place)
    is_wrong, messages = matcher.validate_grammar_with_warnings(text, tokens)
    if is_wrong:
        raise ConfigError(f"{place} is not valid: {' '.join(' '.join(messages).split())}")
    return text


def _as_text(matcher: Any, kind: str, value: Any, place: str) -> str:
    if kind == "json_schema":
        schema = value.model_json_schema() if hasattr(value, "model_json_schema") else value
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{place} is not JSON: {error}") from error
        if not isinstance(schema, Mapping):
            raise ConfigError(f"{place} must be a dict, JSON text or a pydantic model class, got {schema!r:.60}")
        try:
            return str(matcher.grammar_from_json_schema(json.dumps(schema), _JSON_FORM))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{place} is not valid: {first_line(error)}") from error
    if not isinstance(value, str):
        raise ConfigError(f"{place} must be text, got {value!r:.60}")
    return str(matcher.grammar_from_regex(value) if kind == "regex" else matcher.grammar_from_lark(value))
