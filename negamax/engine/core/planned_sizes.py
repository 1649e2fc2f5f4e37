"""Choose parallel sizes for this machine's GPUs by `--performance-mode`, without using torch."""

from dataclasses import fields, replace

from negamax.base.errors import ConfigError
from negamax.base.log import get_logger
from negamax.checkpoint.split import read_ranks
from negamax.engine.core.source import locate
from negamax.options.engine import EngineOptions
from negamax.options.parallel import ParallelOptions
from negamax.planner.cost import Workload
from negamax.planner.gpus import visible_gpus
from negamax.planner.plan import Candidate, Hardware, make_plan

logger = get_logger(__name__)

# Workloads for which parallel sizes are compared: a single request, and a server's default batch.
_LOADS = (Workload(1), Workload(256))


def choose_parallel_sizes(options: EngineOptions, *, one_engine: bool = True) -> EngineOptions:
    """Choose the best parallel sizes for the performance mode. Keep `options` if they set a
    parallel size or if there is one GPU. If `one_engine` is False, several replicas may use the
    GPUs. Raises `ConfigError` if no split of the model fits the GPUs, and the errors of `locate`.
    """
    mode = options.performance_mode
    if mode == "balanced" or options.device == "cpu" or options.script is not None:
        return options
    sizes = [field for field in fields(ParallelOptions) if hasattr(options, field.name)]
    is_sized = any(getattr(options, field.name) != field.default for field in sizes)
    if is_sized or options.num_replicas > 1 or options.nnodes > 1:
        return options
    try:
        gpus = visible_gpus()
    except ConfigError as error:  # The planner does not know these GPUs.
        logger.warning("--performance-mode %s chooses no parallel size: %s", mode, error)
        return options
    if len(gpus) < 2:
        return options
    smallest = min(gpus, key=lambda gpu: gpu.memory)
    # With synthetic weights, `locate` downloads no weights.
    source = locate(replace(options, load_format="synthetic", speculative_config=None))
    spec, is_read = source.spec, options.load_format != "synthetic"
    context_length = options.max_model_len or spec.max_position_embeddings
    plan = make_plan(
        spec,
        Hardware(smallest, len(gpus), utilization=options.gpu_memory_utilization),
        _LOADS,
        kv_dtype=options.kv_cache_dtype,
        index_dtype=options.index_cache_dtype,
        encoder_tokens=options.encoder_cache_tokens,
        max_model_len=context_length,
        max_num_seqs=options.sequences_per_step("cuda"),
        one_engine=one_engine,
        split_for=read_ranks(source.tokenizer_folder) if is_read else (),
    )
    allowed = tuple(each for each in plan.candidates if _is_allowed(options, each))
    plan = replace(plan, candidates=allowed)
    best = plan.busiest if mode == "throughput" else plan.fastest
    if best is None:
        raise ConfigError(
            f"--performance-mode is {mode}: {len(gpus)} x {smallest.name} cannot hold the model "
            f"and one request of {context_length} tokens with any parallel sizes",
            hint="lower --max-model-len or --max-num-seqs; `negamax plan` lists valid sizes",
        )
    logger.info(
        "--performance-mode %s runs %s on %d of %d GPUs (equivalent options: %s)",
        mode,
        best.topology.label,
        best.topology.gpus,
        len(gpus),
        " ".join(best.topology.flags) or "the default sizes",
    )
    return replace(options, **best.topology.sizes, num_replicas=best.topology.replicas)


def _is_allowed(options: EngineOptions, candidate: Candidate) -> bool:
    """Return whether `options` allow `candidate`. DCP and index sharding are never defaults."""
    topology, shards_index = candidate.topology, candidate.shards_index
    if topology.dcp > 1 or (shards_index and options.index_cache_sharding != "on"):
        return False
    try:
        replace(options, **topology.sizes)
    except ConfigError:
        return False
    return True
