"""Print the reference of the HTTP API as Markdown: each route, and each field of its schemas.

    python -m tools.api_reference

`make docs` renders the reference as the page api-reference.md. Types, defaults and limits come from
the schemas, and remarks come from the comments beside the fields.
"""

import ast
import importlib
import inspect
import io
import json
import pkgutil
import re
import sys
import tempfile
import tokenize
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from negamax import api
from negamax.api import dialects, server
from negamax.api.processes.peers import PeerClient
from negamax.api.processes.server_rank import ServerRank
from negamax.api.schemas.request_model import RequestModel
from negamax.base.errors import InvalidRequestError
from negamax.options.server import ServerOptions
from negamax.scheduler.request import SamplingParams

PAGE = "api-reference.md"  # name of the rendered page in docs/
INTRODUCTION = """# API reference

This page lists all routes, and all fields of requests and answers. [api.md](api.md) describes their
behaviour.

In requests, a field is optional unless its default is *required*. `null` counts as a missing field.
Types are strict: for example, a string is not accepted as a number. Unknown fields are ignored, but
a name that closely resembles a known field is refused. The default `none` stands for the default of
the model or the server. In answers, a field is always present unless its remark says otherwise. An
error is an [ErrorAnswer](#erroranswer), or a [MessageError](#messageerror) on Anthropic's routes.
"""
TITLES = {
    "chat": "Chat completions",
    "completions": "Completions",
    "responses": "Responses",
    "messages": "Anthropic messages",
    "tokens": "Tokens",
    "generate": "SGLang's native API",
    "schemas": "Models, health and shared schemas",
}
# request fields, and the engine's names for them
_ALIASES = {"sampling_seed": "seed", "min_new_tokens": "min_tokens"}
_SERVER_LIMITED = frozenset({"logprobs", "prompt_logprobs"})  # by --max-logprobs
_FAR_OUTSIDE = -(2**70)  # below the lower limit of every number

Schema = type[RequestModel] | type[msgspec.Struct]


def render() -> str:
    """Render the page. Raises `ValueError` for a field without a remark."""
    routes = app_routes()
    schemas = all_schemas({_request_of(route) for route in routes})
    parts = [INTRODUCTION]
    for section, title in TITLES.items():
        own = [route for route in routes if _section_of(route.endpoint.__module__) == section]
        parts += [f"## {title}\n", "| route | request | |", "|---|---|---|"]
        parts += [_route_row(method, route) for route in own for method in sorted(route.methods)]
        parts += [f"\n{_schema_text(schema)}" for schema in schemas[section]]
    return "\n".join(parts) + "\n"


def app_routes() -> list[APIRoute]:
    """Return the routes of the app, which needs no engine here."""
    info = types.SimpleNamespace(served_model_name="model", model="model", max_model_len=1)
    with tempfile.TemporaryDirectory() as folder:
        context: Any = types.SimpleNamespace(
            engine=types.SimpleNamespace(info=info),
            options=ServerOptions(),
            peers=PeerClient(ServerRank.of(0, 1, Path(folder))),
            model_names=("model",),
            started=0,
            metrics=None,
            lifecycle=None,
        )
        app = server.create_app(context)
    return [route for route in _all_routes(app.router) if route.path in set(app.state.paths)]


def _all_routes(router: Any) -> Iterator[APIRoute]:
    for route in router.routes:
        if isinstance(route, APIRoute):
            yield route
        elif getattr(route, "original_router", None) is not None:  # The router is included.
            yield from _all_routes(route.original_router)


def all_schemas(requests: set[str]) -> dict[str, list[Schema]]:
    """Return the schemas of each section: `requests`, and schemas that are no base class."""
    found: dict[str, list[Schema]] = {section: [] for section in TITLES}
    for info in pkgutil.walk_packages(api.__path__, f"{api.__name__}."):
        if not re.search(r"\.dialects\.\w+\.(schema|items)$|\.api\.schemas\.", info.name):
            continue
        found[_section_of(info.name)] += [
            value
            for value in vars(importlib.import_module(info.name)).values()
            if inspect.isclass(value)
            and issubclass(value, RequestModel | msgspec.Struct)
            and value.__module__ == info.name
            and (value.__name__ in requests or not value.__subclasses__())
        ]
    return found


