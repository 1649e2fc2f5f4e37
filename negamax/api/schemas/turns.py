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

    model: str | None = None  # a name from /v1/models; left out: the first of them
    stream: bool = False  # answer with events instead of one body
    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None  # the likeliest tokens that have this probability together
    top_k: int | None = None  # only so many of the likeliest tokens; 0 and -1: all
    min_p: float | None = None  # tokens with less than this share of the likeliest one's probability are left out
    repetition_penalty: float | None = None  # above 1: tokens of prompt and answer become less likely
    frequency_penalty: float = 0.0  # taken from a token's logit for each time the answer has it
    presence_penalty: float = 0.0  # taken from a token's logit once the answer has it
    logit_bias: LogitBias | None = None  # added to logits, by token id
    seed: int | None = None  # the same seed gives the same draws
    min_tokens: int = 0  # before so many, no end token is sampled and no stop counts
    stop_token_ids: StopTokenIds = Field(default_factory=list)  # tokens that end the answer
    ignore_eos: bool = False  # the end token does not end the answer
    priority: int = Field(default=0, ge=-_PRIORITY_LIMIT, lt=_PRIORITY_LIMIT)  # lower numbers run earlier
    timeout: float | None = Field(default=None, gt=0)  # seconds from arrival to the last token
    cache_salt: str = Field(default="", max_length=256)  # cached prefixes are shared only within one salt
    # variables of the chat template
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] | None = None

    def sampling_params(self, *, max_tokens: int | None, stop: list[str], logprobs: int | None = None) -> SamplingParams:
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
            logprobs=logprobs,
        )
