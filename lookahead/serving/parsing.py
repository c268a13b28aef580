"""Reads the bodies of requests: each field is honoured, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    ValidationError,
    model_validator,
)
from pydantic_core.core_schema import CoreSchema, tagged_union_schema

from lookahead.serving.api_errors import ApiError, invalid

_MOST_NESTED = 1 << 14  # objects and arrays of a body: Python makes and checks each while other threads wait
_MOST_FIELDS = 64  # listing the errors of a million takes seconds
_TYPES = {"str": "a string", "literal": "a string", "int": "an integer", "list": "an array", "dict": "an object"}


class Body(BaseModel):
    """A JSON object of a client, whose fields are known.

    Attributes:
        ignores: Fields without effect.
        nests: A field of an inner object, and one of its fields: with the latter here, the inner object's are here.
        needs: The fields that an object of each `type` must have.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignores: ClassVar[frozenset[str]] = frozenset()
    nests: ClassVar[tuple[str, str]] = ("", "")
    needs: ClassVar[Mapping[str, Sequence[str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if len(fields) > _MOST_FIELDS:
            raise ValueError(f"an object has at most {_MOST_FIELDS} fields here, got {len(fields)}")
        inner, mark = cls.nests
        if mark in fields and inner not in fields:
            rest = {name: value for name, value in fields.items() if name != "type"}
            fields = {"type": fields.get("type"), inner: rest}
        # A field that is null is absent, as clients send what they got.
        return {name: value for name, value in fields.items() if value is not None and name not in cls.ignores}

    @model_validator(mode="after")
    def _is_whole(self) -> Body:
        kind = getattr(self, "type", None)
        for name in self.needs.get(kind, ()) if kind else ():
            if getattr(self, name) is None:
                raise ValueError(f"a {kind} needs {name}")
        return self


def _by_type(union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    schemas: list[Any] = [handler.generate_schema(kind) for kind in get_args(union)]
    looks_inside = sum(schema["type"] == "list" for schema in schemas) > 1  # lists of texts, of numbers, and so on

    def name_of(kind: str, first: str) -> str:
        name = _TYPES.get(kind, "an object")
        return f"{name} of {_TYPES.get(first)}" if looks_inside and kind == "list" else name

    def type_of(value: Any) -> str:
        return name_of(type(value).__name__, type(value[0]).__name__ if value and isinstance(value, list) else "str")

    choices = {name_of(schema["type"], schema.get("items_schema", schema)["type"]): schema for schema in schemas}
    should = f"Input should be {' or '.join(choices)}"
    return tagged_union_schema(choices, type_of, custom_error_type="kind", custom_error_message=should)


BY_TYPE = GetPydanticSchema(_by_type)
"""Marks a union of which the member with the JSON type of the value is checked: errors are those of one."""


def read_as(kind: Any, translate: Callable[[Any], Any]) -> GetPydanticSchema:
    """Marks a field whose value clients send as another kind, which is translated."""
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(Annotated[kind, AfterValidator(translate)]))


def parsed(kind: type[Any], body: bytes | dict[str, Any]) -> Any:
    """Parse the request in a body, or check its fields; ApiError names the first invalid one."""
    if isinstance(body, bytes) and (nested := _nested(body)) > _MOST_NESTED:
        raise ApiError(400, f"the body must have at most {_MOST_NESTED} objects and arrays, got {nested}")
    try:
        return kind.model_validate_json(body) if isinstance(body, bytes) else kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise ApiError(400, f"the body must be JSON: {first['msg']}", code="invalid_json") from None
        reason = "unknown field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        field = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("a ", "an ")))  # no types
        shown = repr(first["input"])
        shown = shown if len(shown) <= 120 else f"{shown[:110]}...{shown[-6:]}"
        got = "" if first["type"] in ("missing", "extra_forbidden") else f", got {shown}"
        raise invalid(field or None, f"{reason}{got}") from None


def _nested(body: bytes) -> int:
    """How many objects and arrays a JSON text has; while brackets are few, those in strings are counted too."""
    if (most := body.count(b"{") + body.count(b"[")) <= _MOST_NESTED:
        return most
    bare = b"".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    return bare.count(b"{") + bare.count(b"[")
