"""Serve SGLang's native API: generate text, abort requests, and describe the server."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from negamax import __version__
from negamax.api.access import check_admin, get_tenant, is_admin
from negamax.api.common.answer import AnswerSource, AnswerWriter, Choice, respond
from negamax.api.common.api_request import read_api_request
from negamax.api.common.choice_reader import PlainReader
from negamax.api.common.context import ApiContext
from negamax.api.common.logprobs import LEAST_LOGPROB
from negamax.api.common.turn import PlainPrompt, start_prompts
from negamax.api.dialects.generate import schema
from negamax.api.dialects.generate.growing_json import GrowingList, RepeatPacing
from negamax.api.errors import build_json_response
from negamax.api.http.request_body import read_request
from negamax.api.http.sse import encode_event
from negamax.api.openapi import describe_body
from negamax.api.schemas.request_model import refuse
from negamax.base.errors import InvalidRequestError
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.client.output import RequestOutput
from negamax.engine.shape import add_parsers
from negamax.engine.wire import ModelInfo
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import TokenLogprobs
from negamax.text.parser.events import ParserEvent

_ABORT = "abort"  # name of the internal request that makes other server processes abort sequences


def make_native_router(context: ApiContext) -> APIRouter:
    """Build the routes. Routes that describe the server are also served at SGLang's older paths."""
    router = APIRouter()
    abort = partial(_abort, context.engine)
    context.peers.when_asked(_ABORT, abort)
    body_schema = describe_body(schema.NativeRequest)

    @router.post("/generate", openapi_extra=body_schema)
    async def generate(http: Request) -> Response:
        """Continue one or several prompts."""
        request = await read_api_request(context, http, schema.NativeRequest)
        params = request.params
        samplings = params.samplings(len(params.prompts))
        ids = [given or secrets.token_hex(16) for given in params.ids(len(params.prompts))]
        prompts = [
            PlainPrompt(
                prompt=prompt,
                sampling=_build_engine_sampling(params, sampling),
                form=partial(getattr, sampling, "grammar"),
                reasoning_budget=params.max_thinking_tokens,
                request_id=f"generate-{rid}-{secrets.token_hex(4)}",
                names=[rid, params.rid] if isinstance(params.rid, str) else [rid],
                stream_interval=sampling.stream_interval,
            )
            for prompt, sampling, rid in zip(params.prompts, samplings, ids, strict=True)
        ]
        token_ids, source = await start_prompts(context, request, prompts)
        num_choices = sum(sampling.n for sampling in samplings)
        choices = [
            _NativeChoice(
                index,
                PlainReader(context.chat_format, token_ids[number]),
                prompt_index=number,
                is_prompt_only=samplings[number].max_new_tokens == 0,
                rid=ids[number],
                pacing=RepeatPacing(num_choices=num_choices),
            )
            for index, number in enumerate(
                number for number, sampling in enumerate(samplings) for _ in range(sampling.n)
            )
        ]
        writer = _NativeWriter(
            context, params, source, choices, prompts=token_ids, arrival=request.arrival
        )
        return await respond(context, request, writer)

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        """Abort requests by id, or all requests. Administrators may abort requests of every key."""
        params, _ = await read_request(request, schema.AbortRequest, context.body_limits)
        meant = _read_abort(request, params)
        counts = await context.peers.ask_others(_ABORT, meant)
        return build_json_response(schema.NumAborted(abort(meant) + sum(counts)))

    @router.post("/flush_cache")
    async def flush_cache(request: Request) -> Response:
        """Reset the prefix cache (administrators only)."""
        check_admin(request)
        num_open = context.engine.admission.num_open
        if num_open:
            raise InvalidRequestError(
                f"the prefix cache cannot be reset while {num_open} sequences run or wait",
                hint="abort the sequences, or try again after they end",
                code="busy",
            )
        context.engine.reset_prefix_cache()
        return Response("Cache flushed.\n", media_type="text/plain")

    _add_expert_routes(router, context)
    _add_profile_routes(router, context)

    async def model_info() -> Response:
        """Describe the model."""
        info = context.engine.info
        return build_json_response(
            schema.NativeModelInfo(
                model_path=info.model, tokenizer_path=info.model, architectures=[info.architecture]
            )
        )

    async def server_info() -> Response:
        """Describe the server and its load."""
        return build_json_response(_build_server_info(context))

    for name, route in (("model_info", model_info), ("server_info", server_info)):
        router.add_api_route(f"/{name}", route, methods=["GET"])
        router.add_api_route(f"/get_{name}", route, methods=["GET"])
    return router


