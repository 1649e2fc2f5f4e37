"""SGLang's routes to record how often the router selects each expert."""

from fastapi import APIRouter, Request, Response

from negamax.api.access import check_admin
from negamax.api.common.context import ApiContext
from negamax.api.dialects.generate.schema import ExpertDistribution, ExpertPlaces
from negamax.api.errors import build_json_response


def make_expert_distribution_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/start_expert_distribution_record")
    async def start_expert_distribution_record(request: Request) -> Response:
        """Start recording how often each expert is selected; for administrators."""
        check_admin(request)
        await context.engine.record_experts("start")
        return Response("Start recording expert distribution.\n", media_type="text/plain")

    @router.post("/stop_expert_distribution_record")
    async def stop_expert_distribution_record(request: Request) -> Response:
        """Stop recording; for administrators."""
        check_admin(request)
        await context.engine.record_experts("stop")
        return Response("Stop recording expert distribution.\n", media_type="text/plain")

    @router.post("/dump_expert_distribution_record")
    async def dump_expert_distribution_record(request: Request) -> Response:
        """Return the current or the finished record; for administrators."""
        check_admin(request)
        dumps = await context.engine.record_experts("dump")
        layers = zip(*(dump.logical_count for dump in dumps), strict=True)
        counts = [[sum(same) for same in zip(*layer, strict=True)] for layer in layers]
        engines = [ExpertPlaces(dump.physical_to_logical_map, dump.balancedness) for dump in dumps]
        return build_json_response(ExpertDistribution(counts, engines))

    return router
