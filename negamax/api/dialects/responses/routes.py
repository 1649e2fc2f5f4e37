"""/v1/responses: OpenAI's newer API. Answers are items, and the server keeps them, so that a
request can go on from one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from negamax.api.access import tenant_of
from negamax.api.common.content_logprobs import ContentLogprobs
from negamax.api.common.context import ApiContext
from negamax.api.common.conversation import off_loop
from negamax.api.common.thought_signature import ThoughtSigner
from negamax.api.common.turn import Turn, start_turn, turn_conversation, turn_prompt
from negamax.api.dialects.responses.events import ResponseEventWriter
from negamax.api.dialects.responses.history import history_of
from negamax.api.dialects.responses.input_items import page_of
from negamax.api.dialects.responses.item_settings import with_settings
from negamax.api.dialects.responses.items import (
    DeletedResponse,
    InputTokenCount,
    ReasoningEcho,
    ResponseAnswer,
    TextEcho,
)
from negamax.api.dialects.responses.schema import ResponsesRequest
from negamax.api.dialects.responses.store import (
    Item,
    KeptResponse,
    KeptTurn,
    ResponseStore,
    decoded,
)
from negamax.api.errors import error_of, json_response
from negamax.api.http.request_body import decode_request, receive
from negamax.api.http.sse import while_connected
from negamax.api.openapi import json_body
from negamax.api.schemas.answers import encode
from negamax.api.schemas.request_model import refuse, shown
from negamax.base.errors import InvalidRequestError, NotFoundError, PayloadTooLargeError
from negamax.base.log import get_logger

logger = get_logger(__name__)

_ITEMS = "items"  # what server processes ask each other for, by their ids
# that a stopping server waits for the client of a response that ended in the background
_FETCH_SECONDS = 5.0


def responses_router(context: ApiContext) -> APIRouter:
    """The routes of the Responses API."""
    router = APIRouter(route_class=context.peers.owner_route("response_id"))
    responses = _Responses(context)
    body_schema = json_body(ResponsesRequest)

    @router.post("/v1/responses", openapi_extra=body_schema)
    async def create(request: Request) -> Response:
        """Answer a conversation: whole, as a stream of events, or in the background."""
        arrival = time.monotonic()
        read = await _read(context, request)
        if isinstance(read, Response):
            return read
        params, num_bytes = read
        return await responses.create(request, params, num_bytes=num_bytes, arrival=arrival)

    @router.post("/v1/responses/input_tokens", openapi_extra=body_schema)
    async def input_tokens(request: Request) -> Response:
        """How many tokens the prompt of a response has."""
        read = await _read(context, request)
        if isinstance(read, Response):
            return read
        params, num_bytes = read
        return json_response(await responses.count(request, params, num_bytes=num_bytes))

    @router.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        """A kept response."""
        if request.query_params.get("stream", "false").lower() == "true":
            refuse("stream", "a kept response is not streamed again; leave it out")
        return Response(
            responses.fetched(response_id, tenant_of(request)), media_type="application/json"
        )

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        """What the request of a kept response sent, in pages: `order`, `limit`, `after`."""
        kept = responses.kept(response_id, tenant_of(request))
        items, query = kept.turn.input_items, request.query_params
        page = await off_loop(
            lambda: page_of(decoded(items), query, response_id=response_id), num_bytes=len(items)
        )
        return json_response(page)

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        """Forget a response."""
        responses.delete(response_id, tenant_of(request))
        return json_response(DeletedResponse(response_id))

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        """End a response that runs in the background."""
        return Response(
            await responses.cancel(response_id, tenant_of(request)), media_type="application/json"
        )

    return router


async def _read(context: ApiContext, request: Request) -> tuple[ResponsesRequest, int] | Response:
    """The request and its size in bytes, or the answer of the server process that owns what it
    goes on from."""
    body = await receive(request, context.body_limits)
    params = await decode_request(body, ResponsesRequest, context.body_limits)
    owner = context.server_rank.owner_of(params.previous_response_id)
    if owner != context.server_rank.index:
        return await context.peers.relay(request, to=owner, body=body)
    return params, len(body)


class _Responses:
    """The responses of one server: those that are kept, and those that run in the background.
    Single writer: the event loop.
    """

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._signer = ThoughtSigner(context.engine.info.served_model_name)
        self._store = ResponseStore()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._awaited: dict[str, asyncio.Event] = {}  # set when the response is fetched
        context.peers.when_asked(
            _ITEMS, lambda asked: self._store.items(set(asked["ids"]), tenant=asked["tenant"])
        )

    def kept(self, response_id: str, tenant: str) -> KeptResponse:
        """A kept response of a tenant's. Errors: `NotFoundError`."""
        kept = self._store.get(response_id, tenant=tenant)
        if kept is None:
            raise _unknown(response_id, param="response_id", code="response_not_found")
        return kept

    def fetched(self, response_id: str, tenant: str) -> bytes:
        """A kept response as JSON, for its client. Errors: `NotFoundError`."""
        body = self.kept(response_id, tenant).body
        if response_id in self._awaited:
            self._awaited[response_id].set()
        return body

    async def create(
        self, request: Request, params: ResponsesRequest, *, num_bytes: int, arrival: float
    ) -> Response:
        """Answer a request."""
        context = self._context
        model = context.model_name(params.model)
        if params.background and (params.stream or not params.store):
            refuse(
                "background",
                "a response in the background is fetched later; it needs store=true and "
                "stream=false",
            )
        if params.top_logprobs > context.engine.info.max_logprobs:
            refuse(
                "top_logprobs",
                f"{params.top_logprobs}; allowed: 0 to {context.engine.info.max_logprobs}",
            )
        tenant = tenant_of(request)
        parent, given, in_effect, turn, num_bytes = await self._prepare(
            params, tenant, num_bytes=num_bytes
        )
        blank = self._blank(params, model=model, turn=turn)
        keep = partial(
            self._keep, tenant=tenant, parent=parent, input_items=msgspec.json.encode(given)
        )
        started = await start_turn(
            context,
            request,
            turn,
            params,
            request_id=blank.id,
            names=[blank.id],
            num_bytes=num_bytes,
            arrival=arrival,
        )
        logprobs = (
            None
            if params.num_logprobs is None
            else ContentLogprobs(context.engine.tokenizer, context.chat_format)
        )
        writer = ResponseEventWriter(
            started,
            in_effect,
            blank,
            new_id=partial(context.server_rank.new_id, num_bytes=16),
            signer=self._signer,
            logprobs=logprobs,
            keep=keep if params.store else _drop,
            request_id=request.state.request_id,
        )
        if params.background:
            keep(blank)
            work = self._run(writer, blank, keep)
            self._running[blank.id] = context.lifecycle.run_in_background(work)
            return json_response(blank)
        if params.stream:
            return context.event_stream(writer.stream, source=writer.source)
        response = await while_connected(request.receive, writer.whole())
        if params.store:
            keep(response)
        return json_response(response)

    async def count(
        self, request: Request, params: ResponsesRequest, *, num_bytes: int
    ) -> InputTokenCount:
        """Count the tokens of a request's prompt."""
        self._context.model_name(params.model)
        _, _, _, turn, num_bytes = await self._prepare(
            params, tenant_of(request), num_bytes=num_bytes
        )
        prompt = await turn_prompt(self._context, request, turn, params, num_bytes=num_bytes)
        return InputTokenCount(len(prompt.token_ids))

    async def _prepare(
        self, params: ResponsesRequest, tenant: str, *, num_bytes: int
    ) -> tuple[KeptTurn | None, list[Item], ResponsesRequest, Turn, int]:
        """What a request goes on from, its own items, the request as all items change it, what they
        ask for together, and how many bytes that is.
        """
        parent = self._parent(params.previous_response_id, tenant)
        given, num_bytes = await self._given(params, tenant, num_bytes=num_bytes)
        num_bytes += 0 if parent is None else parent.total_bytes
        in_effect, turn = await off_loop(
            lambda: self._turn(params, parent, given), num_bytes=num_bytes
        )
        return parent, given, in_effect, turn, num_bytes

    def delete(self, response_id: str, tenant: str) -> None:
        """Forget a response; one that runs ends. Errors: `NotFoundError`."""
        self.kept(response_id, tenant)
        task = self._running.pop(response_id, None)
        if task is not None:
            task.cancel()
        self._store.remove(response_id)

    async def cancel(self, response_id: str, tenant: str) -> bytes:
        """End a response in the background; its last state. Errors: `NotFoundError`,
        `InvalidRequestError` for another kind.
        """
        response = msgspec.json.decode(self.kept(response_id, tenant).body)
        if not response["background"]:
            raise InvalidRequestError(
                "only a response in the background can be cancelled; close the connection of any "
                "other",
                param="response_id",
                code="not_in_background",
            )
        task = self._running.get(response_id)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return self.kept(response_id, tenant).body

    async def _run(
        self,
        writer: ResponseEventWriter,
        blank: ResponseAnswer,
        keep: Callable[[ResponseAnswer], None],
    ) -> None:
        """Run a response in the background, and keep its last state unless it was deleted."""
        try:
            response = await writer.whole()
        except asyncio.CancelledError:
            response = writer.cancelled()
        except Exception as error:
            logger.warning("response %s failed in the background: %s", blank.id, error)
            response = writer.failed(error_of(error)[1].error.message)
        if self._running.pop(blank.id, None) is not None:
            keep(response)
            if self._context.lifecycle.is_draining and response.status in (
                "completed",
                "incomplete",
            ):
                await self._until_fetched(blank.id)

    async def _until_fetched(self, response_id: str) -> None:
        """Give its client the time to ask for it once more, because with the server the response
        goes.
        """
        fetched = self._awaited[response_id] = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FETCH_SECONDS):
                await fetched.wait()
        del self._awaited[response_id]

    def _keep(
        self, response: ResponseAnswer, tenant: str, *, parent: KeptTurn | None, input_items: bytes
    ) -> None:
        turn = KeptTurn(
            parent, input_items=input_items, output_items=msgspec.json.encode(response.output)
        )
        self._store.put(
            response.id,
            KeptResponse(encode(response), turn, [item.id for item in response.output], tenant),
        )

    def _parent(self, response_id: str | None, tenant: str) -> KeptTurn | None:
        """The turn to go on from."""
        if response_id is None:
            return None
        kept = self._store.get(response_id, tenant=tenant)
        if kept is None:
            raise _unknown(
                response_id, param="previous_response_id", code="previous_response_not_found"
            )
        if response_id in self._running:
            refuse("previous_response_id", f"{response_id} is not complete yet; wait until it is")
        return kept.turn

    async def _given(
        self, params: ResponsesRequest, tenant: str, *, num_bytes: int
    ) -> tuple[list[Item], int]:
        """The input as items, references replaced by what they refer to, and how many bytes the
        request, of `num_bytes`, has with these. Errors: `PayloadTooLargeError`."""
        if isinstance(params.input, str):
            return [{"type": "message", "role": "user", "content": params.input}], num_bytes
        references = {
            index: item.get("id")
            for index, item in enumerate(params.input)
            if item.get("type", "item_reference" if item.keys() == {"id"} else None)
            == "item_reference"
        }
        found = await self._items(
            {item_id for item_id in references.values() if isinstance(item_id, str)}, tenant
        )
        given = list(params.input)
        sizes = {item_id: len(msgspec.json.encode(item)) for item_id, item in found.items()}
        for index, item_id in references.items():
            if not isinstance(item_id, str) or item_id not in found:
                raise _unknown(item_id, param=f"input[{index}].id", code="item_not_found")
            given[index] = found[item_id]
            num_bytes += sizes[item_id]
        allowed = self._context.body_limits.num_bytes
        if num_bytes > allowed:
            raise PayloadTooLargeError(
                f"input: {num_bytes} bytes with what its references refer to; allowed: {allowed}",
                code="body_too_large",
            )
        return given, num_bytes

    async def _items(self, item_ids: set[str], tenant: str) -> dict[str, Item]:
        """Output items of kept responses by id, each asked of the server process that owns it."""
        rank = self._context.server_rank
        by_owner: dict[int, set[str]] = {}
        for item_id in item_ids:
            by_owner.setdefault(rank.owner_of(item_id), set()).add(item_id)
        found = self._store.items(by_owner.pop(rank.index, ()), tenant=tenant)
        for owner, owned in by_owner.items():
            asked = {"ids": list(owned), "tenant": tenant}
            found |= await self._context.peers.ask(_ITEMS, asked, of=owner)
        return found

    def _turn(
        self, params: ResponsesRequest, parent: KeptTurn | None, given: list[Item]
    ) -> tuple[ResponsesRequest, Turn]:
        earlier = [] if parent is None else parent.conversation()
        items = [("previous_response_id", item) for item in earlier]
        items += [
            ("input" if isinstance(params.input, str) else f"input[{i}]", item)
            for i, item in enumerate(given)
        ]
        params = with_settings(params, items)
        thoughts = self._context.hidden_thoughts(self._signer)
        history = history_of(
            items,
            instructions=params.instructions,
            thoughts=thoughts,
            family=self._context.chat_format.family,
        )
        tools, calls = params.choice()
        turn = Turn(
            conversation=turn_conversation(params, history.messages, tools, params.thinking_choice),
            places=history.places,
            calls=calls,
            form=params.grammar,
            sampling=params.shared_sampling(
                seed=params.seed,
                max_tokens=params.max_output_tokens,
                min_tokens=params.min_tokens,
                stop=params.stop,
                logprobs=params.num_logprobs,
            ),
        )
        return params, turn

    def _blank(self, params: ResponsesRequest, *, model: str, turn: Turn) -> ResponseAnswer:
        """The response before anything is answered."""
        info = self._context.engine.info
        resolved = turn.sampling.resolved(info.sampling_defaults, room=info.max_model_len)
        assert resolved.temperature is not None and resolved.top_p is not None
        return ResponseAnswer(
            id=self._context.server_rank.new_id("resp", num_bytes=24),
            created_at=int(time.time()),
            status="in_progress",
            background=params.background,
            instructions=params.instructions,
            max_output_tokens=params.max_output_tokens,
            metadata=params.metadata,
            model=model,
            output=[],
            parallel_tool_calls=params.parallel_tool_calls,
            previous_response_id=params.previous_response_id,
            reasoning=ReasoningEcho(params.reasoning.effort, params.reasoning.summary),
            store=params.store,
            temperature=resolved.temperature,
            text=TextEcho(
                params.text.format or {"type": "text"}, params.text.verbosity or "medium"
            ),
            tool_choice=params.tool_choice,
            tools=params.tools or [],
            top_logprobs=params.top_logprobs,
            top_p=resolved.top_p,
        )


def _drop(response: ResponseAnswer) -> None:
    """The client asked for it not to be kept."""


def _unknown(name: object, *, param: str, code: str) -> NotFoundError:
    return NotFoundError(
        f"{param}: {shown(name)} is not kept here; responses are kept in memory until others "
        f"make room",
        param=param,
        code=code,
    )
