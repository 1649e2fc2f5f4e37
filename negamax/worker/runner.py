"""Build the long-lived state of one rank before the first step: device, model, caches, request
state and captured steps.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from negamax.base.progress import Progress
from negamax.kernels.collectives.op import ALL_REDUCE_ADD_RMS
from negamax.kernels.peers import Collective
from negamax.kernels.platform import platform_of
from negamax.kernels.registry import KernelTable, resolve
from negamax.layers.kv_scales import describe_kv_scales
from negamax.models.build import build_model
from negamax.models.decoder import DecoderLayer
from negamax.parallel.context import ParallelContext
from negamax.quantization.detect import detect
from negamax.worker import kv_cache
from negamax.worker.config import WorkerConfig, WorkerReady
from negamax.worker.device import check_platform, choose_dtype, index_dtype, kv_dtype, runtime_of
from negamax.worker.eager_steps import compile_eager_steps
from negamax.worker.expert_weights import load_recorder
from negamax.worker.file_store import open_files
from negamax.worker.graphs import StepGraphs
from negamax.worker.host_pool import HostPool
from negamax.worker.image_encoder import ImageEncoder
from negamax.worker.lanes import Lane
from negamax.worker.loading import load_model, plan_loading
from negamax.worker.profile import peak_bytes
from negamax.worker.proposer import load_proposer
from negamax.worker.request_state import RequestState
from negamax.worker.sampler import Sampler
from negamax.worker.self_check import SelfCheck
from negamax.worker.shape import describe_shape
from negamax.worker.stages import Stage
from negamax.worker.step_shapes import DRAFTS, ROWS, TOKENS, capture_shapes
from negamax.worker.step_times import measure_steps
from negamax.worker.warmup import warming_up, warmup_layers


class ModelRunner:
    """The model of one rank on its device, ready to run steps (`worker.step`)."""

    def __init__(self, config: WorkerConfig) -> None:
        """Load weights, allocate caches and capture steps. Raises `ConfigError`, `CheckpointError`
        or `ResourceError`, in most cases before the weights take memory.
        """
        self.device = device = take_device(config)
        self.runtime = runtime_of(device)
        dtype = choose_dtype(config.dtype, spec=config.spec, device=config.device)
        cache_dtype = kv_dtype(config.kv_cache_dtype, dtype=dtype, device=config.device)
        of_index = index_dtype(config.index_cache_dtype, dtype=dtype)
        index_name = str(of_index).removeprefix("torch.")
        self.config = config = replace(config, index_cache_dtype=index_name)
        platform = platform_of(device)
        check_platform(platform, cache_dtypes=(cache_dtype, of_index), rank=config.layout.rank)
        self.kernels = kernels = resolve(platform=platform, dtype=dtype).select(config.kernels)
        kv_cache.check_weights_fit(config, kernels=kernels, device=device)
        kv_cache.check_rows_fit(config, device=device)
        load_plan = plan_loading(config, kernels=kernels, cache_dtype=cache_dtype)
        self.proposer = load_proposer(config, kernels=kernels)
        num_draft_tokens = self.proposer.num_draft_tokens if self.proposer else 0
        self.context = context = open_context(config, device, num_draft_tokens)
        self.model = build_model(config.spec, context=context, device=device, kernels=kernels)
        with torch.inference_mode():
            load_summary = load_model(self.model, config, load_plan, device=device)
            if self.proposer is not None:
                load_summary += self.proposer.load(self.model, context, device)
                if self.proposer.acceptance is not None:
                    load_summary += self.proposer.acceptance.load(device)
            load_summary += describe_kv_scales(self.model.layers, cache_dtype)
            if config.self_check:
                check = SelfCheck(self, load_plan, cache_dtype=cache_dtype)
                warm_up = partial(warming_up, context, shows=config.show_progress)
                load_summary += check.run(self.model, warm_up if self.runtime.graph_pool else None)
            self.runtime.release_memory()  # release memory that only loading needed
            self.requests = RequestState(
                config.max_num_seqs,
                config.max_model_len,
                max_blocks=-(-(config.max_model_len + num_draft_tokens) // config.block_size),
                eos_token_ids=config.eos_token_ids,
                device=device,
                num_draft_tokens=num_draft_tokens,
            )
            self.stage = Stage(self)
            self.sampler = Sampler(
                self.requests,
                kernels=kernels,
                group=context.attention_group,
                first_id=self.model.vocab_range.start,
                on_shards=self.runtime.samples_on_shards,
            )
            self.encoder: ImageEncoder | None = None
            tower, spec = self.model.vision, config.spec.vision
            if tower is not None and spec is not None:
                self.encoder = ImageEncoder(tower, spec, self)
            self.experts = load_recorder(config, self.model, context, device)
            num_blocks = self._allocate_caches(cache_dtype)
            self.host_pool = self._open_host_pool(num_blocks, cache_dtype)
            self.lane = self._open_lane()
            self.graphs, graph_summary = self._capture_graphs()
            if self.experts is not None:
                self.experts.reset()
        files = self.host_pool.files if self.host_pool else None
        scheme = detect(config.spec.quantization)
        self.ready = WorkerReady(
            num_kv_blocks=num_blocks,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            kernels=kernels.describe(scheme.formats if scheme else ()),
            load_summary=load_summary,
            paths=describe_paths(self.model.layers, kernels, context.attention_group),
            memory_summary=kv_cache.describe(num_blocks, config, dtype=cache_dtype) + graph_summary,
            num_draft_tokens=num_draft_tokens,
            step_seconds=measure_steps(self),
            num_host_blocks=self.host_pool.num_blocks if self.host_pool else 0,
            host_block_bytes=self.host_pool.block_bytes if self.host_pool else 0,
            num_file_blocks=files.num_blocks if files else 0,
            file_hashes=b"".join(files.found) if files else b"",
            lanes=(self.lane.endpoint,) if self.lane else (),
            shape=describe_shape(self, cache_dtype=cache_dtype),
        )

    def _allocate_caches(self, dtype: torch.dtype) -> int:
        """Allocate the KV caches. Return the number of blocks that fit on every rank."""
        config, device = self.config, self.device
        needed: dict[str, int] = {}
        if self.runtime.graph_pool is not None:  # run a full prefill step to measure its memory
            needed["workspace"] = peak_bytes(self, dtype=dtype)
            if self.encoder:
                needed["encoding"] = self.encoder.peak_bytes()
                needed["partial"] = self.encoder.partial_bytes()
        affordable = kv_cache.choose_blocks(config, dtype=dtype, device=device, **needed)
        num_blocks = self.context.world_min(affordable)
        # add a padding block, which the scheduler does not count
        self.caches = kv_cache.allocate_own(config, num_blocks + 1, dtype=dtype, device=device)
        self.requests.set_padding_block(num_blocks)
        if self.proposer:
            self.proposer.use_caches(self.caches[len(self.model.layers) :])
        return num_blocks

    def _open_host_pool(self, num_blocks: int, dtype: torch.dtype) -> HostPool | None:
        """Allocate equally many host blocks on all ranks, or return None if they are disabled."""
        config, device = self.config, self.device
        if not config.has_host_blocks:
            return None
        chosen = kv_cache.choose_host_blocks(config, num_blocks, dtype=dtype, device=device)
        pool = HostPool(
            self.caches, self.context.world_min(chosen), block_size=config.block_size, device=device
        )
        pool.files = open_files(config, self.kernels, pool.view_bytes(), dtype=str(dtype))
        return pool

    def _open_lane(self) -> Lane | None:
        """Open the lane to other engines. Return None if the config has no lane."""
        config, options = self.config, self.config.lane
        if options is None or self.host_pool is None:
            return None
        rank, ranks = config.layout.rank, config.layout.world_size
        return Lane(self.host_pool, config.kv_caches, self.caches, options, rank=rank, ranks=ranks)

    def _capture_graphs(self) -> tuple[StepGraphs | None, str]:
        """Compile eager steps and capture common steps. Return graphs or None, and a log text."""
        config, pool_of = self.config, self.runtime.graph_pool
        if pool_of is None:
            return None, ""
        compile_eager_steps(self)
        if not config.cudagraph_size:
            return None, ""
        shapes = capture_shapes(
            max_rows=config.cudagraph_size,
            max_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            draft_lengths=draft_lengths(self),
        )
        graphs = StepGraphs(shapes, self)
        with warming_up(self.context, shows=config.show_progress):
            graphs.warmup(warmup_layers(self.model.layers, config.kv_caches))
        pool, summaries = pool_of(), {}
        shown = config.show_progress and config.layout.rank == 0
        for kind, what in ((TOKENS, "prefills"), (ROWS, "decodes"), (DRAFTS, "decodes")):
            if shapes[kind]:
                with Progress(f"recording CUDA graphs of {what}", enabled=shown) as progress:
                    summaries[kind] = graphs.capture(kind, pool, progress)
        listed = [summaries[kind] for kind in (ROWS, DRAFTS, TOKENS) if kind in summaries]
        return graphs, f"; CUDA graphs: {'; '.join(listed)}"


def take_device(config: WorkerConfig) -> torch.device:
    """Return this rank's device. On a GPU, also select a non-default stream, which graphs need."""
    if config.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", config.layout.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    return device


