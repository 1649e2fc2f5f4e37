import pytest
from hypothesis import given
from hypothesis import strategies as st

from negamax.config.grammar import Marker, Reasoning
from negamax.text.grammar.reasoning_gate import ReasoningGate, needs_text

OPEN, CLOSE, CALL = 900, 901, 902  # tokens of their own
CLOSING = (10, CLOSE, 11)
TOKENS = {
    **{i: chr(i).encode() for i in range(256)},
    OPEN: b"<mm:think>",
    CLOSE: b"</mm:think>",
    500: b"ink>x",
    501: b"\xe2\x82",
}


def gate(
    state: str = "open",
    *,
    by_id: bool = True,
    budget: int | None = None,
    calls_end_it: bool = True,
    closing: tuple[int, ...] = CLOSING,
    table: dict[int, bytes] = TOKENS,
) -> ReasoningGate:
    def tag(text: str, token_id: int) -> Marker:
        return Marker(text, token_id if by_id else None)

    reasoning = Reasoning(
        state="open" if state == "open" else "optional",
        opener=tag("<mm:think>", OPEN),
        closer=tag("</mm:think>", CLOSE),
        call_opener=tag("]<]", CALL),
        closing_ids=closing,
        max_newlines=0,
    )
    assert needs_text(reasoning) is not by_id
    return ReasoningGate(
        reasoning,
        budget=budget,
        calls_end_it=calls_end_it,
        token_bytes=None if by_id else table.__getitem__,
    )


def spelled(text: str) -> list[int]:
    return list(text.encode())


def content(following: ReasoningGate, tokens: list[int]) -> list[int | bytes]:
    return [part for token in tokens if (part := following.push(token)) is not None]


def test_content_begins_behind_the_closing_token() -> None:
    following = gate()
    assert content(following, [1, 2, CLOSE, 3, 4]) == [3, 4]
    assert following.is_over


def test_a_closer_in_other_tokens_is_text_where_the_closer_is_a_token() -> None:
    following = gate()
    assert content(following, [*spelled("</mm:think>"), 7]) == []
    assert following.is_open


def test_a_call_ends_the_reasoning_and_is_content() -> None:
    assert content(gate(), [1, CALL, 3]) == [CALL, 3]
    assert content(gate(calls_end_it=False), [1, CALL, 3]) == []


def test_a_spelled_closer_is_found_wherever_token_borders_lie() -> None:
    assert content(gate(by_id=False), [*spelled("so </mm:thi"), *spelled("nk>"), 65]) == [65]
    assert content(gate(by_id=False), [*spelled("so </mm:th"), 500, 66]) == [b"x", 66]
    assert content(gate(by_id=False), [*spelled("so "), CLOSE, 66]) == [66]
    assert content(gate(by_id=False), [*spelled("a]<"), *spelled("]b")]) == [b"]<]", ord("b")]
    assert content(gate(by_id=False, calls_end_it=False), spelled("a]<]b")) == []


def test_white_space_in_the_closers_token_is_dropped() -> None:
    tokens = {**TOKENS, 502: b"k>\n\n"}
    following = gate(by_id=False, table=tokens)
    assert content(following, [*spelled("a</mm:thin"), 502]) == []
    assert not following.is_open


@given(
    before=st.text(alphabet="</m:think>ab", max_size=30),
    cuts=st.lists(st.integers(1, 5), min_size=60, max_size=60),
)
def test_any_cut_of_the_text_gives_the_same_content(before: str, cuts: list[int]) -> None:
    """Tokens of any length over the same bytes; after the first closer everything is content."""
    text = (before + "</mm:think>" + "tail").encode()
    found = text.index(b"</mm:think>") + len(b"</mm:think>")
    pieces, place = [], 0
    for cut in cuts:
        pieces.append(text[place : place + cut])
        place += cut
    table = dict(enumerate(piece for piece in pieces if piece))
    following = gate(by_id=False, table=table)
    parts = content(following, list(table))
    assert sum(map(len, pieces)) == len(text)
    assert (
        b"".join(part if isinstance(part, bytes) else table[part] for part in parts) == text[found:]
    )


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_spent_budget_makes_the_closing_tokens_due_exactly_then(budget: int) -> None:
    following = gate(budget=budget)
    for token in range(budget):
        assert following.due is None
        following.push(token + 100)
    for token in CLOSING:
        assert following.due == token
        last = following.push(token)
    assert following.due is None and following.is_over
    assert last == CLOSING[-1]  # after the closer: content


def test_a_reasoning_that_ends_in_time_is_left_alone() -> None:
    following = gate(budget=3)
    assert content(following, [1, CLOSE, 2, 3, 4, 5]) == [2, 3, 4, 5]
    assert following.due is None


def test_an_optional_reasoning_is_all_content_and_still_has_a_budget() -> None:
    following = gate("optional", budget=2)
    assert content(following, [OPEN, 1]) == [OPEN, 1]
    assert following.due is None
    assert following.push(2) == 2
    assert following.due == CLOSING[0]
    plain = gate("optional", budget=2)
    assert content(plain, [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert plain.due is None and plain.is_over


def test_an_optional_reasoning_without_any_budget_is_closed_before_it_begins() -> None:
    following = gate("optional", budget=0, closing=(CLOSE,))
    assert following.due == CLOSE
    assert following.push(CLOSE) == CLOSE
    assert following.is_over


def test_a_spelled_opener_is_awaited_only_as_long_as_the_text_may_become_it() -> None:
    opened = gate("optional", by_id=False, budget=1)
    content(opened, spelled("<mm:think>"))
    assert opened.is_open and opened.due is None
    opened.push(65)
    assert opened.due == CLOSING[0]
    other = gate("optional", by_id=False, budget=1)
    content(other, spelled("<mm:table>"))
    assert other.is_over


def test_a_fork_goes_its_own_way() -> None:
    following = gate(budget=2)
    following.push(65)
    forked = following.fork()
    assert [forked.push(token) for token in (66, *CLOSING)] == [None, None, None, 11]
    assert not forked.is_open and following.is_open and following.due is None
    following.push(66)
    forked = following.fork()
    forked.push(CLOSING[0])
    assert (forked.due, following.due) == (CLOSE, CLOSING[0])
