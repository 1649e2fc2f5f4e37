"""/health, /ping, /version, /metrics: what load balancers and dashboards ask."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from negamax import __version__
from negamax.api.border import json_response
from negamax.api.context import ApiContext
from negamax.api.schemas.answers import HealthAnswer, VersionAnswer
from negamax.base.errors import EngineDeadError


def health_router(context: ApiContext) -> APIRouter:
    """The routes that need no key."""
    router = APIRouter()

    async def health() -> Response:
        """200 while the engine can serve, 503 once it is gone."""
        if not context.engine.alive:
            raise EngineDeadError("the engine is gone", hint="restart the server", code="engine_dead")
        return json_response(HealthAnswer("ok"))

    router.add_api_route("/health", health, methods=["GET"])
    router.add_api_route("/ping", health, methods=["GET", "POST"])

    @router.get("/version")
    async def version() -> Response:
        return json_response(VersionAnswer(__version__))

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus text, or OpenMetrics where the scraper accepts it."""
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(context.metrics.registry), media_type=content_type)

    return router
