"""Start an engine from its options: worker configuration, scheduler limits, context length."""

import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from negamax.base import env
from negamax.base.crash_dump import CrashDumps
from negamax.base.errors import ConfigError
from negamax.base.log import get_logger
from negamax.base.private_folder import PrivateFolder
from negamax.checkpoint.identity import find_commit
from negamax.config.embedded import EMBEDDED
from negamax.config.json_file import read_json_object
from negamax.config.kv_cache import check_index_options, choose_block_size, shards_index
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import rotation_file
from negamax.engine.core.executor import Executor, InProcessExecutor, MultiProcessExecutor
from negamax.engine.core.expert_balancer import ExpertBalancer
from negamax.engine.core.expert_location import place_experts
from negamax.engine.core.kv_events import EventPublisher
from negamax.engine.core.loop import EngineLoop
from negamax.engine.core.scripted_executor import ScriptedExecutor
from negamax.engine.core.source import ModelSource, choose_context_length, locate
from negamax.engine.core.transfer_sockets import TransferSockets, check_transfer_address
from negamax.engine.core.transfers import Transfers
from negamax.engine.grammar.manager import GrammarManager
from negamax.engine.nodes.facts import collect_facts, digest_model
from negamax.engine.nodes.group import start_on_nodes
from negamax.engine.nodes.network import check_key
from negamax.engine.nodes.ray_launcher import RayLauncher
from negamax.engine.shape import SHAPE, make_shape
from negamax.engine.wire import ModelInfo, TransferInfo
from negamax.models.drafts import EMBEDDING, HEAD, DraftModel, name_draft_errors
from negamax.models.registry import import_names, list_model_types
from negamax.options.engine import STEP_LIMITS, EngineOptions
from negamax.options.eplb import FIXED
from negamax.options.nodes import RAY
from negamax.options.transfer import NIXL
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.split import check_split
from negamax.planner.chunks import plan_even_times
from negamax.planner.cost import Costs, Model
from negamax.planner.gpus import MEASURED, GpuModel, visible_gpus
from negamax.quantization.names import check_name, find_blocks_spec
from negamax.scheduler.chunk_length import ChunkLength, EvenChunks
from negamax.scheduler.draft_length import AdaptiveDraftLength, DraftLength, make_rank_lengths
from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.prefix_cache import HASH_BYTES
from negamax.scheduler.step import ROWS_PER_PAGE
from negamax.text.script import Script, read_script
from negamax.worker.config import LaneOptions, WorkerConfig, WorkerReady
from negamax.worker.nixl_probe import check_nixl

logger = get_logger(__name__)
Spec = TypeVar("Spec", bound=ModelSpec)


def start_loop(options: EngineOptions, *, replica: int = 0) -> tuple[EngineLoop, ModelInfo]:
    """Start the executor and the scheduler of a replica. On an error, end the started processes."""
    with ExitStack() as started:
        loop, info = _start_loop(options, started, replica)
        started.pop_all()  # Do not end the processes here; the loop's shutdown ends them.
    return loop, info


