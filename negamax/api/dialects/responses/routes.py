"""Serve /v1/responses of OpenAI's API. The server stores each response for later use."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from negamax.api.access import get_tenant
from negamax.api.common.answer import respond
from negamax.api.common.api_request import ApiRequest
from negamax.api.common.content_logprobs import ContentLogprobs
from negamax.api.common.context import ApiContext
from negamax.api.common.conversation import ChatPrompt, Conversation
from negamax.api.common.peer_hosts import find_addresses
from negamax.api.common.turn import Turn, answer_blocks, build_prompt, start_turn
from negamax.api.dialects.responses.events import ResponseEventWriter
from negamax.api.dialects.responses.history import build_history
from negamax.api.dialects.responses.input_items import build_page
from negamax.api.dialects.responses.item_settings import apply_settings
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
    ResponseStore,
    StoredResponse,
    StoredTurn,
    decode_items,
    encode_shown,
    trim_setting,
)
from negamax.api.errors import build_json_response, describe_error
from negamax.api.http.body_budget import get_share
from negamax.api.http.request_body import decode_request, receive
from negamax.api.http.request_threads import run_off_loop
from negamax.api.http.sse import run_while_connected
from negamax.api.openapi import describe_body
from negamax.api.schemas.answers import encode
from negamax.api.schemas.request_model import describe, refuse
from negamax.base.errors import InvalidRequestError, NotFoundError, PayloadTooLargeError
from negamax.base.log import get_logger

logger = get_logger(__name__)

_ITEMS = "items"  # Name of the request by which server processes read each other's items.
_FETCH_SECONDS = 5.0  # Longest wait of a stopping server for a client to fetch a response.


def make_responses_router(context: ApiContext) -> APIRouter:
    router = APIRouter(route_class=context.peers.owner_route("response_id"))
    responses = _Responses(context)
    body_schema = describe_body(ResponsesRequest)

    @router.post("/v1/responses", openapi_extra=body_schema)
    async def create(http: Request) -> Response:
        """Answer a conversation with one object, with a stream of events, or in the background."""
        request = await _read(context, http)
        return request if isinstance(request, Response) else await responses.create(request)

    @router.post("/v1/responses/input_tokens", openapi_extra=body_schema)
    async def input_tokens(http: Request) -> Response:
        """Count the tokens of a response's prompt."""
        request = await _read(context, http)
        if isinstance(request, Response):
            return request
        _, prompt = await responses.build_prompt(request)
        return build_json_response(InputTokenCount(len(prompt.token_ids)))

    @router.post("/v1/responses/kv_blocks", openapi_extra=body_schema)
    async def kv_blocks(http: Request) -> Response:
        """Return the block hashes of a response's prompt. Generate no answer."""
        request = await _read(context, http)
        if isinstance(request, Response):
            return request
        whole, prompt = await responses.build_prompt(request)
        return await answer_blocks(context, whole, prompt.token_ids, prompt.images)

    @router.get("/v1/responses/{response_id}")
    async def retrieve(http: Request, response_id: str) -> Response:
        """Return a stored response."""
        if http.query_params.get("stream", "false").lower() == "true":
            refuse("stream", "a stored response cannot be streamed again; leave the field out")
        return _json_bytes(responses.fetch(response_id, get_tenant(http)))

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(http: Request, response_id: str) -> Response:
        """List the input items of a response. The query may have `order`, `limit` and `after`."""
        kept = responses.get(response_id, get_tenant(http))
        items, query = kept.turn.input_items, http.query_params
        page = await run_off_loop(
            lambda: build_page(decode_items(items), query, response_id=response_id),
            num_bytes=len(items),
        )
        return build_json_response(page)

    @router.delete("/v1/responses/{response_id}")
    async def delete(http: Request, response_id: str) -> Response:
        """Delete a response."""
        responses.delete(response_id, get_tenant(http))
        return build_json_response(DeletedResponse(response_id))

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(http: Request, response_id: str) -> Response:
        """Cancel a response that runs in the background."""
        return _json_bytes(await responses.cancel(response_id, get_tenant(http)))

    return router


