from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_support import make_tokenizer

from negamax.base.errors import InvalidRequestError
from negamax.text.detokenizer import Detokenizer, TextPiece
from tests.speed import cpu_seconds, is_linear

TOKENIZER = make_tokenizer()
ANY_IDS = st.lists(st.integers(0, TOKENIZER.vocab_size + 1), max_size=60)
ORDINARY = [i for i in range(TOKENIZER.vocab_size) if not TOKENIZER.is_added(i)]
ORDINARY_IDS = st.lists(st.sampled_from(ORDINARY), max_size=40)
AB_IDS = st.text("ab<>🙂", max_size=30).map(
    lambda text: TOKENIZER.encode(text, allow_special=False)
)
STOPS = st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=3)
ids_of = TOKENIZER.encode
(CLOSE,) = ids_of("</think>")


def run(ids: Sequence[int], detokenizer: Detokenizer, *, step: int = 1) -> list[TextPiece]:
    steps = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [piece for pieces in [*steps, detokenizer.finish()] for piece in pieces]


def joined(pieces: Sequence[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def emitted_lengths(ids: Sequence[int]) -> list[int]:
    detokenizer = Detokenizer(TOKENIZER)
    lengths, total = [], 0
    for token_id in ids:
        total += len(joined(detokenizer.push([token_id])))
        lengths.append(total)
    return lengths


def expected_stop(
    text: str, stops: Sequence[str], *, ids: Sequence[int], min_tokens: int
) -> tuple[str | None, int]:
    """Find by trial the stop string that is complete first, and its end in `text`."""
    lengths = emitted_lengths(ids)
    for end in range(1, len(text) + 1):
        num_tokens = next((n + 1 for n, length in enumerate(lengths) if length >= end), len(ids))
        for stop in sorted(stops, key=len, reverse=True):
            if num_tokens >= min_tokens and text[:end].endswith(stop):
                return stop, end
    return None, len(text)


@settings(deadline=None)
@given(ids=ANY_IDS, skip=st.booleans(), step=st.integers(1, 5))
def test_pieces_join_to_the_text(ids: list[int], skip: bool, step: int) -> None:
    pieces = run(ids, Detokenizer(TOKENIZER, skip_special_tokens=skip), step=step)
    assert joined(pieces) == TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert all(piece.text for piece in pieces)
    for piece in pieces:
        if piece.token_id is not None:  # The piece is exactly this token.
            assert piece.text == TOKENIZER.token_text(piece.token_id)


@settings(deadline=None)
@given(
    ids=AB_IDS | ANY_IDS, stops=STOPS, include=st.booleans(), min_tokens=st.integers(0, 12),
    step=st.integers(1, 7),
)  # fmt: skip
def test_text_ends_at_the_stop_string_that_is_complete_first(
    ids: list[int], stops: list[str], include: bool, min_tokens: int, step: int
) -> None:
    detokenizer = Detokenizer(
        TOKENIZER, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    text = TOKENIZER.decode(ids)
    stop, end = expected_stop(text, stops, ids=ids, min_tokens=min_tokens)
    pieces = run(ids, detokenizer, step=step)
    assert detokenizer.matched_stop == stop
    assert joined(pieces) == text[: end - (0 if stop is None or include else len(stop))]


@settings(deadline=None)
@given(ids=ORDINARY_IDS | AB_IDS, stops=STOPS)
def test_only_the_beginning_of_a_stop_string_is_held(ids: list[int], stops: list[str]) -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=stops, min_tokens=10**6)
    out = ""
    for token_id, length in zip(ids, emitted_lengths(ids), strict=True):
        out += joined(detokenizer.push([token_id]))
        text = TOKENIZER.decode(ids)[:length]
        beginnings = (stop[:n] for stop in stops for n in range(1, len(stop)))
        held = max((len(start) for start in beginnings if text.endswith(start)), default=0)
        assert out == text[: length - held]


def test_unfinished_characters_and_tags() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert joined(detokenizer.push(ids_of("x🚀")[:-1])) == "x"
    assert joined(detokenizer.finish()) == "\ufffd"
    pieces = run([*ids_of("🚀")[:-1], CLOSE], Detokenizer(TOKENIZER))
    assert pieces == [TextPiece("\ufffd", None), TextPiece("</think>", CLOSE)]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("quick brown fox jumps", "fox jum", "quick brown "),  # a string of several tokens
        ("a</think>xyz", "nk>x", "a</thi"),  # a stop string inside a tag
        ("done[e~[more", "[e~[", "done"),  # a control token that is part of the visible text
    ],
)
def test_a_stop_string_may_be_anywhere(text: str, stop: str, expected: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=False, stop=[stop])
    assert joined(run(ids_of(text), detokenizer)) == expected
    assert detokenizer.matched_stop == stop
    assert detokenizer.push(ids_of("more")) == detokenizer.finish() == []


def test_refuses_an_empty_stop_string() -> None:
    with pytest.raises(InvalidRequestError, match="empty string"):
        Detokenizer(TOKENIZER, stop=["a", ""])


def test_time_is_linear_with_hostile_stop_strings() -> None:
    stops = ["a" * 1023 + chr(0x100 + i) for i in range(32)]
    ids = ids_of("a")

    def seconds(num_tokens: int) -> float:
        return cpu_seconds(lambda: run(ids * num_tokens, Detokenizer(TOKENIZER, stop=stops)))

    assert is_linear(seconds, 80_000)