def _start_loop(
    options: EngineOptions, started: ExitStack, replica: int
) -> tuple[EngineLoop, ModelInfo]:
    """Start the engine loop. On an error, the callbacks in `started` end processes."""
    launcher = None  # With Ray, the launcher starts agents on other nodes; else None.
    if options.distributed_executor_backend == RAY:
        launcher = RayLauncher(options)
        started.callback(launcher.close)
        options = launcher.options
    if options.node_rank:
        raise ConfigError(
            f"--node-rank is {options.node_rank}, but an engine starts on node 0 only",
            hint="start the other nodes with `negamax serve`",
        )
    check_key(options.nodes)
    publishers = _open_publishers(options, replica, started)
    source = locate(options)
    transfer, folder = options.kv_transfer, None
    if transfer is not None:
        check_transfer_address(transfer)
        if transfer.lane == NIXL:
            check_nixl(transfer.transport)
        folder = PrivateFolder()
        started.callback(folder.remove)
    elif options.kv_transfer_config is not None:
        connector = options.kv_transfer_config.get("kv_connector")
        logger.info("--kv-transfer-config: %s exchanges no prompts with other engines", connector)
    script = None if options.script is None else read_script(options.script)
    config = _make_worker_config(options, source, script)
    if transfer is not None and folder is not None:
        host = None if transfer.is_loopback else transfer.host
        config = replace(config, lane=LaneOptions(transfer.lane, folder.path, host))
    grammars = GrammarManager(
        source.tokenizer_folder,
        vocab_size=config.spec.vocab_size,
        eos_token_ids=config.eos_token_ids,
    )
    started.callback(grammars.shutdown)
    # On a CPU, only the first grammar starts the process, because ranks need all cores at start.
    if config.device != "cpu":
        grammars.start()
    executor = _start_executor(config, options, source, script=script, launcher=launcher)
    started.callback(executor.shutdown)
    ready = executor.ready
    _log_ready(ready, block_size=config.block_size, dp=config.layout.dp)
    max_model_len = _limit_context_length(
        config.max_model_len, ready.num_kv_blocks * config.block_size
    )
    scheduler = _make_scheduler(options, config, ready, max_model_len=max_model_len)
    info = _describe_model(options, source, config, ready, max_model_len=max_model_len)
    for publisher in publishers:
        publisher.start()
    sockets = None
    if folder is not None:
        sockets, about = _open_transfers(options, source, config, ready, scheduler, folder=folder)
        info = msgspec.structs.replace(info, transfer=about)
    return EngineLoop(
        scheduler,
        executor,
        grammars=grammars,
        overlap=options.enable_overlap,
        num_stages=config.layout.pp,
        experts=None if options.script else _make_balancer(options, config),
        crash_dumps=CrashDumps(
            options.crash_dump_dir, part="engine", options={**asdict(options), SHAPE: info.shape}
        ),
        launcher=launcher,
        publishers=publishers,
        transfers=sockets,
    ), info


def _open_publishers(
    options: EngineOptions, replica: int, started: ExitStack
) -> list[EventPublisher]:
    """Open the publishers of cache events. Subscribers can connect while the model loads."""
    publishers: list[EventPublisher] = []
    if options.kv_events is not None:
        for rank in range(options.data_parallel_size):
            number = replica * options.data_parallel_size + rank
            publishers.append(EventPublisher(options.kv_events, number))
            started.callback(publishers[-1].close)
    return publishers


def _open_transfers(
    options: EngineOptions,
    source: ModelSource,
    config: WorkerConfig,
    ready: WorkerReady,
    scheduler: GroupScheduler,
    *,
    folder: PrivateFolder,
) -> tuple[TransferSockets, TransferInfo]:
    """Open the sockets to other engines. Raises the errors of `TransferSockets`."""
    transfer, lane = options.kv_transfer, config.lane
    assert transfer is not None and lane is not None
    imports = [lane.imports_endpoint(rank) for rank in range(len(ready.lanes))]
    sockets = TransferSockets(transfer, imports, folder=folder)
    caches = (config.block_size, ready.dtype, config.kv_cache_dtype, config.index_cache_dtype)
    (rank,) = scheduler.ranks
    sockets.transfers = Transfers(
        transfer,
        rank.shared,
        block_size=config.block_size,
        engine_id=uuid.uuid4().hex,
        fingerprint=digest_model(source, caches),
        lanes=list(ready.lanes),
        send=sockets.send,
        copy=sockets.copy,
    )
    engine_id, num_lanes = sockets.transfers.engine_id, len(ready.lanes)
    host, port, role = transfer.host, transfer.port, transfer.role
    logger.info("the engine exchanges prompts with other engines at %s:%d as %s", host, port, role)
    logger.info("ranks send KV blocks by %s, on %d lanes", transfer.lane, num_lanes)
    about = TransferInfo(engine_id, role, host, port, num_lanes, transfer.hosts_of_others)
    return sockets, about


