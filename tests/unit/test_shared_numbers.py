import subprocess
import sys
from pathlib import Path

from negamax.base.shared_numbers import SharedNumbers


def test_processes_share_numbers(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    mine = SharedNumbers(3, num_rows=2, path=path)
    mine.row(0)[2] = 5.0
    write = (
        "import sys; from pathlib import Path; from negamax.base.shared_numbers import "
        "SharedNumbers\n"
        "theirs = SharedNumbers(3, num_rows=2, path=Path(sys.argv[1]))\n"
        "assert theirs.total(2) == 5.0\n"
        "theirs.row(1)[2] += 2**53 - 10\n"
    )
    subprocess.run([sys.executable, "-c", write, str(path)], check=True)
    assert mine.total(2) == 2**53 - 5
    assert list(mine.row(0)) == [0.0, 0.0, 5.0]


def test_only_the_row_of_a_dead_process_is_cleared(tmp_path: Path) -> None:
    numbers = SharedNumbers(3, num_rows=3)
    for index in range(3):
        numbers.row(index)[:] = [1.0, 2.0, 3.0]
    numbers.clear(1, num_columns=2)
    assert [numbers.total(column) for column in range(3)] == [2.0, 4.0, 9.0]
    numbers.clear(1)
    assert list(numbers.row(1)) == [0.0, 0.0, 0.0]
    assert [numbers.total(column) for column in range(3)] == [2.0, 4.0, 6.0]


def test_part_of_a_row_is_the_row() -> None:
    numbers = SharedNumbers(4, num_rows=2)
    numbers.row(1, start=2, count=2)[1] = 7.0
    assert numbers.row(1)[3] == 7.0 and numbers.row(0)[3] == 0.0
