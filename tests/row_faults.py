"""Plant faults in the worker for one row, which `asking(fault)` selects by logit bias."""

from collections.abc import Callable
from typing import Any

from negamax import SamplingParams
from negamax.scheduler.step import NewRow
from negamax.worker import prompt_logprobs, sampler
from negamax.worker import request_state as state_module
from negamax.worker.batch import SampleInputs
from negamax.worker.request_state import RequestState

FAULTS = ("classify", "state", "fill", "late fill", "edit", "late edit", "prompt logprobs")
LATE = 4  # number of output tokens before a late fault

Patch = Callable[[object, str, Any], None]


class Injected(Exception):
    """Raised for a fault that a test requested."""


def asking(fault: str, *, only_rank: int = -1, **params: Any) -> SamplingParams:
    """Return parameters of a request that triggers `fault`, on every rank or on one rank."""
    asks_for_prompt = {"prompt_logprobs": 1} if fault == "prompt logprobs" else {}
    bias = {FAULTS.index(fault): 1.0 + only_rank / 10}
    fixed = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return SamplingParams(logit_bias=bias, **fixed | asks_for_prompt | params)


def install(rank: int, patch: Patch) -> None:
    def asks(params: SamplingParams, fault: str) -> bool:
        value = (params.logit_bias or {}).get(FAULTS.index(fault))
        return value is not None and round(10 * (value - 1.0)) in (-1, rank)

    def wrap(owner: object, name: str, is_due: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def faulty(*args: Any, **named: Any) -> Any:
            if is_due(*args, **named):
                raise Injected(name)
            return original(*args, **named)

        patch(owner, name, faulty)

    def in_edit(
        _logits: object, row: int, inputs: SampleInputs, *, requests: RequestState, **_: object
    ) -> bool:
        state = requests.state(inputs.slots[row])
        is_late = inputs.bounds[row] >= state.prompt_len + LATE
        return asks(state.sampling, "edit") or (is_late and asks(state.sampling, "late edit"))

    def in_fill(_rows: RequestState, row: NewRow) -> bool:
        return asks(row.sampling, "fill")

    fill = RequestState._fill

    def fill_late(rows: RequestState, row: NewRow) -> None:
        fill(rows, row)
        if asks(row.sampling, "late fill"):
            raise Injected("after the row was filled")

    def in_entries(_model: object, _hidden: object, token_ids: Any, **_: object) -> bool:
        return int(token_ids[0]) == PROMPT_MARK

    patch(RequestState, "_fill", fill_late)
    wrap(RequestState, "_fill", in_fill)
    wrap(RequestState, "_classify", lambda _rows, _slot, params, **_: asks(params, "classify"))
    wrap(state_module, "SlotState", lambda _, params, *__: asks(params, "state"))
    wrap(sampler, "_edit", in_edit)
    wrap(prompt_logprobs, "_entries", in_entries)


PROMPT_MARK = 17  # second token of a prompt whose log-probabilities fail
