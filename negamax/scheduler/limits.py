"""The limits of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from negamax.scheduler.chunk_length import ChunkLength, EvenChunks


@dataclass(frozen=True)
class SchedulerLimits:
    """What the scheduler may use. All at least 1; the options have been checked before."""

    max_num_seqs: int  # sequences that run at a time; the worker's slots
    max_num_batched_tokens: int  # tokens in one step
    max_model_len: int  # tokens of one sequence, prompt and output
    block_size: int  # tokens per KV block
    num_blocks: int
    enable_prefix_caching: bool
    max_queued_requests: int
    eos_token_ids: frozenset[int]
    num_draft_tokens: int = 0  # that a row may verify in a step
    # of a pipeline: a plan for each is on its way, and none needs what another one will sample
    num_stages: int = 1
    num_shares: int = 1  # context-parallel ranks, which share out the tokens of prompts
    constrained_drafts: bool = True  # whether rows with masks verify any
    chunk_length: ChunkLength = field(default_factory=EvenChunks)  # of prompts
