"""Requests and answers of SGLang's native API."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field

from negamax.api.schemas.request_model import RequestModel, describe, refuse
from negamax.api.schemas.sampled_request import (
    MAX_PROMPTS,
    EngineRequest,
    RequestId,
    SamplingFields,
    StopStrings,
)
from negamax.api.schemas.structure import build_grammar
from negamax.config.grammar import Grammar, GrammarKind
from negamax.scheduler.request import SamplingParams

_FORMS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")


class NativeSampling(SamplingFields):
    """`sampling_params`."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {"spaces_between_special_tokens", "custom_params"}
    )
    unsupported_fields: ClassVar[Mapping[str, str]] = {
        "stop_regex": "it is not implemented yet; use stop"
    }

    max_new_tokens: int = Field(default=128, ge=0)  # 0: read the prompt, generate nothing
    min_new_tokens: int = 0  # before so many, no end token is sampled and no stop counts
    n: int = 1  # answers to the same prompt
    sampling_seed: int | None = None  # the same seed gives the same draws
    stop: StopStrings = Field(default_factory=list)  # texts that end the answer
    no_stop_trim: bool = False  # the stop string or token stays in the answer
    skip_special_tokens: bool = True  # special tokens have no text in the answer
    json_schema: dict[str, Any] | str | bool | None = None  # a JSON schema for the text
    regex: str | None = None  # an expression that the whole text matches
    ebnf: str | None = None  # an EBNF grammar, whose start is `root`
    structural_tag: dict[str, Any] | str | None = None  # forms of parts of the text, between tags

    def sampling_params(self, **renamed: Any) -> SamplingParams:
        return super().sampling_params(
            seed=self.sampling_seed,
            max_tokens=max(1, self.max_new_tokens),
            min_tokens=self.min_new_tokens,
            include_stop_str_in_output=self.no_stop_trim,
            **renamed,
        )

    @functools.cached_property
    def grammar(self) -> Grammar | None:
        named = [(kind, getattr(self, kind)) for kind in _FORMS if getattr(self, kind) is not None]
        if len(named) > 1:
            refuse(f"sampling_params.{named[1][0]}", "an answer has one form")
        if not named:
            return None
        kind, value = named[0]
        return build_grammar(kind, value, param=f"sampling_params.{kind}")


class NativeRequest(EngineRequest):
    """One prompt or several, as text or as token ids."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {"log_metrics", "modalities", "model", "weight_version"}
    )
    unsupported_fields: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("image_data", "video_data", "audio_data", "input_embeds"),
            "this version of Negamax reads text only",
        ),
        "token_ids_logprob": "it is not implemented yet; use top_logprobs_num",
        "session_params": "send the whole text; its prefix is cached",
        "lora_path": "the server has no adapters",
        "return_hidden_states": "hidden states do not leave the engine",
        "custom_logit_processor": "the server runs no code of clients",
    }

    text: str | list[str] | None = None  # a prompt or up to 128, instead of input_ids
    input_ids: list[int] | list[list[int]] | None = None  # token ids, instead of text
    # the same for every prompt, or one for each
    sampling_params: dict[str, Any] | list[dict[str, Any]] = Field(default_factory=dict)
    rid: RequestId | list[RequestId] | None = None  # for /abort_request, or one per prompt
    return_logprob: bool = False  # meta_info has the log-probability of each token
    logprob_start_len: int = Field(default=-1, ge=-1)  # first prompt token with logprobs; -1: none
    top_logprobs_num: int = Field(default=0, ge=0)  # alternatives per token
    return_text_in_logprobs: bool = False  # logprobs have the texts of their tokens
    max_thinking_tokens: int | None = Field(default=None, ge=0)  # most tokens of reasoning

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list because several prompts were sent."""
        ids = self.input_ids
        return isinstance(self.text, list) or (
            ids is not None and bool(ids) and isinstance(ids[0], list)
        )

    @property
    def prompts(self) -> list[str | list[int]]:
        if (self.text is None) == (self.input_ids is None):
            refuse("text", "send either text or input_ids")
        sent: Any = self.input_ids if self.text is None else self.text
        prompts = list(sent) if self.is_batch else [sent]
        if not 0 < len(prompts) <= MAX_PROMPTS:
            refuse("text", f"{len(prompts)} prompts; allowed: 1 to {MAX_PROMPTS} in one request")
        return prompts

    def samplings(self, count: int) -> list[NativeSampling]:
        sent = self.sampling_params
        if isinstance(sent, dict):
            return [NativeSampling.parse(sent)] * count
        if len(sent) != count:
            refuse(
                "sampling_params",
                f"{len(sent)} objects for {count} prompts; send one, or one per prompt",
            )
        return [NativeSampling.parse(each) for each in sent]

    def ids(self, count: int) -> list[str | None]:
        if self.rid is None or isinstance(self.rid, str):
            return [
                self.rid if count == 1 or self.rid is None else f"{self.rid}_{index}"
                for index in range(count)
            ]
        if len(self.rid) != count:
            refuse("rid", f"{len(self.rid)} ids for {count} prompts; allowed: {describe(count)}")
        return list(self.rid)


