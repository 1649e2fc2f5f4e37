"""Linear time: an output twice as long takes twice as long, whole or in pieces, whatever stands in
it.

Limits are several times what a laptop needs; `python tools/prove_parser.py` shows the figures for 1
MB.
"""

from __future__ import annotations

import pytest
from parser_support import proof

NUM_CHARS = 100_000
TEXTS, SHORT_TEXTS = proof.long_outputs(NUM_CHARS), proof.long_outputs(NUM_CHARS // 5)


@pytest.mark.parametrize("name", TEXTS)
def test_time_grows_with_the_length_and_no_faster(name: str) -> None:
    format, text = TEXTS[name]
    assert proof.seconds_to_read(format, text, size=len(text)) < 0.5

    def is_linear() -> bool:
        reference = proof.seconds_to_read(format, SHORT_TEXTS[name][1], size=4)
        limit = min(1.0, 12 * max(reference, 0.01))
        return proof.seconds_to_read(format, text, size=4) < limit

    assert any(is_linear() for _ in range(3))  # others may slow one of them down
