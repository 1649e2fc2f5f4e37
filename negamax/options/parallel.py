"""Sizes that split a model over ranks, with the checks that do not depend on the model."""

from dataclasses import dataclass

from negamax.base.errors import ConfigError

# sizes that error messages suggest, because all published models can be split by these sizes
USUAL_SIZES = (1, 2, 4, 8, 16)

# Either NCCL or kernels that write to peer memory send tokens between data-parallel ranks.
ALL2ALL_BACKENDS = ("allgather_reducescatter", "one_sided")


@dataclass(frozen=True)
class ParallelOptions:
    """Numbers of ranks, named as in vLLM. Each `ConfigError` suggests a size that works."""

    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False  # Whether each rank has whole experts.
    # `expert_parallel_size`: number of groups with different experts; None: all ranks if EP, else 1
    expert_parallel_size: int | None = None
    # number of tensor-parallel groups with their own requests; all groups share the experts
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pp_layer_partition: str | None = None  # layers per stage, "16,16,15,15"; None splits evenly.
    # `prefill_context_parallel_size`: number of tensor-parallel groups that split prompts (PCP).
    prefill_context_parallel_size: int = 1
    # number of ranks that split the KV cache of one head instead of each storing a copy (DCP)
    decode_context_parallel_size: int = 1
    # number of consecutive tokens of a sequence on one DCP rank; None: the block size
    cp_kv_cache_interleave_size: int | None = None
    redundant_experts: int = 0  # number of extra expert copies in each layer

    def __post_init__(self) -> None:
        ranks, experts = self.tensor_parallel_size, self.expert_parallel_size
        replicas, shares = self.data_parallel_size, self.prefill_context_parallel_size
        interleave = self.cp_kv_cache_interleave_size
        for name, size in (
            ("--tensor-parallel-size", ranks),
            ("--expert-parallel-size", 1 if experts is None else experts),
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
            ("--data-parallel-size", replicas),
            ("--prefill-context-parallel-size", shares),
            ("--decode-context-parallel-size", self.decode_context_parallel_size),
            ("--cp-kv-cache-interleave-size", 1 if interleave is None else interleave),
        ):
            if size < 1:
                raise ConfigError(f"{name} is {size}; allowed: 1 or more")
        if experts is not None and ranks * replicas * shares % experts:
            usual = max(size for size in USUAL_SIZES if size <= max(1, ranks))
            fitting = ", ".join(str(size) for size in USUAL_SIZES if size <= usual)
            groups = ((replicas, "data-parallel"), (shares, "context-parallel"))
            beside = "".join(f" in each of {n} {kind} ranks" for n, kind in groups if n > 1)
            raise ConfigError(
                f"--expert-parallel-size is {experts}; it must divide the number of ranks, "
                f"but --tensor-parallel-size is {ranks}{beside}",
                hint=f"use one of {fitting}"
                + (f" with --tensor-parallel-size {usual}" if usual != ranks else ""),
            )
        if self.enable_expert_parallel and experts == 1 < ranks * replicas * shares:
            refusal = "--enable-expert-parallel contradicts --expert-parallel-size 1"
            raise ConfigError(refusal, hint="omit --enable-expert-parallel, or use a larger size")
        _ = self.layers_of_stages  # this property checks `pp_layer_partition`
        self._check_cache_ranks()

    def _check_cache_ranks(self) -> None:
        holders, ranks = self.decode_context_parallel_size, self.tensor_parallel_size
        if holders > 1 < self.prefill_context_parallel_size:
            raise ConfigError(
                f"--decode-context-parallel-size is {holders} and --prefill-context-parallel-size "
                f"is {self.prefill_context_parallel_size}; with prefill context parallelism, "
                f"each rank must store the whole KV cache",
                hint="use only one of the two options, with --tensor-parallel-size",
            )
        if ranks % holders:
            sizes = range(1, min(ranks, holders) + 1)
            nearest = max(size for size in sizes if ranks % size == 0)
            raise ConfigError(
                f"--decode-context-parallel-size is {holders}; it must divide "
                f"--tensor-parallel-size, which is {ranks}",
                hint=f"use --decode-context-parallel-size {nearest}",
            )

    def check_interleave(self, block_size: int) -> None:
        """Raise `ConfigError` if the interleave size is not the block size."""
        size = self.cp_kv_cache_interleave_size
        if self.decode_context_parallel_size > 1 and size not in (None, block_size):
            raise ConfigError(
                f"--cp-kv-cache-interleave-size is {size}; it must equal the block size "
                f"{block_size}, because a rank stores whole blocks",
                hint=f"use --cp-kv-cache-interleave-size {block_size}",
            )

    @property
    def layers_of_stages(self) -> tuple[int, ...]:
        """Return the number of layers per stage, or () for an even split. Raises `ConfigError`."""
        given, stages = self.pp_layer_partition, self.pipeline_parallel_size
        if given is None:
            return ()
        words = [word.strip() for word in given.split(",")]
        if not all(word.isdecimal() and int(word) for word in words):
            allowed = "numbers of layers, 1 or more for each stage, separated by commas"
            raise ConfigError(f"--pp-layer-partition is {given!r}; allowed: {allowed}")
        if len(words) != stages:
            raise ConfigError(
                f"--pp-layer-partition has {len(words)} stages, but --pipeline-parallel-size is "
                f"{stages}",
                hint=f"use --pipeline-parallel-size {len(words)}, or give {stages} numbers",
            )
        return tuple(map(int, words))

    @property
    def num_ranks(self) -> int:
        stage = self.tensor_parallel_size * self.prefill_context_parallel_size
        return self.pipeline_parallel_size * self.data_parallel_size * stage

    @property
    def num_expert_ranks(self) -> int:
        """Return the number of groups of ranks that split the experts of a layer."""
        if self.expert_parallel_size is not None:
            return self.expert_parallel_size
        ranks = self.tensor_parallel_size * self.data_parallel_size
        ranks *= self.prefill_context_parallel_size
        return ranks if self.enable_expert_parallel else 1
