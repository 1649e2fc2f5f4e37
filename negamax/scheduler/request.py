"""Sampling parameters, and the request that is sent to the engine."""

import msgspec

from negamax.base.errors import InvalidRequestError
from negamax.config.generation import SamplingDefaults
from negamax.config.grammar import Grammar, Reasoning

MAX_STOP_STRINGS = 32
MAX_STOP_STRING_CHARS = 1024
MAX_CHOICES = 128
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 256
SEED_LIMIT = 2**63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request, named as in vLLM. `resolved` replaces None by the model's
    default from generation_config.json. `temperature=0` means greedy decoding. A `top_k` of 0 or -1
    means no limit. `check` raises `InvalidRequestError` with the field, the value and the limit.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    # only these token ids may be sampled; cannot be combined with a grammar or a thinking budget
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    max_tokens: int | None = None  # None: up to the context length
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: off; 0: the sampled token only; k: also the top k tokens
    prompt_logprobs: int | None = None  # like `logprobs`, for prompt tokens after the first
    grammar: Grammar | None = None  # grammar that constrains the content
    reasoning: Reasoning | None = None  # tags around the reasoning; None: no reasoning
    thinking_token_budget: int | None = None  # maximum reasoning tokens; needs `reasoning`

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar or a thinking budget may restrict output tokens."""
        return self.grammar is not None or (
            self.reasoning is not None and self.thinking_token_budget is not None
        )

    def check(self, *, max_logprobs: int, vocab_size: int) -> None:
        """Refuse values out of range. `max_logprobs`: largest `logprobs` that the server allows."""
        most = 2**31 - 1
        ranges: dict[str, tuple[float, float]] = {
            "n": (1, MAX_CHOICES),
            "temperature": (0.0, 2.0),
            "top_k": (-1, most),
            "min_p": (0.0, 1.0),
            "frequency_penalty": (-2.0, 2.0),
            "presence_penalty": (-2.0, 2.0),
            "seed": (-SEED_LIMIT, SEED_LIMIT - 1),
            "max_tokens": (1, most),
            "min_tokens": (0, most if self.max_tokens is None else self.max_tokens),
            "logprobs": (0, max_logprobs),
            "prompt_logprobs": (0, max_logprobs),
            "repetition_penalty": (0.01, 10.0),  # division by smaller values overflows float32
            "thinking_token_budget": (0, most),
        }
        for name, (low, high) in ranges.items():
            _in_range(name, getattr(self, name), low, high)
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            _refuse("top_p", self.top_p, "above 0 and at most 1")
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                allowed = f"1 to {MAX_STOP_STRING_CHARS} characters each"
                _refuse("stop", f"a string of {len(text)} characters", allowed)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            found = f"{len(self.stop_token_ids)} ids"
            _refuse("stop_token_ids", found, f"at most {MAX_STOP_TOKEN_IDS} ids")
        for token_id in self.stop_token_ids:
            _in_range("stop_token_ids", token_id, 0, vocab_size - 1)
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            _refuse("logit_bias", f"{len(bias)} entries", f"at most {MAX_LOGIT_BIAS} entries")
        for token_id, value in bias.items():
            _in_range("logit_bias", token_id, 0, vocab_size - 1)
            _in_range("logit_bias", value, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            self._check_allowed_tokens(self.allowed_token_ids, vocab_size=vocab_size)
        if self.grammar is not None:
            self.grammar.check()
        if self.reasoning is not None:
            self.reasoning.check(vocab_size=vocab_size)

    def _check_allowed_tokens(self, token_ids: tuple[int, ...], *, vocab_size: int) -> None:
        if not 0 < len(token_ids) <= vocab_size:
            _refuse("allowed_token_ids", f"{len(token_ids)} ids", f"1 to {vocab_size} ids")
        _in_range("allowed_token_ids", min(token_ids), 0, vocab_size - 1)
        _in_range("allowed_token_ids", max(token_ids), 0, vocab_size - 1)
        if self.is_constrained:
            raise InvalidRequestError(
                "allowed_token_ids cannot be combined with structured output, a tool choice or "
                "a thinking budget",
                hint="remove allowed_token_ids or the other parameter",
                param="allowed_token_ids",
                code="invalid_value",
            )

    def resolved(self, defaults: SamplingDefaults, *, room: int) -> "SamplingParams":
        """Replace None by the model's defaults in a copy. `room`: tokens left in the context."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        found = {name: getattr(self, name) for name in names}
        found |= {name: getattr(defaults, name) for name in names if found[name] is None}
        found["top_k"] = max(0, found["top_k"])
        max_tokens = room if self.max_tokens is None else self.max_tokens
        return msgspec.structs.replace(self, **found, max_tokens=max_tokens)

    def copy_for_choice(self, index: int, *, seed: int) -> "SamplingParams":
        """Return a copy for choice `index` with the seed `seed + index`, wrapped to int64."""
        wrapped = (seed + index + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
        return msgspec.structs.replace(self, n=1, seed=wrapped)


class RemotePrompt(msgspec.Struct, frozen=True, array_like=True):
    """Address of an engine, and a prompt that this engine has computed or is computing."""

    host: str
    port: int
    lease_id: str
    engine_id: str = ""  # "": accept any engine at the address, even before the prompt is computed


class ImageInput(msgspec.Struct, frozen=True):
    """An image of a prompt: its pixels, and its position among the prompt tokens."""

    offset: int  # index of the image's first token in the prompt
    num_tokens: int
    grid: tuple[int, int]  # number of rows and of columns of patches
    digest: bytes  # hash of the pixels
    pixels: bytes  # uint8 [height, width, 3]

    @property
    def end(self) -> int:
        """The index after the image's last token."""
        return self.offset + self.num_tokens

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one output sequence. `sampling` is resolved, and its `n` is 1."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0  # requests with lower values run earlier
    tenant: str = ""  # tenants with requests of equal priority take turns
    cache_salt: str = ""  # only requests with the same salt share prefix-cache blocks
    data_parallel_rank: int | None = None  # data-parallel rank that must run the request; None: any
    lease_id: str = ""  # if set, id under which the KV of the prompt is kept for another engine
    remote: RemotePrompt | None = None  # engine that has the prompt's KV; None: compute the KV here
    images: list[ImageInput] = []  # images in the order of the prompt.
    # `num_remote_cached_tokens`: prompt tokens that `remote` found cached; None: no `remote`
    num_remote_cached_tokens: int | None = None


def _in_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # NaN fails the comparison and is refused
        _refuse(name, value, f"{low} to {high}")


def _refuse(name: str, value: object, allowed: str) -> None:
    raise InvalidRequestError(
        f"{name} is {value}; allowed: {allowed}", param=name, code="invalid_value"
    )
