import pytest
from parser_support import proof

from tests.speed import is_linear, slowness

NUM_CHARS = 100_000
TEXTS = {num_chars: proof.long_outputs(num_chars) for num_chars in (NUM_CHARS, NUM_CHARS // 4)}


@pytest.mark.parametrize("name", TEXTS[NUM_CHARS])
def test_time_grows_with_the_length_and_no_faster(name: str) -> None:
    format = TEXTS[NUM_CHARS][name][0]

    def seconds(num_chars: int, *, size: int) -> float:
        return proof.seconds_to_read(format, TEXTS[num_chars][name][1], size=size)

    assert is_linear(lambda num_chars: seconds(num_chars, size=num_chars), NUM_CHARS)
    assert is_linear(lambda num_chars: seconds(num_chars, size=4), NUM_CHARS)


@pytest.mark.full
@pytest.mark.parametrize("name", TEXTS[NUM_CHARS])
def test_a_megabyte_takes_less_than_a_second(name: str) -> None:
    format, text = proof.long_outputs(1_000_000)[name]
    assert proof.seconds_to_read(format, text, size=len(text)) < slowness()
    assert proof.seconds_to_read(format, text, size=4) < slowness()
