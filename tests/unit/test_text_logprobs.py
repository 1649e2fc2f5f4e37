from pathlib import Path

import pytest

from negamax.api.common.logprobs import TextLogprobWriter
from negamax.scheduler.step import TokenLogprobs
from negamax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(Path(__file__).parents[2] / "negamax" / "assets" / "nano")
FIRST, SECOND, THIRD = (
    next(number for number in range(300) if TOKENIZER.token_bytes(number) == bytes([byte]))
    for byte in (0xE2, 0x82, 0xAC)
)


@pytest.mark.parametrize("chosen", [FIRST, SECOND, THIRD])
def test_the_chosen_token_has_its_own_logprob_among_tokens_of_one_text(chosen: int) -> None:
    assert {TOKENIZER.token_text(number) for number in (FIRST, SECOND, THIRD)} == {"\ufffd"}
    logprobs = {FIRST: -0.5, SECOND: -1.0, THIRD: -9.0}
    writer = TextLogprobWriter(TOKENIZER)
    writer.push(TokenLogprobs(chosen, logprobs[chosen], 1, [FIRST, SECOND], [-0.5, -1.0]))
    taken = writer.take()
    assert taken.token_logprobs == [logprobs[chosen]]
    assert taken.top_logprobs == [{"\ufffd": logprobs[chosen]}]


def test_of_other_tokens_with_one_text_the_likeliest_counts() -> None:
    writer = TextLogprobWriter(TOKENIZER)
    letter = next(number for number in range(300) if TOKENIZER.token_bytes(number) == b"a")
    writer.push(TokenLogprobs(letter, -2.0, 3, [FIRST, SECOND], [-0.5, -1.0]))
    assert writer.take().top_logprobs == [{"\ufffd": -0.5, "a": -2.0}]
