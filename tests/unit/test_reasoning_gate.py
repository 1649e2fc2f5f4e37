import pytest
from hypothesis import given
from hypothesis import strategies as st

from negamax.config.grammar import Marker, Reasoning
from negamax.text.grammar.reasoning_gate import ReasoningGate, needs_text

OPEN, CLOSE, CALL = 900, 901, 902  # These tokens have no text.
CLOSING = (10, CLOSE, 11)
TOKENS = {
    **{i: chr(i).encode() for i in range(256)}, OPEN: b"<mm:think>", CLOSE: b"</mm:think>",
    500: b"ink>x", 501: b"\xe2\x82", 502: b"k>\n\n",
}  # fmt: skip


def make_gate(
    state: str = "open", *, by_id: bool = True, budget: int | None = None,
    calls_end_it: bool = True, closing: tuple[int, ...] = CLOSING,
    table: dict[int, bytes] = TOKENS,
) -> ReasoningGate:  # fmt: skip
    ids = (OPEN, CLOSE, CALL) if by_id else (None, None, None)
    opener, closer, call_opener = map(Marker, ("<mm:think>", "</mm:think>", "]<]"), ids)
    reasoning = Reasoning(
        state="open" if state == "open" else "optional", opener=opener, closer=closer,
        call_opener=call_opener, closing_ids=closing, max_newlines=0,
    )  # fmt: skip
    assert needs_text(reasoning) is not by_id
    lookup = None if by_id else table.__getitem__
    return ReasoningGate(reasoning, budget=budget, calls_end_it=calls_end_it, token_bytes=lookup)


def spell(text: str) -> list[int]:
    return list(text.encode())


def content(gate: ReasoningGate, tokens: list[int]) -> list[int | bytes]:
    return [part for token in tokens if (part := gate.push(token)) is not None]


@pytest.mark.parametrize(
    ("by_id", "calls_end_it", "tokens", "expected"),
    [
        (True, True, [1, 2, CLOSE, 3, 4], [3, 4]),
        (True, True, [*spell("</mm:think>"), 7], []),  # The closer must be a token here.
        (True, True, [1, CALL, 3], [CALL, 3]),
        (True, False, [1, CALL, 3], []),
        (False, True, [*spell("so </mm:thi"), *spell("nk>"), 65], [65]),
        (False, True, [*spell("so </mm:th"), 500, 66], [b"x", 66]),
        (False, True, [*spell("so "), CLOSE, 66], [66]),
        (False, True, [*spell("a]<"), *spell("]b")], [b"]<]", ord("b")]),
        (False, False, spell("a]<]b"), []),
        (False, True, [*spell("a</mm:thin"), 502], []),  # The last token ends with white space.
    ],
)
def test_content_begins_after_the_closer_or_with_a_call(
    by_id: bool, calls_end_it: bool, tokens: list[int], expected: list[int | bytes]
) -> None:
    gate = make_gate(by_id=by_id, calls_end_it=calls_end_it)
    assert content(gate, tokens) == expected
    assert gate.is_over is (bool(expected) or tokens[-1] == 502)
    assert gate.is_open is not gate.is_over


@given(
    before=st.text(alphabet="</m:think>ab", max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=60, max_size=60),
)
def test_any_split_of_the_text_gives_the_same_content(before: str, sizes: list[int]) -> None:
    """Split the same bytes into tokens of any length. Bytes after the first closer are content."""
    text = (before + "</mm:think>" + "tail").encode()
    found = text.index(b"</mm:think>") + len(b"</mm:think>")
    pieces, place = [], 0
    for size in sizes:
        pieces.append(text[place : place + size])
        place += size
    table = dict(enumerate(piece for piece in pieces if piece))
    parts = content(make_gate(by_id=False, table=table), list(table))
    assert sum(map(len, pieces)) == len(text)
    joined = b"".join(part if isinstance(part, bytes) else table[part] for part in parts)
    assert joined == text[found:]


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_spent_budget_makes_the_closing_tokens_due_exactly_then(budget: int) -> None:
    gate = make_gate(budget=budget)
    for token in range(budget):
        assert gate.due is None
        gate.push(token + 100)
    for token in CLOSING:
        assert gate.due == token
        last = gate.push(token)
    assert gate.due is None and gate.is_over
    assert last == CLOSING[-1]  # After the closer, the gate returns tokens as content.


def test_reasoning_within_its_budget_and_optional_reasoning_are_unchanged() -> None:
    gate = make_gate(budget=3)
    assert content(gate, [1, CLOSE, 2, 3, 4, 5]) == [2, 3, 4, 5]
    assert gate.due is None
    gate = make_gate("optional", budget=2)
    assert content(gate, [OPEN, 1]) == [OPEN, 1]
    assert gate.due is None
    assert gate.push(2) == 2
    assert gate.due == CLOSING[0]
    plain = make_gate("optional", budget=2)
    assert content(plain, [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert plain.due is None and plain.is_over
    closed = make_gate("optional", budget=0, closing=(CLOSE,))
    assert closed.due == closed.push(CLOSE) == CLOSE
    assert closed.is_over


def test_spelled_openers_and_forks_of_a_gate() -> None:
    opened = make_gate("optional", by_id=False, budget=1)
    content(opened, spell("<mm:think>"))
    assert opened.is_open and opened.due is None
    opened.push(65)
    assert opened.due == CLOSING[0]
    other = make_gate("optional", by_id=False, budget=1)
    content(other, spell("<mm:table>"))
    assert other.is_over
    gate = make_gate(budget=2)
    gate.push(65)
    forked = gate.fork()
    assert [forked.push(token) for token in (66, *CLOSING)] == [None, None, None, 11]
    assert not forked.is_open and gate.is_open and gate.due is None
    gate.push(66)
    forked = gate.fork()
    forked.push(CLOSING[0])
    assert (forked.due, gate.due) == (CLOSE, CLOSING[0])
