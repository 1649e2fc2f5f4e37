"""The engine's options on the command line, one table for all commands; vLLM's names first,
SGLang's beside them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from negamax.base import env, log
from negamax.base.errors import ConfigError
from negamax.cli.flags import Flag, chosen_fields, flag_parameters, parameter
from negamax.config.embedded import QUOTED_NAMES
from negamax.options.engine import (
    DEVICES,
    DTYPES,
    INDEX_CACHE_SHARDINGS,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    PERFORMANCE_MODES,
    SOURCES,
    EngineOptions,
)
from negamax.options.eplb import RECORDER_MODES
from negamax.options.nodes import LAUNCHERS
from negamax.options.parallel import ALL2ALL_BACKENDS

MODEL, MEMORY, PARALLEL, LOGS = "Model", "Batching and memory", "Parallelism", "Logs"
SPECULATION, NODES = "Speculation", "Several machines"


_TABLE = (
    Flag("revision", MODEL, "Branch, tag or commit of a hub model."),
    Flag(
        "source",
        MODEL,
        "Hub of models; auto: huggingface, or modelscope with NEGAMAX_USE_MODELSCOPE=1.",
        choices=SOURCES,
    ),
    Flag("download_dir", MODEL, "Folder for downloads; default: the hub's cache."),
    Flag(
        "script",
        MODEL,
        "Answer by the rules of this TOML file, without weights; 'agents' is bundled.",
    ),
    Flag("dtype", MODEL, "Of weights and activations.", choices=DTYPES),
    Flag(
        "load_format", MODEL, "How weights are read; synthetic: random ones.", choices=LOAD_FORMATS
    ),
    Flag(
        "weight_cache",
        MODEL,
        "Folder that keeps each rank's weights for the next start.",
    ),
    Flag(
        "quantization",
        MODEL,
        "How the checkpoint is quantised (default: as its files say), or a plain one is to be.",
        flags=("--quantization", "-q"),
    ),
    Flag("device", MODEL, "auto: cuda where there is a GPU.", choices=DEVICES),
    Flag("num_hidden_layers", MODEL, "Run fewer layers than the model has (synthetic weights)."),
    Flag(
        "max_model_len",
        MODEL,
        "Tokens of prompt and output; default: the model's context length.",
        also=("--context-length",),
        is_count=True,
    ),
    Flag(
        "seed",
        MODEL,
        "For requests that name none, and for synthetic weights.",
        also=("--random-seed",),
    ),
    Flag(
        "max_num_seqs",
        MEMORY,
        "Sequences in one step; default: 256 (CPU: 64).",
        also=("--max-running-requests",),
        is_count=True,
    ),
    Flag(
        "max_num_batched_tokens",
        MEMORY,
        "Tokens in one step; default: 8192 (CPU: 2048).",
        also=("--chunked-prefill-size",),
        is_count=True,
    ),
    Flag(
        "max_queued_requests",
        MEMORY,
        "Waiting requests; more are refused (429).",
        also=("--max-num-queued-reqs",),
    ),
    Flag(
        "max_queued_tokens",
        MEMORY,
        "Prompt tokens that may wait; default: 4 times what the KV cache holds.",
        also=("--max-num-queued-tokens",),
        is_count=True,
    ),
    Flag(
        "block_size",
        MEMORY,
        "Tokens per KV block; default: 64 (CPU: 16).",
        also=("--page-size",),
        is_count=True,
    ),
    Flag(
        "kv_cache_memory",
        MEMORY,
        "KV cache per rank, such as 4GiB.",
        also=("--kv-cache-memory-bytes",),
        is_size=True,
    ),
    Flag(
        "kv_cache_dtype",
        MEMORY,
        "auto: as the model; fp8 is e4m3, on a GPU.",
        choices=KV_CACHE_DTYPES,
    ),
    Flag(
        "index_cache_dtype",
        MEMORY,
        "The same of the keys that choose blocks (MiniMax-M3); fp8 on the CPU, too.",
        choices=KV_CACHE_DTYPES,
    ),
    Flag(
        "index_cache_sharding",
        MEMORY,
        "A shard of these keys on each rank; auto: for long contexts.",
        choices=INDEX_CACHE_SHARDINGS,
    ),
    Flag(
        "gpu_memory_utilization",
        MEMORY,
        "Share of a GPU's memory that may be used.",
        also=("--mem-fraction-static", "--device-memory-utilization"),
    ),
    Flag(
        "num_kv_blocks",
        MEMORY,
        "KV blocks; overrides --kv-cache-memory.",
        also=("--num-gpu-blocks-override",),
        is_count=True,
    ),
    Flag(
        "enable_prefix_caching",
        MEMORY,
        "Compute every prompt from its start.",
        flags=("--no-enable-prefix-caching",),
        also=("--disable-radix-cache",),
        turns_off=True,
    ),
    Flag(
        "enable_overlap",
        MEMORY,
        "Commit a step before the next is launched.",
        flags=("--no-async-scheduling",),
        also=("--disable-overlap-schedule",),
        turns_off=True,
    ),
    Flag("enforce_eager", MEMORY, "Run without CUDA graphs.", also=("--disable-cuda-graph",)),
    Flag(
        "max_cudagraph_capture_size",
        MEMORY,
        "Sequences of the largest captured decode step; default: --max-num-seqs.",
        also=("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
        is_count=True,
    ),
    Flag(
        "speculative_config",
        SPECULATION,
        "Who guesses tokens ahead: method (eagle3, ngram), model, num_speculative_tokens, adaptive "
        "and what else docs/speculation.md lists.",
        flags=("--speculative-config", "-sc"),
        is_json=True,
    ),
    Flag("max_logprobs", MEMORY, "The most logprobs a request may ask for."),
    Flag(
        "performance_mode",
        PARALLEL,
        "Choose parallel sizes for the GPUs that are there, where none is given; balanced: do not.",
        choices=PERFORMANCE_MODES,
    ),
    Flag(
        "tensor_parallel_size",
        PARALLEL,
        "Ranks that share each layer.",
        flags=("--tensor-parallel-size", "-tp"),
        also=("--tp-size", "--tp"),
    ),
    Flag(
        "enable_expert_parallel",
        PARALLEL,
        "Split experts over the ranks, each held whole by one.",
        flags=("--enable-expert-parallel", "-ep"),
    ),
    Flag(
        "expert_parallel_size",
        PARALLEL,
        "Ranks that experts are split over; default: 1, or all with --enable-expert-parallel.",
        also=("--ep-size", "--ep"),
        is_count=True,
    ),
    Flag(
        "pipeline_parallel_size",
        PARALLEL,
        "Stages that run one behind the other, each of them some of the layers.",
        flags=("--pipeline-parallel-size", "-pp"),
        also=("--pp-size",),
    ),
    Flag(
        "pp_layer_partition",
        PARALLEL,
        "Layers of each stage, such as 16,16,15,15; default: as even as can be.",
    ),
    Flag(
        "enable_dynamic_chunking",
        PARALLEL,
        "With stages: run long prompts in chunks of equal length, not of equal time.",
        flags=("--no-enable-dynamic-chunking",),
        turns_off=True,
    ),
    Flag(
        "data_parallel_size",
        PARALLEL,
        "Groups of tensor-parallel ranks that have requests and a KV cache of their own; the "
        "experts are shared by all.",
        flags=("--data-parallel-size", "-dp"),
    ),
    Flag(
        "all2all_backend",
        PARALLEL,
        "How such groups send tokens to experts; one_sided: few tokens in one launch, GPUs of one "
        "machine.",
        choices=ALL2ALL_BACKENDS,
    ),
    Flag(
        "num_replicas",
        PARALLEL,
        "Engines behind one server, each with all ranks and GPUs of its own; for serve.",
    ),
    Flag(
        "prefill_context_parallel_size",
        PARALLEL,
        "Groups of tensor-parallel ranks that share out the tokens of prompts; each holds the "
        "whole KV cache, and the experts are shared by all.",
        also=("-pcp",),
    ),
    Flag(
        "decode_context_parallel_size",
        PARALLEL,
        "Ranks with copies of a KV head that share out the blocks of its cache.",
        also=("-dcp", "--dcp-size"),
    ),
    Flag(
        "cp_kv_cache_interleave_size",
        PARALLEL,
        "Neighbouring tokens that lie on the same one of these ranks: those of a block.",
    ),
    Flag(
        "enable_eplb",
        PARALLEL,
        "Move experts between ranks as they are chosen, so that all ranks have the same to do.",
    ),
    Flag(
        "eplb_config",
        PARALLEL,
        "When, and with how many copies: window_size, step_interval, num_redundant_experts and "
        "what else docs/parallelism.md lists.",
        is_json=True,
    ),
    Flag(
        "expert_distribution_recorder_mode",
        PARALLEL,
        "Count how often each expert is chosen; it is always so with --enable-eplb.",
        choices=RECORDER_MODES,
    ),
    Flag(
        "init_expert_location",
        PARALLEL,
        "Where experts lie at start: trivial (in order), or JSON with logical_count, as a dump has "
        "it, or physical_to_logical_map.",
    ),
    Flag(
        "nnodes",
        NODES,
        "Machines that the ranks are spread over, each with as many; the same command on each.",
    ),
    Flag("node_rank", NODES, "Which of them this is; 0 has the API."),
    Flag("master_addr", NODES, "Address of node 0."),
    Flag("master_port", NODES, "First of its ports that the other nodes connect to."),
    Flag(
        "interface",
        NODES,
        "Of the network between the nodes, such as eth0; default: on the way to --master-addr.",
    ),
    Flag(
        "allow_cross_node_tp",
        NODES,
        "Let tensor-parallel ranks be on several machines.",
    ),
    Flag(
        "distributed_executor_backend",
        NODES,
        "Who starts the ranks; mp: this command on each machine; ray: Ray chooses machines of its "
        "cluster, and GPUs of this one.",
        choices=LAUNCHERS,
    ),
    Flag(
        "ray_placement_timeout",
        NODES,
        "Seconds to wait until Ray has room for all ranks.",
    ),
    Flag(
        "num_threads",
        PARALLEL,
        "CPU threads per rank; default: all cores, shared out.",
        is_count=True,
    ),
    Flag("log_level", LOGS, "The least that is logged.", choices=log.LEVELS),
    Flag("log_format", LOGS, "json: an object per line.", choices=log.FORMATS),
    Flag(
        "show_progress",
        LOGS,
        "Do not show how far loading is.",
        flags=("--no-progress",),
        also=("--no-use-tqdm-on-load",),
        turns_off=True,
    ),
    Flag(
        "crash_dump_dir",
        LOGS,
        "Folder for crash dumps; default: negamax/crashes in XDG_STATE_HOME; 'none': no dumps.",
        also=("--crash-dump-folder",),
    ),
)
_NEEDED_FILES = 128  # of a process with a model and a few connections
_MODEL_ARGUMENT = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"A local folder, a hub id, or {QUOTED_NAMES}, the embedded models.",
        show_default=False,
    ),
]
_MODEL = Flag(
    "model_option", MODEL, "The same as MODEL.", flags=("--model",), also=("--model-path",)
)
_MODEL_OPTION = Annotated[
    str | None,
    typer.Option(*_MODEL.names, help=_MODEL.listed_help, rich_help_panel=MODEL, show_default=False),
]


def with_engine_options(
    *, defaults: dict[str, Any] | None = None, needs_model: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that takes `engine: EngineOptions`: it gets MODEL, --model and every
    option of the table.

    `defaults` replaces defaults of `EngineOptions` for this command; without `needs_model` the
    name may be missing, and is empty then.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        parameters = [
            parameter("model", None, _MODEL_ARGUMENT),
            *(given for name, given in own.parameters.items() if name != "engine"),
            parameter("model_option", None, _MODEL_OPTION),
            *flag_parameters(EngineOptions, _TABLE, defaults=defaults or {}),
        ]

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            model = _one_model(values.pop("model"), values.pop("model_option"), needed=needs_model)
            chosen = chosen_fields(_TABLE, {flag.field: values.pop(flag.field) for flag in _TABLE})
            engine = EngineOptions(model=model, **chosen)
            env.allow_open_files(_NEEDED_FILES)
            command(engine=engine, **values)

        wrapper.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapper.flags = (*getattr(command, "flags", ()), _MODEL, *_TABLE)  # type: ignore[attr-defined]
        wrapper.takes_foreign_flags = True  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _one_model(argument: str | None, option: str | None, *, needed: bool) -> str:
    model = option if argument is None else argument
    if model is None and not needed:
        return ""
    if model is None:
        raise ConfigError(
            "MODEL is missing",
            hint=f"give a folder, a hub id, or {QUOTED_NAMES}, the embedded models",
        )
    if option not in (None, model):
        raise ConfigError(
            f"MODEL is {argument!r} and --model is {option!r}", hint="give one of them"
        )
    return model