def _section_of(module: str) -> str:
    own = module.removeprefix(f"{dialects.__name__}.")
    return own.partition(".")[0] if own != module else "schemas"


def _route_row(method: str, route: APIRoute) -> str:
    request = _request_of(route)
    about = table_cell(inspect.getdoc(route.endpoint) or "")
    return f"| `{method} {route.path}` | {_link(request) if request else ''} | {about} |"


def _request_of(route: APIRoute) -> str:
    body = (route.openapi_extra or {}).get("requestBody")
    return str(body["content"]["application/json"]["schema"]["title"]) if body else ""


def _schema_text(schema: Schema) -> str:
    rows = list(_rows(schema))
    about = inspect.cleandoc(schema.__doc__ or "")
    lines = [f"### {schema.__name__}\n", *([f"{about}\n"] if about else [])]
    lines += ["| field | type | default or value | remarks |", "|---|---|---|---|"] if rows else []
    lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
    if not issubclass(schema, msgspec.Struct):
        if schema.ignored_fields:
            ignored = ", ".join(f"`{name}`" for name in sorted(schema.ignored_fields))
            lines.append(f"Accepted without effect: {ignored}.\n")
        if schema.unsupported_fields:
            lines += ["| refused, unless the value asks for nothing | because |", "|---|---|"]
            refused = sorted(schema.unsupported_fields.items())
            lines += [f"| `{name}` | {table_cell(reason)} |" for name, reason in refused]
    return "\n".join(lines)


def _rows(schema: Schema) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default or value, and remarks of each field."""
    is_answer = issubclass(schema, msgspec.Struct)
    remarks = field_comments(schema)
    for name, *cells, about in _answer_fields(schema) if is_answer else _request_fields(schema):
        if not about and name not in remarks:
            where = f"{schema.__module__}.{schema.__name__}"
            raise ValueError(f"{where} has no remark on {name}; add a comment")
        text = ". ".join(filter(None, (about, remarks.get(name))))
        yield f"`{name}`", cells[0], cells[1], table_cell(text)


def _request_fields(model: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield the required fields first, then the optional ones."""
    properties = model.model_json_schema()["properties"]
    fields = sorted(model.model_fields.items(), key=lambda item: not item[1].is_required())
    for name, field in fields:
        default = field.get_default(call_default_factory=True)
        if field.is_required():
            shown = "*required*"
        elif default is None or isinstance(default, RequestModel):
            shown = "none" if default is None else "its defaults"
        else:
            shown = f"`{msgspec.json.encode(default).decode()}`"
        limits = _limits(properties[name]) or _engine_range(name)
        about = "; ".join(filter(None, (limits, _allowed(field), field.description)))
        yield name, _json_type(properties[name]), shown, about


def _answer_fields(struct: Any) -> Iterator[tuple[str, str, str, str]]:
    config = struct.__struct_config__
    if config.tag_field is not None:
        yield config.tag_field, "string", f"`{json.dumps(config.tag)}`", "the kind of this object"
    for field in msgspec.structs.fields(struct):
        is_absent = msgspec.UnsetType in get_args(field.type)
        has_value = not (field.required or is_absent or field.default in (None, msgspec.NODEFAULT))
        value = ""
        if has_value and not isinstance(field.default, msgspec.Struct):
            value = f"`{msgspec.json.encode(field.default).decode()}`"
        about = "absent where it does not apply" if is_absent else ""
        yield field.encode_name, _python_type(field.type), value, about


