"""The OpenAPI document's description of bodies, which routes read themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from negamax.api.schemas.request_model import RequestModel


def json_body(model: type[RequestModel]) -> dict[str, Any]:
    """What a route's `openapi_extra` says of a JSON body of type `model`."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def document(app: FastAPI) -> dict[str, Any]:
    """The document of `app`, made once. Definitions of bodies stand among its components, where
    references look for them."""
    if app.openapi_schema is None:
        made = FastAPI.openapi(app)
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        for operations in made["paths"].values():
            for operation in operations.values():
                content = operation.get("requestBody", {}).get("content", {})
                for body in content.values():
                    for name, schema in body["schema"].pop("$defs", {}).items():
                        assert schemas.setdefault(name, schema) == schema, f"two schemas {name}"
    assert app.openapi_schema is not None
    return app.openapi_schema
