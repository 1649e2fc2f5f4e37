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
    """The field `sampling_params`."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {"spaces_between_special_tokens", "custom_params"}
    )
    unsupported_fields: ClassVar[Mapping[str, str]] = {
        "stop_regex": "it is not implemented yet; use stop"
    }

    max_new_tokens: int = Field(default=128, ge=0)  # token limit; 0 only reads the prompt
    min_new_tokens: int = 0  # tokens before which neither end tokens nor stops end the answer
    n: int = 1  # number of answers to the prompt
    sampling_seed: int | None = None  # equal seeds give equal random draws
    stop: StopStrings = Field(default_factory=list)  # texts that end the answer
    no_stop_trim: bool = False  # keep the stop string or token in the answer
    skip_special_tokens: bool = True  # omit the text of special tokens
    json_schema: dict[str, Any] | str | bool | None = None  # a JSON schema for the text
    regex: str | None = None  # regular expression for the whole text
    ebnf: str | None = None  # an EBNF grammar with the start rule `root`
    structural_tag: dict[str, Any] | str | None = None  # grammars for text between tags

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
            refuse(f"sampling_params.{named[1][0]}", "one answer cannot have two grammars")
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

    text: str | list[str] | None = None  # one prompt or up to 128, instead of input_ids
    input_ids: list[int] | list[list[int]] | None = None  # token ids, instead of text
    # parameters for all prompts, or one object per prompt
    sampling_params: dict[str, Any] | list[dict[str, Any]] = Field(default_factory=dict)
    rid: RequestId | list[RequestId] | None = None  # id for /abort_request, or one id per prompt
    return_logprob: bool = False  # return the log-probability of each token in meta_info
    logprob_start_len: int = Field(default=-1, ge=-1)  # first prompt token with logprobs; -1: none
    top_logprobs_num: int = Field(default=0, ge=0)  # alternatives per token
    return_text_in_logprobs: bool = False  # add the texts of tokens to logprobs
    max_thinking_tokens: int | None = Field(default=None, ge=0)  # reasoning token limit

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
    """Selects the requests to abort."""

    rid: RequestId | None = None  # id from a request or from its answer
    abort_all: bool = False  # abort the requests of all clients


LogprobEntry = tuple[float | None, int, str | None]


class MetaInfo(Struct, frozen=True, kw_only=True):
    """Facts about an answer, with logprobs if the client requested logprobs."""

    id: str  # the client's rid, or a random id
    finish_reason: dict[str, Any] | None  # `type` (stop, length, abort); null before the end
    prompt_tokens: int  # prompt tokens, including cached tokens
    completion_tokens: int  # generated tokens
    cached_tokens: int  # prompt tokens found in the prefix cache
    weight_version: str = "default"  # always `default`
    e2e_latency: float | UnsetType = UNSET  # seconds, in a complete answer
    spec_verify_ct: int | UnsetType = UNSET  # steps with draft tokens, in a complete answer
    spec_draft_token_num: int | UnsetType = UNSET  # verified draft tokens
    spec_accept_token_num: int | UnsetType = UNSET  # accepted draft tokens
    spec_accept_rate: float | UnsetType = UNSET  # share of draft tokens that were accepted
    spec_accept_length: float | UnsetType = UNSET  # tokens per step with draft tokens
    # per prompt token from logprob_start_len on: log-probability, token id, text or null
    input_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_token_logprobs: list[LogprobEntry] | UnsetType = UNSET  # entries per token of the answer
    # the likeliest tokens at each position of the prompt
    input_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET
    # the likeliest tokens at each position of the answer
    output_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET


class NativeAnswer(Struct, frozen=True, kw_only=True):
    text: str  # the answer so far
    output_ids: list[int]  # token ids of the answer so far
    meta_info: MetaInfo  # token counts, logprobs and finish reason
    index: int | UnsetType = UNSET  # number of the choice, if there are several


class NumAborted(Struct, frozen=True):
    num_aborted: int  # number of aborted sequences


class NativeModelInfo(Struct, frozen=True, kw_only=True):
    model_path: str  # folder or hub id of the model
    tokenizer_path: str  # same value as model_path
    is_generation: bool = True  # the model generates text
    preferred_sampling_params: None = None  # always null: see /server_info
    weight_version: str = "default"  # always `default`
    has_image_understanding: bool = False  # always false in this API
    has_audio_understanding: bool = False  # the model reads no audio
    architectures: list[str]  # architectures in config.json


class NativeServerInfo(Struct, frozen=True, kw_only=True):
    """The configuration and the load of the server, by SGLang's names."""

    version: str  # version of this server
    model_path: str  # folder or hub id of the model
    served_model_name: str  # first name in /v1/models
    context_length: int  # context length in tokens, including the answer
    device: str  # device that runs the model
    dtype: str  # data type of activations
    tp_size: int  # number of tensor-parallel ranks
    ep_size: int  # number of ranks that hold shards of the experts
    dp_size: int  # number of data-parallel ranks in all replicas
    page_size: int  # tokens per block of the KV cache
    max_running_requests: int  # most sequences in one step
    max_total_num_tokens: int  # tokens that the KV cache holds
    sampling_defaults: dict[str, Any]  # the checkpoint's values for missing fields
    num_running_reqs: int  # number of running sequences
    num_queue_reqs: int  # number of waiting sequences
    num_used_tokens: int  # tokens of KV cache in use
    num_generated_tokens: int  # tokens generated since the server started
    serving_shape: dict[str, Any]  # settings that decide results and speed, with a `hash`
    speculative_algorithm: str | None = None  # method that proposes draft tokens
    speculative_draft_model_path: str | None = None  # folder of a draft model
    speculative_num_steps: int | None = None  # most draft tokens per sequence and step
    speculative_num_draft_tokens: int | None = None  # speculative_num_steps plus one
    speculative_adaptive: bool = False  # whether measured times limit the draft length
    avg_spec_accept_length: float | None = None  # tokens per step with draft tokens, so far
    # mean accepted draft length that a benchmark prescribes; texts are meaningless with it
    synthetic_acceptance_length: float | None = None


class ExpertPlaces(Struct, frozen=True):
    """The slots of the experts in an engine."""

    # expert number by layer and slot; slots are in the order of the ranks
    physical_to_logical_map: list[list[int]]
    balancedness: float  # mean load of the ranks divided by the busiest rank's load


class ExpertDistribution(Struct, frozen=True):
    """How often each expert was selected, and which slots hold the expert."""

    # selections by layer and expert; layers without experts have zeros
    logical_count: list[list[int]]
    engines: list[ExpertPlaces]  # one entry per engine replica
