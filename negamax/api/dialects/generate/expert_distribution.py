"""SGLang's routes for how often each expert is chosen."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from negamax.api.access import check_admin
from negamax.api.common.context import ApiContext
from negamax.api.dialects.generate.schema import ExpertDistribution, ExpertPlaces
from negamax.api.errors import json_response


def expert_distribution_router(context: ApiContext) -> APIRouter:
    """The routes, by SGLang's names."""
    router = APIRouter()

    @router.post("/start_expert_distribution_record")
    async def start_expert_distribution_record(request: Request) -> Response:
        """Begin to record how often each expert is chosen; for administrators."""
        check_admin(request)
        await context.engine.record_experts("start")
        return Response("Start recording expert distribution.\n", media_type="text/plain")

    @router.post("/stop_expert_distribution_record")
    async def stop_expert_distribution_record(request: Request) -> Response:
        """End the record, which can be dumped afterwards; for administrators."""
        check_admin(request)
        await context.engine.record_experts("stop")
        return Response("Stop recording expert distribution.\n", media_type="text/plain")

    @router.post("/dump_expert_distribution_record")
    async def dump_expert_distribution_record(request: Request) -> Response:
        """What was recorded until now, or until the record ended; for administrators."""
        check_admin(request)
        dumps = await context.engine.record_experts("dump")
        layers = zip(*(dump.logical_count for dump in dumps), strict=True)
        counts = [[sum(same) for same in zip(*layer, strict=True)] for layer in layers]
        engines = [ExpertPlaces(dump.physical_to_logical_map, dump.balancedness) for dump in dumps]
        return json_response(ExpertDistribution(counts, engines))

    return router
