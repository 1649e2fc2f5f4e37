"""Partial results of attention to a rank's blocks, as one message: outputs, then their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.kernels.peers import Collective


@dataclass(frozen=True)
class PartialResults:
    """Attention of T tokens to some of their keys, and the log2 of the softmax sums.

    Both are views of `message`. Messages of several ranks add a leading dimension to both.
    """

    message: Tensor  # [bytes] uint8, or [ranks, bytes]
    out: Tensor  # [T, heads * head_dim] in the model's dtype; 0 where there is no key
    lse: Tensor  # [T, heads] fp32, of scores in units of log2(e); -inf where there is no key

    @classmethod
    def empty(cls, q: Tensor) -> PartialResults:
        """Allocate results for queries q [T, heads, head_dim]."""
        assert q.itemsize > 1, "queries are not in FP8"
        num_bytes = q.numel() * q.element_size() + 4 * q.shape[0] * q.shape[1]
        return cls.of(torch.empty(num_bytes, dtype=torch.uint8, device=q.device), q)

    def gathered(self, group: Collective) -> PartialResults:
        """Gather the results of all ranks of the group."""
        messages = group.all_gather(self.message.unsqueeze(0), dim=0)
        q = self.out.unflatten(-1, (self.lse.shape[-1], -1))
        return PartialResults.of(messages, q)

    @classmethod
    def joined(cls, out: Tensor, lse: Tensor) -> PartialResults:
        """Put `out` and `lse` into one message."""
        message = torch.cat([part.flatten().view(torch.uint8) for part in (out, lse)])
        return cls(message, out, lse)

    @classmethod
    def of(cls, message: Tensor, q: Tensor) -> PartialResults:
        """View results of one rank or of several in `message`; shape and dtype are those of `q`."""
        num_tokens, heads, head_dim = q.shape
        out, lse = message.split(
            [q.numel() * q.element_size(), 4 * num_tokens * heads], dim=message.dim() - 1
        )
        return cls(
            message,
            out.view(q.dtype).unflatten(-1, (num_tokens, heads * head_dim)),
            lse.view(torch.float32).unflatten(-1, (num_tokens, heads)),
        )
