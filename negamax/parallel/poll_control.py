"""Limit how long kernels poll this rank's memory for data that other ranks write."""

import ctypes

import torch


class PollControl:
    """A clock, a time limit and an abort flag in host memory. Waiting kernels read clock and flag
    every millisecond, and set the flag at the time limit. After an abort, all results are invalid.
    """

    def __init__(self, seconds: float) -> None:
        """Limit each wait of a kernel to `seconds`. Only `tick` advances the clock."""
        self._memory = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        self.address = self._memory.data_ptr()  # Address of `words` for kernels.
        # `words`: [clock in ms, limit in ms, abort flag]. Python writes `words` through ctypes,
        # because a thread inside a tensor operation would abort the process at exit.
        self.words = (ctypes.c_int64 * 3).from_address(self.address)
        self.words[1] = round(1000 * seconds)

    @property
    def is_aborted(self) -> bool:
        return self.words[2] != 0

    def tick(self, seconds: float) -> None:
        """Advance the clock by `seconds`. Only one thread may call this method."""
        self.words[0] += round(1000 * seconds)

    def abort(self) -> None:
        """Abort all current and future waits of kernels."""
        self.words[2] = 1
