"""How a model is split over ranks: the sizes, and what can be said of them without a model."""

from __future__ import annotations

from dataclasses import dataclass

from negamax.base.errors import ConfigError

# sizes above 1 that nothing runs with, and why
UNSUPPORTED = {
    "data_parallel_size": "there is no data parallelism",
    "pipeline_parallel_size": "layers are not split into stages",
    "prefill_context_parallel_size": "prompts are not split over GPUs",
}
MOST_RANKS = 8  # of one machine
# Numbers of ranks that published models are split over, and that refusals offer; what else a model
# takes is said by `parallel/split.py`, which knows it.
USUAL_SIZES = (1, 2, 4, 8, 16)


def instead_of(name: str, size: int, *, ranks: int, splits_experts: bool) -> str:
    """The nearest setting that works to `size` of the unsupported `name`, beside `ranks`
    tensor-parallel ones.
    """
    nearest, own = "use --tensor-parallel-size", _usual(ranks)
    if splits_experts and ranks * size <= MOST_RANKS:
        return f"{nearest} {_usual(ranks * size)} --enable-expert-parallel"
    if name != "data_parallel_size":
        return f"{nearest} {own} without it" if ranks > 1 else f"{nearest} {_usual(size)}"
    return (
        f"{nearest} {own if ranks > 1 else 4}, and start one server per group of GPUs "
        "(CUDA_VISIBLE_DEVICES)"
    )


def _usual(size: int) -> int:
    """The largest usual size up to `size`."""
    return max(each for each in USUAL_SIZES if each <= max(1, size))


@dataclass(frozen=True)
class ParallelOptions:
    """Numbers of ranks; their names are those of vLLM's options. Errors: `ConfigError` with the
    reason and the nearest setting that works.
    """

    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False  # over all ranks that share a layer
    # ranks that experts are split over, the others cut each expert; None: 1, or all of them
    expert_parallel_size: int | None = None
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1

    def __post_init__(self) -> None:
        ranks, experts = self.tensor_parallel_size, self.expert_parallel_size
        for name, size in (
            ("--tensor-parallel-size", ranks),
            ("--expert-parallel-size", 1 if experts is None else experts),
        ):
            if size < 1:
                raise ConfigError(f"{name} is {size}; allowed: 1 or more")
        if experts is not None and ranks % experts:
            usual = _usual(ranks)
            fitting = ", ".join(str(size) for size in USUAL_SIZES if size <= usual)
            raise ConfigError(
                f"--expert-parallel-size is {experts}; experts are split over ranks of "
                f"--tensor-parallel-size, which is {ranks}",
                hint=f"use one of {fitting}"
                + (f" with --tensor-parallel-size {usual}" if usual != ranks else ""),
            )
        if self.enable_expert_parallel and experts == 1 < ranks:
            raise ConfigError(
                "--enable-expert-parallel splits experts, --expert-parallel-size 1 does not",
                hint="give one of them",
            )
        for name in UNSUPPORTED:
            size = getattr(self, name)
            if size != 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {size}: {UNSUPPORTED[name]}",
                    hint=instead_of(name, size, ranks=ranks, splits_experts=self.splits_experts),
                )

    @property
    def splits_experts(self) -> bool:
        """Whether ranks hold different experts."""
        return self.num_expert_ranks > 1 or self.enable_expert_parallel

    @property
    def num_expert_ranks(self) -> int:
        """Ranks that the experts of a layer are split over."""
        if self.expert_parallel_size is not None:
            return self.expert_parallel_size
        return self.tensor_parallel_size if self.enable_expert_parallel else 1
