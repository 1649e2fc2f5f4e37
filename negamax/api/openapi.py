"""Build the OpenAPI document, including the bodies that routes parse themselves."""

from typing import Any

from fastapi import FastAPI

from negamax.api.schemas.request_model import RequestModel


def describe_body(model: type[RequestModel]) -> dict[str, Any]:
    """Build the `openapi_extra` of a route with a JSON body of type `model`."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def build_document(app: FastAPI) -> dict[str, Any]:
    """Build and cache the OpenAPI document of `app`, with schemas of bodies in `components`."""
    if app.openapi_schema is None:
        made = FastAPI.openapi(app)
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        for operations in made["paths"].values():
            for operation in operations.values():
                for body in operation.get("requestBody", {}).get("content", {}).values():
                    for name, schema in body["schema"].pop("$defs", {}).items():
                        assert schemas.setdefault(name, schema) == schema, f"two schemas {name}"
    assert app.openapi_schema is not None
    return app.openapi_schema
