"""Measure the memory that the largest prefill step needs in addition to weights and caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from negamax.base.log import get_logger
from negamax.kernels.attention.metadata import attention_metadata
from negamax.layers.attention import KvCaches
from negamax.worker.kv_cache import allocate_own
from negamax.worker.proposer import DraftRows, TokenStates
from negamax.worker.warmup import cut, warming_up, warmup_layers

if TYPE_CHECKING:
    from negamax.worker.runner import ModelRunner

logger = get_logger(__name__)


@torch.inference_mode()
def peak_bytes(runner: ModelRunner, *, dtype: torch.dtype) -> int:
    """Measure the GPU bytes of the largest prefill step and of the proposer. The layers share one
    cache in `dtype`, which stores only the tokens of the measured step.
    """
    model, config, requests = runner.model, runner.config, runner.requests
    proposer, device = runner.proposer, runner.device
    num_tokens = config.max_num_batched_tokens
    length = min(num_tokens, config.max_model_len)
    counts = cut(num_tokens, length)
    blocks_each = -(-length // config.block_size)
    kv = allocate_own(config, len(counts) * blocks_each, dtype=dtype, device=device, shared=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    # block tables have the width of `RequestState`, for which kernels are compiled
    tables = requests.block_tables.new_zeros(len(counts), requests.block_tables.shape[1])
    blocks = torch.arange(len(counts) * blocks_each, device=device)
    tables[:, :blocks_each] = blocks.view(-1, blocks_each)
    metadata = attention_metadata(tables, counts, counts)
    token_ids = torch.randint(0, config.spec.vocab_size, (num_tokens,), device=device)
    most, entering = config.max_num_seqs, None
    if not model.is_first_stage:
        shape = num_tokens, config.spec.hidden_size
        entering = torch.zeros(shape, dtype=model.dtype, device=device)

    def step(caches: Sequence[KvCaches]) -> None:
        capture = proposer.capture if proposer else ()
        hidden, residuals = model.forward(
            token_ids, metadata, caches, capture=capture, entering=entering
        )
        if model.is_last_stage:
            model.local_logits(hidden[:most])
        if proposer is not None and capture and model.is_last_stage:
            # a warmup may run fewer layers, so use `hidden` for the captured layers after them
            residuals += [hidden] * (len(capture) - len(residuals))
            # reuse slots, because the profiled step may have more sequences than there are slots
            at = replace(metadata, token_slots=metadata.token_slots % most)
            ends = metadata.query_starts[1:].long()[:most] - 1
            proposer.use_caches(kv[len(model.layers) :])
            rows = DraftRows(at.token_slots[ends], at.positions[ends] + 2, ends)
            proposer.propose(TokenStates(at, residuals), rows, requests, proposer.num_draft_tokens)
            proposer.use_caches(())

    with warming_up(runner.context, shows=config.show_progress):
        step(kv[: warmup_layers(model.layers, config.kv_caches)])
        if runner.encoder is not None:
            runner.encoder.run_tower(tokens=1)
    step(kv)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    kv.clear()
    torch.cuda.empty_cache()
    text = "a step of %d tokens takes %.2f GiB in addition to weights and cache"
    logger.info(text, num_tokens, peak / 2**30)
    return peak + peak // 8  # add an eighth for fragmentation of the allocator
