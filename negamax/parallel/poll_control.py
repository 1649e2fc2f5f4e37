"""Limits how long kernels wait for words that other ranks push into this rank's memory."""

from __future__ import annotations

import ctypes

import torch


class PollControl:
    """A clock, a time limit and an abort flag in host memory, which polling kernels look at about
    once a millisecond: the flag reaches a kernel that no stream could be told anything behind.

    Kernels set the flag themselves when their time is up. Whatever they computed since it was set
    is not to be used.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds` of `tick`: the time limit of one wait. Without ticks there is none."""
        self._memory = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        self.address = self._memory.data_ptr()  # for kernels
        # [clock, limit, abort flag], in ms. No tensor operation: a thread inside one when the
        # process ends would abort it
        self.words = (ctypes.c_int64 * 3).from_address(self.address)
        self.words[1] = round(1000 * seconds)

    @property
    def is_aborted(self) -> bool:
        """Whether waits were given up."""
        return self.words[2] != 0

    def tick(self, seconds: float) -> None:
        """Let the clock go on by `seconds`. Single writer: one thread."""
        self.words[0] += round(1000 * seconds)

    def abort(self) -> None:
        """Let every kernel that waits, or is going to, give up."""
        self.words[2] = 1
