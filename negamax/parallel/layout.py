"""Compute which part of a model each rank stores. The parallel sizes are tensor (tp), expert (ep),
data (dp), pipeline (pp), prefill context (cp) and decode context (dcp).

The ranks form a grid with the axes `pp, dp, cp, tp`, where `tp` varies fastest. The number of a
rank is ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank. In each data-parallel replica,
`tp` ranks split the attention heads. All `dp * cp * tp` ranks of a pipeline stage have experts. The
ranks of a stage form `ep` equal sets, and each set holds a part of every layer's experts. The ranks
of a set split the width of each expert.
"""

from dataclasses import dataclass, replace

from negamax.base.errors import ConfigError
from negamax.options.parallel import ParallelOptions


@dataclass(frozen=True)
class AttentionView:
    """A rank's position among the `size` ranks that split the attention heads of a replica.
    `cache_size` adjacent ranks have copies of the same KV heads and split the KV cache blocks.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]  # World ranks that split the attention heads.
    cache_size: int = 1

    @property
    def cache_rank(self) -> int:
        """Return this rank's position among the ranks that split a KV cache."""
        return self.rank % self.cache_size

    @property
    def cache_ranks(self) -> tuple[int, ...]:
        """Return the world ranks that split a KV cache with this rank, this rank included."""
        first = self.rank - self.cache_rank
        return self.ranks[first : first + self.cache_size]

    def heads(self, num_heads: int) -> range:
        """Return this rank's query heads. Raises `ConfigError` if `num_heads % size` is not 0."""
        return shard(num_heads, rank=self.rank, size=self.size, what="number of attention heads")

    def cache_heads(self, num_heads: int) -> range:
        """Return the query heads of all ranks that split a KV cache with this rank."""
        own = self.heads(num_heads)
        first = own.start - self.cache_rank * len(own)
        return range(first, first + self.cache_size * len(own))

    def kv_replicas(self, num_kv_heads: int) -> int:
        """Return the number of ranks that store each KV head. Raises `ConfigError`."""
        if num_kv_heads % self.size == 0:
            return 1
        if self.size % num_kv_heads == 0:
            return self.size // num_kv_heads
        raise ConfigError(
            f"{num_kv_heads} KV heads cannot be split or replicated over {self.size} ranks",
            hint="choose a --tensor-parallel-size that divides the number of KV heads or is a "
            "multiple of it",
        )

    def kv_heads(self, num_kv_heads: int) -> range:
        """Return this rank's KV heads. If ranks outnumber heads, several ranks store each head."""
        replicas = self.kv_replicas(num_kv_heads)
        per_rank = max(1, num_kv_heads // self.size)
        first = self.rank // replicas * per_rank
        return range(first, first + per_rank)


@dataclass(frozen=True)
class RankShare:
    """A rank's part of the rows or columns of a weight."""

    part: range
    size: int  # Number of rows or columns per rank after zero padding.


@dataclass(frozen=True)
class ExpertView:
    """A rank's position among the `size` ranks that split the experts of a layer."""

    rank: int  # Position among the ranks that split the experts, from 0 to size - 1.
    size: int
    ep: int
    ranks: tuple[int, ...]

    @property
    def ep_rank(self) -> int:
        return self.rank // self.tp

    @property
    def tp(self) -> int:
        """Return the number of ranks that split the width of one expert."""
        return self.size // self.ep

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    def experts(self, num_experts: int) -> range:
        """Return this rank's experts. Raises `ConfigError` if `ep` does not divide the experts."""
        if num_experts % self.ep:
            raise ConfigError(
                f"{num_experts} experts cannot be split over {self.ep} expert-parallel ranks",
                hint="choose an expert-parallel size that divides the number of experts",
            )
        per_rank = num_experts // self.ep
        return range(self.ep_rank * per_rank, (self.ep_rank + 1) * per_rank)

    def width(self, intermediate_size: int, *, unit: int = 1) -> RankShare:
        """Return this rank's rows of an expert's gate_proj and up_proj, or columns of down_proj."""
        what = "expert intermediate size"
        shard(intermediate_size, rank=self.tp_rank, size=self.tp, what=what)
        return share(intermediate_size, rank=self.tp_rank, size=self.tp, unit=unit)


@dataclass(frozen=True)
class ParallelLayout:
    """One rank's position in the grid. Raises `ConfigError` for invalid sizes or ranks."""

    rank: int = 0
    tp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    cp: int = 1
    dcp: int = 1  # Number of adjacent tp ranks that split one KV cache.
    partition: tuple[int, ...] = ()  # Number of layers of each pipeline stage; (): split evenly.
    redundant_experts: int = 0  # Slots for extra expert copies per layer, summed over ranks.
    # `expert_placement`: for each layer, the initial expert of each slot; (): experts in order.
    expert_placement: tuple[tuple[int, ...], ...] = ()
    nodes: int = 1  # Number of machines, each with equally many consecutive ranks.

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "dp", "pp", "cp", "dcp", "nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank is {self.rank}; allowed: 0 to {self.world_size - 1}")
        if self.stage_size % self.ep:
            raise ConfigError(
                f"expert-parallel size {self.ep} does not divide the {self.stage_size} ranks of "
                f"a pipeline stage",
                hint="ep must divide dp * cp * tp",
            )
        if self.tp % self.dcp:
            raise ConfigError(
                f"{self.tp} tensor-parallel ranks cannot shard KV caches in groups of {self.dcp}",
                hint="use a --decode-context-parallel-size that divides --tensor-parallel-size",
            )
        if self.world_size % self.nodes:
            raise ConfigError(f"{self.world_size} ranks cannot be split over {self.nodes} nodes")

    @staticmethod
    def of(options: ParallelOptions, *, nodes: int = 1) -> "ParallelLayout":
        """Create the layout of rank 0."""
        return ParallelLayout(
            tp=options.tensor_parallel_size,
            ep=options.num_expert_ranks,
            dp=options.data_parallel_size,
            pp=options.pipeline_parallel_size,
            cp=options.prefill_context_parallel_size,
            dcp=options.decode_context_parallel_size,
            partition=options.layers_of_stages,
            redundant_experts=options.redundant_experts,
            nodes=nodes,
        )

    def replace_rank(self, rank: int) -> "ParallelLayout":
        return replace(self, rank=rank)

    @property
    def world_size(self) -> int:
        return self.pp * self.stage_size

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """Return this rank's position among the ranks of its machine."""
        return self.rank % self.ranks_per_node

    def ranks_of_node(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def is_on_one_node(self, ranks: tuple[int, ...]) -> bool:
        """Return whether all `ranks` are on the same machine."""
        return len({rank // self.ranks_per_node for rank in ranks}) == 1

    @property
    def stage_size(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def pp_rank(self) -> int:
        return self.rank // self.stage_size

    @property
    def dp_rank(self) -> int:
        return self.rank % self.stage_size // (self.cp * self.tp)

    @property
    def cp_rank(self) -> int:
        return self.rank % (self.cp * self.tp) // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def num_encoders(self) -> int:
        """Return the number of ranks that share the image encoding of a data-parallel replica."""
        return self.cp * self.tp

    @property
    def encoder_rank(self) -> int:
        """Return this rank's position among the ranks that encode the images of a replica."""
        return self.rank % self.num_encoders

    @property
    def attention(self) -> AttentionView:
        first = self.rank - self.tp_rank
        ranks = tuple(range(first, first + self.tp))
        return AttentionView(rank=self.tp_rank, size=self.tp, ranks=ranks, cache_size=self.dcp)

    @property
    def experts(self) -> ExpertView:
        first = self.pp_rank * self.stage_size
        ranks = tuple(range(first, first + self.stage_size))
        return ExpertView(rank=self.rank - first, size=self.stage_size, ep=self.ep, ranks=ranks)

    def expert_slots(self, num_experts: int, layer: int) -> tuple[int, ...]:
        """Return the initial expert of each slot. By default, experts are in index order."""
        if self.expert_placement:
            return self.expert_placement[layer]
        return tuple(slot % num_experts for slot in range(num_experts + self.redundant_experts))

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """Return the world ranks at this rank's position in all data-parallel replicas."""
        per_replica = self.cp * self.tp
        first = self.rank - self.dp_rank * per_replica
        return tuple(first + number * per_replica for number in range(self.dp))

    @property
    def context_ranks(self) -> tuple[int, ...]:
        """Return the world ranks that split prompts with this rank and hold the same weights."""
        first = self.rank - self.cp_rank * self.tp
        return tuple(first + number * self.tp for number in range(self.cp))

    @property
    def token_ranks(self) -> tuple[int, ...]:
        """Return the world ranks of this stage that have this rank's tensor-parallel rank."""
        first = self.pp_rank * self.stage_size + self.tp_rank
        return tuple(range(first, first + self.stage_size, self.tp))

    @property
    def reports_results(self) -> bool:
        """Return whether this rank sends the results for all ranks that run the same plans."""
        return self.is_last_stage and self.cp_rank == 0 and self.tp_rank == 0

    @property
    def is_first_stage(self) -> bool:
        """Return whether this rank embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank computes logits."""
        return self.pp_rank == self.pp - 1

    @property
    def within_stage(self) -> "ParallelLayout":
        """Return this rank's layout in a grid of one pipeline stage."""
        return replace(self, rank=self.rank % self.stage_size, pp=1, partition=())

    def layers(self, num_layers: int) -> range:
        """Return the layers of this rank's pipeline stage. Raises `ConfigError`."""
        if num_layers < self.pp:
            raise ConfigError(
                f"{num_layers} layers cannot be split over {self.pp} pipeline stages",
                hint=f"use --pipeline-parallel-size {num_layers} or less",
            )
        base, extra = divmod(num_layers, self.pp)
        even = tuple(base + (stage < extra) for stage in range(self.pp))
        sizes = self.partition or even
        if sum(sizes) != num_layers:
            raise ConfigError(
                f"--pp-layer-partition adds up to {sum(sizes)} layers; the model has {num_layers}",
                hint=f"use for example {','.join(map(str, even))}",
            )
        first = sum(sizes[: self.pp_rank])
        return range(first, first + sizes[self.pp_rank])

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Return the world ranks at this rank's position in all pipeline stages."""
        return tuple(range(self.rank % self.stage_size, self.world_size, self.stage_size))

    def vocab(self, vocab_size: int) -> range:
        """Return the rows of the embedding and of the head that this rank holds."""
        return shard(vocab_size, rank=self.tp_rank, size=self.tp, what="vocabulary size")


def shard(total: int, *, rank: int, size: int, what: str) -> range:
    """Return the range of `rank` if `size` ranks split `total` equally. `what` names `total`."""
    if total % size:
        raise ConfigError(f"{what} {total} cannot be split over {size} ranks equally")
    per_rank = total // size
    return range(rank * per_rank, (rank + 1) * per_rank)


def share(total: int, *, rank: int, size: int, unit: int) -> RankShare:
    """Return the range of `rank` if `size` ranks split `total` almost evenly in whole `unit`s."""
    units = -(-total // unit)
    first, stop = (min(units * edge // size * unit, total) for edge in (rank, rank + 1))
    return RankShare(range(first, stop), -(-units // size) * unit)
