"""Choose the number of accepted drafts at random, to measure speculative decoding at a given
acceptance rate with random weights. The generated text is meaningless.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from negamax.kernels.sampling import noise

# `_DRAWS`: table length. `_SEED_STEP` spreads the consecutive seeds of a request's outputs.
_DRAWS, _SEED_STEP = 2**16, 40503


class SyntheticAcceptance:
    """A table of random accepted lengths. `rates[i]`: fraction of rows that accept draft i."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._mean_length = 1.0 + sum(rates)
        numbers = torch.arange(_DRAWS)
        draws = noise.uniforms(numbers, numbers).unsqueeze(1)
        self._counts = (draws < torch.tensor(rates)).sum(dim=1)

    def load(self, device: torch.device) -> str:
        """Move the table to `device`, and return a warning for the log."""
        self._counts = self._counts.to(device)
        return (
            f"; SYNTHETIC ACCEPTANCE of {self._mean_length:.2f} tokens per row, whatever the "
            "drafts are: the generated text is meaningless"
        )

    def count(self, num_drafts: Tensor, seeds: Tensor, lengths: Tensor) -> Tensor:
        """Count accepted drafts, [R]. `lengths`: tokens before drafts. Arguments are [R] int64."""
        places = (seeds * _SEED_STEP + lengths) & (_DRAWS - 1)
        return torch.minimum(self._counts[places], num_drafts)
