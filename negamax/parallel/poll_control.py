"""Whether and how long kernels wait for words that other ranks push into this one's memory."""

from __future__ import annotations

import torch


class PollControl:
    """A clock, a time limit and an abort flag in host memory, which polling kernels look at about once a millisecond: the flag
    reaches a kernel that no stream could be told anything behind.

    Kernels set the flag themselves when their time is up. Whatever they computed since it was set is not to be used.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds` of `tick`: the time limit of one wait. Without ticks there is none."""
        self.words = torch.zeros(3, dtype=torch.int64, pin_memory=True)  # [clock, limit, abort flag], in ms
        self.words[1] = round(1000 * seconds)

    @property
    def address(self) -> int:
        """Of `words`, for kernels."""
        return self.words.data_ptr()

    @property
    def is_aborted(self) -> bool:
        """Whether waits were given up."""
        return bool(self.words[2])

    def tick(self, seconds: float) -> None:
        """Let the clock go on by `seconds`. Single writer: one thread."""
        self.words[0] += round(1000 * seconds)

    def abort(self) -> None:
        """Let every kernel that waits, or is going to, give up."""
        self.words[2] = 1