def open_context(
    config: WorkerConfig, device: torch.device, num_draft_tokens: int
) -> ParallelContext:
    """Wait for the other ranks, and open the process groups of this rank."""
    if config.layout.world_size == 1:
        return ParallelContext.single()
    assert config.addresses is not None, "several ranks need addresses to meet at"
    rendezvous, has_drafts = config.addresses.rendezvous, num_draft_tokens > 0
    if device.type == "cpu":
        return ParallelContext.gloo(config.layout, rendezvous, has_drafts=has_drafts)
    return ParallelContext.nccl(
        config.layout,
        rendezvous,
        device=device,
        hidden_size=config.spec.hidden_size,
        max_tokens=config.max_num_batched_tokens,
        max_rows=config.max_num_seqs * (1 + num_draft_tokens),
        is_one_sided=config.all2all_backend == "one_sided",
        has_drafts=has_drafts,
    )


def describe_paths(layers: Sequence[DecoderLayer], kernels: KernelTable, group: Collective) -> str:
    """List the kernels that compute the QK norms and the all-reduce."""
    norms = dict.fromkeys(layer.attention.norm_kernel for layer in layers)
    named = [f"{one.provider} ({one.op})" if one else "unfused, by its definition" for one in norms]
    way = f"{kernels[ALL_REDUCE_ADD_RMS].provider} ({ALL_REDUCE_ADD_RMS}), "
    if group.size == 1:
        way = "none, one rank"
    elif kernels.platform.vendor == "cpu":
        way += "gloo"
    else:
        way += "NCCL" if group.peers is None else "peer memory, and NCCL for many rows"
    return f"QK norm: {', '.join(named)}; all-reduce: {way}"


def draft_lengths(runner: ModelRunner) -> tuple[int, ...]:
    """Return the nonzero numbers of draft tokens for which steps are captured."""
    if runner.proposer is None:
        return ()
    speculation = runner.config.speculation
    return speculation.lengths if speculation else (runner.proposer.num_draft_tokens,)
