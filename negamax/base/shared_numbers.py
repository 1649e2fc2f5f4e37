"""Share numbers between processes. Each process writes one row and reads all rows. No lock is
needed: the CPU writes all bytes of a number at once, and readers do not combine numbers.
"""

import ctypes
import mmap
from pathlib import Path

_BYTES = ctypes.sizeof(ctypes.c_double)

Row = ctypes.Array[ctypes.c_double]


class SharedNumbers:
    """A table of float64, initially zero, with a row for each of `num_rows` processes.

    Integers are exact up to 2^53. Processes with the same `path` share the table. A process may map
    only the table's first rows. Without `path`, the table belongs to this process.
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
        self._num_columns, self.num_rows = num_columns, num_rows

    def row(self, index: int, *, start: int = 0, count: int | None = None) -> Row:
        """Return `count` (default: all) numbers of process `index`, starting at column `start`."""
        count = self._num_columns - start if count is None else count
        offset = (index * self._num_columns + start) * _BYTES
        return (ctypes.c_double * count).from_buffer(self._memory, offset)

    def total(self, column: int) -> float:
        """Return the sum of a column over all processes."""
        return sum(self._numbers[column :: self._num_columns])

    def clear(self, index: int, *, num_columns: int | None = None) -> None:
        """Set the row of a dead process to 0. With `num_columns`, set only its first columns."""
        row = self.row(index, count=num_columns)
        row[:] = [0.0] * len(row)
