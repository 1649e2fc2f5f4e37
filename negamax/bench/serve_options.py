"""Options of `negamax bench serve` as frozen dataclasses, named as in vLLM's `vllm bench serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from negamax.base.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DATASETS = ("random", "prefix_repetition", "sharegpt", "agent", "custom")
DATASET_ALIASES = {
    "random-ids": "random",
    "prefix-repetition": "prefix_repetition",
    "generated-shared-prefix": "prefix_repetition",
    "gsp": "prefix_repetition",
    "openai": "custom",
    "agent-trace": "agent",
}
# Datasets of vLLM's and SGLang's commands that have no counterpart here, and what to use instead.
FOREIGN_DATASETS = {
    **dict.fromkeys(
        ("random-mm", "random-image", "image", "mmmu", "custom_mm", "custom_image"),
        "the models served here read text only; use random",
    ),
    **dict.fromkeys(
        ("hf", "burstgpt", "sonnet", "spec_bench", "mooncake", "longbench_v2", "loogle"),
        "nothing is downloaded; write its requests as JSONL and use custom with --dataset-path",
    ),
    **dict.fromkeys(("random-rerank",), "there is no rerank route; use random"),
}
BACKENDS = {  # None: the route follows from the dataset
    "openai": None,
    "vllm": None,
    "sglang": None,
    "sglang-native": None,
    "sglang-oai": None,
    "lmdeploy": None,
    "llama.cpp": None,
    "openai-completions": COMPLETIONS,
    "openai-chat": CHAT,
    "vllm-chat": CHAT,
    "sglang-oai-chat": CHAT,
    "lmdeploy-chat": CHAT,
}
RANGE_RULES = ("auto", "vllm", "sglang")
PROMPT_FORMATS = ("auto", "ids", "text")
ITL_RULES = ("gap", "token")
HISTORIES = ("recorded", "live")
METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class BenchOptions:
    """Everything of one run. Lengths in tokens, rates in 1/s, times in seconds unless a name says
    otherwise.
    """

    # the server
    base_url: str | None = None  # default: http://host:port
    host: str = "127.0.0.1"
    port: int = 8000
    backend: str = "openai"
    endpoint: str | None = None  # default: by backend and dataset
    model: str | None = None  # default: the first of /v1/models
    api_key: str | None = None
    headers: tuple[str, ...] = ()  # NAME=VALUE
    request_timeout: float = 3600.0
    ready_check_timeout_sec: float = 0.0
    # the load
    num_prompts: int = 1000
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 1
    seed: int = 0
    # the requests
    dataset_name: str = "random"
    dataset_path: str | None = None
    tokenizer: str | None = None
    prompt_format: str = "auto"
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_range_rule: str = "auto"  # "auto": by backend
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    sharegpt_output_len: int | None = None  # default: of the recorded answer
    # default: the model's context length, where the server tells it
    sharegpt_context_len: int | None = None
    custom_output_len: int = 256
    agent_turns: int = 24
    agent_system_len: int = 3000
    agent_tools: int = 12
    agent_result_len: int = 600
    agent_reasoning_len: int = 120
    agent_output_len: int = 200
    agent_pause: float = 0.0
    agent_history: str = "recorded"
    # sampling
    ignore_eos: bool = False
    temperature: float | None = None  # None: not sent, as below
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    # what is reported
    percentile_metrics: tuple[str, ...] = METRICS
    metric_percentiles: tuple[float, ...] = (95.0, 99.0)
    goodput: dict[str, float] = field(default_factory=dict)  # limits in ms by metric
    itl_rule: str = "gap"
    label: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dataset_name not in DATASETS:
            raise ConfigError(
                f"--dataset-name is {self.dataset_name[:60]!r}; allowed: {', '.join(DATASETS)}",
                hint=FOREIGN_DATASETS.get(self.dataset_name),
            )
        for flag, value, allowed in (
            ("--backend", self.backend, tuple(BACKENDS)),
            ("--prompt-format", self.prompt_format, PROMPT_FORMATS),
            ("--itl-rule", self.itl_rule, ITL_RULES),
            ("--random-range-rule", self.random_range_rule, RANGE_RULES),
            ("--agent-history", self.agent_history, HISTORIES),
        ):
            if value not in allowed:
                raise ConfigError(f"{flag} is {value[:60]!r}; allowed: {', '.join(allowed)}")
        if self.endpoint is not None and not self.endpoint.endswith(("/completions",)):
            raise ConfigError(
                f"--endpoint is {self.endpoint[:60]!r}; allowed: {COMPLETIONS} or {CHAT}, with a "
                f"prefix or not"
            )
        if self.dataset_name in ("sharegpt", "custom") and self.dataset_path is None:
            raise ConfigError(
                f"--dataset-name {self.dataset_name} needs a file", hint="add --dataset-path FILE"
            )
        if self.dataset_name == "agent" and self.endpoint is not None and not self.is_chat:
            raise ConfigError(
                f"agent sessions are conversations; --endpoint is {self.endpoint}",
                hint=f"use --endpoint {CHAT}",
            )
        if self.prompt_format == "ids" and self.is_chat:
            raise ConfigError(
                "--prompt-format ids needs a route that takes token ids",
                hint=f"use --endpoint {COMPLETIONS}",
            )
        ratio, is_sglang = self.random_range_ratio, self.range_rule == "sglang"
        if not (0.0 <= ratio < 1.0 or (is_sglang and ratio == 1.0)):
            allowed = "0 to 1" if is_sglang else "0 up to, not including, 1"
            raise ConfigError(f"--random-range-ratio is {ratio:g}; allowed: {allowed}")
        self._check_numbers()

    def _check_numbers(self) -> None:
        """The ranges of whole numbers, times and rates."""
        least_one = (
            "num_prompts", "max_concurrency", "random_input_len", "random_output_len",
            "prefix_repetition_suffix_len",
            "prefix_repetition_num_prefixes", "prefix_repetition_output_len", "sharegpt_output_len",
            "sharegpt_context_len",
            "custom_output_len", "agent_turns", "agent_system_len", "agent_result_len",
            "agent_output_len",
        )  # fmt: skip
        least_zero = (
            "num_warmups", "random_prefix_len", "prefix_repetition_prefix_len", "agent_tools",
            "agent_reasoning_len",
            "agent_pause", "ready_check_timeout_sec",
        )  # fmt: skip
        for names, low in ((least_one, 1), (least_zero, 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and not value >= low:
                    raise ConfigError(
                        f"--{name.replace('_', '-')} is {value}; allowed: {low} or more"
                    )
        for name in ("request_rate", "burstiness", "request_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name):g}; allowed: above 0"
                )

    @property
    def is_chat(self) -> bool:
        """Whether requests carry messages, as far as the options tell."""
        return self.path.endswith("/chat/completions")

    @property
    def range_rule(self) -> str:
        """What `random_range_ratio` means: "vllm" or "sglang"."""
        if self.random_range_rule == "auto":
            return "sglang" if self.backend.startswith("sglang") else "vllm"
        return self.random_range_rule

    def length_range(self, length: int) -> tuple[int, int]:
        """The least and the greatest of the random lengths around or below `length`, in tokens.

        vLLM's ratio r gives length * (1 - r) to length * (1 + r), SGLang's length * r to length.
        """
        ratio = self.random_range_ratio
        if self.range_rule == "sglang":
            return max(1, int(length * ratio)), length
        return max(1, int(length * (1 - ratio))), max(1, math.ceil(length * (1 + ratio)))

    @property
    def path(self) -> str:
        """The route that is asked."""
        if self.endpoint is not None:
            return self.endpoint if self.endpoint.startswith("/") else f"/{self.endpoint}"
        return BACKENDS[self.backend] or (CHAT if self.dataset_name == "agent" else COMPLETIONS)

    @property
    def url(self) -> str:
        """Where the server is. A trailing /v1, which clients of OpenAI's API are given, belongs to
        the route.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/").removesuffix("/v1")
