"""Linear time: an output twice as long takes twice as long, whole or in pieces, whatever stands in
it.

`python tools/prove_parser.py` shows the figures for 1 MB.
"""

from __future__ import annotations

import pytest
from parser_support import proof

from tests.speed import is_linear

NUM_CHARS = 100_000
TEXTS = {num_chars: proof.long_outputs(num_chars) for num_chars in (NUM_CHARS, NUM_CHARS // 4)}


@pytest.mark.parametrize("name", TEXTS[NUM_CHARS])
def test_time_grows_with_the_length_and_no_faster(name: str) -> None:
    format = TEXTS[NUM_CHARS][name][0]

    def seconds(num_chars: int, *, size: int) -> float:
        return proof.seconds_to_read(format, TEXTS[num_chars][name][1], size=size)

    assert is_linear(lambda num_chars: seconds(num_chars, size=num_chars), NUM_CHARS)
    assert is_linear(lambda num_chars: seconds(num_chars, size=4), NUM_CHARS)