def _json_type(schema: dict[str, Any]) -> str:
    """Describe a JSON schema in words. Omit null, because null counts as a missing field."""
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        kinds = [_json_type(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    kind, inner = schema.get("type", "any"), schema.get("additionalProperties")
    if kind == "array":
        return f"list of {_json_type(schema.get('items', {}))}"
    return f"object of {_json_type(inner)}" if isinstance(inner, dict) and inner else str(kind)


def _python_type(kind: Any) -> str:
    """Describe the type of an answer's field in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        kinds = [_python_type(part) for part in inner if part is not msgspec.UnsetType]
        return " or ".join(dict.fromkeys(kinds))
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        return _link(kind.__name__)
    if origin is list:
        return f"list of {_python_type(inner[0])}"
    if origin is tuple or kind is tuple:
        return f"list [{', '.join(map(_python_type, inner))}]" if inner else "empty list"
    if origin is dict and inner[1] is not Any:
        return f"object of {_python_type(inner[1])}"
    names = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
    return "any" if kind is Any else names.get(kind, "object")


def _limits(schema: dict[str, Any]) -> str:
    found: dict[str, Any] = {}
    for part in (schema, *schema.get("anyOf", ())):
        found |= {key: value for key, value in part.items() if isinstance(value, int | float | str)}
    words = {
        "minimum": "at least {}", "exclusiveMinimum": "above {}", "maximum": "at most {}",
        "exclusiveMaximum": "below {}", "pattern": "matches `{}`",
        "maxLength": "at most {} characters", "maxItems": "at most {} entries",
        "maxProperties": "at most {} entries",
    }  # fmt: skip
    said = [text.format(found[key]) for key, text in words.items() if key in found]
    return _shorten(", ".join(said))


def _engine_range(name: str) -> str:
    """Return the range of a sampling parameter from the engine's refusal of a bad value."""
    name = _ALIASES.get(name, name)
    fields = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
    kind = fields.get(name)
    kinds = set(get_args(kind)) if isinstance(kind, types.UnionType) else {kind}
    if name in _SERVER_LIMITED or not {int, float} & kinds:
        return ""
    parameters: dict[str, Any] = {name: _FAR_OUTSIDE}
    try:
        SamplingParams(**parameters).check(max_logprobs=1, vocab_size=1)
    except InvalidRequestError as error:
        return _allowed_in(error)
    raise ValueError(f"the engine has no lower limit for {name}")


def _allowed(field: Any) -> str:
    """Return the values that a text field accepts, from the error that refuses another value."""
    kind: Any = field.annotation
    if field.metadata:
        kind = Annotated[(kind, *field.metadata)]
    if "str" not in str(field.annotation) and "Any" not in str(field.annotation):
        return ""
    try:
        TypeAdapter(kind).validate_python("?")
    except InvalidRequestError as error:
        return _allowed_in(error)
    except ValidationError:
        return ""  # The JSON schema contains this limit.
    return ""


def _allowed_in(error: InvalidRequestError) -> str:
    return _shorten(str(error).partition("allowed: ")[2].partition("\n")[0])


def _shorten(text: str) -> str:
    text = re.sub(r"(\d)\.0\b", r"\1", text)
    for power in (31, 63):
        text = text.replace(str(2**power - 1), f"2^{power} - 1")
        text = text.replace(str(2**power), f"2^{power}")
    return text


def field_comments(schema: Schema) -> dict[str, str]:
    """Return the comments after or above the fields of a schema and its bases."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if base.__module__.startswith(api.__name__):
            found |= _module_comments(base.__module__).get(base.__name__, {})
    return found


@cache
def _module_comments(module: str) -> dict[str, dict[str, str]]:
    source = inspect.getsource(importlib.import_module(module))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith(("# fmt:", "# type:"))
    }
    lines = source.splitlines()
    above: dict[int, str] = {}  # line -> the comment that ends just before it
    for number, text in comments.items():
        if lines[number - 1].lstrip().startswith("#"):
            above[number + 1] = f"{above.pop(number, '')} {text}".strip()
    found: dict[str, dict[str, str]] = {}
    for declared in ast.parse(source).body:
        if isinstance(declared, ast.ClassDef):
            found[declared.name] = {
                ast.unparse(field.target): remark
                for field in declared.body
                if isinstance(field, ast.AnnAssign)
                and (remark := comments.get(field.end_lineno or 0, above.get(field.lineno)))
            }
    return found


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def table_cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(render())
