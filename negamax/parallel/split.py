"""How a model can be split over ranks: all conditions in one place, in integers.

The engine asks before it starts a process, and `negamax doctor` asks for what would run.
"""

from __future__ import annotations

from collections.abc import Iterator

from negamax.base.errors import ConfigError
from negamax.config.model_spec import ModelSpec
from negamax.config.parallel import ParallelOptions
from negamax.parallel.layout import ParallelLayout, shard


def check_split(layout: ParallelLayout, spec: ModelSpec, *, block: int = 1) -> None:
    """Refuse a layout that cannot hold the model; `block` is the unit in which matrices are cut
    (128 where FP8 weights are kept as stored, else 1). Errors: `ConfigError` with the sizes that
    work.
    """
    try:
        _check(layout, spec, block=block)
    except ConfigError as error:
        plain, whole = [], []  # sizes that cut experts, and those that need experts to be whole
        for splits in possible_splits(spec, block=block, most=spec.num_heads):
            sizes = whole if splits.enable_expert_parallel else plain
            sizes.append(str(splits.tensor_parallel_size))
        hint = f"use --tensor-parallel-size {', '.join(plain)}" if plain else "use --device cpu"
        if plain and whole:
            hint += f", or {', '.join(whole)} with --enable-expert-parallel"
        raise ConfigError(error.message, hint=hint) from None


def possible_splits(spec: ModelSpec, *, block: int = 1, most: int) -> Iterator[ParallelOptions]:
    """What `check_split` takes, for each number of ranks up to `most`: experts cut or, where they
    cannot be, whole.
    """
    for size in range(1, most + 1):
        for whole in (False, True):
            options = ParallelOptions(size, enable_expert_parallel=whole)
            try:
                _check(ParallelLayout.of(options), spec, block=block)
            except ConfigError:
                continue
            yield options
            break


def _check(layout: ParallelLayout, spec: ModelSpec, *, block: int) -> None:
    heads = len(layout.attention.heads(spec.num_heads))
    kv_heads = len(layout.attention.kv_heads(spec.num_kv_heads))
    layout.vocab(spec.vocab_size)
    shares = {"query heads": heads * spec.head_dim, "KV heads": kv_heads * spec.head_dim}
    for what, width in spec.mlp_widths().items():
        shares[what] = len(shard(width, rank=layout.tp_rank, size=layout.tp, what=what))
    experts = spec.expert_sizes()
    if experts is not None:
        count, width = experts
        layout.experts.experts(count)
        shares["experts' width"] = len(layout.experts.width(width))
    for what, share in shares.items():
        if share % block:
            raise ConfigError(
                f"on {layout.world_size} ranks a rank's share of the {what} is {share} rows; FP8 "
                f"weights are cut in blocks of {block}"
            )
