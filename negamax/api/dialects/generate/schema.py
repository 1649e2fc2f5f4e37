"""Requests and answers of SGLang's native API."""

import functools
from typing import Annotated, Any

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

MAX_PROFILED_STEPS = 10_000
_FORMS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")


class NativeSampling(SamplingFields):
    """The field `sampling_params`."""

    # Limit of generated tokens. A limit of 0 caches the prompt and returns no text.
    max_new_tokens: int = Field(default=128, ge=0)
    min_new_tokens: int = 0  # An answer with fewer tokens ignores end tokens and stop strings.
    n: int = 1  # Number of answers to the prompt.
    sampling_seed: int | None = None  # Equal seeds give equal random draws.
    stop: StopStrings = Field(default_factory=list)  # Strings that end the answer.
    no_stop_trim: bool = False  # Keep the stop string or token in the answer.
    skip_special_tokens: bool = True  # Omit the text of special tokens.
    json_schema: dict[str, Any] | str | bool | None = None  # JSON schema of the whole text.
    regex: str | None = None  # Regular expression for the whole text.
    ebnf: str | None = None  # An EBNF grammar with the start rule `root`.
    structural_tag: dict[str, Any] | str | None = None  # Grammars for text between tags.

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
    """A request to continue one or several prompts, which are texts or lists of token ids."""

    text: str | list[str] | None = None  # One text or up to 128 texts, instead of input_ids.
    input_ids: list[int] | list[list[int]] | None = None  # Token ids of prompts, instead of text.
    # `sampling_params`: one object for all prompts, or one object per prompt.
    sampling_params: dict[str, Any] | list[dict[str, Any]] = Field(default_factory=dict)
    rid: RequestId | list[RequestId] | None = None  # Id of the request, or one id per prompt.
    return_logprob: bool = False  # Return the log-probability of each token in meta_info.
    logprob_start_len: int = Field(default=-1, ge=-1)  # First prompt token with logprobs; -1: none.
    top_logprobs_num: int = Field(default=0, ge=0)  # Number of likely tokens to list per position.
    return_text_in_logprobs: bool = False  # Add the text of the token to each logprob.
    max_thinking_tokens: int | None = Field(default=None, ge=0)  # Limit of reasoning tokens.

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
            refuse("text", f"the request has {len(prompts)} prompts; send 1 to {MAX_PROMPTS}")
        return prompts

    def samplings(self, count: int) -> list[NativeSampling]:
        sent = self.sampling_params
        if isinstance(sent, dict):
            return [NativeSampling.parse(sent)] * count
        if len(sent) != count:
            refuse(
                "sampling_params",
                f"{len(sent)} objects for {count} prompts; send one object, or one per prompt",
            )
        return [NativeSampling.parse(each) for each in sent]

    def ids(self, count: int) -> list[str | None]:
        if self.rid is None or isinstance(self.rid, str):
            return [
                self.rid if count == 1 or self.rid is None else f"{self.rid}_{index}"
                for index in range(count)
            ]
        if len(self.rid) != count:
            refuse("rid", f"{len(self.rid)} ids for {count} prompts; send {describe(count)} ids")
        return list(self.rid)


class AbortRequest(RequestModel):
    """Selects the requests to abort."""

    rid: RequestId | None = None  # Id of the request to abort, or of its answer.
    abort_all: bool = False  # Abort the requests of all clients.


class ProfileRequest(RequestModel):
    """Starts a profile."""

    # End the profile after this many steps, if it is not stopped before.
    num_steps: Annotated[int, Field(ge=1, le=MAX_PROFILED_STEPS)] = 500


LogprobEntry = tuple[float | None, int, str | None]


