"""Streamed text equals decoded text, with stop strings at any token boundaries, without delay."""

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
ORDINARY_IDS = st.lists(
    st.sampled_from([i for i in range(TOKENIZER.vocab_size) if not TOKENIZER.is_added(i)]),
    max_size=40,
)
AB_IDS = st.text("ab<>🙂", max_size=30).map(
    lambda text: TOKENIZER.encode(text, allow_special=False)
)
STOPS = st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=3)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def run(ids: Sequence[int], detokenizer: Detokenizer, *, step: int = 1) -> list[TextPiece]:
    pieces = [
        piece for i in range(0, len(ids), step) for piece in detokenizer.push(ids[i : i + step])
    ]
    return pieces + detokenizer.finish()


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
    """Find by trial the stop string that is complete first, and its end."""
    lengths = emitted_lengths(ids)
    for end in range(1, len(text) + 1):
        num_tokens = next((n + 1 for n, length in enumerate(lengths) if length >= end), len(ids))
        for stop in sorted(stops, key=len, reverse=True):
            if num_tokens >= min_tokens and text[:end].endswith(stop):
                return stop, end
    return None, len(text)


@settings(deadline=None)
@given(ids=ANY_IDS, skip=st.booleans(), step=st.integers(1, 5))
def test_pieces_join_to_the_decoded_text(ids: list[int], skip: bool, step: int) -> None:
    pieces = run(ids, Detokenizer(TOKENIZER, skip_special_tokens=skip), step=step)
    assert joined(pieces) == TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert all(piece.text for piece in pieces)


@settings(deadline=None)
@given(ids=ANY_IDS, stops=STOPS)
def test_a_piece_with_an_id_is_that_whole_token(ids: list[int], stops: list[str]) -> None:
    for piece in run(ids, Detokenizer(TOKENIZER, skip_special_tokens=False, stop=stops)):
        if piece.token_id is not None:
            assert piece.text == TOKENIZER.token_text(piece.token_id)


@settings(deadline=None)
@given(
    ids=AB_IDS | ANY_IDS,
    stops=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
    step=st.integers(1, 7),
)
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
    for token_id, known in zip(ids, emitted_lengths(ids), strict=True):
        out += joined(detokenizer.push([token_id]))
        text = TOKENIZER.decode(ids)[:known]
        held = max(
            n
            for n in range(known + 1)
            if n == 0 or any(len(s) > n and s.startswith(text[-n:]) for s in stops)
        )
        assert out == text[: known - held]


def test_emoji_over_several_tokens_comes_whole() -> None:
    ids = ids_of("a👩‍🚀b")
    assert any(
        len(TOKENIZER.token_bytes(i)) < 4 and TOKENIZER.token_bytes(i)[0] >= 0x80 for i in ids
    )
    pieces = run(ids, Detokenizer(TOKENIZER))
    assert joined(pieces) == "a👩‍🚀b"
    assert not any("\ufffd" in piece.text for piece in pieces)


def test_unfinished_character_becomes_a_replacement_at_the_end_only() -> None:
    ids = ids_of("x🚀")[:-1]
    detokenizer = Detokenizer(TOKENIZER)
    assert joined(detokenizer.push(ids)) == "x"
    assert joined(detokenizer.finish()) == "\ufffd"


def test_tag_after_an_unfinished_character_keeps_its_id() -> None:
    close = ids_of("</think>")[0]
    pieces = run([*ids_of("🚀")[:-1], close], Detokenizer(TOKENIZER))
    assert pieces == [TextPiece("\ufffd", None), TextPiece("</think>", close)]


def test_tag_that_ends_like_a_stop_string_keeps_its_id() -> None:
    close = ids_of("</think>")[0]
    detokenizer = Detokenizer(TOKENIZER, stop=[">x"])
    pieces = detokenizer.push([close])
    pieces += detokenizer.push(ids_of("y"))
    assert TextPiece("</think>", close) in pieces


def test_stop_string_across_token_borders_and_inside_a_token() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["fox jum"])
    assert joined(run(ids_of("quick brown fox jumps"), detokenizer)) == "quick brown "
    assert detokenizer.matched_stop == "fox jum"
    assert detokenizer.push(ids_of("more")) == []
    assert detokenizer.finish() == []


def test_stop_string_that_begins_inside_a_tag_cuts_the_tag() -> None:
    assert joined(run(ids_of("a</think>xyz"), Detokenizer(TOKENIZER, stop=["nk>x"]))) == "a</thi"


def test_stop_string_may_cover_a_control_token_that_is_shown() -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=False, stop=["[e~["])
    assert joined(run(ids_of("done[e~[more"), detokenizer)) == "done"


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, ""), (2, "a"), (3, "aa"), (9, "aaaa")]
)
def test_stop_string_counts_from_the_token_that_reaches_the_minimum(
    min_tokens: int, text: str
) -> None:
    token = ids_of("a")
    assert joined(run(token * 4, Detokenizer(TOKENIZER, stop=["a"], min_tokens=min_tokens))) == text


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty string"):
        Detokenizer(TOKENIZER, stop=["a", ""])


def test_time_is_linear_with_hostile_stop_strings() -> None:
    stops = ["a" * 1023 + chr(0x100 + i) for i in range(32)]
    ids = ids_of("a")

    def seconds(num_tokens: int) -> float:
        return cpu_seconds(lambda: run(ids * num_tokens, Detokenizer(TOKENIZER, stop=stops)))

    assert is_linear(seconds, 80_000)