def _add_expert_routes(router: APIRouter, context: ApiContext) -> None:
    async def record_experts(request: Request, action: Literal["start", "stop"]) -> Response:
        check_admin(request)
        await context.engine.record_experts(action)
        text = f"{action.capitalize()} recording expert distribution.\n"
        return Response(text, media_type="text/plain")

    @router.post("/start_expert_distribution_record")
    async def start_expert_distribution_record(request: Request) -> Response:
        """Start recording how often each expert is selected (administrators only)."""
        return await record_experts(request, "start")

    @router.post("/stop_expert_distribution_record")
    async def stop_expert_distribution_record(request: Request) -> Response:
        """Stop recording how often each expert is selected (administrators only)."""
        return await record_experts(request, "stop")

    @router.post("/dump_expert_distribution_record")
    async def dump_expert_distribution_record(request: Request) -> Response:
        """Return how often each expert was selected during the recording (administrators only)."""
        check_admin(request)
        dumps = await context.engine.record_experts("dump")
        layers = zip(*(dump.logical_count for dump in dumps), strict=True)
        counts = [[sum(same) for same in zip(*layer, strict=True)] for layer in layers]
        engines = [
            schema.ExpertPlaces(dump.physical_to_logical_map, dump.balancedness) for dump in dumps
        ]
        return build_json_response(schema.ExpertDistribution(counts, engines))


def _add_profile_routes(router: APIRouter, context: ApiContext) -> None:
    @router.post("/start_profile", openapi_extra=describe_body(schema.ProfileRequest))
    async def start_profile(request: Request) -> Response:
        """Start to record a trace of the steps on each rank (administrators only)."""
        check_admin(request)
        folder = context.options.profile_dir
        if folder is None:
            raise InvalidRequestError(
                "profiles are turned off",
                hint="start the server with --profile-dir FOLDER",
                code="profile",
            )
        params = schema.ProfileRequest()
        if request.headers.get("content-length", "0") != "0":
            params, _ = await read_request(request, schema.ProfileRequest, context.body_limits)
        path = Path(folder).absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refusal = f"--profile-dir {folder} cannot be used: {error.strerror}"
            raise InvalidRequestError(refusal, code="profile") from None
        await context.engine.record_trace(str(path), num_steps=params.num_steps)
        return Response(f"Start profiling. Files: {path}-*.json.gz\n", media_type="text/plain")

    @router.post("/stop_profile")
    async def stop_profile(request: Request) -> Response:
        """Write the traces and end the profile (administrators only)."""
        check_admin(request)
        await context.engine.record_trace(None)
        return Response("Stop profiling.\n", media_type="text/plain")


def _read_abort(request: Request, params: schema.AbortRequest) -> dict[str, str | None]:
    """Return the id and the tenant of requests to abort; None matches every id or tenant."""
    if params.rid is None and not params.abort_all:
        refuse("rid", "send the id of a request, or abort_all")
    if params.abort_all:
        check_admin(request)
    return {
        "name": None if params.abort_all else params.rid,
        "tenant": None if is_admin(request) else get_tenant(request),
    }


def _abort(engine: AsyncEngine, meant: Mapping[str, str | None]) -> int:
    """Abort this process's sequences with the id and tenant in `meant`, and return their number."""
    name, tenant = meant["name"], meant["tenant"]
    return engine.abort(
        lambda owner: name in (None, *owner.names) and tenant in (None, owner.tenant)
    )


def _build_engine_sampling(
    params: schema.NativeRequest, sampling: schema.NativeSampling
) -> SamplingParams:
    top = params.top_logprobs_num if params.return_logprob else None
    in_prompt = top if params.logprob_start_len >= 0 else None
    return sampling.sampling_params(logprobs=top, prompt_logprobs=in_prompt)