def _make_worker_config(
    options: EngineOptions, source: ModelSource, script: Script | None
) -> WorkerConfig:
    """Return the configuration of the ranks. Raises `ConfigError` for invalid options."""
    spec = source.spec
    if script is not None:
        spec = replace(spec, max_position_embeddings=script.context_length)
    for part in (spec, source.speculation, source.draft and source.draft.spec):
        for note in part.notes if part else ():
            logger.info("%s", note)
    if source.generation.warning is not None:
        logger.warning("%s", source.generation.warning)
    max_model_len = choose_context_length(options, spec)
    device, gpus = find_device(options.device)
    layout = ParallelLayout.of(options.parallel, nodes=options.nnodes)
    check_split(layout, spec, gpus=None if gpus is None else gpus * layout.nodes)
    layout = place_experts(layout, spec, options.init_expert_location)
    draft = source.draft
    if draft is not None:
        # The check ignores DCP (dcp=1), which does not shard a draft model's KV caches.
        check_split(replace(layout.within_stage, dcp=1), draft.spec)
        types = list_model_types(spec.architecture)
        for doubt in draft.spec.doubts(spec, target_types=types, max_model_len=max_model_len):
            logger.warning("%s", doubt)
        draft = _complete_draft(draft, spec, source.weights_folder)
    if device == "cpu":
        env.set_batch_invariant_gemms()
    spec = _choose_weight_format(options, spec, device)
    if draft is not None:
        draft = replace(draft, spec=_choose_weight_format(options, draft.spec, device))
    spec = _choose_vision(options, source, spec)
    limits, max_num_seqs = STEP_LIMITS[device], options.sequences_per_step(device)
    block_size = choose_block_size(spec.kv_caches(), options.block_size, default=limits.block_size)
    options.parallel.check_interleave(block_size)
    return WorkerConfig(
        spec=_shard_index_keys(options, spec, layout, max_model_len=max_model_len),
        eos_token_ids=source.generation.eos_token_ids,
        folder=None if source.weights_folder is None else str(source.weights_folder),
        weight_cache=options.weight_cache,
        layout=layout,
        device=device,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        index_cache_dtype=options.index_cache_dtype,
        all2all_backend=options.all2all_backend,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or limits.max_num_batched_tokens,
        max_logprobs=options.max_logprobs,
        encoder_tokens=0
        if spec.vision is None
        else options.encoder_cache_tokens // ROWS_PER_PAGE * ROWS_PER_PAGE,
        num_replicas=options.num_replicas,
        block_size=block_size,
        num_kv_blocks=options.num_kv_blocks,
        kv_cache_memory=options.kv_cache_memory,
        gpu_memory_utilization=options.gpu_memory_utilization,
        # Kernels that the user selects may wait for the device, which a CUDA graph cannot capture.
        cudagraph_size=0
        if options.enforce_eager or options.kernels
        else min(options.max_cudagraph_capture_size or max_num_seqs, max_num_seqs),
        num_threads=choose_num_threads(options, layout),
        seed=options.seed,
        show_progress=options.show_progress,
        crash_dump_dir=options.crash_dump_dir,
        speculation=source.speculation,
        draft=draft,
        addresses=None,
        experts=options.expert_mode,
        kv_offloading_size=options.host_gib,
        kv_offloading_ratio=options.kv_offloading_ratio,
        kv_offloading_path=options.file_folder,
        kv_offloading_path_size=options.kv_offloading_path_size,
        kernels=options.kernels,
        self_check=options.self_check,
    )


def _choose_weight_format(options: EngineOptions, spec: Spec, device: str) -> Spec:
    """Choose FP8 blocks for MXFP8 weights if the GPU multiplies FP8 blocks (Hopper). If
    `--quantization` sets a format, do not change the format.
    """
    if device == "cpu" or spec.quantization is None or check_name(options.quantization):
        return spec
    from negamax.worker.device import multiplies_blocks

    if not multiplies_blocks(device) or (blocks := find_blocks_spec(spec.quantization)) is None:
        return spec
    logger.info(
        "MXFP8 weights of %s become FP8 in 128 x 128 blocks (--quantization mxfp8 keeps MXFP8)",
        spec.architecture,
    )
    return replace(spec, quantization=blocks)


