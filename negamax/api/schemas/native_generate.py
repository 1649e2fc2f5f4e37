"""SGLang's native API: the requests and the answers of /generate and its helpers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field

from negamax.api.schemas.common import LogitBias, RequestId, RequestModel, StopStrings, StopTokenIds, refuse, shown
from negamax.api.schemas.completions import MAX_PROMPTS
from negamax.api.schemas.structure import form_grammar
from negamax.config.grammar import Grammar, GrammarKind
from negamax.scheduler.request import SamplingParams

_FORMS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")
_PRIORITY_LIMIT = 2**31


class NativeSampling(RequestModel):
    """`sampling_params`."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"spaces_between_special_tokens", "stream_interval", "custom_params"})
    unsupported_fields: ClassVar[Mapping[str, str]] = {"stop_regex": "it is not implemented yet; use stop"}

    max_new_tokens: int = Field(default=128, ge=0)  # 0: read the prompt, generate nothing
    min_new_tokens: int = 0
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    sampling_seed: int | None = None
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    json_schema: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None

    def sampling_params(self, *, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """The engine's parameters."""
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=self.logit_bias or None,
            seed=self.sampling_seed,
            max_tokens=max(1, self.max_new_tokens),
            min_tokens=self.min_new_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.no_stop_trim,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    @property
    def grammar(self) -> Grammar | None:
        """The form of the answer."""
        named = [(kind, getattr(self, kind)) for kind in _FORMS if getattr(self, kind) is not None]
        if len(named) > 1:
            refuse(f"sampling_params.{named[1][0]}", "an answer has one form")
        return form_grammar(named[0][0], named[0][1], param=f"sampling_params.{named[0][0]}") if named else None


class NativeRequest(RequestModel):
    """One prompt or several, as text or as token ids."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"log_metrics", "modalities", "model", "weight_version"})
    unsupported_fields: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("image_data", "video_data", "audio_data", "input_embeds"), "this model reads text only"),
        **dict.fromkeys(
            ("bootstrap_host", "bootstrap_port", "bootstrap_room"), "prefill and decode are not done on different servers"
        ),
        "token_ids_logprob": "it is not implemented yet; use top_logprobs_num",
        "session_params": "send the whole text; its prefix is cached",
        "lora_path": "the server has no adapters",
        "return_hidden_states": "hidden states do not leave the engine",
        "custom_logit_processor": "the server runs no code of clients",
    }

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = Field(default_factory=dict)
    stream: bool = False
    rid: RequestId | list[RequestId] | None = None
    return_logprob: bool = False
    logprob_start_len: int = Field(default=-1, ge=-1)  # from which prompt token on; -1: of the answer only
    top_logprobs_num: int = Field(default=0, ge=0)
    return_text_in_logprobs: bool = False
    max_thinking_tokens: int | None = Field(default=None, ge=0)
    priority: int = Field(default=0, ge=-_PRIORITY_LIMIT, lt=_PRIORITY_LIMIT)
    timeout: float | None = Field(default=None, gt=0)  # seconds from arrival to the last token
    cache_salt: Annotated[str, Field(max_length=256)] = ""

    @property
    def is_batch(self) -> bool:
        """Whether several prompts were sent, so that the answer is a list."""
        return isinstance(self.text, list) or (bool(self.input_ids) and isinstance(self.input_ids[0], list))  # type: ignore[index]

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts."""
        if (self.text is None) == (self.input_ids is None):
            refuse("text", "send either text or input_ids")
        sent: Any = self.input_ids if self.text is None else self.text
        prompts = list(sent) if self.is_batch else [sent]
        if not 0 < len(prompts) <= MAX_PROMPTS:
            refuse("text", f"{len(prompts)} prompts; allowed: 1 to {MAX_PROMPTS} in one request")
        return prompts

    def samplings(self, count: int) -> list[NativeSampling]:
        """The parameters of each of `count` prompts."""
        sent = self.sampling_params
        if isinstance(sent, dict):
            return [NativeSampling.parse(sent)] * count
        if len(sent) != count:
            refuse("sampling_params", f"{len(sent)} of them for {count} prompts; send one, or one for each")
        return [NativeSampling.parse(each) for each in sent]

    def ids(self, count: int) -> list[str | None]:
        """The client's id of each of `count` prompts."""
        if self.rid is None or isinstance(self.rid, str):
            return [self.rid if count == 1 or self.rid is None else f"{self.rid}_{index}" for index in range(count)]
        if len(self.rid) != count:
            refuse("rid", f"{len(self.rid)} ids for {count} prompts; allowed: {shown(count)}")
        return list(self.rid)


class AbortRequest(RequestModel):
    """Which requests are to end."""

    rid: RequestId | None = None
    abort_all: bool = False


LogprobEntry = tuple[float | None, int, str | None]


class MetaInfo(Struct, frozen=True, kw_only=True):
    """What is known of an answer; the logprob fields are there where they were asked for."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str = "default"
    e2e_latency: float | UnsetType = UNSET  # seconds, of an answer that is complete
    input_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET


class NativeAnswer(Struct, frozen=True, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


class NumAborted(Struct, frozen=True):
    num_aborted: int


class NativeModelInfo(Struct, frozen=True, kw_only=True):
    model_path: str
    tokenizer_path: str
    is_generation: bool = True
    preferred_sampling_params: None = None
    weight_version: str = "default"
    has_image_understanding: bool = False
    has_audio_understanding: bool = False
    architectures: list[str]


class NativeServerInfo(Struct, frozen=True, kw_only=True):
    """What the server was started with, by SGLang's names, and how busy it is."""

    version: str
    model_path: str
    served_model_name: str
    context_length: int
    device: str
    dtype: str
    tp_size: int
    page_size: int
    max_running_requests: int
    max_total_num_tokens: int
    sampling_defaults: dict[str, Any]
    num_running_reqs: int
    num_queue_reqs: int
    num_used_tokens: int