@dataclass(slots=True, eq=False, kw_only=True)
class _NativeChoice(Choice):
    rid: str
    pacing: RepeatPacing  # Limits the byte rate of the choice's events.
    has_begun: bool = False
    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    last_token_id: int | None = None
    token_ids: GrowingList = field(default_factory=GrowingList)
    input_logprobs: GrowingList = field(default_factory=GrowingList)
    input_top_logprobs: GrowingList = field(default_factory=GrowingList)
    logprobs: GrowingList = field(default_factory=GrowingList)
    top_logprobs: GrowingList = field(default_factory=GrowingList)
    finish_reason: dict[str, object] | None = None
    num_cached_tokens: int = 0
    drafts: tuple[int, int, int] | None = None
    seconds: float | None = None  # seconds from the request's arrival to the choice's end

    @property
    def num_bytes(self) -> int:
        """The approximate size of an event that contains the whole choice."""
        inputs = (self.input_logprobs, self.input_top_logprobs)
        lists = (*inputs, self.token_ids, self.logprobs, self.top_logprobs)
        return sum(entries.num_bytes for entries in lists) + sum(map(len, self.texts))


class _NativeWriter(AnswerWriter[_NativeChoice, schema.NativeAnswer | list[schema.NativeAnswer]]):
    """Writes SGLang's answers. Each event of a stream repeats the earlier output."""

    def __init__(
        self,
        context: ApiContext,
        params: schema.NativeRequest,
        source: AnswerSource,
        choices: list[_NativeChoice],
        *,
        prompts: list[list[int]],
        arrival: float,
    ) -> None:
        super().__init__(choices[0].rid, source, choices)
        self._tokenizer = context.engine.tokenizer
        self._params = params
        self._prompts = prompts
        self._arrival = arrival
        self._is_list = params.is_batch or len(choices) > 1

    def response(self) -> schema.NativeAnswer | list[schema.NativeAnswer]:
        answers = [self._build_answer(choice) for choice in self.choices]
        return answers if self._is_list else answers[0]

    def chunk(
        self, choice: _NativeChoice, output: RequestOutput, events: list[ParserEvent]
    ) -> bytes:
        self.take(choice, output, events)
        is_due = choice.pacing.is_due(choice.num_bytes, now=time.monotonic())
        is_sent = is_due or choice.finish_reason is not None
        return encode_event(self._build_answer(choice)) if is_sent else b""

    def take(self, choice: _NativeChoice, output: RequestOutput, events: list[ParserEvent]) -> None:
        choice.texts.append(output.text)
        if not choice.has_begun:
            choice.has_begun = True
            self._take_input(choice, output.prompt_logprobs or [])
        choice.num_tokens += len(output.token_ids)
        choice.last_token_id = output.token_ids[-1] if output.token_ids else choice.last_token_id
        choice.token_ids.extend(output.token_ids)
        if self._params.return_logprob:
            logprobs = output.logprobs or ()
            choice.logprobs.extend([self._build_entry(one.token_id, one) for one in logprobs])
            if self._params.top_logprobs_num > 0:
                choice.top_logprobs.extend([self._build_top(entry) for entry in logprobs])
        choice.num_cached_tokens, choice.drafts = output.num_cached_tokens, output.drafts
        if output.finish_reason is not None:
            choice.seconds = time.monotonic() - self._arrival
            choice.finish_reason = self._build_finish_reason(choice, output)

    def _build_finish_reason(
        self, choice: _NativeChoice, output: RequestOutput
    ) -> dict[str, object]:
        match output.finish_reason:
            case "length":
                return {"type": "length", "length": choice.num_tokens}
            case "stop":
                matched = output.stop_reason
                matched = choice.last_token_id if matched is None else matched
                return {"type": "stop", "matched": matched}
            case _:
                return {"type": "abort", "message": "the request was aborted"}

    def _build_answer(self, choice: _NativeChoice) -> schema.NativeAnswer:
        text = "".join(choice.texts)
        choice.texts = [text]
        return schema.NativeAnswer(
            text=text,
            output_ids=choice.token_ids.json(),
            meta_info=self._build_meta(choice),
            index=choice.index if self._is_list else UNSET,
        )

    def _take_input(self, choice: _NativeChoice, prompt_logprobs: list[TokenLogprobs]) -> None:
        prompt, start = self._prompts[choice.prompt_index], self._params.logprob_start_len
        if not self._params.return_logprob or start < 0:
            return
        given: list[TokenLogprobs | None] = (
            [None, *prompt_logprobs] if prompt_logprobs or start == 0 else []
        )
        asked = list(zip(prompt, given, strict=False))[min(start, len(prompt) - 1) :]
        choice.input_logprobs.extend(
            [self._build_entry(token_id, entry) for token_id, entry in asked]
        )
        if self._params.top_logprobs_num > 0:
            choice.input_top_logprobs.extend([self._build_top(entry) for _, entry in asked])

    def _build_meta(self, choice: _NativeChoice) -> schema.MetaInfo:
        params = self._params
        has_logprobs = params.return_logprob
        has_top = has_logprobs and params.top_logprobs_num > 0
        return schema.MetaInfo(
            id=choice.rid,
            finish_reason=choice.finish_reason,
            prompt_tokens=len(self._prompts[choice.prompt_index]),
            completion_tokens=choice.num_tokens,
            cached_tokens=choice.num_cached_tokens,
            e2e_latency=UNSET if choice.seconds is None else choice.seconds,
            **({} if choice.drafts is None else _describe_drafts(*choice.drafts)),
            input_token_logprobs=choice.input_logprobs.json() if has_logprobs else UNSET,
            output_token_logprobs=choice.logprobs.json() if has_logprobs else UNSET,
            input_top_logprobs=choice.input_top_logprobs.json() if has_top else UNSET,
            output_top_logprobs=choice.top_logprobs.json() if has_top else UNSET,
        )

    def _build_entry(self, token_id: int, entry: TokenLogprobs | None) -> schema.LogprobEntry:
        return self._build_logprob(token_id, None if entry is None else entry.logprob)

    def _build_top(self, entry: TokenLogprobs | None) -> list[schema.LogprobEntry] | None:
        if entry is None:
            return None
        return list(map(self._build_logprob, entry.top_ids, entry.top_logprobs))

    def _build_logprob(self, token_id: int, logprob: float | None) -> schema.LogprobEntry:
        has_text = self._params.return_text_in_logprobs
        text = self._tokenizer.token_text(token_id) if has_text else None
        return None if logprob is None else max(logprob, LEAST_LOGPROB), token_id, text