class AbortRequest(RequestModel):
    """Which requests to abort."""

    rid: RequestId | None = None  # the id of a request, as its client gave it or its answer has it
    abort_all: bool = False  # those of all clients


LogprobEntry = tuple[float | None, int, str | None]


class MetaInfo(Struct, frozen=True, kw_only=True):
    """Facts about an answer; logprobs only if they were requested."""

    id: str  # the client's rid, or a random one
    finish_reason: dict[str, Any] | None  # `type` (stop, length, abort), what matched; null before
    prompt_tokens: int  # of the prompt, cached ones included
    completion_tokens: int  # generated
    cached_tokens: int  # of the prompt, found in the cache
    weight_version: str = "default"  # always `default`
    e2e_latency: float | UnsetType = UNSET  # seconds, of an answer that is complete
    spec_verify_ct: int | UnsetType = UNSET  # steps with draft tokens, of a complete answer
    spec_draft_token_num: int | UnsetType = UNSET  # draft tokens verified
    spec_accept_token_num: int | UnsetType = UNSET  # accepted draft tokens
    spec_accept_rate: float | UnsetType = UNSET  # share of draft tokens that were accepted
    spec_accept_length: float | UnsetType = UNSET  # tokens per step with draft tokens
    # of the prompt, from logprob_start_len on: log-probability, token id, text or null
    input_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_token_logprobs: list[LogprobEntry] | UnsetType = UNSET  # of the answer, in the same form
    # the likeliest tokens at each place of the prompt
    input_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET
    # the likeliest tokens at each place of the answer
    output_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET


class NativeAnswer(Struct, frozen=True, kw_only=True):
    text: str  # the answer so far
    output_ids: list[int]  # its tokens so far
    meta_info: MetaInfo  # counts, logprobs and how it ended
    index: int | UnsetType = UNSET  # of the prompt, in the stream of several


class NumAborted(Struct, frozen=True):
    num_aborted: int  # sequences that were ended


class NativeModelInfo(Struct, frozen=True, kw_only=True):
    model_path: str  # what the model was loaded from
    tokenizer_path: str  # the same
    is_generation: bool = True  # it writes text
    preferred_sampling_params: None = None  # always null: see /server_info
    weight_version: str = "default"  # always `default`
    has_image_understanding: bool = False  # it reads text only
    has_audio_understanding: bool = False  # it reads text only
    architectures: list[str]  # of config.json


class NativeServerInfo(Struct, frozen=True, kw_only=True):
    """The configuration and the load of the server, by SGLang's names."""

    version: str  # of this server
    model_path: str  # what the model was loaded from
    served_model_name: str  # the first name of /v1/models
    context_length: int  # tokens of the context, answer included
    device: str  # where the model runs
    dtype: str  # of activations
    tp_size: int  # ranks that share the model
    ep_size: int  # ranks that experts are split over
    dp_size: int  # data-parallel ranks, of all replicas
    page_size: int  # tokens of a block of the KV cache
    max_running_requests: int  # sequences in one step at most
    max_total_num_tokens: int  # that the KV cache holds
    sampling_defaults: dict[str, Any]  # the checkpoint's, for fields left out
    num_running_reqs: int  # sequences that run
    num_queue_reqs: int  # sequences that wait
    num_used_tokens: int  # of the KV cache, in use
    num_generated_tokens: int  # since the server started
    serving_shape: dict[str, Any]  # what decides results and speed, with a short `hash`
    speculative_algorithm: str | None = None  # how draft tokens are proposed
    speculative_draft_model_path: str | None = None  # folder of a draft model
    speculative_num_steps: int | None = None  # draft tokens per sequence and step at most
    speculative_num_draft_tokens: int | None = None  # the same, and the token before them
    speculative_adaptive: bool = False  # whether drafts are shorter when that is faster
    avg_spec_accept_length: float | None = None  # tokens per step with draft tokens, so far
    # mean length of the accepted drafts of a benchmark; the texts are meaningless then
    synthetic_acceptance_length: float | None = None


class ExpertPlaces(Struct, frozen=True):
    """Where the experts of an engine are."""

    # by layer and slot: the expert in it; slots are in the order of the ranks
    physical_to_logical_map: list[list[int]]
    balancedness: float  # mean load of the ranks over the busiest rank's; 1: balanced


class ExpertDistribution(Struct, frozen=True):
    """How often experts were selected, and where they are."""

    # by layer and expert: how often it was selected; zeros in layers without experts
    logical_count: list[list[int]]
    engines: list[ExpertPlaces]  # of each of --num-replicas
