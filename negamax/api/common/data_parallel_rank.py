"""Which data-parallel rank a request asks for."""

from __future__ import annotations

import re

from fastapi import Request

from negamax.api.schemas.request_model import shown
from negamax.api.schemas.sampled_request import EngineRequest
from negamax.base.errors import InvalidRequestError

HEADER = "X-data-parallel-rank"  # as vLLM and SGLang name it
_NUMBER = re.compile("[0-9]{1,9}")


def asked_rank(http: Request, params: EngineRequest, *, num_ranks: int) -> int | None:
    """The rank that the header names, or the body where there is no header; None: any. Errors:
    `InvalidRequestError` for what is none of the server's `num_ranks`.
    """
    in_body = params.data_parallel_rank if params.routed_dp_rank is None else params.routed_dp_rank
    where, given = "routed_dp_rank", None if in_body is None else str(in_body)
    if in_header := http.headers.getlist(HEADER):
        where, given = HEADER, ", ".join(in_header)
    if given is None:
        return None
    if not _NUMBER.fullmatch(given) or int(given) >= num_ranks:
        allowed = "0, the only rank" if num_ranks == 1 else f"0 to {num_ranks - 1}"
        raise InvalidRequestError(
            f"{where} is {shown(given)}; allowed: {allowed}",
            hint="leave it out: the server chooses",
            param=where,
            code="no_such_data_parallel_rank",
        )
    return int(given)