def _build_server_info(context: ApiContext) -> schema.NativeServerInfo:
    engine = context.engine
    info, stats = engine.info, engine.stats
    drafts, accepted = stats.num_drafts, stats.num_accepted_tokens
    return schema.NativeServerInfo(
        version=__version__,
        model_path=info.model,
        served_model_name=context.model_names[0],
        context_length=info.max_model_len,
        device=info.device,
        dtype=info.dtype,
        tp_size=engine.parallel.tensor_parallel_size,
        ep_size=engine.parallel.num_expert_ranks,
        dp_size=engine.num_ranks,
        page_size=info.block_size,
        max_running_requests=info.max_num_seqs,
        max_total_num_tokens=info.num_kv_blocks * info.block_size * engine.num_ranks,
        sampling_defaults=msgspec.to_builtins(info.sampling_defaults),
        num_running_reqs=stats.num_running,
        num_queue_reqs=stats.num_waiting,
        num_used_tokens=(stats.num_kv_blocks - stats.num_free_kv_blocks) * info.block_size,
        num_generated_tokens=stats.generated_tokens,
        avg_spec_accept_length=1.0 + accepted / drafts if drafts else None,
        serving_shape=add_parsers(info.shape, context.options),
        **_describe_speculation(info),
    )


def _describe_speculation(info: ModelInfo) -> dict[str, Any]:
    if (speculation := info.speculation) is None:
        return {}
    return {
        "speculative_algorithm": speculation.method.upper(),
        "speculative_draft_model_path": speculation.model,
        "speculative_num_steps": speculation.num_speculative_tokens,
        "speculative_num_draft_tokens": speculation.num_speculative_tokens + 1,
        "speculative_adaptive": speculation.adaptive,
        "synthetic_acceptance_length": speculation.synthetic_acceptance_length,
    }


def _describe_drafts(rows: int, tokens: int, accepted: int) -> dict[str, Any]:
    return {
        "spec_verify_ct": rows,
        "spec_draft_token_num": tokens,
        "spec_accept_token_num": accepted,
        "spec_accept_rate": accepted / tokens,
        "spec_accept_length": 1.0 + accepted / rows,
    }
