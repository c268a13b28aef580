"""Reads the bodies of requests: each field is honoured, or refused by its name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    GetPydanticSchema,
    ValidationError,
    model_validator,
)

from lookahead.serving.api_errors import ApiError, invalid

_MOST_NESTED = 1 << 14  # objects and arrays of a body: Python makes and checks each while other threads wait
_MOST_FIELDS = 64  # listing the errors of a million takes seconds
_TYPES = frozenset(("bool", "dict", "float", "int", "list", "none", "str"))  # in the paths of pydantic
_SHOULD = "Input should be "  # how pydantic's messages about types begin


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
    def _has_few_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > _MOST_FIELDS:
            raise ValueError(f"an object has at most {_MOST_FIELDS} fields here, got {len(given)}")
        inner, mark = cls.nests
        if mark in given and inner not in given:
            rest = {name: value for name, value in given.items() if name != "type"}
            given = {"type": given.get("type"), inner: rest}
        # A field that is null is absent, as clients send what they got.
        ignored = cls.ignores - _names_of(cls)
        return {name: each for name, each in given.items() if each is not None and name not in ignored}

    @model_validator(mode="after")
    def _is_whole(self) -> Body:
        kind = getattr(self, "type", None)
        for name in self.needs.get(kind, ()) if kind else ():
            if getattr(self, name) is None:
                raise ValueError(f"a {kind} needs {name}")
        return self


def read_as(kind: Any, translate: Callable[[Any], Any]) -> GetPydanticSchema:
    """Marks a field whose value clients send as another kind, which is translated."""
    return GetPydanticSchema(lambda _, handler: handler(Annotated[kind, AfterValidator(translate)]))


def parsed(kind: type[Any], body: bytes | dict[str, Any]) -> Any:
    """Parse the request in a body, or check its fields; ApiError names the first invalid one."""
    if isinstance(body, bytes) and (nested := _nested(body)) > _MOST_NESTED:
        raise ApiError(400, f"the body must have at most {_MOST_NESTED} objects and arrays, got {nested}")
    try:
        return kind.model_validate_json(body) if isinstance(body, bytes) else kind.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first, reason = _of_fitting_branch(errors)
        if first["type"] == "json_invalid":
            raise ApiError(400, f"the body must be JSON: {first['msg']}", code="invalid_json") from None
        field = ".".join(map(str, _path(first)))
        got = "" if first["type"] in ("missing", "extra_forbidden") else f", got {shortened(first['input'])}"
        raise invalid(field or None, f"{reason}{got}") from None


def _nested(body: bytes) -> int:
    """How many objects and arrays a JSON text has; while brackets are few, those in strings are counted too."""
    if (most := body.count(b"{") + body.count(b"[")) <= _MOST_NESTED:
        return most
    bare = b"".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    return bare.count(b"{") + bare.count(b"[")


def _of_fitting_branch(errors: Sequence[Any]) -> tuple[Any, str]:
    """The first error, and its message.

    A field that may have several types has errors of each. The first error of the type that the value fits is furthest
    in the value, or is not about the type; if there is no such type, the message lists them all.
    """
    start = _path(errors[0])
    at, branches = len(start), dict[tuple[Any, ...], Any]()
    for each in errors:
        if _path(each)[:at] == start:
            branches.setdefault(each["loc"][at : at + 1], each)

    def fit(error: Any) -> tuple[list[int], int, bool]:
        inner = _path(error)[at:]
        return [part for part in inner if isinstance(part, int)], len(inner), not _is_of_type(error)

    best = max(branches.values(), key=fit)
    if best["type"] == "extra_forbidden":
        return best, "unknown field"
    others = [branch["msg"] for branch in branches.values() if fit(branch) == fit(best)] if _is_of_type(best) else []
    first, *more = dict.fromkeys(others or [best["msg"]])
    return best, " or ".join([first.removeprefix("Value error, "), *(each.removeprefix(_SHOULD) for each in more)])


def _is_of_type(error: Any) -> bool:
    """Whether a value has another type than the branch of an error."""
    is_other_literal = error["type"] == "literal_error" and not isinstance(error["input"], str)
    return is_other_literal or error["type"].rpartition("_")[2] == "type"


def _path(error: Any) -> list[str | int]:
    """The fields and indices that lead to an error; the branches between are named after types."""
    *outer, last = error["loc"] or [""]
    path = [part for part in outer if _is_place(part)]
    return [*path, last] if _is_place(last) or error["type"] == "extra_forbidden" else path


def _is_place(part: str | int) -> bool:
    """Whether a part of a path is an index or the name of a field, not a type."""
    return isinstance(part, int) or (part.isidentifier() and part.islower() and part not in _TYPES)


@functools.cache
def _names_of(kind: type[Body]) -> frozenset[str]:
    aliases = [field.validation_alias or name for name, field in kind.model_fields.items()]
    choices = [alias.choices if isinstance(alias, AliasChoices) else [alias] for alias in aliases]
    return frozenset(str(name) for names in choices for name in names)


def shortened(value: object) -> str:
    """The repr of a client's value, in at most 120 characters."""
    shown = repr(value)
    return shown if len(shown) <= 120 else f"{shown[:110]}...{shown[-6:]}"
