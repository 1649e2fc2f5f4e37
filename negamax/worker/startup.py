"""What a rank does once, before its first step: it takes its device, joins the other ranks and
records CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from negamax.base.progress import Progress
from negamax.kernels.registry import KernelTable
from negamax.layers.attention import KvCaches
from negamax.models.decoder import Decoder
from negamax.parallel.context import ParallelContext
from negamax.worker.config import WorkerConfig
from negamax.worker.device import Runtime
from negamax.worker.graphs import StepGraphs
from negamax.worker.proposer import Proposer
from negamax.worker.request_state import RequestState
from negamax.worker.step_shapes import DRAFTS, ROWS, TOKENS, capture_shapes
from negamax.worker.warmup import warming_up, warmup_layers


def take_device(config: WorkerConfig) -> torch.device:
    """This rank's device, with a stream of its own as the calling thread's current one (graphs need
    that).
    """
    if config.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", config.layout.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    return device


def open_context(
    config: WorkerConfig, device: torch.device, num_draft_tokens: int
) -> ParallelContext:
    """The groups of ranks that this one is in; waits for the others."""
    if config.layout.world_size == 1:
        return ParallelContext.single()
    assert config.addresses is not None, "several ranks need a rendezvous"
    rendezvous = config.addresses.rendezvous
    if device.type == "cpu":
        return ParallelContext.gloo(config.layout, rendezvous, has_drafts=num_draft_tokens > 0)
    return ParallelContext.nccl(
        config.layout,
        rendezvous,
        device=device,
        hidden_size=config.spec.hidden_size,
        max_tokens=config.max_num_batched_tokens,
        max_rows=config.max_num_seqs * (1 + num_draft_tokens),
        is_one_sided=config.all2all_backend == "one_sided",
        has_drafts=num_draft_tokens > 0,
    )


def capture_graphs(
    config: WorkerConfig,
    *,
    model: Decoder,
    caches: Sequence[KvCaches],
    requests: RequestState,
    kernels: KernelTable,
    context: ParallelContext,
    runtime: Runtime,
    proposer: Proposer | None,
) -> tuple[StepGraphs | None, str]:
    """The CUDA graphs of a rank, recorded, and what they took, for people; None where steps are
    launched kernel by kernel.
    """
    if runtime.graph_pool is None or not config.cudagraph_size:
        return None, ""
    shapes = capture_shapes(
        max_rows=config.cudagraph_size,
        max_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        draft_lengths=_draft_lengths(config, proposer),
    )
    graphs = StepGraphs(
        shapes,
        model,
        caches,
        requests,
        kernels=kernels,
        group=context.attention_group,
        runtime=runtime,
        proposer=proposer,
    )
    with warming_up(context):
        graphs.warmup(warmup_layers(model.layers, config.kv_caches))
    pool = runtime.graph_pool()
    shown = config.show_progress and config.layout.rank == 0
    with Progress("recording CUDA graphs of prefills", enabled=shown) as progress:
        prefills = graphs.capture(TOKENS, pool, progress)
    with Progress("recording CUDA graphs of decodes", enabled=shown) as progress:
        captured = [graphs.capture(ROWS, pool, progress)]
        if shapes[DRAFTS]:
            captured.append(graphs.capture(DRAFTS, pool, progress))
    return graphs, f"; CUDA graphs: {'; '.join([*captured, prefills])}"


def _draft_lengths(config: WorkerConfig, proposer: Proposer | None) -> tuple[int, ...]:
    """The numbers of draft tokens, beside none, whose steps are captured."""
    if proposer is None:
        return ()
    speculation = config.speculation
    return speculation.lengths if speculation else (proposer.num_draft_tokens,)