def _choose_vision(options: EngineOptions, source: ModelSource, spec: Spec) -> Spec:
    """Remove the vision tower from `spec` if the model's files lack it or the options exclude
    images. Without a vision tower the server refuses images. A bundled spec gets the image token
    ids of the bundled tokenizer, not those of the published tokenizer.
    """
    if spec.vision is None:
        return spec
    reason = _explain_text_only(options, source)
    if reason is not None:
        logger.info("requests with images are refused: %s", reason)
        return replace(spec, vision=None)
    if source.tokenizer_folder not in EMBEDDED.values():
        return spec
    tokenizer = read_json_object(source.tokenizer_folder / "tokenizer.json")
    ids = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    names = {"token": "image", "start": "start of image", "end": "end of image"}
    own = {f"image_{part}_id": ids[f"]<]{name}[>["] for part, name in names.items()}
    return replace(spec, vision=replace(spec.vision, **own))


def _explain_text_only(options: EngineOptions, source: ModelSource) -> str | None:
    """Return why the model runs without a vision tower, or None if it runs with one."""
    folder = source.weights_folder
    if options.encoder_cache_tokens < ROWS_PER_PAGE:
        return f"--encoder-cache-tokens is {options.encoder_cache_tokens}"
    if options.script is not None:
        return "a script provides the answers"
    if folder is None:
        return None  # no problem: synthetic weights include the vision tower
    from negamax.checkpoint.reader import read_entries  # Imports PyTorch.

    if rotation_file(read_json_object(folder / "config.json"), folder) is not None:
        return "the checkpoint's embeddings are rotated (QuaRot)"
    if not any("vision_tower." in name for name in read_entries(folder)):
        return "the checkpoint's files have no vision tower"
    return None


def _complete_draft(draft: DraftModel, target: ModelSpec, folder: Path | None) -> DraftModel:
    """Record whether `draft` has its own embedding and head. A draft without one of them uses that
    of the target in `folder`. Raises `CheckpointError`, or `ConfigError` if that does not fit.
    """
    from negamax.checkpoint.reader import read_entries  # Imports PyTorch.

    if draft.folder is None:
        return draft
    with name_draft_errors(draft.folder):
        tensors = read_entries(Path(draft.folder))
    placed = import_names(draft.spec).place(tensors, num_layers=0)
    found = {slot for placement in placed.values() for slot in placement.slots}
    rotation = folder and rotation_file(read_json_object(folder / "config.json"), folder)
    spec = replace(
        draft.spec,
        is_rotated_back=rotation is not None,
        own_embedding=EMBEDDING in found,
        own_head=HEAD in found or draft.spec.is_pruned,
    )
    borrows = not (spec.own_embedding and spec.own_head)
    if borrows and spec.hidden_size != target.hidden_size:
        raise ConfigError(
            f"the draft's hidden_size is {spec.hidden_size}, and its files lack an embedding or a "
            f"head; the model's hidden_size is {target.hidden_size}",
            hint="use a draft with its own embedding and head, or with the model's hidden_size",
        )
    if spec.is_rotated_back and not spec.own_head:
        raise ConfigError(
            "the draft's files lack a head, and the model's head cannot be used: QuaRot "
            "rotated it together with the scale of a norm",
            hint="use a draft with its own head",
        )
    return replace(draft, spec=spec)


def _shard_index_keys(
    options: EngineOptions, spec: ModelSpec, layout: ParallelLayout, *, max_model_len: int
) -> ModelSpec:
    caches, sharding = spec.kv_caches(), options.index_cache_sharding
    check_index_options(caches, dtype=options.index_cache_dtype, sharding=sharding)
    dtypes = (options.index_cache_dtype, options.dtype, spec.dtype)
    is_sharded = shards_index(
        caches,
        "off" if layout.cp > 1 or options.has_host_blocks else sharding,
        dtype=next(dtype for dtype in dtypes if dtype != "auto"),
        ranks=layout.attention.size,
        max_model_len=max_model_len,
    )
    return spec.shard_index() if is_sharded else spec


