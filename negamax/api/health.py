"""Serve probes and metrics: /livez, /readyz, /health, /ping, /version, /metrics."""

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from negamax import __version__
from negamax.api.common.context import ApiContext
from negamax.api.errors import build_json_response
from negamax.api.schemas.answers import HealthAnswer, ReplicaHealth, VersionAnswer


def make_health_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> Response:
        """Return status 200 while the event loop runs, even if no engine runs."""
        return build_json_response(HealthAnswer("ok"))

    @router.get("/readyz")
    async def readyz() -> Response:
        """Return 200 if the server accepts requests and all server processes send heartbeats."""
        context.lifecycle.check_accepting()
        context.lifecycle.check_leader()
        context.engine.check_responsive()
        return build_json_response(HealthAnswer("ok"))

    async def health() -> Response:
        """Return 200 if an engine runs, else 503. The body contains the status of each replica."""
        context.engine.check_alive()
        replicas = [
            ReplicaHealth(replica.index, replica.state) for replica in context.engine.replicas
        ]
        if len(replicas) == 1:
            return build_json_response(HealthAnswer("ok"))
        is_whole = all(replica.status == "ok" for replica in replicas)
        return build_json_response(HealthAnswer("ok" if is_whole else "degraded", replicas))

    router.add_api_route("/health", health, methods=["GET"])
    for method in ("GET", "POST"):  # OpenAPI describes each method separately.
        router.add_api_route("/ping", health, methods=[method])

    @router.get("/version")
    async def version() -> Response:
        """Return the version of this server."""
        return build_json_response(VersionAnswer(__version__))

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return the metrics of all server processes as Prometheus text or OpenMetrics."""
        if context.server_rank.index:
            return await context.peers.relay(request, to=0)
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(context.metrics.registry), media_type=content_type)

    return router