def _json_bytes(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _read(context: ApiContext, http: Request) -> ApiRequest[ResponsesRequest] | Response:
    """Read the request, or relay it to the server process that owns the previous response."""
    arrival = time.monotonic()
    body = await receive(http, context.body_limits)
    params, num_bytes = await decode_request(body, ResponsesRequest, context.body_limits)
    owner = context.server_rank.owner_of(params.previous_response_id)
    if owner != context.server_rank.index:
        return await context.peers.relay(http, to=owner, body=body)
    get_share(http).keep(num_bytes)
    addresses = await find_addresses(params, context.engine.info.transfer)
    return ApiRequest(http, params, num_bytes, arrival, addresses)


@dataclass(frozen=True, slots=True)
class _Prepared:
    request: ApiRequest[ResponsesRequest]  # `num_bytes` includes referenced items
    parent: StoredTurn | None  # The turn that the request continues.
    input_items: bytes  # Input items of this request only, as JSON for the store.
    in_effect: ResponsesRequest  # The request, with the settings after changes by its input items.
    turn: Turn


class _Responses:
    """Stored responses and background responses. Only the event loop changes this object."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._store = ResponseStore()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._awaited: dict[str, asyncio.Event] = {}  # response id -> event that a GET request sets
        context.peers.when_asked(
            _ITEMS, lambda asked: self._store.items(set(asked["ids"]), tenant=asked["tenant"])
        )

    def get(self, response_id: str, tenant: str) -> StoredResponse:
        kept = self._store.get(response_id, tenant=tenant)
        if kept is None:
            raise _build_unknown_error(response_id, param="response_id", code="response_not_found")
        return kept

    def fetch(self, response_id: str, tenant: str) -> bytes:
        """Return a stored response as JSON. Raises `NotFoundError` if the response is unknown."""
        body = self.get(response_id, tenant).body
        if response_id in self._awaited:
            self._awaited[response_id].set()
        return body

    async def create(self, request: ApiRequest[ResponsesRequest]) -> Response:
        context, params = self._context, request.params
        model = context.model_name(params.model)
        if params.background and (params.stream or not params.store):
            refuse("background", "a background response needs store=true and stream=false")
        most = context.engine.info.max_logprobs
        if params.top_logprobs > most:
            refuse("top_logprobs", f"{params.top_logprobs} is not allowed; send 0 to {most}")
        prepared = await self._prepare(request)
        blank = self._build_blank(params, model=model, turn=prepared.turn)
        keep = partial(
            self._keep,
            tenant=get_tenant(request.http),
            parent=prepared.parent,
            input_items=prepared.input_items,
        )
        started = await start_turn(
            context, prepared.request, prepared.turn, request_id=blank.id, names=[blank.id]
        )
        logprobs: ContentLogprobs | None = None
        if params.num_logprobs is not None:
            logprobs = ContentLogprobs(context.engine.tokenizer, context.chat_format)
        writer = ResponseEventWriter(
            started,
            prepared.in_effect,
            blank,
            new_id=partial(context.server_rank.new_id, num_bytes=16),
            signer=context.signer,
            logprobs=logprobs,
            keep=keep if params.store else lambda _: None,
            request_id=request.http.state.request_id,
        )
        if params.background:
            keep(blank)
            work = self._run(writer, blank, keep)
            self._running[blank.id] = context.lifecycle.run_in_background(work)
            return build_json_response(blank)
        if params.stream:
            return await respond(context, request, writer)
        response = await run_while_connected(request.http.receive, writer.whole())
        if params.store:
            keep(response)
        return build_json_response(response)

    async def build_prompt(
        self, request: ApiRequest[ResponsesRequest]
    ) -> tuple[ApiRequest[ResponsesRequest], ChatPrompt]:
        """Return the request with the `num_bytes` of all items, and its prompt without pixels."""
        self._context.model_name(request.params.model)
        prepared = await self._prepare(request)
        whole, turn = prepared.request, prepared.turn
        return whole, await build_prompt(self._context, whole, turn, needs_pixels=False)

    async def _prepare(self, request: ApiRequest[ResponsesRequest]) -> _Prepared:
        params, tenant = request.params, get_tenant(request.http)
        parent = self._get_parent(params.previous_response_id, tenant)
        given, num_bytes = await self._resolve_references(
            params, tenant, num_bytes=request.num_bytes
        )
        if parent is not None:
            num_bytes += parent.total_bytes
            self._check_chain(parent, num_bytes=num_bytes)
            get_share(request.http).take(parent.total_bytes)

        def prepare() -> tuple[ResponsesRequest, Turn, bytes]:
            in_effect, turn = self._build_turn(params, parent, given)
            keeps = self._context.engine.info.vision is not None
            shown = encode_shown(given, keeps_images=keeps) if params.store else b"[]"
            return in_effect, turn, shown

        in_effect, turn, stored = await run_off_loop(prepare, num_bytes=num_bytes)
        return _Prepared(replace(request, num_bytes=num_bytes), parent, stored, in_effect, turn)

    def _check_chain(self, parent: StoredTurn, *, num_bytes: int) -> None:
        """Refuse a request if it and its earlier turns together exceed the limits for one body."""
        limits = self._context.body_limits
        if num_bytes > limits.num_bytes or parent.total_openers > limits.openers:
            raise PayloadTooLargeError(
                f"previous_response_id: the conversation has {num_bytes} bytes and "
                f"{parent.total_openers} brackets and colons; at most {limits.num_bytes} and "
                f"{limits.openers} are allowed; send a shorter conversation as input",
                code="body_too_large",
            )

    def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response, and abort it if it runs. Raises `NotFoundError` for an unknown id."""
        self.get(response_id, tenant)
        task = self._running.pop(response_id, None)
        if task is not None:
            task.cancel()
        self._store.remove(response_id, tenant=tenant)

    async def cancel(self, response_id: str, tenant: str) -> bytes:
        """Cancel a background response and return its last state.

        Raises `NotFoundError` for an unknown id, `InvalidRequestError` for a foreground response.
        """
        response = msgspec.json.decode(self.get(response_id, tenant).body)
        if not response["background"]:
            raise InvalidRequestError(
                "the response does not run in the background; close its connection to end it",
                param="response_id",
                code="not_in_background",
            )
        task = self._running.get(response_id)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return self.get(response_id, tenant).body

    async def _run(
        self,
        writer: ResponseEventWriter,
        blank: ResponseAnswer,
        keep: Callable[[ResponseAnswer], None],
    ) -> None:
        """Generate a background response. Store the final response unless the client deleted it."""
        try:
            response = await writer.whole()
        except asyncio.CancelledError:
            response = writer.cancelled()
        except Exception as error:
            logger.warning("response %s failed in the background: %s", blank.id, error)
            response = writer.failed(describe_error(error)[1].error.message)
        if self._running.pop(blank.id, None) is not None:
            keep(response)
            is_answer = response.status in ("completed", "incomplete")
            if self._context.lifecycle.is_draining and is_answer:
                await self._wait_until_fetched(blank.id)

    async def _wait_until_fetched(self, response_id: str) -> None:
        """Wait a few seconds for the client to fetch a response before the server stops."""
        fetched = self._awaited[response_id] = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FETCH_SECONDS):
                await fetched.wait()
        del self._awaited[response_id]

    def _keep(
        self,
        response: ResponseAnswer,
        tenant: str,
        *,
        parent: StoredTurn | None,
        input_items: bytes,
    ) -> None:
        turn = StoredTurn(
            parent, input_items=input_items, output_items=msgspec.json.encode(response.output)
        )
        self._store.put(
            response.id,
            StoredResponse(encode(response), turn, [item.id for item in response.output], tenant),
        )

    def _get_parent(self, response_id: str | None, tenant: str) -> StoredTurn | None:
        if response_id is None:
            return None
        kept = self._store.get(response_id, tenant=tenant)
        if kept is None:
            raise _build_unknown_error(
                response_id, param="previous_response_id", code="previous_response_not_found"
            )
        if response_id in self._running:
            refuse("previous_response_id", f"{response_id} still runs; wait until it is complete")
        return kept.turn

    async def _resolve_references(
        self, params: ResponsesRequest, tenant: str, *, num_bytes: int
    ) -> tuple[list[Item], int]:
        """Return the input with references replaced by items, and the request's size in bytes."""
        if isinstance(params.input, str):
            return [{"type": "message", "role": "user", "content": params.input}], num_bytes
        references = {
            index: item.get("id")
            for index, item in enumerate(params.input)
            if item.get("type", "item_reference" if item.keys() == {"id"} else None)
            == "item_reference"
        }
        found = await self._find_items(
            {item_id for item_id in references.values() if isinstance(item_id, str)}, tenant
        )
        given = list(params.input)
        sizes = {item_id: len(msgspec.json.encode(item)) for item_id, item in found.items()}
        for index, item_id in references.items():
            if not isinstance(item_id, str) or item_id not in found:
                raise _build_unknown_error(
                    item_id, param=f"input[{index}].id", code="item_not_found"
                )
            given[index] = found[item_id]
            num_bytes += sizes[item_id]
        allowed = self._context.body_limits.num_bytes
        if num_bytes > allowed:
            raise PayloadTooLargeError(
                f"input and its referenced items have {num_bytes} bytes; allowed: {allowed}",
                code="body_too_large",
            )
        return given, num_bytes

    async def _find_items(self, item_ids: set[str], tenant: str) -> dict[str, Item]:
        """Map item ids to output items of responses that this and other server processes store."""
        rank = self._context.server_rank
        by_owner: dict[int, set[str]] = {}
        for item_id in item_ids:
            by_owner.setdefault(rank.owner_of(item_id), set()).add(item_id)
        found = self._store.items(by_owner.pop(rank.index, ()), tenant=tenant)
        for owner, owned in by_owner.items():
            asked = {"ids": list(owned), "tenant": tenant}
            found |= await self._context.peers.ask(_ITEMS, asked, of=owner)
        return found

    def _build_turn(
        self, params: ResponsesRequest, parent: StoredTurn | None, given: list[Item]
    ) -> tuple[ResponsesRequest, Turn]:
        earlier = [] if parent is None else parent.conversation()
        items = [("previous_response_id", item) for item in earlier]
        items += [
            ("input" if isinstance(params.input, str) else f"input[{i}]", item)
            for i, item in enumerate(given)
        ]
        settings = apply_settings(params, items)
        params = settings.params
        history = build_history(
            items,
            instructions=params.instructions,
            thoughts=self._context.hidden_thoughts(),
            family=self._context.chat_format.family,
            tool_notes=settings.notes,
        )
        if not history.messages:
            refuse("input", "the items have no content for the model; send text or a message")
        tools, calls = params.choice()
        shown = [tool for tool in tools or () if tool["function"]["name"] not in settings.later]
        turn = Turn(
            tools=tools,
            conversation=Conversation(
                messages=history.messages,
                tools=shown or None,
                thinking=params.thinking_choice,
                template_kwargs=params.chat_template_kwargs,
            ),
            places=history.places,
            calls=calls,
            form=params.grammar,
            sampling=params.sampling_params(
                max_tokens=params.max_output_tokens, logprobs=params.num_logprobs
            ),
        )
        return params, turn

    def _build_blank(self, params: ResponsesRequest, *, model: str, turn: Turn) -> ResponseAnswer:
        info = self._context.engine.info
        resolved = turn.sampling.resolved(info.sampling_defaults, room=info.max_model_len)
        assert resolved.temperature is not None and resolved.top_p is not None
        choice = params.tool_choice
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
                trim_setting(params.text.format or {"type": "text"}),
                (params.text.verbosity or "medium")[:64],
            ),
            tool_choice=choice if isinstance(choice, str) else trim_setting(choice),
            tools=[trim_setting(tool) for tool in params.tools or ()],
            top_logprobs=params.top_logprobs,
            top_p=resolved.top_p,
        )


def _build_unknown_error(name: object, *, param: str, code: str) -> NotFoundError:
    return NotFoundError(
        f"{param}: {describe(name)} is not stored; the server stores only the most recently used "
        f"responses",
        param=param,
        code=code,
    )
