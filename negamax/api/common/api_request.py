"""Read a client's request, check its parameters, and send its prompts to the engine."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from fastapi import Request

from negamax.api.access import get_owner, get_salt
from negamax.api.common.context import ApiContext
from negamax.api.common.peer_hosts import find_addresses
from negamax.api.common.transfer import read_transfer
from negamax.api.http.request_body import read_request
from negamax.api.recorder import RequestRecord
from negamax.api.schemas.request_model import RequestModel, RequestT, describe, refuse
from negamax.api.schemas.sampled_request import EngineRequest
from negamax.base.errors import InvalidRequestError
from negamax.engine.client.open_request import OpenRequest
from negamax.engine.client.output import TextReader
from negamax.scheduler.request import ImageInput, SamplingParams

DATA_PARALLEL_RANK_HEADER = "X-data-parallel-rank"  # vLLM's and SGLang's header to select a rank
MAX_PROMPT_LOGPROBS = 2**22  # maximum number of prompt logprobs in one answer
_WHOLE_INTERVAL = 32  # The engine sends an unstreamed answer in groups of this many tokens.
_NUMBER = re.compile("[0-9]{1,9}")

ParamsT_co = TypeVar("ParamsT_co", bound=RequestModel, covariant=True)


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[ParamsT_co]):
    http: Request
    params: ParamsT_co
    num_bytes: int  # Size of the JSON text of the fields in `params`.
    arrival: float  # Arrival time in monotonic seconds.
    addresses: Mapping[str, str]  # host name in a transfer field -> IP address of the host


async def read_api_request(
    context: ApiContext, http: Request, model: type[RequestT]
) -> ApiRequest[RequestT]:
    """Parse a JSON body into `model`. Raises the errors of `read_request` and `find_addresses`."""
    arrival = time.monotonic()
    params, num_bytes = await read_request(http, model, context.body_limits)
    addresses: Mapping[str, str] = {}
    if isinstance(params, EngineRequest):
        addresses = await find_addresses(params, context.engine.info.transfer)
    return ApiRequest(http, params, num_bytes, arrival, addresses)


def get_cache_salt(request: ApiRequest[EngineRequest]) -> str:
    return get_salt(request.http, request.params.cache_salt)


def check_sampling(context: ApiContext, sampling: SamplingParams) -> None:
    """Refuse sampling parameters that are out of range."""
    info = context.engine.info
    sampling.check(max_logprobs=info.max_logprobs, vocab_size=info.vocab_size)


def check_prompt_logprobs(prompts: Iterable[tuple[SamplingParams, int]]) -> None:
    """Refuse too many prompt logprobs. `prompts` has each prompt's parameters and token count."""
    count = sum(
        sampling.n * num_tokens * (1 + sampling.prompt_logprobs)
        for sampling, num_tokens in prompts
        if sampling.prompt_logprobs is not None
    )
    if count > MAX_PROMPT_LOGPROBS:
        refuse(
            "prompt_logprobs",
            f"all prompts and choices together have {count} logprobs; at most "
            f"{MAX_PROMPT_LOGPROBS} are allowed",
        )


def generate(
    context: ApiContext,
    request: ApiRequest[EngineRequest],
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    request_id: str,
    names: Iterable[str],
    stream_interval: int | None,
    readers: Sequence[TextReader] | None = None,
    index: int = 0,
    num_prompts: int = 1,
    images: Sequence[ImageInput] = (),
) -> OpenRequest:
    """Send prompt number `index` of the request to the engine.

    The client may abort the request by any id in `names`. The time limits of the request and of the
    server both apply. Raises the errors of `AsyncEngine.generate`, and `InvalidRequestError` for a
    priority or a data-parallel rank that the server does not support.
    """
    http, params, options = request.http, request.params, context.options
    record = RequestRecord(
        request_id=request_id,
        http_request_id=http.state.request_id,
        route=http.url.path,
        model=context.model_names[0],
        headers=http.headers,
        num_prompt_tokens=len(prompt_token_ids),
        is_stream=params.stream,
        arrival=request.arrival,
        sampling=sampling,
        measured=context.metrics.measured,
        takers=context.record_takers,
    )
    context.metrics.measured.count_request(sampling)
    if params.priority and options.scheduling_policy != "priority":
        raise InvalidRequestError(
            f"priority is {params.priority}; allowed: 0, because this server schedules requests in "
            f"order of arrival",
            hint="leave priority out, or start the server with --scheduling-policy priority",
            param="priority",
            code="invalid_value",
        )
    about = context.engine.info.transfer
    transfer = read_transfer(params, about, request.addresses, index=index, num_prompts=num_prompts)
    if transfer.only_prefills:
        most = min(sampling.min_tokens, 1)
        sampling = msgspec.structs.replace(sampling, max_tokens=1, min_tokens=most)
    limits = [limit for limit in (params.timeout, options.request_timeout) if limit is not None]
    interval = (stream_interval or options.stream_interval) if params.stream else _WHOLE_INTERVAL
    generation = context.engine.generate(
        prompt_token_ids,
        sampling,
        request_id=request_id,
        priority=params.priority,
        cache_salt=get_cache_salt(request),
        data_parallel_rank=_read_rank(request, num_ranks=context.engine.num_ranks),
        deadline=request.arrival + min(limits) if limits else None,
        observer=record,
        readers=readers,
        owner=get_owner(http, names),
        interval=interval,
        lease_id=transfer.lease_id,
        remote=transfer.remote,
        images=images,
    )
    record.sampling = msgspec.structs.replace(generation.sampling, n=sampling.n)
    if context.request_log is not None:
        context.request_log.began(record, prompt_token_ids)
    return generation


def _read_rank(request: ApiRequest[EngineRequest], *, num_ranks: int) -> int | None:
    """Return the data-parallel rank in the request's header or body; None if neither has one."""
    params = request.params
    in_body = params.data_parallel_rank if params.routed_dp_rank is None else params.routed_dp_rank
    where, given = "routed_dp_rank", None if in_body is None else str(in_body)
    if in_header := request.http.headers.getlist(DATA_PARALLEL_RANK_HEADER):
        where, given = DATA_PARALLEL_RANK_HEADER, ", ".join(in_header)
    if given is None:
        return None
    if not _NUMBER.fullmatch(given) or int(given) >= num_ranks:
        allowed = "0, the only rank" if num_ranks == 1 else f"0 to {num_ranks - 1}"
        raise InvalidRequestError(
            f"{where} is {describe(given)}; allowed: {allowed}",
            hint="leave the rank out to let the server choose",
            param=where,
            code="no_such_data_parallel_rank",
        )
    return int(given)
