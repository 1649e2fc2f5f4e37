"""Which tensor-parallel sizes a model can be split over: all conditions in one place, in integers.

The engine asks before it starts a process, and `negamax doctor` asks for what would run.
"""

from __future__ import annotations

from collections.abc import Iterator

from negamax.base.errors import ConfigError
from negamax.config.model_spec import ModelSpec
from negamax.parallel.layout import ParallelLayout


def check_split(layout: ParallelLayout, spec: ModelSpec, *, block: int = 1) -> None:
    """Refuse a layout that cannot hold the model; `block` is the unit in which matrices are cut
    (128 where FP8 weights are kept as stored, else 1). Errors: `ConfigError` with the sizes that
    work.
    """
    try:
        _check(layout, spec, block=block)
    except ConfigError as error:
        sizes = ", ".join(map(str, tensor_parallel_sizes(spec, block=block, most=spec.num_heads)))
        hint = f"use --tensor-parallel-size {sizes}" if sizes else "use --device cpu"
        raise ConfigError(error.message, hint=hint) from None


def tensor_parallel_sizes(spec: ModelSpec, *, block: int = 1, most: int) -> Iterator[int]:
    """The numbers of ranks up to `most` that `check_split` takes."""
    for size in range(1, most + 1):
        try:
            _check(ParallelLayout(tp=size), spec, block=block)
        except ConfigError:
            continue
        yield size


def _check(layout: ParallelLayout, spec: ModelSpec, *, block: int) -> None:
    heads = len(layout.attention.heads(spec.num_heads))
    kv_heads = len(layout.attention.kv_heads(spec.num_kv_heads))
    layout.vocab(spec.vocab_size)
    widths = {what: len(layout.experts.width(width)) for what, width in spec.mlp_widths().items()}
    for what, share in (
        ("query heads", heads * spec.head_dim),
        ("KV heads", kv_heads * spec.head_dim),
        *widths.items(),
    ):
        if share % block:
            raise ConfigError(
                f"on {layout.world_size} ranks a rank's share of the {what} is {share} rows; FP8 "
                f"weights are cut in blocks of {block}"
            )
