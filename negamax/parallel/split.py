"""Check whether a model can be split over ranks.

The engine calls `check_split` before it starts a process. `negamax doctor` lists valid sizes.
Weight formats allow all sizes, because `layout.share` zero-pads parts to whole quantization groups.
"""

from collections.abc import Iterator

from negamax.base.errors import ConfigError
from negamax.config.model_spec import ModelSpec
from negamax.options.parallel import ParallelOptions
from negamax.parallel.layout import ParallelLayout, shard


def check_split(layout: ParallelLayout, spec: ModelSpec, *, gpus: int | None = None) -> None:
    """Raise a `ConfigError` that lists valid sizes if the model or `gpus` do not allow `layout`."""
    layout.layers(spec.num_layers)
    _check_slots(layout, spec)
    stages = layout.pp
    if gpus is not None and stages > gpus:
        raise ConfigError(
            f"{stages} pipeline stages need {stages} GPUs; {gpus} are available",
            hint=f"use --pipeline-parallel-size {max(1, gpus)}",
        )
    try:
        if gpus is not None and layout.world_size > gpus:
            ranks = layout.world_size
            raise ConfigError(f"{ranks} ranks need {ranks} GPUs; {gpus} are available")
        _check(layout, spec)
    except ConfigError as error:
        most = spec.num_heads if gpus is None else gpus // stages
        possible = list(possible_splits(spec, most=most))
        cut = [each.tensor_parallel_size for each in possible if not each.enable_expert_parallel]
        whole = [each.tensor_parallel_size for each in possible if each.enable_expert_parallel]
        whole = [size for size in whole if layout.ep > 1 or size not in cut]
        hint = f"use --tensor-parallel-size {', '.join(map(str, cut))}"
        hint += " without expert parallelism" if layout.ep > 1 else ""
        if whole:
            hint += f", or {', '.join(map(str, whole))} with --enable-expert-parallel"
        hint += f" with --pipeline-parallel-size {stages}" if stages > 1 else ""
        sizes = {"--prefill-context-parallel-size": layout.cp, "--data-parallel-size": layout.dp}
        others = [name for name, size in sizes.items() if size > 1]
        hint += f" without {' and '.join(others)}" if others else ""
        hint += ", or --device cpu" if gpus is not None else ""
        raise ConfigError(error.message, hint=hint) from None
    _check_cache_ranks(layout, spec)


def possible_splits(spec: ModelSpec, *, most: int) -> Iterator[ParallelOptions]:
    """Yield valid options for 1 to `most` ranks, without and with expert parallelism."""
    for size in range(1, most + 1):
        for whole in (False, True)[: 1 + (size > 1)]:
            options = ParallelOptions(size, enable_expert_parallel=whole)
            try:
                _check(ParallelLayout.of(options), spec)
            except ConfigError:
                continue
            yield options


def _check_slots(layout: ParallelLayout, spec: ModelSpec) -> None:
    """Raise `ConfigError` if a rank has an expert twice, or if ranks differ in expert count."""
    sizes, redundant = spec.expert_sizes(), layout.redundant_experts
    if sizes is None or not redundant:
        return
    count, ranks = sizes[0], layout.ep
    least, most = -count % ranks, count * (ranks - 1)
    if (count + redundant) % ranks or redundant > most:
        nearest = min(most, max(least, least + (redundant - least) // ranks * ranks))
        raise ConfigError(
            f"num_redundant_experts is {redundant}. {count} experts and their copies must be split "
            f"evenly over {ranks} ranks, with no expert twice on a rank",
            hint=f"use {nearest}, or another number from 0 to {most} that can be split evenly",
        )


def _check_cache_ranks(layout: ParallelLayout, spec: ModelSpec) -> None:
    """Raise `ConfigError` if ranks that split a KV cache have different KV heads."""
    if layout.dcp == 1:
        return
    if not spec.supports_dcp:
        raise ConfigError(
            f"--decode-context-parallel-size is {layout.dcp}: the KV cache of {spec.architecture} "
            f"cannot be sharded",
            hint="use --decode-context-parallel-size 1",
        )
    copies = layout.attention.kv_replicas(spec.num_kv_heads)
    if copies % layout.dcp:
        sizes = range(1, min(copies, layout.dcp) + 1)
        nearest = max(size for size in sizes if copies % size == 0)
        least = layout.dcp * spec.num_kv_heads
        raise ConfigError(
            f"--decode-context-parallel-size is {layout.dcp}; it must divide {copies}, "
            f"the number of ranks that store the same KV head",
            hint=f"use --decode-context-parallel-size {nearest}, or --tensor-parallel-size {least}",
        )


def _check(layout: ParallelLayout, spec: ModelSpec) -> None:
    layout.attention.heads(spec.num_heads)
    layout.attention.kv_heads(spec.num_kv_heads)
    layout.vocab(spec.vocab_size)
    for what, width in spec.mlp_widths().items():
        shard(width, rank=layout.tp_rank, size=layout.tp, what=what)
    experts = spec.expert_sizes()
    if experts is not None:
        count, width = experts
        layout.experts.experts(count + layout.redundant_experts)
        layout.experts.width(width)
