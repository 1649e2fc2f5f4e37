"""Options of `negamax bench offline` as a frozen dataclass."""

from dataclasses import dataclass

from negamax.bench.serve_options import WORKLOAD
from negamax.options.flags import check_options, option


@dataclass(frozen=True)
class OfflineWorkload:
    """Batches of `concurrency` concurrent requests. Lengths are in tokens."""

    concurrency: tuple[int, ...] = (1,)
    input_len: int = option(1000, "Set the number of prompt tokens.", panel=WORKLOAD, least=1)
    output_len: int = option(129, "Set the number of output tokens per request.", least=2)
    repeat: int = option(1, "Repeat each measurement this many times, and report medians.", least=1)
    temperature: float = option(1.0, "Set the temperature; 0 is greedy.", least=0.0, most=2.0)
    top_k: int = option(0, "Sample from the k likeliest tokens; 0 allows all tokens.", least=0)
    top_p: float = option(1.0, "Set the nucleus probability (top-p).", least=0.0, most=1.0)
    no_distinct_experts: bool = option(
        False,
        "Disable the count of selected experts, which runs an extra batch without CUDA graphs.",
        "--no-distinct-experts",
    )
    cached_prompts: bool = option(
        False, "Reuse the KV cache of prompts, to time only the decode steps after long contexts."
    )
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self)
