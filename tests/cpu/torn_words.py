"""Find words in compiled kernels that several threads poll without agreeing on them."""

import math
import re
from collections.abc import Iterator, Mapping

_POLLED = r"tt\.load .*isVolatile = true.*: tensor<([\dx]+)x!tt\.ptr<i64>, (#\w+)>"
_LAYOUT = r"^(#\w+) = #ttg\.blocked<\{(.*?)\}>"


def reads_torn_words(code: Mapping[str, str]) -> bool:
    """Return whether a polled load of shared words lacks `launch.ptx.agree`.

    `code` is Triton's output for a GPU, by kind.
    """
    if "ptx" not in code:
        return False
    return code["ttgir"].count("bar.red.or.pred") < sum(_are_shared(code["ttgir"]))


def _are_shared(ir: str) -> Iterator[bool]:
    """Return whether several threads may hold the same word, for each polled load."""
    held = {}  # bases of the threads, by layout and dimension
    for name, layout in re.findall(_LAYOUT, ir, re.M):
        numbers = dict(re.findall(r"(\w+) = \[([\d, ]*)\]", layout))
        keys = ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
        each = zip(*(map(int, numbers[key].split(",")) for key in keys), strict=True)
        held[name] = list(map(math.prod, each))
    for shape, name in re.findall(_POLLED, ir):
        sizes = [int(size) for size in shape.split("x")]
        yield name not in held or any(
            size < threads for size, threads in zip(sizes, held[name], strict=True)
        )
