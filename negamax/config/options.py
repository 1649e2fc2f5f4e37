"""Every option of the engine and the server, as frozen dataclasses. Flags, TOML and Python use the same names.

This module is pure: it describes and checks values; it reads no file and no environment.
"""

from __future__ import annotations

from dataclasses import dataclass

from negamax.base.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "safetensors", "synthetic")
DEVICES = ("auto", "cpu")


@dataclass(frozen=True)
class EngineOptions:
    """How a model is loaded and run. Names follow vLLM; `None` means: derived from the model and the machine."""

    model: str  # local folder, hub id, bundled spec with load_format=synthetic, or "nano"
    revision: str | None = None  # of a hub model
    download_dir: str | None = None
    dtype: str = "auto"  # "auto": the checkpoint's, or float32 where the CPU has no bfloat16 arithmetic
    load_format: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None  # tokens, prompt and output; default: the model's window
    block_size: int = 16  # tokens per KV block
    max_num_seqs: int = 64  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step
    max_queued_requests: int = 1024  # waiting requests above this are refused with 429
    kv_cache_memory: int | None = None  # bytes per rank; default: a share of the free memory
    num_kv_blocks: int | None = None  # overrides kv_cache_memory
    enable_prefix_caching: bool = True
    enable_overlap: bool = True  # launch step N before step N-1 is committed
    tensor_parallel_size: int = 1
    num_threads: int | None = None  # CPU threads per rank; default: the cores (from three up: less one) shared out
    seed: int = 0  # for requests that name none, and for synthetic weights
    max_logprobs: int = 20
    log_level: str = "info"

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--load-format", self.load_format, LOAD_FORMATS)
        _one_of("--device", self.device, DEVICES)
        _at_least("--max-model-len", self.max_model_len, 2)
        _at_least("--block-size", self.block_size, 1)
        _at_least("--max-num-seqs", self.max_num_seqs, 1)
        _at_least("--max-num-batched-tokens", self.max_num_batched_tokens, 1)
        _at_least("--max-queued-requests", self.max_queued_requests, 1)
        _at_least("--kv-cache-memory", self.kv_cache_memory, 1)
        _at_least("--num-kv-blocks", self.num_kv_blocks, 1)
        _at_least("--tensor-parallel-size", self.tensor_parallel_size, 1)
        _at_least("--num-threads", self.num_threads, 1)
        _at_least("--max-logprobs", self.max_logprobs, 0)


@dataclass(frozen=True)
class ServerOptions:
    """How the HTTP server answers."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()  # default: the model's own name
    api_key: str | None = None
    chat_template: str | None = None  # file that replaces the checkpoint's template
    max_body_bytes: int = 64 * 2**20
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; allowed: 0 to 65535 (0 picks a free one)")


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} is {value!r}; allowed: {', '.join(allowed)}")


def _at_least(flag: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{flag} is {value}; allowed: {low} or more")
