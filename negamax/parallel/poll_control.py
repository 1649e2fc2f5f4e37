"""Limit how long kernels poll for words that other ranks write to this rank's memory."""

import ctypes

import torch


class PollControl:
    """A clock, a time limit and an abort flag in host memory. Polling kernels read these numbers
    about once a millisecond, and set the flag at the time limit, which makes results invalid.
    """

    def __init__(self, seconds: float) -> None:
        """Limit one wait of a kernel to `seconds` of the clock, which only `tick` advances."""
        self._memory = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        self.address = self._memory.data_ptr()  # Kernels read and write the words here.
        # [clock, limit, abort flag], in ms. ctypes writes the words, because a thread that is in a
        # tensor operation at exit would abort the process.
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
