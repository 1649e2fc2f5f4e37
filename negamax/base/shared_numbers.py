"""Numbers that several processes share: a row for each of them, which it alone writes and all can
read. No locks: a number is eight aligned bytes, and nobody needs two of them to fit together."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_BYTES = ctypes.sizeof(ctypes.c_double)

Row = ctypes.Array[ctypes.c_double]


class SharedNumbers:
    """A table of float64, all zero at first: `num_rows` processes with `num_columns` numbers each.
    Counts are exact up to 2^53.

    With `path`, processes that give the same file share the table, of which some may know the first
    rows alone; without, it belongs to this process.
    """

    def __init__(self, num_columns: int, *, num_rows: int = 1, path: Path | None = None) -> None:
        num_numbers = num_columns * num_rows
        self._memory: bytearray | mmap.mmap = bytearray(num_numbers * _BYTES)
        if path is not None:
            with path.open("a+b") as file:
                if file.tell() < num_numbers * _BYTES:
                    file.truncate(num_numbers * _BYTES)
                self._memory = mmap.mmap(file.fileno(), num_numbers * _BYTES)
        self._numbers: Row = (ctypes.c_double * num_numbers).from_buffer(self._memory)
        self._num_columns = num_columns
        self.num_rows = num_rows

    def row(self, index: int, *, start: int = 0, count: int | None = None) -> Row:
        """The numbers of process `index`, to write or to read: `count` of them from column `start`
        on, all by default.
        """
        count = self._num_columns - start if count is None else count
        offset = (index * self._num_columns + start) * _BYTES
        return (ctypes.c_double * count).from_buffer(self._memory, offset)

    def total(self, column: int) -> float:
        """The sum of a number over all processes."""
        return sum(self._numbers[column :: self._num_columns])

    def clear(self, index: int, *, num_columns: int | None = None) -> None:
        """Set the first numbers of a process that is gone to zero, or all."""
        row = self.row(index, count=num_columns)
        row[:] = [0.0] * len(row)
