"""The endpoint of CONTRIBUTING's "How to add an endpoint", and a server that has it.

`POST /v1/shout` continues a prompt in capital letters. The product would have a folder
`api/dialects/shout/` with `schema.py` and `routes.py`, and a line in `server.ROUTERS`.
"""

import secrets
import sys

from fastapi import APIRouter, Request, Response
from msgspec import Struct

from negamax.api import server
from negamax.api.common.answer import AnswerWriter, Choice, respond
from negamax.api.common.api_request import read_api_request
from negamax.api.common.choice_reader import PlainReader
from negamax.api.common.context import ApiContext
from negamax.api.common.turn import PlainPrompt, start_prompts
from negamax.api.http.sse import encode_event
from negamax.api.openapi import describe_body
from negamax.api.schemas.sampled_request import SampledRequest
from negamax.cli.main import main
from negamax.engine.client.output import RequestOutput
from negamax.text.parser.events import ParserEvent

# schema.py: requests are pydantic models, and answers are msgspec structs.


class ShoutRequest(SampledRequest):
    """A request to continue a prompt, with all sampling parameters."""

    prompt: str  # the text to continue
    max_tokens: int = 16


class ShoutAnswer(Struct, frozen=True):
    text: str  # the continuation, or the new part of it in a stream


# routes.py: the route reads the request, starts it, and writes the engine's output.


def make_shout_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/shout", openapi_extra=describe_body(ShoutRequest))
    async def shout(http: Request) -> Response:
        """Continue a prompt in capital letters."""
        request = await read_api_request(context, http, ShoutRequest)
        params = request.params
        shout_id = f"shout-{secrets.token_hex(8)}"
        prompt = PlainPrompt(
            prompt=params.prompt, sampling=params.sampling_params(), form=lambda: None,
            reasoning_budget=None, request_id=shout_id, names=[shout_id],
            stream_interval=params.stream_interval,
        )  # fmt: skip
        (token_ids,), source = await start_prompts(context, request, [prompt])
        choice = Choice(0, PlainReader(context.chat_format, token_ids))
        return await respond(context, request, _ShoutWriter(shout_id, source, [choice]))

    return router


class _ShoutWriter(AnswerWriter[Choice, ShoutAnswer]):
    text = ""

    def take(self, choice: Choice, output: RequestOutput, events: list[ParserEvent]) -> None:
        self.text += output.text.upper()

    def chunk(self, choice: Choice, output: RequestOutput, events: list[ParserEvent]) -> bytes:
        return encode_event(ShoutAnswer(output.text.upper()))

    def response(self) -> ShoutAnswer:
        return ShoutAnswer(self.text)


if __name__ == "__main__":
    server.ROUTERS += (make_shout_router,)
    sys.exit(main())
