"""Define the base class of all requests, which validates strictly and raises readable errors.

In every object of a request, a field with `null` counts as absent, and a number such as 5.0 counts
as an integer. A field in `ignored_fields` has no effect. A field in `unsupported_fields` is refused
with a reason, unless its value is false, 0, "" or [].

An unknown field is refused if its name resembles a known field that the request does not set. Other
unknown fields are ignored, because clients send fields of other servers. Only the first wrong
element of a list is reported. The length of a list is checked before its elements.

`SamplingParams.check` checks ranges, so that the server and the `LLM` class refuse the same values.
"""

import difflib
import functools
import re
import typing
from collections.abc import Collection, Mapping, Sized
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from negamax.base.errors import InvalidRequestError
from negamax.base.tables import read_table

RequestT = TypeVar("RequestT", bound="RequestModel")
ValueT = TypeVar("ValueT")

_UNREAD = read_table(__file__, "unread_fields.toml")
FOREIGN_FIELDS = frozenset(_UNREAD["foreign"].split())
_MAX_CHECKED_FIELDS = 32  # At most this many unknown fields are checked for misspelling.

_JSON_TYPES: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
_UNION_BRANCH = re.compile(r"(str|int|float|bool|list\[.*|dict\[.*|constrained-.*|function-.*)$")
_SHOWN_CHARS = 60  # An error message quotes at most this many characters of a wrong value.
_SLIP_LIKENESS = 0.85  # Least similarity of a misspelling to a known name; 1.0 means equal.


def refuse(param: str, message: str) -> NoReturn:
    """Raise `InvalidRequestError` (status 400) about field `param`."""
    raise InvalidRequestError(f"{param}: {message}", param=param, code="invalid_value")


def check_choice(value: object, allowed: Collection[str], param: str, *, what: str = "") -> str:
    """Return `value` if `allowed` contains it, else raise `InvalidRequestError` about `param`."""
    if not isinstance(value, str) or value not in allowed:
        refuse(
            param, f"{what}{describe(value)} is not valid; allowed: {', '.join(map(repr, allowed))}"
        )
    return value


def validate_one_of(field: str, allowed: tuple[str, ...]) -> AfterValidator:
    return AfterValidator(lambda value: check_choice(value, allowed, field))


def check_type(value: object, kind: type[ValueT], param: str, what: str = "") -> ValueT:
    """Return `value` if its type is `kind`, else raise `InvalidRequestError` about `param`."""
    if not isinstance(value, kind):
        refuse(param, f"the value must be {what or _JSON_TYPES[kind]}; got {describe(value)}")
    return value


def validate_at_most(
    field: str, limit: int, what: str, *, of: type[Sized] = list
) -> BeforeValidator:
    """Make a validator that refuses over `limit` elements before the elements are checked."""

    def check(value: object) -> object:
        if isinstance(value, of) and len(value) > limit:
            refuse(field, f"the field has {len(value)} {what}; at most {limit} are allowed")
        return value

    return BeforeValidator(check)


def describe(value: object) -> str:
    """Describe `value` for an error message, in at most one line."""
    if isinstance(value, list | tuple | dict):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, str):
        shown = value[:_SHOWN_CHARS]
        return repr(value) if shown == value else f"{shown!r}... ({len(value)} characters)"
    if isinstance(value, int) and value.bit_length() >= 256:
        return "a very large integer"
    return str(value)[:_SHOWN_CHARS]


def check_token_ids(values: list[Any], where: str) -> list[int]:
    """Check that `values` of field `where` are token ids, or raise `InvalidRequestError`."""
    for index, value in enumerate(values):
        if type(value) is not int:
            refuse(f"{where}[{index}]", f"the value must be a token id; got {describe(value)}")
    return values


