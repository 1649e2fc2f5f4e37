"""The limits of a scheduler."""

from dataclasses import dataclass, field

from negamax.scheduler.chunk_length import ChunkLength, EvenChunks


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of a scheduler, from options that have already been checked."""

    max_num_seqs: int  # largest number of running sequences
    max_num_batched_tokens: int  # largest number of tokens in one step
    max_model_len: int  # largest number of tokens of a sequence, including its output
    block_size: int  # tokens per KV block
    num_blocks: int
    enable_prefix_caching: bool
    max_queued_requests: int
    eos_token_ids: frozenset[int]
    num_draft_tokens: int = 0  # largest number of draft tokens per row and step.
    # `num_stages`: number of pipeline stages, and of plans in flight. A plan never reads a token
    # that another plan in flight samples.
    num_stages: int = 1
    num_shards: int = 1  # number of context-parallel ranks that split a prompt's tokens
    constrained_drafts: bool = True  # whether rows with grammar masks verify drafts
    num_host_blocks: int = 0  # number of host blocks, the second level of the prefix cache
    num_file_blocks: int = 0  # number of KV blocks in files, the third level of the prefix cache
    stores_new_blocks: bool = True  # whether host memory gets all full blocks, not only reused ones
    encoder_tokens: int = 0  # capacity of the encoder cache in image tokens; 0: images are refused
    num_encoders: int = 1  # number of ranks that encode images
    logs_cache_changes: bool = False  # whether `Scheduler.cache_log` records changes
    chunk_length: ChunkLength = field(default_factory=EvenChunks)  # chooses the chunk lengths
