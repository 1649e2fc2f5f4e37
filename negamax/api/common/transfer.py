"""Read and write the API fields about prompts that another server computes."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from negamax.api.schemas.answers import TransferParams
from negamax.api.schemas.request_model import refuse
from negamax.api.schemas.sampled_request import EngineRequest
from negamax.base.errors import InvalidRequestError
from negamax.engine.wire import TransferInfo
from negamax.options.transfer import BOTH, CONSUMER, PRODUCER
from negamax.scheduler.request import GenerateRequest, RemotePrompt

_PARAMS, _ROOM = "kv_transfer_params", "bootstrap_room"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Settings to keep a prompt's KV blocks for another server, or to read them from a server."""

    lease_id: str = ""
    remote: RemotePrompt | None = None
    only_prefills: bool = False  # If True, another server, which decodes, answers the request.


def read_transfer(
    params: EngineRequest,
    info: TransferInfo | None,
    addresses: Mapping[str, str],
    *,
    index: int,
    num_prompts: int,
) -> Transfer:
    """Read the transfer fields of vLLM or of SGLang for prompt `index` of a request.

    `addresses` comes from `find_addresses`. Raises `InvalidRequestError` for unusable values.
    """
    if params.bootstrap_room is not None:
        info = _check_server(info, _ROOM)
        return _read_room(params, info, addresses, index=index, num_prompts=num_prompts)
    if params.kv_transfer_params is None:
        return Transfer()
    try:
        given = msgspec.convert(params.kv_transfer_params, TransferParams)
    except msgspec.ValidationError as error:
        refuse(_PARAMS, str(error))
    if given.do_remote_decode and given.do_remote_prefill:
        refuse(_PARAMS, "do_remote_decode and do_remote_prefill are both true; send one of them")
    if given.do_remote_decode:
        _check_role(_check_server(info, _PARAMS), CONSUMER, _PARAMS)
        if num_prompts > 1:
            return Transfer()  # An answer's kv_transfer_params describe one prompt only.
        return Transfer(lease_id=secrets.token_hex(16))
    if not given.do_remote_prefill:
        return Transfer()
    _check_role(_check_server(info, _PARAMS), PRODUCER, _PARAMS)
    host, port, name = given.remote_host, given.remote_port, given.remote_request_id
    if not (host and port and name and given.remote_engine_id):
        names = "remote_host, remote_port, remote_request_id and remote_engine_id"
        refuse(_PARAMS, f"do_remote_prefill needs {names}, as the prefilling server returned them")
    is_short = len(host) <= 253 and max(len(name), len(given.remote_engine_id)) <= 128
    if not (1 <= port <= 65535 and is_short):
        names = "remote_host, remote_port, remote_request_id or remote_engine_id"
        refuse(_PARAMS, f"{names} is too long or out of range")
    return Transfer(remote=RemotePrompt(addresses[host], port, name, given.remote_engine_id))


def describe_lease(
    request: GenerateRequest, info: TransferInfo | None, *, block_size: int
) -> TransferParams | None:
    """Return the parameters with which a decoding server reads a kept prompt, or None."""
    if not request.lease_id or info is None or request.lease_id.startswith(_ROOM):
        return None
    num_blocks = (len(request.prompt_token_ids) - 1) // block_size
    return TransferParams(
        do_remote_prefill=True,
        remote_block_ids=list(range(num_blocks)),
        remote_engine_id=info.engine_id,
        remote_request_id=request.lease_id,
        remote_host=info.host,
        remote_port=info.port,
        tp_size=info.num_ranks,
        dcp_size=1,
        pp_size=1,
        remote_num_tokens=num_blocks * block_size,
    )


def _read_room(
    params: EngineRequest,
    info: TransferInfo,
    addresses: Mapping[str, str],
    *,
    index: int,
    num_prompts: int,
) -> Transfer:
    def pick(field: str) -> Any:
        value = getattr(params, field)
        if not isinstance(value, list):
            return value
        if len(value) != num_prompts:
            given = f"{len(value)} values for {num_prompts} prompts"
            refuse(field, f"{given}; send one value, or one per prompt")
        return value[index]

    room = pick(_ROOM)
    if not isinstance(params.bootstrap_room, list):
        room += index  # SGLang adds the prompt's index to bootstrap_room.
    if info.role == BOTH:
        refuse(_ROOM, "this server both prefills and decodes; start it with --disaggregation-mode")
    if info.role == PRODUCER:
        return Transfer(lease_id=f"{_ROOM}-{room}", only_prefills=True)
    host, port = pick("bootstrap_host"), pick("bootstrap_port")
    if not host:
        refuse("bootstrap_host", "the field is missing; send the host of the prefilling server")
    port = 8998 if port is None else port  # 8998 is the default port of SGLang.
    return Transfer(remote=RemotePrompt(addresses[host], port, f"{_ROOM}-{room}"))


def _check_server(info: TransferInfo | None, field: str) -> TransferInfo:
    if info is None:
        raise InvalidRequestError(
            "this server computes all prompts itself",
            hint="start the server with --kv-transfer-config or --disaggregation-mode",
            param=field,
            code="no_kv_transfer",
        )
    return info


def _check_role(info: TransferInfo, other: str, field: str) -> None:
    if info.role == other:
        task = "decodes only" if other == CONSUMER else "prefills only"
        refuse(field, f"this server {task} (kv_role {other})")
