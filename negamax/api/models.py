"""/v1 and /v1/models: the server, and the model names that it serves."""

import datetime

from fastapi import APIRouter, Request, Response

from negamax import __version__
from negamax.api.common.context import ApiContext
from negamax.api.errors import build_json_response
from negamax.api.schemas.answers import ModelCard, ModelList, ServerAnswer


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
    async def models() -> Response:
        """List all model names."""
        return build_json_response(
            ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)
        )

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Return one model; 404 for an unknown name."""
        return build_json_response(cards[context.model_names.index(context.model_name(name))])

    return router