class MetaInfo(Struct, frozen=True, kw_only=True):
    """Metadata of an answer, with logprobs if the client requested logprobs."""

    id: str  # The client's rid, or a random id.
    finish_reason: dict[str, Any] | None  # Null before the end. `type` is stop, length or abort.
    prompt_tokens: int  # Prompt tokens, including cached tokens.
    completion_tokens: int  # Generated tokens.
    cached_tokens: int  # Prompt tokens found in the prefix cache.
    weight_version: str = "default"  # Always `default`.
    e2e_latency: float | UnsetType = UNSET  # Seconds from arrival to the answer's end.
    spec_verify_ct: int | UnsetType = UNSET  # Number of steps that verified draft tokens.
    spec_draft_token_num: int | UnsetType = UNSET  # Number of verified draft tokens.
    spec_accept_token_num: int | UnsetType = UNSET  # Number of accepted draft tokens.
    spec_accept_rate: float | UnsetType = UNSET  # Fraction of draft tokens that were accepted.
    spec_accept_length: float | UnsetType = UNSET  # Mean generated tokens per step with drafts.
    # `input_token_logprobs`: [logprob, id, text or null] per token from logprob_start_len on.
    input_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_token_logprobs: list[LogprobEntry] | UnsetType = UNSET  # One entry per answer token.
    # `input_top_logprobs`: the likeliest tokens at each position of the prompt.
    input_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET
    # The likeliest tokens at each position of the answer.
    output_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET


class NativeAnswer(Struct, frozen=True, kw_only=True):
    text: str  # The answer so far.
    output_ids: list[int]  # Token ids of the answer so far.
    meta_info: MetaInfo  # Token counts, logprobs and finish reason.
    index: int | UnsetType = UNSET  # Number of the choice, if the answer has several choices.


class NumAborted(Struct, frozen=True):
    num_aborted: int  # Number of aborted sequences.


class NativeModelInfo(Struct, frozen=True, kw_only=True):
    model_path: str  # Folder or hub id of the model.
    tokenizer_path: str  # Same value as model_path.
    is_generation: bool = True  # The model generates text.
    preferred_sampling_params: None = None  # Always null; /server_info has the sampling defaults.
    weight_version: str = "default"  # Always `default`.
    has_image_understanding: bool = False  # Always false; this API reads no images.
    has_audio_understanding: bool = False  # The model reads no audio.
    architectures: list[str]  # Architectures in config.json.


class NativeServerInfo(Struct, frozen=True, kw_only=True):
    """The configuration and the load of the server, with SGLang's field names."""

    version: str  # Version of this server.
    model_path: str  # Folder or hub id of the model.
    served_model_name: str  # First name in /v1/models.
    context_length: int  # Context length in tokens, including the answer.
    device: str  # Device that runs the model.
    dtype: str  # Data type of activations.
    tp_size: int  # Number of tensor-parallel ranks.
    ep_size: int  # Number of ranks that hold shards of the experts.
    dp_size: int  # Number of data-parallel ranks in all replicas.
    page_size: int  # Tokens per block of the KV cache.
    max_running_requests: int  # Maximum number of sequences in one step.
    max_total_num_tokens: int  # Capacity of the KV cache in tokens.
    sampling_defaults: dict[str, Any]  # The checkpoint's defaults for missing request fields.
    num_running_reqs: int  # Number of running sequences.
    num_queue_reqs: int  # Number of waiting sequences.
    num_used_tokens: int  # Number of tokens in the KV cache.
    num_generated_tokens: int  # Tokens generated since the server started.
    serving_shape: dict[str, Any]  # Settings that affect results and speed, and their `hash`.
    speculative_algorithm: str | None = None  # Method that proposes draft tokens.
    speculative_draft_model_path: str | None = None  # Folder of a draft model.
    speculative_num_steps: int | None = None  # Maximum draft tokens per sequence and step.
    speculative_num_draft_tokens: int | None = None  # `speculative_num_steps` plus one.
    speculative_adaptive: bool = False  # Whether measured step times limit the draft length.
    avg_spec_accept_length: float | None = None  # Mean generated tokens per step with drafts.
    # `synthetic_acceptance_length`: mean tokens per step in a benchmark with meaningless answers.
    synthetic_acceptance_length: float | None = None


class ExpertPlaces(Struct, frozen=True):
    """The assignment of experts to slots in one engine replica."""

    # Per layer, the id of the expert in each slot. The slots of rank 0 are first.
    physical_to_logical_map: list[list[int]]
    balancedness: float  # Mean load per rank / load of the busiest rank, in expert selections.


class ExpertDistribution(Struct, frozen=True):
    """How often each expert was selected, and which slots hold the expert."""

    # Per layer, how often tokens selected each expert. Layers without experts have zeros.
    logical_count: list[list[int]]
    engines: list[ExpertPlaces]  # One entry per engine replica.