def _log_ready(ready: WorkerReady, *, block_size: int, dp: int) -> None:
    summary = f"{ready.load_summary}; {ready.dtype} on {ready.device}"
    logger.info("%s; %d KV blocks of %d tokens", summary, ready.num_kv_blocks, block_size)
    if ready.memory_summary:
        logger.info("%s", ready.memory_summary)
    if num_blocks := dp * ready.num_host_blocks:
        logger.info(
            "main memory has room for the KV of %d more tokens (%d blocks, %.2f GiB on all ranks)",
            num_blocks * block_size,
            num_blocks,
            num_blocks * ready.host_block_bytes / 2**30,
        )
    if ready.num_file_blocks:
        logger.info(
            "files can hold the KV cache of %d tokens; existing files hold %d tokens",
            ready.num_file_blocks * block_size,
            len(ready.file_hashes) // HASH_BYTES * block_size,
        )
    if ready.paths:
        logger.info("%s", ready.paths)
    logger.debug("kernels:\n%s", ready.kernels)


def _start_executor(
    config: WorkerConfig,
    options: EngineOptions,
    source: ModelSource,
    *,
    script: Script | None,
    launcher: RayLauncher | None,
) -> Executor:
    if script is not None:
        return ScriptedExecutor(script, source, options, block_size=config.block_size)
    if config.layout.world_size == 1:
        return InProcessExecutor(config)
    if config.layout.nodes == 1:
        return MultiProcessExecutor(config)
    facts = collect_facts(options, source, device=config.device)
    checks = {} if launcher is None else {"check": launcher.check}
    return start_on_nodes(config, options.nodes, facts=facts, **checks)


def _make_scheduler(
    options: EngineOptions, config: WorkerConfig, ready: WorkerReady, *, max_model_len: int
) -> GroupScheduler:
    speculation = config.speculation
    num_ranks = _count_dp_ranks(options, config)
    num_rows = num_ranks * options.num_replicas * config.max_num_seqs
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=ready.num_kv_blocks,
        enable_prefix_caching=options.enable_prefix_caching,
        # The server's limit is lower, so normally only the server refuses requests.
        max_queued_requests=2 * (options.max_queued_requests + num_rows),
        eos_token_ids=frozenset(config.eos_token_ids),
        num_draft_tokens=ready.num_draft_tokens,
        num_stages=config.layout.pp if options.enable_overlap else 1,
        num_shards=config.layout.cp,
        encoder_tokens=config.encoder_tokens,
        num_encoders=config.layout.num_encoders,
        # Synthetic acceptance ignores masks, so constrained rows must not verify drafts.
        constrained_drafts=not speculation or speculation.synthetic_acceptance_rates is None,
        chunk_length=choose_chunk_length(options, config, max_model_len=max_model_len),
        num_host_blocks=ready.num_host_blocks,
        num_file_blocks=ready.num_file_blocks,
        logs_cache_changes=options.kv_events is not None,
        stores_new_blocks=options.kv_offloading_write_policy == "write_through",
    )
    lengths: Sequence[DraftLength | None] = [None] * num_ranks
    if speculation is not None and speculation.adaptive and ready.num_draft_tokens:
        joint = AdaptiveDraftLength(speculation.lengths, ready.step_seconds)
        lengths = make_rank_lengths(joint, num_ranks)
    scheduler = GroupScheduler(limits, lengths)
    found = ready.file_hashes
    for rank in scheduler.ranks:
        rank.host.files.add_found(
            found[at : at + HASH_BYTES] for at in range(0, len(found), HASH_BYTES)
        )
    return scheduler


