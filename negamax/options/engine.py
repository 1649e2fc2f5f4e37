"""The engine's options: how a model is loaded and run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.base.unicode import valid_unicode
from negamax.options.checks import check_choices, check_least, check_within, flag_of
from negamax.options.eplb import COUNTED, FIXED, IN_ORDER, MOVED, RECORDER_MODES, EplbConfig
from negamax.options.nodes import LAUNCHERS, MASTER_PORT, MP, RAY, NodeOptions
from negamax.options.parallel import ALL2ALL_BACKENDS, ParallelOptions
from negamax.options.speculation import SpeculationConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")
SOURCES = ("auto", "huggingface", "modelscope")
LOAD_FORMATS = ("auto", "safetensors", "synthetic")
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
INDEX_CACHE_SHARDINGS = ("auto", "on", "off")
# "balanced": sizes as they are given; latency is what vLLM calls interactivity
PERFORMANCE_MODES = ("balanced", "interactivity", "latency", "throughput")
MAX_REPLICAS = 64
MAX_PLACEMENT_SECONDS = 86400.0
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
    eplb_config: dict[str, Any] | None = None  # when, with the keys of vLLM's (options/eplb.py)
    # "stat": how often each expert is chosen is counted, as it is with enable_eplb
    expert_distribution_recorder_mode: str = "off"
    # where experts lie at start: "trivial" (in order), or JSON, in a file or as it is, with how
    # often each was chosen or where each lies (engine/core/expert_location.py)
    init_expert_location: str = IN_ORDER
    # over how many machines the ranks are spread, and where these meet (options/nodes.py)
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = MASTER_PORT
    interface: str | None = None
    allow_cross_node_tp: bool = False
    distributed_executor_backend: str = MP  # "ray": it chooses the machines and starts the agents
    ray_placement_timeout: float = 60.0  # seconds that Ray may take to have room
    # who guesses tokens ahead, with the keys of vLLM's (options/speculation.py)
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
        check_choices(
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
                    f"{flag_of(name)} is {value!r}, which is no UTF-8",
                    hint="rename the file or folder, or make a link to it",
                )
        for name in ("speculative_config", "eplb_config"):
            if not isinstance(value := getattr(self, name), dict | None):
                raise ConfigError(
                    f"{flag_of(name)} is {value!r}; allowed: an object, {{key: value}}"
                )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; allowed: above 0, "
                f"at most 1"
            )
        self._check_weights()
        check_least(
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
        check_within("--num-threads", self.num_threads, 1, MAX_THREADS)
        check_within("--seed", self.seed, -(2**63), 2**63 - 1)

    def _check_weights(self) -> None:
        check_least(self, num_hidden_layers=1)
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
        check_within("--num-replicas", self.num_replicas, 1, MAX_REPLICAS)
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