def suggest_nearest(name: str, known: frozenset[str] | list[str]) -> str:
    """Return ' Did you mean X?' for the known name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name[:_SHOWN_CHARS], sorted(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def _fail_fast(schema: Any) -> None:
    """Make the validation of a list stop at the first wrong element."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class RequestModel(BaseModel):
    """The base of all requests and of their inner objects, strictly typed and immutable."""

    model_config = ConfigDict(
        strict=True, extra="ignore", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )
    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    unsupported_fields: ClassVar[Mapping[str, str]] = {}
    # Values that unsupported fields may have in addition to false, 0, "" and [].
    neutral_values: ClassVar[Mapping[str, object]] = {}
    synonyms: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # field -> other names of the field

    def __init_subclass__(cls, **options: Any) -> None:
        """Extend the base class's unread fields by this class's table in unread_fields.toml."""
        super().__init_subclass__(**options)
        table = _UNREAD.get(cls.__name__, {})
        cls.ignored_fields = cls.ignored_fields.union(table.get("ignored", "").split())
        cls.unsupported_fields = {**cls.unsupported_fields, **table.get("unsupported", {})}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @classmethod
    def parse(cls: type[RequestT], body: object) -> RequestT:
        """Validate decoded JSON. Raises `InvalidRequestError` about the first invalid field."""
        if not isinstance(body, dict):
            raise InvalidRequestError(
                f"the body must be a JSON object; it is {describe(body)}", code="invalid_body"
            )
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _describe_validation_error(error) from None

    @classmethod
    def reads(cls, name: str) -> bool:
        """Return whether this class uses the value of the field `name`."""
        is_known = name in cls.model_fields or name in cls.unsupported_fields
        return is_known and name not in cls.ignored_fields

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, fields: Any) -> Any:
        """Drop the fields that have no effect. Refuse unsupported and misspelt fields."""
        if not isinstance(fields, dict):
            return fields
        kept: dict[str, Any] = {}
        unknown: list[str] = []
        for name, value in fields.items():
            if value is None or name in cls.ignored_fields:
                continue
            if name in cls.model_fields:
                is_whole = isinstance(value, float) and value.is_integer()
                kept[name] = int(value) if is_whole and name in _find_integer_fields(cls) else value
            elif name in cls.unsupported_fields:
                if value not in (False, "", [], cls.neutral_values.get(name)):
                    reason = {"name": name, "reason": cls.unsupported_fields[name]}
                    raise PydanticCustomError(
                        "unsupported_parameter", "is not supported: {reason}", reason
                    )
            elif name not in FOREIGN_FIELDS:
                unknown.append(name)
        cls._check_unknown(unknown, given=kept)
        return kept

    @classmethod
    def _check_unknown(cls, names: list[str], *, given: Mapping[str, Any]) -> None:
        """Refuse an unknown name if it resembles a known field that the request does not set."""
        known = {_squash(name): name for name in cls.model_fields}
        for name in names[:_MAX_CHECKED_FIELDS]:
            near = difflib.get_close_matches(_squash(name), known, n=1, cutoff=_SLIP_LIKENESS)
            meant = known[near[0]] if near else ""
            if near and given.keys().isdisjoint((meant, *cls.synonyms.get(meant, ()))):
                message = "is not a known field. Did you mean '{meant}'?"
                raise PydanticCustomError(
                    "unknown_parameter", message, {"name": name, "meant": meant}
                )


@functools.cache
def _find_integer_fields(model: type[RequestModel]) -> frozenset[str]:
    return frozenset(
        name
        for name, field in model.model_fields.items()
        if _find_number_types(field.annotation) == {int}
    )


def _find_number_types(annotation: Any) -> set[type]:
    if annotation in (int, float):
        return {annotation}
    if typing.get_origin(annotation) in (list, dict):
        return set()
    return set().union(*map(_find_number_types, typing.get_args(annotation)))


def _squash(name: str) -> str:
    return name[:_SHOWN_CHARS].replace("_", "").replace("-", "").lower()


def _describe_validation_error(error: ValidationError) -> InvalidRequestError:
    """Describe pydantic's first error in one sentence that has the path, the rule and the value."""
    first = error.errors(include_url=False)[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, str) and _UNION_BRANCH.match(part):
            continue  # Skip names of union branches, which pydantic adds to the path.
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    kind, message = first["type"], first["msg"]
    if kind in ("unknown_parameter", "unsupported_parameter"):
        name = describe(first["ctx"]["name"]).strip("'")
        path = f"{path}.{name}" if path else name
        hint = "leave the field out" if kind == "unsupported_parameter" else None
        return InvalidRequestError(f"{path} {message}", hint=hint, param=path, code=kind)
    if kind == "missing":
        return InvalidRequestError(
            f"{path} is required and missing", param=path, code="missing_parameter"
        )
    message = message[0].lower() + message[1:]
    return InvalidRequestError(
        f"{path}: {message}; got {describe(first['input'])}", param=path, code="invalid_value"
    )
