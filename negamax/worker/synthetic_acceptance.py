"""Accept drafts by a schedule instead of by comparison, so that random weights suffice to measure a
step's cost and gain at a given acceptance rate. The generated text is meaningless.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# consecutive seeds, as of the choices of one request, start far apart in the table
_DRAWS, _SEED_STEP = 2**16, 40503
# constants of SplitMix64 (Steele, Lea, Flood 2014), as signed numbers
_STEP, _MIX = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


class SyntheticAcceptance:
    """A table of random accepted lengths. `rates`: by place, share of accepting rows."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._mean_length = 1.0 + sum(rates)
        numbers = torch.arange(_DRAWS)
        draws = uniform(numbers, numbers).unsqueeze(1)
        self._counts = (draws < torch.tensor(rates, dtype=torch.float64)).sum(dim=1)

    def load(self, device: torch.device) -> str:
        """Move the table to `device`, and return a warning for the log."""
        self._counts = self._counts.to(device)
        return (
            f"; SYNTHETIC ACCEPTANCE of {self._mean_length:.2f} tokens per row, whatever the "
            "drafts are: the generated text is meaningless"
        )

    def count(self, num_drafts: Tensor, seeds: Tensor, lengths: Tensor) -> Tensor:
        """Return accepted drafts [R]. `lengths`: tokens before the drafts. Arguments: [R] int64."""
        places = (seeds * _SEED_STEP + lengths) & (_DRAWS - 1)
        return torch.minimum(self._counts[places], num_drafts)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Hash `seeds` and `positions`, [R] int64, to numbers in [0, 1), [R] fp64."""
    return _shift_right(_mix(_mix(seeds) + positions), 11).double() * 2.0**-53


def _mix(numbers: Tensor) -> Tensor:
    bits = numbers + _STEP
    for shift, factor in zip((30, 27), _MIX, strict=True):
        bits = (bits ^ _shift_right(bits, shift)) * factor
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift int64 as if it were unsigned."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
