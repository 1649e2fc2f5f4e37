"""Every option of the engine and the server, as frozen dataclasses. Flags, TOML and Python use the
same names.

This module is pure: it describes and checks values; it reads no file and no environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.base.unicode import valid_unicode
from negamax.config.eplb import COUNTED, FIXED, IN_ORDER, MOVED, RECORDER_MODES, EplbConfig
from negamax.config.key_file import check_keys
from negamax.config.nodes import LAUNCHERS, MASTER_PORT, MP, RAY, NodeOptions
from negamax.config.parallel import ALL2ALL_BACKENDS, ParallelOptions
from negamax.config.speculation import SpeculationConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")
SOURCES = ("auto", "huggingface", "modelscope")
LOAD_FORMATS = ("auto", "safetensors", "synthetic")
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
INDEX_CACHE_SHARDINGS = ("auto", "on", "off")
# "balanced": sizes as they are given; latency is what vLLM calls interactivity
PERFORMANCE_MODES = ("balanced", "interactivity", "latency", "throughput")
MAX_API_SERVERS = 64
MAX_REPLICAS = 64
MAX_PLACEMENT_SECONDS = 86400.0
SCHEDULING_POLICIES = ("fcfs", "priority")
MAX_THREADS = 1024


@dataclass(frozen=True)
class StepLimits:
    """Sizes of a step and of a KV block unless the user says otherwise."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


# A GPU reads all experts for any large prefill, so its chunks are long, and its attention gathers
# blocks of 64 tokens faster (docs/performance.md). A CPU's chunks are short, so that tokens keep
# flowing.
STEP_LIMITS = {"cuda": StepLimits(256, 8192, 64), "cpu": StepLimits(64, 2048, 16)}


