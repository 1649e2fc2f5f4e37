"""Options that define how the engine loads and runs a model."""

from dataclasses import dataclass, field, fields
from typing import Any

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.base.unicode import valid_unicode
from negamax.options.eplb import COUNTED, FIXED, IN_ORDER, MOVED, RECORDER_MODES, EplbConfig
from negamax.options.flags import check_keys, check_options, flag_name, option, optional
from negamax.options.kv_events import KvEventsConfig
from negamax.options.nodes import LAUNCHERS, MASTER_PORT, MP, RAY, NodeOptions
from negamax.options.parallel import ALL2ALL_BACKENDS, ParallelOptions
from negamax.options.speculation import SpeculationConfig
from negamax.options.transfer import HOST_GIB, KvTransferConfig, check_one_engine, read_offloading

DTYPES = ("auto", "bfloat16", "float16", "float32")
SOURCES = ("auto", "huggingface", "modelscope")
LOAD_FORMATS = ("auto", "safetensors", "synthetic")
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
INDEX_CACHE_SHARDINGS = ("auto", "on", "off")
# "balanced" keeps the given parallel sizes; "interactivity" is vLLM's name for "latency"
PERFORMANCE_MODES = ("balanced", "interactivity", "latency", "throughput")
GENERATION_KEYS = (
    "eos_token_id", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample",
)  # fmt: skip
WRITE_POLICIES = ("write_through", "write_through_selective")
MAX_REPLICAS = 64
MAX_HOST_GIB, MAX_FILE_GIB = 65536, 1 << 24
MAX_PLACEMENT_SECONDS = 86400
MAX_THREADS = 1024

MODEL, MEMORY, PARALLEL, LOGS = "Model", "Batching and memory", "Parallelism", "Logs"
SPECULATION, NODES = "Speculation", "Several machines"


