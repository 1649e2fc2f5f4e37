"""Compare two results of `negamax bench accuracy --json` on the same problems."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from negamax.base.errors import ConfigError

SIGNIFICANT = 0.05  # A result with a p-value below this limit is significant.
Suites = Sequence[Mapping[str, Any]]


def compare(files: Sequence[Path], results: Sequence[Suites]) -> Iterator[str]:
    """Yield the lines of a report on each suite that both `results` contain. McNemar's exact test
    decides whether the results differ beyond chance. Raises `ConfigError` if the results have no
    common suite, or if a suite's problems differ.
    """
    if len(results) != 2:
        raise ConfigError(
            f"{len(results)} accuracy results are given; 2 can be compared",
            hint="use two files of `bench accuracy --json`",
        )
    first, second = ({each["suite"]: each for each in result} for result in results)
    common = [suite for suite in first if suite in second]
    if not common:
        raise ConfigError(
            f"the files have no suite in common: {', '.join(first)} and {', '.join(second)}"
        )
    for suite in common:
        a, b = first[suite], second[suite]
        if a["digest"] != b["digest"]:
            raise ConfigError(
                f"the results of {suite} are for different problems",
                hint="use the same --count, --seed and --data for both results",
            )
        solved = list(zip(a["solved"], b["solved"], strict=True))
        only = [solved.count(pair) for pair in (("1", "0"), ("0", "1"))]
        chance = compute_chance(*only)
        verdict = "the results differ" if chance < SIGNIFICANT else "no difference beyond chance"
        yield f"{suite}, {a['problems']} problems"
        for file, result, number in zip(files, (a, b), only, strict=True):
            low, high = result["interval"]
            length = result.get("spec_decode_acceptance_length")
            yield (
                f"  {file}: {result['accuracy']:.1%} (95 % interval {low:.1%} to {high:.1%}), "
                f"{number} problems solved only here"
                + (f", {length:.2f} tokens per row with drafts" if length else "")
            )
        yield f"  probability of such a difference by chance: {chance:.2g}; {verdict}"


def compute_chance(first: int, second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test. `first` and `second` are the numbers of
    problems that only the first or only the second result solves.
    """
    total = first + second
    tail = sum(math.comb(total, number) for number in range(min(first, second) + 1))
    return min(1.0, 2 * tail / 2**total)