@dataclass(frozen=True)
class EngineOptions:
    """How a model is loaded and run. Names follow vLLM; `None` means: derived from the model and
    the machine.
    """

    model: str  # local folder, hub id, embedded name, or bundled spec with load_format=synthetic
    revision: str | None = None  # of a hub model
    source: str = "auto"  # of hub models; "auto": huggingface, unless NEGAMAX_USE_MODELSCOPE is 1
    download_dir: str | None = None
    dtype: str = "auto"  # "auto": the checkpoint's, or float32 on CPUs without bf16 instructions
    load_format: str = "auto"
    weight_cache: str | None = None  # folder for what a rank keeps of a checkpoint
    # as a checkpoint is quantised, which its files say, too (quantization/names.py)
    quantization: str | None = None
    script: str | None = None  # answers by the rules of this TOML file, without a model
    device: str = "auto"  # "auto": cuda where there is a GPU
    # fewer layers than the spec has; with synthetic weights only
    num_hidden_layers: int | None = None
    max_model_len: int | None = (
        None  # tokens, prompt and output; default: what the model is made for
    )
    block_size: int | None = None  # tokens per KV block; default: 64 on a GPU, 16 on the CPU
    max_num_seqs: int | None = None  # sequences in one step; default: 256 on a GPU, 64 on the CPU
    # tokens in one step; default: 8192 on a GPU, 2048 on the CPU
    max_num_batched_tokens: int | None = None
    max_queued_requests: int = 1024  # waiting requests above this are refused with 429
    # of waiting prompts, the same; default: 4 times what the KV cache holds
    max_queued_tokens: int | None = None
    kv_cache_dtype: str = "auto"  # "auto": the compute dtype; "fp8" is "fp8_e4m3"
    index_cache_dtype: str = "auto"  # of the keys that choose blocks in sparse attention; likewise
    index_cache_sharding: str = "off"  # such keys shared out over the ranks
    # bytes per rank; default: what is left on the GPU, a share of main memory on the CPU
    kv_cache_memory: int | None = None
    # share of a GPU's memory that weights, cache and workspaces may take together
    gpu_memory_utilization: float = 0.92
    num_kv_blocks: int | None = None  # overrides kv_cache_memory
    enable_prefix_caching: bool = True
    enable_overlap: bool = True  # launch step N before step N-1 is committed
    enforce_eager: bool = False  # no CUDA graphs
    # sequences of the largest captured decode step; default: max_num_seqs
    max_cudagraph_capture_size: int | None = None
    # what parallel sizes are chosen for where none is given
    performance_mode: str = "balanced"
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False  # a rank holds whole experts instead of parts of all
    # ranks that experts are split over; default: 1, or all with enable_expert_parallel
    expert_parallel_size: int | None = None
    pipeline_parallel_size: int = 1  # stages, each of them some of the layers
    pp_layer_partition: str | None = None  # layers of each stage; default: as even as can be
    # with stages: the deeper in its prompt, the shorter a chunk, so that all take equally long
    enable_dynamic_chunking: bool = True
    # groups of tensor-parallel ranks, each with requests and a KV cache of its own
    data_parallel_size: int = 1
    all2all_backend: str = "allgather_reducescatter"  # of tokens between data-parallel ranks
    # engines behind one server, each with weights and ranks of its own
    num_replicas: int = 1
    # groups of tensor-parallel ranks that share out the tokens of prompts and have the same cache
    prefill_context_parallel_size: int = 1
    # of the ranks with copies of one KV head: how many share out the blocks of its cache
    decode_context_parallel_size: int = 1
    # neighbouring tokens that lie on the same one of them; default: those of a block
    cp_kv_cache_interleave_size: int | None = None
    enable_eplb: bool = False  # experts move between ranks as they are chosen
    eplb_config: dict[str, Any] | None = None  # when, with the keys of vLLM's (config/eplb.py)
    # "stat": how often each expert is chosen is counted, as it is with enable_eplb
    expert_distribution_recorder_mode: str = "off"
    # where experts lie at start: "trivial" (in order), or JSON, in a file or as it is, with how
    # often each was chosen or where each lies (engine/core/expert_location.py)
    init_expert_location: str = IN_ORDER
    # over how many machines the ranks are spread, and where these meet (config/nodes.py)
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = MASTER_PORT
    interface: str | None = None
    allow_cross_node_tp: bool = False
    distributed_executor_backend: str = MP  # "ray": it chooses the machines and starts the agents
    ray_placement_timeout: float = 60.0  # seconds that Ray may take to have room
    # who guesses tokens ahead, with the keys of vLLM's (config/speculation.py)
    speculative_config: dict[str, Any] | None = None
    # CPU threads per rank; default: the cores (from three up: less one) shared out
    num_threads: int | None = None
    seed: int = 0  # for requests that name none, and for synthetic weights
    max_logprobs: int = 20
    log_level: str = "info"
    log_format: str = "text"
    show_progress: bool = True  # of loading, on standard error
    crash_dump_dir: str | None = None  # default: under XDG_STATE_HOME; "none": no dumps

    def __post_init__(self) -> None:
        _check_choices(
            self,
            source=SOURCES,
            dtype=DTYPES,
            load_format=LOAD_FORMATS,
            device=DEVICES,
            kv_cache_dtype=KV_CACHE_DTYPES,
            index_cache_dtype=KV_CACHE_DTYPES,
            index_cache_sharding=INDEX_CACHE_SHARDINGS,
            performance_mode=PERFORMANCE_MODES,
            all2all_backend=ALL2ALL_BACKENDS,
            expert_distribution_recorder_mode=RECORDER_MODES,
            log_format=log.FORMATS,
            distributed_executor_backend=LAUNCHERS,
        )
        for name, value in vars(self).items():  # which other processes and clients are told
            if isinstance(value, str) and valid_unicode(value) != value:
                raise ConfigError(
                    f"{_flag(name)} is {value!r}, which is no UTF-8",
                    hint="rename the file or folder, or make a link to it",
                )
        for name in ("speculative_config", "eplb_config"):
            if not isinstance(value := getattr(self, name), dict | None):
                raise ConfigError(f"{_flag(name)} is {value!r}; allowed: an object, {{key: value}}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; allowed: above 0, "
                f"at most 1"
            )
        self._check_weights()
        _check_least(
            self,
            max_cudagraph_capture_size=1,
            max_model_len=2,
            block_size=1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_queued_requests=1,
            max_queued_tokens=1,
            kv_cache_memory=1,
            num_kv_blocks=1,
            max_logprobs=0,
        )
        self._check_parallel()
        _within("--num-threads", self.num_threads, 1, MAX_THREADS)
        _within("--seed", self.seed, -(2**63), 2**63 - 1)

    def _check_weights(self) -> None:
        _check_least(self, num_hidden_layers=1)
        if self.num_hidden_layers is not None and self.load_format != "synthetic":
            raise ConfigError(
                "--num-hidden-layers leaves layers of a checkpoint out; it is for synthetic "
                "weights",
                hint="add --load-format synthetic",
            )
        if self.weight_cache is not None and self.load_format == "synthetic":
            raise ConfigError(
                "--weight-cache keeps what is read of a checkpoint; synthetic weights are drawn",
                hint="leave it out",
            )

    def _check_parallel(self) -> None:
        parallel, _ = self.parallel, self.speculation  # which check their options
        if (
            self.enable_eplb
            and parallel.num_expert_ranks == 1
            and self.performance_mode == "balanced"
        ):
            raise ConfigError(
                "--enable-eplb moves whole experts between ranks; here a rank has a part of each",
                hint="add --enable-expert-parallel, with more than one rank",
            )
        self.nodes.check(parallel)
        _within("--num-replicas", self.num_replicas, 1, MAX_REPLICAS)
        if not 0.0 < self.ray_placement_timeout <= MAX_PLACEMENT_SECONDS:
            raise ConfigError(
                f"--ray-placement-timeout is {self.ray_placement_timeout}; allowed: above 0, at "
                f"most {MAX_PLACEMENT_SECONDS:g}"
            )
        if self.index_cache_sharding == "on" and self.prefill_context_parallel_size > 1:
            raise ConfigError(
                "--index-cache-sharding is on, and --prefill-context-parallel-size is "
                f"{self.prefill_context_parallel_size}: ranks that share out prompts each hold all "
                "index keys",
                hint="use --index-cache-sharding off",
            )

    def sequences_per_step(self, device: str) -> int:
        """Sequences in one step of a data-parallel rank."""
        factor = 2 if self.performance_mode == "throughput" else 1  # as in vLLM
        return self.max_num_seqs or factor * STEP_LIMITS[device].max_num_seqs

    @property
    def parallel(self) -> ParallelOptions:
        """How the model is split over ranks. Errors: `ConfigError`."""
        return ParallelOptions(
            tensor_parallel_size=self.tensor_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
            expert_parallel_size=self.expert_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            pp_layer_partition=self.pp_layer_partition,
            data_parallel_size=self.data_parallel_size,
            prefill_context_parallel_size=self.prefill_context_parallel_size,
            decode_context_parallel_size=self.decode_context_parallel_size,
            cp_kv_cache_interleave_size=self.cp_kv_cache_interleave_size,
            redundant_experts=self._eplb_config.num_redundant_experts,
        )

    @property
    def eplb(self) -> EplbConfig | None:
        """When experts move between ranks; None: never. Errors: `ConfigError`."""
        return self._eplb_config if self.enable_eplb else None

    @property
    def _eplb_config(self) -> EplbConfig:
        """`--eplb-config`, which without `--enable-eplb` may only ask for the copies that
        `--init-expert-location` places. Errors: `ConfigError`.
        """
        given = self.eplb_config or {}
        if not self.enable_eplb:
            has_location = self.init_expert_location != IN_ORDER
            if set(given) - ({"num_redundant_experts"} if has_location else set()):
                raise ConfigError(
                    "--eplb-config is given, and experts stay where they are",
                    hint="add --enable-eplb",
                )
        return EplbConfig.read(given)

    @property
    def expert_mode(self) -> str:
        """FIXED, COUNTED or MOVED: whether experts are counted, and whether they move."""
        if self.enable_eplb:
            return MOVED
        return FIXED if self.expert_distribution_recorder_mode == "off" else COUNTED

    @property
    def nodes(self) -> NodeOptions:
        """The machines that the ranks are spread over. Errors: `ConfigError`."""
        is_ray = self.distributed_executor_backend == RAY
        said = "--distributed-executor-backend is ray" if is_ray else f"--nnodes is {self.nnodes}"
        if (is_ray or self.nnodes > 1) and self.script is not None:
            raise ConfigError(
                f"--script answers without a model, and {said}", hint="leave one of them out"
            )
        if (is_ray or self.nnodes > 1) and self.num_replicas > 1:
            raise ConfigError(
                f"--num-replicas is {self.num_replicas}, and {said}: the replicas of a server are "
                f"on its own machine",
                hint="start a server with its nodes for each replica",
            )
        return NodeOptions(
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            master_addr=self.master_addr,
            master_port=self.master_port,
            interface=self.interface,
            allow_cross_node_tp=self.allow_cross_node_tp,
            launcher=self.distributed_executor_backend,
        )

    @property
    def speculation(self) -> SpeculationConfig | None:
        """What proposes draft tokens; None: nothing does. Errors: `ConfigError`."""
        if self.speculative_config is None:
            return None
        return SpeculationConfig.read(
            self.speculative_config, tensor_parallel_size=self.tensor_parallel_size
        )


