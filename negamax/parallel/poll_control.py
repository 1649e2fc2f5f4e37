"""Limits how long kernels poll for words that other ranks write to this rank's memory."""

import ctypes

import torch


class PollControl:
    """A clock, a time limit and an abort flag in host memory, which polling kernels read and set
    about once a millisecond. Later results are invalid once the flag is set.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds` per `tick`: the time limit of one wait. Without ticks there is no limit."""
        self._memory = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        self.address = self._memory.data_ptr()  # address for kernels
        # [clock, limit, abort flag], in ms. Not written by tensor operations: a thread inside one
        # at exit would abort the process.
        self.words = (ctypes.c_int64 * 3).from_address(self.address)
        self.words[1] = round(1000 * seconds)

    @property
    def is_aborted(self) -> bool:
        return self.words[2] != 0

    def tick(self, seconds: float) -> None:
        """Advance the clock by `seconds`. Single writer: one thread."""
        self.words[0] += round(1000 * seconds)

    def abort(self) -> None:
        """Abort every wait of kernels, current and future."""
        self.words[2] = 1
