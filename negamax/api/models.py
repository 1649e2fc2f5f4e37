"""Serve /v1, which describes the server, and /v1/models, which lists its model names."""

import datetime
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from negamax import __version__
from negamax.api.common.context import ApiContext
from negamax.api.errors import build_json_response
from negamax.api.schemas import answers
from negamax.api.schemas.answers import ModelCard, ModelList, ServerAnswer

_CODEX_MODEL = Path(answers.__file__).with_name("codex_model.json")  # a model in Codex's format


def make_models_router(context: ApiContext) -> APIRouter:
    router = APIRouter()
    cards = [
        ModelCard(
            id=name,
            display_name=name,
            created=context.started,
            created_at=datetime.datetime.fromtimestamp(context.started, datetime.UTC).isoformat(),
            root=context.engine.info.model,
            max_model_len=context.engine.info.max_model_len,
            max_input_tokens=context.engine.info.max_model_len,
        )
        for name in context.model_names
    ]

    codex_model: dict[str, Any] = msgspec.json.decode(_CODEX_MODEL.read_bytes())
    context_length = context.engine.info.max_model_len
    windows = {"context_window": context_length, "max_context_window": context_length}
    codex_models = [
        {"slug": name, "display_name": name, **codex_model, **windows}
        for name in context.model_names
    ]

    async def server(request: Request) -> Response:
        """Describe the server and list its routes."""
        answer = ServerAnswer(
            name="negamax",
            version=__version__,
            models=list(context.model_names),
            max_model_len=context.engine.info.max_model_len,
            endpoints=request.app.state.endpoints,
        )
        return build_json_response(answer)

    router.add_api_route("/v1", server, methods=["GET"])
    router.add_route("/v1/", server, methods=["GET"])

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        """List all model names. If the client sends `client_version`, add Codex's model list."""
        is_codex = "client_version" in request.query_params
        return build_json_response(
            ModelList(
                data=cards,
                first_id=cards[0].id,
                last_id=cards[-1].id,
                models=codex_models if is_codex else UNSET,
            )
        )

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Return the description of one model, or status 404 for an unknown name."""
        return build_json_response(cards[context.model_names.index(context.model_name(name))])

    return router