def choose_chunk_length(
    options: EngineOptions, config: WorkerConfig, *, max_model_len: int
) -> ChunkLength:
    layout, most = config.layout, config.max_num_batched_tokens
    if layout.pp == 1 or not options.enable_dynamic_chunking or max_model_len <= most:
        return EvenChunks()
    gpu = _find_gpu(config.device)
    model = Model.of(
        config.spec, gpu, kv_dtype=config.kv_cache_dtype, index_dtype=config.index_cache_dtype
    )
    costs = Costs(model, gpu, layout, per_node=layout.ranks_per_node)
    length = plan_even_times(
        costs,
        max_num_batched_tokens=most,
        block_size=config.block_size,
        max_model_len=max_model_len,
    )
    logger.info(
        "prompt chunks take equal time: %d tokens at first, %d at the end of a maximal prompt",
        most,
        length.fit(max_model_len, most, most)[0],
    )
    return length


def _find_gpu(device: str) -> GpuModel:
    """Return this machine's GPU, or `MEASURED` for an unknown GPU. Plans need only time ratios."""
    if device == "cpu":
        return MEASURED
    try:
        return next(iter(visible_gpus()), MEASURED)
    except ConfigError:
        return MEASURED


def _count_dp_ranks(options: EngineOptions, config: WorkerConfig) -> int:
    return 1 if options.script else config.layout.dp


def _make_balancer(options: EngineOptions, config: WorkerConfig) -> ExpertBalancer | None:
    """Create the expert balancer. Return None if options neither record loads nor move experts."""
    sizes = config.spec.expert_sizes()
    if config.experts == FIXED or sizes is None:
        return None
    return ExpertBalancer(
        config.layout, num_layers=config.spec.num_layers, num_experts=sizes[0], config=options.eplb
    )


def find_device(name: str) -> tuple[str, int | None]:
    """Resolve `--device` to ("cpu", None) or to ("cuda", number of GPUs)."""
    if name == "cpu":
        return name, None
    from negamax.worker.device import choose_device, num_gpus

    device = choose_device(name)
    return device, num_gpus(device)


def _describe_model(
    options: EngineOptions,
    source: ModelSource,
    config: WorkerConfig,
    ready: WorkerReady,
    *,
    max_model_len: int,
) -> ModelInfo:
    return ModelInfo(
        model=source.name,
        served_model_name=source.name,
        architecture=source.spec.architecture,
        max_model_len=max_model_len,
        vocab_size=source.spec.vocab_size,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=source.spec.bos_token_id,
        sampling_defaults=source.generation.sampling,
        max_logprobs=options.max_logprobs,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        num_kv_blocks=ready.num_kv_blocks,
        data_parallel_size=_count_dp_ranks(options, config),
        device=ready.device,
        dtype=ready.dtype,
        memory=ready.memory_summary,
        host_block_bytes=ready.host_block_bytes,
        speculation=config.speculation,
        shape=make_shape(
            options,
            ready.shape,
            model=source.name,
            revision=find_commit(Path(config.folder)) if config.folder else options.revision,
        ),
        vision=config.spec.vision,
    )


def choose_num_threads(options: EngineOptions, layout: ParallelLayout) -> int:
    """Return the number of CPU threads per rank. All engines share the machine's cores."""
    return options.num_threads or default_num_threads(layout.ranks_per_node * options.num_replicas)


def default_num_threads(num_ranks: int) -> int:
    """Return the default number of CPU threads per rank: the number of cores / number of ranks.
    With three cores or more, one core stays free for the server and the scheduler.

    If there are more threads than free cores, threads wait for each other's time slices. For
    example, if one of 2 cores is busy, a GEMM of 25 us takes 4 to 8 ms on 2 threads. On 2 idle
    cores, 2 threads decode up to 1.4 times as fast as one thread.
    """
    cores = env.usable_cores()
    return max(1, (cores - (cores > 2)) // num_ranks)


def _limit_context_length(max_model_len: int, pool_tokens: int) -> int:
    """Limit the context length to `pool_tokens` + 1. A sequence's last token needs no KV."""
    limit = pool_tokens + 1
    if max_model_len > limit:
        text = "the KV cache holds %d tokens, so the context length is %d instead of %d"
        logger.warning(text, pool_tokens, limit, max_model_len)
    return min(max_model_len, limit)