@dataclass(frozen=True)
class StepLimits:
    """Default sizes of a step and of a KV block."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


# On GPUs, prompt chunks are long, because each chunk reads all experts. GPUs read KV blocks of 64
# tokens fastest. On CPUs, prompt chunks are short, so that decodes wait less for prompts.
STEP_LIMITS = {"cuda": StepLimits(256, 8192, 64), "cpu": StepLimits(64, 2048, 16)}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of loading and running a model, named as in vLLM. None means a computed default."""

    model: str = field(kw_only=False)  # folder, hub id, built-in name, or bundled specification

    revision: str | None = optional("Load this branch, tag or commit of a hub model.", panel=MODEL)
    source: str = option(
        "auto",
        "Choose the hub for downloads; auto selects Hugging Face, or ModelScope if "
        "NEGAMAX_USE_MODELSCOPE=1 is set.",
        choices=SOURCES,
    )
    download_dir: str | None = optional(
        "Download models to this folder (default: the cache folder of the hub)."
    )
    script: str | None = optional(
        "Run no model, but answer by the rules in this TOML file or in the bundled file 'agents'."
    )
    dtype: str = option(
        "auto",
        "Set the dtype of weights and activations; auto uses the dtype of the checkpoint, or "
        "float32 on CPUs without bf16 instructions.",
        choices=DTYPES,
    )
    load_format: str = option(
        "auto",
        "Choose how weights are loaded; synthetic creates random weights for speed measurements "
        "without a checkpoint.",
        choices=LOAD_FORMATS,
    )
    weight_cache: str | None = optional(
        "Store each rank's weights in this folder, so that the next start loads faster."
    )
    quantization: str | None = optional(
        "Check that a quantized checkpoint has this format, or quantize an unquantized "
        "checkpoint to this format while loading (default: keep the format of the checkpoint).",
        "-q",
    )
    device: str = option(
        "auto", "Run on this device; auto selects cuda if there is a GPU.", choices=DEVICES
    )
    num_hidden_layers: int | None = optional(
        "Build only this many layers; this option needs --load-format synthetic.", least=1
    )
    max_model_len: int | None = optional(
        "Limit the prompt and output tokens of a request together (default: the model's context "
        "length); lower the limit if the KV cache does not fit into memory.",
        also="--context-length",
        least=2,
        is_count=True,
    )
    override_generation_config: dict[str, Any] | None = optional(
        "Override these fields of generation_config.json: eos_token_id, temperature, top_p, "
        "top_k, min_p, repetition_penalty, do_sample.",
        also="--preferred-sampling-params",
        is_json=True,
    )
    seed: int = option(
        0,
        "Set the seed of synthetic weights and of requests that send no seed.",
        also="--random-seed",
        least=-(2**63),
        most=2**63 - 1,
    )

    max_num_seqs: int | None = optional(
        "Limit the sequences in one step to save memory (default: 256 on GPUs, 64 on CPUs).",
        also="--max-running-requests",
        is_count=True,
        panel=MEMORY,
    )
    max_num_batched_tokens: int | None = optional(
        "Limit the tokens in one step (default: 8192 on GPUs, 2048 on CPUs); lower the limit if "
        "long prompts slow the decoding of other requests.",
        also="--chunked-prefill-size",
        is_count=True,
    )
    max_queued_requests: int = option(
        1024,
        "Refuse new requests (status 429) while this many requests wait.",
        also="--max-num-queued-reqs",
        least=1,
    )
    max_queued_tokens: int | None = optional(
        "Refuse new requests (status 429) while the prompts of waiting requests have this many "
        "tokens (default: 4 times the tokens that fit into the KV cache).",
        also="--max-num-queued-tokens",
        is_count=True,
    )
    block_size: int | None = optional(
        "Set the number of tokens in a KV block (default: 64 on GPUs, 16 on CPUs).",
        also="--page-size",
        is_count=True,
    )
    kv_cache_memory: int | None = optional(
        "Reserve this much memory for the KV cache of each rank, such as 4GiB (default: the rest "
        "of the allowed GPU memory, or a part of main memory on CPUs).",
        also="--kv-cache-memory-bytes",
        least=1,
        is_size=True,
    )
    kv_cache_dtype: str = option(
        "auto",
        "Set the dtype of the KV cache; auto uses the dtype of the model. With fp8 (e4m3, GPUs "
        "only), the cache holds twice as many tokens as with bf16.",
        choices=KV_CACHE_DTYPES,
    )
    index_cache_dtype: str = option(
        "auto",
        "Set the dtype of MiniMax-M3's index keys, which select KV blocks; fp8 also works on CPUs.",
        choices=KV_CACHE_DTYPES,
    )
    index_cache_sharding: str = option(
        "off",
        "Split MiniMax-M3's index keys over the ranks; auto splits them only for long contexts.",
        choices=INDEX_CACHE_SHARDINGS,
    )
    gpu_memory_utilization: float = option(
        0.92,
        "Limit the fraction of a GPU's memory that the engine uses; lower the limit if other "
        "processes use the GPU.",
        also="--mem-fraction-static --device-memory-utilization",
        above=0,
        most=1,
    )
    num_kv_blocks: int | None = optional(
        "Set the number of KV blocks; this option overrides --kv-cache-memory.",
        also="--num-gpu-blocks-override",
        is_count=True,
    )
    encoder_cache_tokens: int = option(
        32_768,
        "Accept images, and cache embeddings of this many image tokens; 0 refuses images.",
        least=0,
        most=2**20,
    )
    kv_offloading_size: float | None = optional(
        "Store KV blocks also in main memory, so that later requests can reuse evicted blocks. The "
        "value is the total GiB for all ranks of an engine (default: no main memory).",
        above=0,
        most=MAX_HOST_GIB,
    )
    kv_offloading_ratio: float | None = optional(
        "Reserve main memory for this many KV blocks per block of the KV cache.",
        above=0,
        most=MAX_HOST_GIB,
    )
    kv_offloading_backend: str = option(
        "native",
        "Choose the second storage for KV blocks; native means main memory.",
        choices=("native",),
    )
    kv_offloading_write_policy: str = option(
        "write_through",
        "Choose which KV blocks are copied to main memory: write_through copies all blocks, and "
        "write_through_selective copies a block when a second request uses this block.",
        also="--hicache-write-policy",
        choices=WRITE_POLICIES,
    )
    kv_offloading_path: str | None = optional(
        "Copy KV blocks from main memory to files in this folder, for use after a restart."
    )
    kv_offloading_path_size: float = option(
        64.0,
        "Limit the total size of the files in --kv-offloading-path, in GiB.",
        above=0,
        most=MAX_FILE_GIB,
    )
    kv_events_config: dict[str, Any] | None = optional(
        "Publish the contents of the prefix cache to routers. docs/kv-events.md lists the JSON "
        "keys, such as enable_kv_cache_events and endpoint.",
        is_json=True,
    )
    kv_transfer_config: dict[str, Any] | None = optional(
        "Exchange KV blocks with other engines. docs/disaggregation.md lists the JSON keys.",
        is_json=True,
    )
    enable_prefix_caching: bool = option(
        True, "Disable prefix caching: compute each prompt in full.", also="--disable-radix-cache"
    )
    enable_overlap: bool = option(
        True,
        "Disable async scheduling: process the results of a step before the next step starts.",
        "--no-async-scheduling",
        also="--disable-overlap-schedule",
    )
    enforce_eager: bool = option(
        False,
        "Disable CUDA graphs, so that the server starts sooner but decodes more slowly.",
        also="--disable-cuda-graph",
    )
    max_cudagraph_capture_size: int | None = optional(
        "Set the largest batch size of captured CUDA graphs (default: --max-num-seqs).",
        also="--cuda-graph-max-bs --cuda-graph-max-bs-decode",
        is_count=True,
    )
    kernels: tuple[str, ...] = option(
        (), "Select an op's kernel (OP=PROVIDER), or unfused norms (plain-norm); may be repeated."
    )
    self_check: bool = option(
        False, "At start, compare loaded weights with the files, and kernels with their references."
    )
    max_logprobs: int = option(
        20, "Limit the number of log-probabilities per token that a request may get.", least=0
    )

    speculative_config: dict[str, Any] | None = optional(
        "Enable speculative decoding. docs/speculation.md lists the JSON keys, such as method "
        "(eagle3, dspark, dflash, ngram), model and num_speculative_tokens.",
        "-sc",
        is_json=True,
        panel=SPECULATION,
    )

    performance_mode: str = option(
        "balanced",
        "If no parallel size is set, choose all parallel sizes for low latency or high throughput "
        "on this machine's GPUs; balanced keeps the default sizes.",
        choices=PERFORMANCE_MODES,
        panel=PARALLEL,
    )
    tensor_parallel_size: int = option(
        1,
        "Shard each layer over this many ranks; use more ranks if one GPU cannot hold the weights.",
        "-tp",
        also="--tp-size --tp",
    )
    enable_expert_parallel: bool = option(
        False, "Place whole experts on each rank, instead of a shard of every expert.", "-ep"
    )
    expert_parallel_size: int | None = optional(
        "Split the experts over this many ranks (default: 1, or all ranks with "
        "--enable-expert-parallel).",
        also="--ep-size --ep",
        is_count=True,
    )
    pipeline_parallel_size: int = option(
        1,
        "Split the layers into this many pipeline stages, for example one stage per machine.",
        "-pp",
        also="--pp-size",
    )
    pp_layer_partition: str | None = optional(
        "Set the layers per pipeline stage, such as 16,16,15,15 (default: an even split)."
    )
    enable_dynamic_chunking: bool = option(
        True, "Disable dynamic chunking: pipeline stages then get prompt chunks of equal length."
    )
    data_parallel_size: int = option(
        1,
        "Run this many data-parallel groups of ranks for more throughput. Each group has its own "
        "requests and KV cache. The experts are split over all groups.",
        "-dp",
    )
    all2all_backend: str = option(
        "allgather_reducescatter",
        "Choose how data-parallel ranks send tokens to experts. one_sided sends a small batch "
        "with one kernel launch, and needs GPUs of one machine.",
        choices=ALL2ALL_BACKENDS,
    )
    num_replicas: int = option(
        1,
        "Run this many engines behind one server, each on its own GPUs (negamax serve only).",
        least=1,
        most=MAX_REPLICAS,
    )
    prefill_context_parallel_size: int = option(
        1,
        "Split the tokens of long prompts over this many groups of ranks; each group stores the "
        "whole KV cache (prefill context parallelism).",
        also="-pcp",
    )
    decode_context_parallel_size: int = option(
        1,
        "For long contexts, split the KV cache of each KV head over this many ranks (decode "
        "context parallelism).",
        also="-dcp --dcp-size",
    )
    cp_kv_cache_interleave_size: int | None = optional(
        "With -dcp, let each rank in turn store the KV cache of this many consecutive tokens. The "
        "only valid value is the block size, which is also the default."
    )
    enable_eplb: bool = option(
        False, "Move experts between ranks while serving, to balance the load of the ranks."
    )
    eplb_config: dict[str, Any] | None = optional(
        "Configure --enable-eplb. docs/parallelism.md lists the JSON keys, such as window_size, "
        "step_interval and num_redundant_experts.",
        is_json=True,
    )
    expert_distribution_recorder_mode: str = option(
        "off",
        "Count how often each expert is selected; --enable-eplb always counts selections.",
        choices=RECORDER_MODES,
    )
    init_expert_location: str = option(
        IN_ORDER,
        "Assign experts to ranks at start. trivial assigns consecutive experts to each rank; JSON "
        "text or a JSON file sets logical_count or physical_to_logical_map.",
    )
    num_threads: int | None = optional(
        "Set the number of CPU threads of each rank (default: an equal part of the cores; if a "
        "machine has three or more cores, one core stays free).",
        most=MAX_THREADS,
        is_count=True,
    )

    nnodes: int = option(
        1,
        "Spread the ranks over this many machines. On each machine, run this command with its own "
        "--node-rank, and set the environment variable NEGAMAX_NODE_KEY to the same secret.",
        panel=NODES,
    )
    node_rank: int = option(0, "Set the index of this machine; machine 0 runs the API server.")
    master_addr: str | None = optional("Set the address at which nodes reach node 0.")
    master_port: int = option(
        MASTER_PORT, "Set the first of the ports on which other nodes connect to node 0."
    )
    interface: str | None = optional(
        "Connect nodes over this network interface, such as eth0 (default: the interface that "
        "reaches --master-addr)."
    )
    allow_cross_node_tp: bool = option(
        False, "Allow tensor parallelism over several machines, which is slow on most networks."
    )
    distributed_executor_backend: str = option(
        MP,
        "Choose what starts ranks on other machines: your own commands (mp), or Ray (ray).",
        choices=LAUNCHERS,
    )
    ray_placement_timeout: float = option(
        60.0,
        "Wait up to this many seconds until Ray has reserved resources for all ranks.",
        above=0,
        most=MAX_PLACEMENT_SECONDS,
    )

    log_level: str = option(
        "info", "Log messages of this level and above.", choices=log.LEVELS, panel=LOGS
    )
    log_format: str = option(
        "text", "Set the format of the log; json writes one object per line.", choices=log.FORMATS
    )
    show_progress: bool = option(
        True, "Hide the loading progress.", "--no-progress", also="--no-use-tqdm-on-load"
    )
    crash_dump_dir: str | None = optional(
        "Write crash dumps to this folder; 'none' disables crash dumps (default: negamax/crashes "
        "in XDG_STATE_HOME).",
        also="--crash-dump-folder",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name, value in vars(self).items():  # option values are sent as UTF-8 to other processes
            if isinstance(value, str) and valid_unicode(value) != value:
                hint = "rename the file or folder, or make a link to it"
                raise ConfigError(f"{flag_name(name)} is {value!r}, not valid UTF-8", hint=hint)
        also = ("bos_token_id", "pad_token_id")  # keys that are accepted without effect
        name, given = "--override-generation-config", self.override_generation_config or {}
        check_keys(name, given, GENERATION_KEYS, also=also)
        self._check_weights()
        self._check_parallel()
        self._check_cache()
        if self.kv_transfer is not None:
            check_one_engine(vars(self))

    def _check_weights(self) -> None:
        if self.num_hidden_layers is not None and self.load_format != "synthetic":
            refusal = "--num-hidden-layers works only with synthetic weights"
            raise ConfigError(refusal, hint="add --load-format synthetic")
        if self.weight_cache is not None and self.load_format == "synthetic":
            raise ConfigError(
                "--weight-cache stores the weights of a checkpoint, but --load-format is synthetic",
                hint="leave --weight-cache out",
            )

    def _check_parallel(self) -> None:
        parallel, _ = self.parallel, self.speculation  # both properties check the options they read
        if (
            self.enable_eplb
            and parallel.num_expert_ranks == 1
            and self.performance_mode == "balanced"
        ):
            raise ConfigError(
                "--enable-eplb moves whole experts between ranks, but each rank has a shard of "
                "every expert",
                hint="add --enable-expert-parallel and use more than one rank",
            )
        self.nodes.check(parallel)
        if self.index_cache_sharding == "on" and self.prefill_context_parallel_size > 1:
            raise ConfigError(
                "--index-cache-sharding is on, but with --prefill-context-parallel-size "
                f"{self.prefill_context_parallel_size}, each rank stores all index keys",
                hint="use --index-cache-sharding off",
            )

    def _check_cache(self) -> None:
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "--kv-events-config publishes the prefix cache's blocks, but "
                "--no-enable-prefix-caching turns the cache off",
                hint="use only one of the two options",
            )
        if self.kv_offloading_path == "":
            raise ConfigError("--kv-offloading-path is empty", hint="pass a folder")
        if not self.has_host_blocks:
            if self.kv_offloading_path is not None:
                raise ConfigError(
                    "--kv-offloading-path writes KV blocks of main memory to files, but no main "
                    "memory is reserved for KV blocks",
                    hint="add --kv-offloading-size",
                )
            return
        name = "--kv-offloading-ratio" if self.kv_offloading_ratio else "--kv-offloading-size"
        if self.kv_offloading_size is None and self.kv_offloading_ratio is None:
            name = "--kv-transfer-config"
        dcp = self.decode_context_parallel_size
        refusals = (
            (not self.enable_prefix_caching, "--no-enable-prefix-caching turns off the cache"),
            (dcp > 1, f"--decode-context-parallel-size {dcp} splits the blocks over ranks"),
            (self.index_cache_sharding == "on", "--index-cache-sharding on splits index keys"),
        )
        for is_refused, reason in refusals:
            if is_refused:
                raise ConfigError(
                    f"{name} stores whole KV blocks in main memory, but {reason}",
                    hint="use only one of the two options",
                )

    @property
    def kv_transfer(self) -> KvTransferConfig | None:
        """Return the parsed `--kv-transfer-config`, or None if unset. Raises `ConfigError`."""
        given = self.kv_transfer_config
        return None if given is None else KvTransferConfig.read(given)

    @property
    def has_host_blocks(self) -> bool:
        """Return whether evicted KV blocks are kept in main memory."""
        return self.host_gib is not None or self.kv_offloading_ratio is not None

    @property
    def host_gib(self) -> float | None:
        """Return the GiB of main memory for KV blocks, or None if no option sets a size in GiB."""
        if self.kv_offloading_size or self.kv_offloading_ratio:
            return self.kv_offloading_size
        if self.kv_transfer is None:
            return read_offloading(self.kv_transfer_config or {})[0]
        return HOST_GIB

    @property
    def file_folder(self) -> str | None:
        """Return the folder for files of KV blocks, or None if there are no such files."""
        return self.kv_offloading_path or read_offloading(self.kv_transfer_config or {})[1]

    def sequences_per_step(self, device: str) -> int:
        """Return the largest number of sequences in one step of a data-parallel rank."""
        factor = 2 if self.performance_mode == "throughput" else 1  # vLLM doubles its limit, too
        return self.max_num_seqs or factor * STEP_LIMITS[device].max_num_seqs

    @property
    def parallel(self) -> ParallelOptions:
        """Return the number of ranks per parallel axis. Raises `ConfigError`."""
        shared = {one.name for one in fields(ParallelOptions)} & vars(self).keys()
        sizes = {name: getattr(self, name) for name in shared}
        return ParallelOptions(**sizes, redundant_experts=self._eplb_config.num_redundant_experts)

    @property
    def eplb(self) -> EplbConfig | None:
        """Return the parsed `--eplb-config`, or None if EPLB is off. Raises `ConfigError`."""
        return self._eplb_config if self.enable_eplb else None

    @property
    def _eplb_config(self) -> EplbConfig:
        """Parse `--eplb-config`. Raises `ConfigError`."""
        given = self.eplb_config or {}
        if not self.enable_eplb:
            has_location = self.init_expert_location != IN_ORDER
            # `--init-expert-location` may place copies of experts without `--enable-eplb`
            if set(given) - ({"num_redundant_experts"} if has_location else set()):
                refusal = "--eplb-config has no effect without --enable-eplb"
                raise ConfigError(refusal, hint="add --enable-eplb")
        return EplbConfig.read(given)

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """Return the parsed `--kv-events-config`, or None if disabled. Raises `ConfigError`."""
        num_ranks = self.data_parallel_size * self.num_replicas
        return KvEventsConfig.read(self.kv_events_config or {}, num_ranks=num_ranks)

    @property
    def expert_mode(self) -> str:
        """Return MOVED if experts move, COUNTED if only selections are counted, else FIXED."""
        if self.enable_eplb:
            return MOVED
        return FIXED if self.expert_distribution_recorder_mode == "off" else COUNTED

    @property
    def nodes(self) -> NodeOptions:
        """Return the settings for several machines. Raises `ConfigError`."""
        is_ray = self.distributed_executor_backend == RAY
        said = "--distributed-executor-backend is ray" if is_ray else f"--nnodes is {self.nnodes}"
        if (is_ray or self.nnodes > 1) and self.script is not None:
            raise ConfigError(
                f"--script runs no model, but {said}", hint="use only one of the two options"
            )
        if (is_ray or self.nnodes > 1) and self.num_replicas > 1:
            raise ConfigError(
                f"--num-replicas is {self.num_replicas}, and {said}: all replicas of a server run "
                f"on the server's machine",
                hint="start one server for each group of machines, without --num-replicas",
            )
        shared = {one.name for one in fields(NodeOptions)} & vars(self).keys()
        given = {name: getattr(self, name) for name in shared}
        return NodeOptions(**given, launcher=self.distributed_executor_backend)

    @property
    def speculation(self) -> SpeculationConfig | None:
        """Return the parsed `--speculative-config`, or None if unset. Raises `ConfigError`."""
        if self.speculative_config is None:
            return None
        return SpeculationConfig.read(
            self.speculative_config, tensor_parallel_size=self.tensor_parallel_size
        )