@dataclass(frozen=True)
class ServerOptions:
    """How the HTTP server answers. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    node_health_port: int | None = None  # of nodes without the API, for probes; None: none
    api_server_count: int = 1  # processes that answer HTTP, in front of the same engines
    served_model_name: tuple[str, ...] = ()  # default: the model's own name
    api_keys: tuple[str, ...] = ()  # any of them opens every route; none: no key is asked for
    api_key_file: str | None = None  # of further ones, one per line
    # opens every route, and alone those that act on the requests of all
    admin_api_key: str | None = None
    allow_unauthenticated: bool = False  # listen on more than this machine without a key
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call the server (CORS); "*": all
    # further names in the Host header, where no key is asked for; "*": all
    allowed_hosts: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    chat_template: str | None = None  # file that replaces the checkpoint's template
    # for requests that do not set them
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    allow_special_tokens_in_text: bool = False  # what a conversation says may become control tokens
    tool_call_parser: str = "auto"  # names: text.formats
    reasoning_parser: str = "auto"
    scheduling_policy: str = "fcfs"  # "priority": requests may say how urgent they are
    max_body_bytes: int = 32 * 2**20
    # of one server process; default: half of all it may have
    max_connections_per_address: int | None = None
    # from arrival to the last token; a request may ask for less
    request_timeout: float | None = None
    drain_timeout: float = 30.0  # that open requests get after SIGTERM
    # a client that does not read what is sent is cut off after this
    slow_client_timeout: float = 60.0
    # tokens of a stream that are sent together; a request may ask for another number
    stream_interval: int = 1
    # of comments in a stream that has nothing to say; 0: none
    sse_keep_alive_interval: float = 15.0
    # of one engine within engine_restart_window; after that it stays dead, and the server ends
    # unless another one is left
    max_engine_restarts: int = 3
    engine_restart_window: float = 600.0
    engine_hang_timeout: float = 300.0  # that the engine's loop may stand still while there is work
    enable_log_requests: bool = False  # a line when a request begins and one when it ends
    max_log_len: int = 256  # characters of a prompt in these lines
    enable_access_log: bool = False  # a line per HTTP request
    log_stats: bool = True  # a line every log_stats_interval while the engine is busy
    log_stats_interval: float = 10.0
    otlp_traces_endpoint: str | None = None  # of an OpenTelemetry collector, OTLP over HTTP

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; allowed: 0 to 65535 (0 picks a free one)")
        if self.node_health_port is not None and not 0 <= self.node_health_port <= 65535:
            raise ConfigError(
                f"--node-health-port is {self.node_health_port}; allowed: 0 to 65535 (0 picks a "
                f"free one)"
            )
        if not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ConfigError(
                f"--api-server-count is {self.api_server_count}; allowed: 1 to {MAX_API_SERVERS}"
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "--ssl-keyfile" if self.ssl_keyfile is None else "--ssl-certfile"
            raise ConfigError(
                f"{missing} is missing; TLS needs a certificate and its key", hint=f"add {missing}"
            )
        keys = self.api_keys if self.admin_api_key is None else (*self.api_keys, self.admin_api_key)
        check_keys(keys)
        if self.admin_api_key is not None and self.admin_api_key in self.api_keys:
            raise ConfigError(
                "--admin-api-key is one of the API keys, which are for everybody else",
                hint="give a key of its own",
            )
        _check_choices(self, scheduling_policy=SCHEDULING_POLICIES)
        _check_least(
            self,
            max_body_bytes=1024,
            max_connections_per_address=1,
            max_engine_restarts=0,
            stream_interval=1,
            max_log_len=0,
        )
        for name in (
            "log_stats_interval", "request_timeout", "slow_client_timeout", "engine_restart_window",
            "engine_hang_timeout",
        ):  # fmt: skip
            seconds = getattr(self, name)
            # NaN fails the comparison and is refused
            if seconds is not None and not 0.0 < seconds < float("inf"):
                raise ConfigError(f"{_flag(name)} is {seconds}; allowed: seconds above 0")
        for name in ("sse_keep_alive_interval", "drain_timeout"):
            seconds = getattr(self, name)
            if not 0.0 <= seconds < float("inf"):
                raise ConfigError(f"{_flag(name)} is {seconds}; allowed: 0 seconds or more")


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _check_choices(options: object, **allowed: tuple[str, ...]) -> None:
    for name, values in allowed.items():
        if getattr(options, name) not in values:
            raise ConfigError(
                f"{_flag(name)} is {getattr(options, name)!r}; allowed: {', '.join(values)}"
            )


def _check_least(options: object, **least: int) -> None:
    """The least values of whole numbers, where they are given."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise ConfigError(f"{_flag(name)} is {value}; allowed: {low} or more")


def _within(flag: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{flag} is {value}; allowed: {low} to {high}")
