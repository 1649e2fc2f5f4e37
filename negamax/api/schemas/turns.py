"""What the dialects with one answer per request share: the sampling fields, beside those of their own."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from negamax.api.schemas.chat import check_template_kwargs
from negamax.api.schemas.common import LogitBias, RequestModel, StopTokenIds
from negamax.scheduler.request import SamplingParams

_PRIORITY_LIMIT = 2**31


class TurnRequest(RequestModel):
    """One answer to a conversation. The fields below its dialect's own are extensions, named as in chat completions."""

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: LogitBias | None = None
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    priority: int = Field(default=0, ge=-_PRIORITY_LIMIT, lt=_PRIORITY_LIMIT)
    timeout: float | None = Field(default=None, gt=0)  # seconds from arrival to the last token
    cache_salt: str = Field(default="", max_length=256)
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] | None = None

    def sampling_params(self, *, max_tokens: int | None, stop: list[str]) -> SamplingParams:
        """The engine's parameters; the limit and the stop strings have other names in each dialect."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=self.logit_bias or None,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )
