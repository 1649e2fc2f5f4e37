"""Options of `negamax bench serve` as frozen dataclasses, named as in vLLM's `vllm bench serve`."""

import math
from dataclasses import dataclass, field
from typing import Any

from negamax.base.errors import ConfigError
from negamax.config.embedded import QUOTED_NAMES
from negamax.options.flags import check_options, flag_name, option, optional

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
# Datasets of vLLM and SGLang that this benchmark lacks -> advice on a replacement.
FOREIGN_DATASETS = {
    **dict.fromkeys(
        ("random-mm", "random-image", "image", "mmmu", "custom_mm", "custom_image"),
        "write requests with images as JSONL, and use custom with --dataset-path",
    ),
    **dict.fromkeys(
        (
            *("hf", "burstgpt", "sonnet", "spec_bench", "speed_bench", "speed-bench", "mooncake"),
            *("longbench_v2", "loogle", "timed_trace", "txt-slices", "agentic-trace"),
        ),
        "this benchmark downloads nothing; write JSONL and use custom with --dataset-path",
    ),
    **dict.fromkeys(("random-rerank",), "the server has no rerank route; use random"),
}
# backend -> API route of requests; None: the dataset selects the route
BACKENDS: dict[str, str | None] = {
    **dict.fromkeys(("openai", "vllm", "sglang", "sglang-native", "sglang-oai")),
    **dict.fromkeys(("lmdeploy", "llama.cpp")),
    "openai-completions": COMPLETIONS,
    **dict.fromkeys(("openai-chat", "vllm-chat", "sglang-oai-chat", "lmdeploy-chat"), CHAT),
}
RANGE_RULES = ("auto", "vllm", "sglang")
PROMPT_FORMATS = ("auto", "ids", "text")
ITL_RULES = ("gap", "token")
HISTORIES = ("recorded", "live")
METRICS = ("ttft", "tpot", "itl", "e2el")
SERVER, LOAD, WORKLOAD, SAMPLING, OUTPUT = "Server", "Load", "Workload", "Sampling", "Output"


@dataclass(frozen=True)
class BenchOptions:
    """Options of one run. Lengths are in tokens, rates in 1/s, and times in seconds."""

    base_url: str | None = optional(
        "Set the URL of the server, such as http://127.0.0.1:8000. Default: --host and --port.",
        panel=SERVER,
    )
    host: str = option("127.0.0.1", "Set the server's host.")
    port: int = option(8000, "Set the server's port.")
    backend: str = option(
        "openai", "Choose the API. Names with -chat use chat completions.", choices=tuple(BACKENDS)
    )
    endpoint: str | None = optional(
        "Send requests to /v1/completions or /v1/chat/completions. Default: selected by --backend "
        "and the dataset."
    )
    model: str | None = optional(
        "Set the model. Default: the first entry of /v1/models.", also="--served-model-name"
    )
    api_key: str | None = optional("Send this bearer token. Default: $OPENAI_API_KEY.")
    headers: tuple[str, ...] = option(
        (), "Add the header NAME=VALUE to each request (repeatable).", "--header"
    )
    request_timeout: float = option(
        3600.0, "Treat a request as failed after this many seconds.", above=0
    )
    ready_check_timeout_sec: float = option(
        0.0, "Wait up to this many seconds until the server answers.", least=0
    )

    num_prompts: int = 1000
    max_concurrency: int | None = None
    request_rate: float = option(
        math.inf,
        "Start this many requests or sessions per second; inf starts all requests at once.",
        above=0,
        panel=LOAD,
    )
    burstiness: float = option(
        1.0,
        "Set the burstiness of arrivals: 1 produces a Poisson process, lower values produce "
        "bursts.",
        above=0,
    )
    profile: bool = option(
        False, "Record a trace of the timed requests with the server's /start_profile."
    )
    num_warmups: int = option(
        1, "Send this many warm-up requests before timing.", also="--warmup-requests", least=0
    )
    seed: int = option(0, "Set the seed of random prompts and arrival times.")

    dataset_name: str = option(
        "random", f"Choose the dataset: {', '.join(DATASETS)}.", panel=WORKLOAD
    )
    dataset_path: str | None = optional(
        "Read requests from this file: ShareGPT JSON, or JSONL for the datasets custom and agent."
    )
    tokenizer: str | None = optional(
        f"Use this tokenizer to draw prompt ids, and to count tokens of ShareGPT and of "
        f"generated texts. Set a folder, a hub id, or {QUOTED_NAMES}."
    )
    prompt_format: str = option(
        "auto",
        "Choose the prompt format: ids sends exact numbers of token ids to /v1/completions; text "
        "sends texts whose lengths are estimated from token counts of the server.",
        choices=PROMPT_FORMATS,
    )
    random_input_len: int = option(
        1024, "Set the number of prompt tokens.", also="--input-len --random-input", least=1
    )
    random_output_len: int = option(
        128, "Set the number of output tokens.", also="--output-len --random-output", least=1
    )
    random_range_ratio: float = option(
        0.0, "Multiply lengths by random factors from 1 - r to 1 + r, or from r to 1 (rule sglang)."
    )
    random_range_rule: str = option(
        "auto", "Choose the rule of --random-range-ratio; auto uses --backend.", choices=RANGE_RULES
    )
    random_prefix_len: int = option(
        0, "Begin all prompts with the same prefix of this many tokens.", least=0
    )
    prefix_repetition_prefix_len: int = option(
        256, "Set the number of tokens per prefix.", also="--gsp-system-prompt-len", least=0
    )
    prefix_repetition_suffix_len: int = option(
        256, "Set the number of tokens after a prefix.", also="--gsp-question-len", least=1
    )
    prefix_repetition_num_prefixes: int = option(
        10, "Set the number of different prefixes.", also="--gsp-num-groups", least=1
    )
    prefix_repetition_output_len: int = option(
        128, "Set the number of output tokens.", also="--gsp-output-len", least=1
    )
    sharegpt_output_len: int | None = optional(
        "Set the number of output tokens. Default: the recorded answer's length.", least=1
    )
    sharegpt_context_len: int | None = optional(
        "Skip conversations with more tokens. Default: the model's context length.", least=1
    )
    custom_output_len: int = option(
        256, "Set max_tokens of recorded requests that set no limit.", least=1
    )
    agent_turns: int = option(
        24, "Send this many requests per session, or fewer if the context is too short.", least=1
    )
    agent_system_len: int = option(
        3000, "Set the number of tokens in the system prompt, without the tools.", least=1
    )
    agent_tools: int = option(12, "Declare this many tools per request.", least=0)
    agent_result_len: int = option(600, "Set the mean number of tokens per tool result.", least=1)
    agent_reasoning_len: int = option(
        120, "Include this many tokens of thinking in each answer of the history.", least=0
    )
    agent_output_len: int = option(200, "Set the number of output tokens per turn.", least=1)
    agent_pause: float = option(
        0.0, "Wait this many seconds between an answer and the next turn.", least=0
    )
    agent_history: str = option(
        "recorded",
        "Choose the history: recorded sends the same requests in each run; live includes the "
        "server's answers.",
        choices=HISTORIES,
    )

    ignore_eos: bool = option(
        False, "Ignore end tokens, so that answers have the full length.", panel=SAMPLING
    )
    disable_ignore_eos: bool = option(
        False, "End answers at end tokens, which sglang backends ignore by default."
    )
    temperature: float | None = optional("Set the temperature (default: set by the server).")
    top_p: float | None = optional("Set the nucleus probability (default: set by the server).")
    top_k: int | None = optional("Sample from the top k tokens (default: set by the server).")
    min_p: float | None = optional("Exclude tokens below this fraction of the top probability.")
    frequency_penalty: float | None = optional("Penalize tokens by their count in the answer.")
    presence_penalty: float | None = optional("Penalize tokens that occur in the answer.")
    repetition_penalty: float | None = optional("Penalize repeated tokens by this factor.")
    extra_body: dict[str, Any] = option(
        {}, "Merge this JSON object into each request.", is_json=True
    )

    percentile_metrics: tuple[str, ...] = METRICS
    metric_percentiles: tuple[float, ...] = (95.0, 99.0)
    goodput: dict[str, float] = field(default_factory=dict)  # metric -> limit in ms
    itl_rule: str = option(
        "gap",
        "Choose how to measure inter-token latency: gap records one value per gap between "
        "chunks; token records one value per token of a chunk.",
        choices=ITL_RULES,
        panel=OUTPUT,
    )
    label: str | None = optional("Set a label for the result file and its content.")
    metadata: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = DATASET_ALIASES.get(self.dataset_name, self.dataset_name)
        object.__setattr__(self, "dataset_name", name)
        if name not in DATASETS:
            refusal = f"--dataset-name is {name[:60]!r}; allowed: {', '.join(DATASETS)}"
            raise ConfigError(refusal, hint=FOREIGN_DATASETS.get(name))
        check_options(self)
        for limit in ("num_prompts", "max_concurrency"):
            if (value := getattr(self, limit)) is not None and value < 1:
                raise ConfigError(f"{flag_name(limit)} is {value}; allowed: 1 or more")
        for header in self.headers:
            if not header.partition("=")[0].strip() or "=" not in header:
                raise ConfigError(f"--header is {header[:60]!r}; allowed: NAME=VALUE")
        if self.endpoint is not None and not self.endpoint.endswith(("/completions",)):
            raise ConfigError(
                f"--endpoint is {self.endpoint[:60]!r}; allowed: {COMPLETIONS} or {CHAT}, "
                f"optionally with a prefix"
            )
        if self.dataset_name in ("sharegpt", "custom") and self.dataset_path is None:
            raise ConfigError(
                f"--dataset-name {self.dataset_name} needs a file", hint="add --dataset-path FILE"
            )
        if self.dataset_name == "agent" and self.endpoint is not None and not self.is_chat:
            refusal = f"agent sessions need chat completions; --endpoint is {self.endpoint}"
            raise ConfigError(refusal, hint=f"use --endpoint {CHAT}")
        if self.prompt_format == "ids" and self.is_chat:
            hint = f"use --endpoint {COMPLETIONS}"
            raise ConfigError("--prompt-format ids needs a route that accepts token ids", hint=hint)
        ratio, is_sglang = self.random_range_ratio, self.range_rule == "sglang"
        if not (0.0 <= ratio < 1.0 or (is_sglang and ratio == 1.0)):
            allowed = "0 to 1" if is_sglang else "0 or more, and below 1"
            raise ConfigError(f"--random-range-ratio is {ratio:g}; allowed: {allowed}")

    @property
    def is_chat(self) -> bool:
        """Return whether requests are chat completions."""
        return self.path.endswith("/chat/completions")

    @property
    def ignores_eos(self) -> bool:
        """Return whether answers ignore end tokens (the default only of sglang backends)."""
        is_sglang = self.backend.startswith("sglang")
        return self.ignore_eos or (is_sglang and not self.disable_ignore_eos)

    @property
    def range_rule(self) -> str:
        """The rule for `random_range_ratio`: "vllm" or "sglang"."""
        if self.random_range_rule == "auto":
            return "sglang" if self.backend.startswith("sglang") else "vllm"
        return self.random_range_rule

    def length_range(self, length: int) -> tuple[int, int]:
        """Return (1 - ratio, 1 + ratio) * `length`, or for SGLang's rule (ratio, 1) * `length`."""
        ratio = self.random_range_ratio
        if self.range_rule == "sglang":
            return max(1, int(length * ratio)), length
        return max(1, int(length * (1 - ratio))), max(1, math.ceil(length * (1 + ratio)))

    @property
    def path(self) -> str:
        """Return the path of the route that the requests use."""
        if self.endpoint is not None:
            return self.endpoint if self.endpoint.startswith("/") else f"/{self.endpoint}"
        return BACKENDS[self.backend] or (CHAT if self.dataset_name == "agent" else COMPLETIONS)

    @property
    def url(self) -> str:
        """Return the server's URL without a trailing /v1, because routes begin with /v1."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/").removesuffix("/v1")
