"""Compile the kernels of eager steps before the first request.

A kernel specialization is compiled at its first launch, which takes up to a second while all
requests wait. A step's numbers of tokens, decodes and sampled rows determine the specializations
that the step launches. The capture of steps compiles the kernels of captured steps. This module
compiles the kernels that no capture compiles. Examples are the kernels of proposers after captured
layers, the kernels of long prompts, and the kernels for rows that need all logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from negamax.layers.attention import KvCaches
from negamax.worker.batch import BatchLayout, StepColumns, sample_inputs
from negamax.worker.config import WorkerConfig
from negamax.worker.device import indices
from negamax.worker.proposer import DraftRows, TokenStates
from negamax.worker.step_shapes import TOKENS, capture_sizes
from negamax.worker.token_shards import shard_tokens
from negamax.worker.warmup import cut, warming_up, warmup_layers

if TYPE_CHECKING:
    from negamax.worker.runner import ModelRunner

# A warmup step computes logits of up to max(_MOST_LOGITS, max_num_seqs) rows. Steps with more rows
# use the same kernel specializations.
_MOST_LOGITS = 128
# `_LONG`: longer sequences use the same kernel specializations as sequences of this many tokens.
# `_SHORT`: number of tokens of a prompt that every kernel treats as short.
_LONG, _SHORT = 16_384, 1024


@torch.inference_mode()
def compile_eager_steps(runner: ModelRunner) -> None:
    """Compile the kernels by launching the first layers for all sizes of steps."""
    model, config, requests = runner.model, runner.config, runner.requests
    layers, slot = warmup_layers(model.layers, config.kv_caches), requests.padding_slot
    entering = None
    if not model.is_first_stage:
        shape = config.max_num_batched_tokens, config.spec.hidden_size
        entering = requests.tokens.new_zeros(shape, dtype=model.dtype)
    with warming_up(runner.context, shows=config.show_progress):
        for num_decodes, num_prompt_tokens, num_computed, longest in step_sizes(config):
            requests.num_computed[slot] = num_computed
            counts = [1] * num_decodes + cut(num_prompt_tokens, longest)
            columns = StepColumns.of_decodes([slot] * len(counts), counts)
            bounds = columns.end_offsets + num_computed
            layout = BatchLayout.without_samples(num_decodes, columns, bounds)
            _launch(layout, runner, runner.caches[:layers], entering)
    requests.num_computed[slot] = 0


def step_sizes(config: WorkerConfig) -> Iterator[tuple[int, int, int, int]]:
    """For each step, yield the number of decodes, the number of prompt tokens, the number of
    computed tokens of each sequence, and the maximum length of a prompt.
    """
    most, longest = config.max_num_batched_tokens, config.max_model_len
    num_drafts = config.speculation.num_speculative_tokens if config.speculation else 0
    most_rows = min(config.max_num_seqs * (1 + num_drafts), most)  # each draft runs as a decode
    powers = {1 << power for power in range(most.bit_length())}
    rows = sorted({*(power for power in powers if power < most_rows), most_rows})
    tokens = capture_sizes(TOKENS, most)
    # FP8 GEMMs have separate specializations for odd numbers of tokens
    sizes = sorted({*powers, *tokens, *(size - 1 for size in tokens if size > 1)})
    yield from ((num_rows, 0, 0, longest) for num_rows in rows)
    yield from ((0, size, 0, longest) for size in sizes)
    yield (0, most, 0, min(longest, _SHORT))
    yield from ((num_rows, num_rows + 1, 0, longest) for num_rows in rows if 2 * num_rows < most)
    long = min(longest, _LONG)
    yield from ((num_rows, 1, long - 1, longest) for num_rows in rows if num_rows < most)
    yield from ((0, size, long - size, longest) for size in sorted(powers) if size < long)


def _launch(
    layout: BatchLayout, runner: ModelRunner, caches: Sequence[KvCaches], entering: Tensor | None
) -> None:
    """Launch one step: the model, the sampler, and the proposal of draft tokens."""
    model, requests, proposer = runner.model, runner.requests, runner.proposer
    most_rows = runner.config.max_num_seqs
    shard = shard_tokens(layout, requests, runner.context.context_group)
    token_ids, metadata = shard.build()
    if entering is not None:
        entering = entering[: len(token_ids)].zero_()
    capture = proposer.capture if proposer else ()
    images = None
    if runner.encoder:
        images = runner.encoder.place_rows((), shard.columns, len(token_ids))
    hidden, streams = model.forward(
        token_ids, metadata, caches, capture=capture, entering=entering, images=images
    )
    if not model.is_last_stage:
        return
    columns = layout.columns
    slots, last = columns.slots, columns.query_starts[1:] - 1
    logits = model.local_logits(shard.gather(hidden)[: max(most_rows, _MOST_LOGITS)])
    runner.sampler.launch_all(logits[:1], sample_inputs(slots[:1], np.ones(1, np.int64), requests))
    if proposer is None or not capture:
        return
    # a warmup may run fewer layers, so use `hidden` for the captured layers after them
    streams += [hidden] * (len(capture) - len(streams))
    states = TokenStates(shard.describe_all(metadata), [shard.gather(one) for one in streams])
    ends = indices(last[:most_rows], token_ids.device)
    rows = indices(slots[:most_rows], token_ids.device)
    drafted = DraftRows(rows, states.positions[ends] + 2, ends)
    proposer.propose(states, drafted, requests, proposer.num_draft_tokens)
