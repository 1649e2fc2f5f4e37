import pytest

from negamax.text.parser.events import (
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from negamax.text.parser.packets import HOLD_SECONDS, PacedPackets

FAST = HOLD_SECONDS / 5


def texts(events: list[ParserEvent]) -> list[str]:
    return [
        event.text
        for event in events
        if isinstance(event, ContentDelta | ReasoningDelta | ToolArgumentsDelta)
    ]


def sent(
    pieces: list[str],
    *,
    step: float,
    kind: type[ContentDelta] | type[ReasoningDelta] = ContentDelta,
) -> list[list[str]]:
    """Return the fragments sent with each piece; one piece comes every `step` seconds."""
    packets = PacedPackets()
    last = len(pieces) - 1
    return [
        texts(packets.push([kind(piece)], now=100 + i * step, is_last=i == last))
        for i, piece in enumerate(pieces)
    ]


def test_first_text_goes_out_at_once_and_the_next_is_sized() -> None:
    assert sent(["I", " a", "m ", "he", "re", "!"], step=FAST) == [
        ["I"],
        [],
        [],
        [" am he"],
        [],
        ["re!"],
    ]


def test_silent_outputs_do_not_count_as_the_first() -> None:
    packets = PacedPackets()
    assert packets.push([], now=100, is_last=False) == []
    assert texts(packets.push([ContentDelta("I")], now=100 + FAST, is_last=False)) == ["I"]


def test_nothing_is_held_where_outputs_come_slowly() -> None:
    assert sent(["I", " a", "m ", "he"], step=1.2 * HOLD_SECONDS) == [["I"], [" a"], ["m "], ["he"]]


@pytest.mark.parametrize("kind", [ContentDelta, ReasoningDelta])
def test_held_text_goes_out_in_time(kind: type[ContentDelta] | type[ReasoningDelta]) -> None:
    step = HOLD_SECONDS * 0.6
    pieces = [str(i % 10) for i in range(40)]
    out = sent(pieces, step=step, kind=kind)
    assert "".join(text for texts in out for text in texts) == "".join(pieces)
    num_sent = 0
    for i, fragments in enumerate(out):
        num_sent += len("".join(fragments))
        assert (i + 1 - num_sent) * step <= 2 * HOLD_SECONDS


def test_quick_arguments_are_sized_and_complete() -> None:
    packets = PacedPackets()
    out = packets.push([ToolCallStart(0, "f")], now=100, is_last=False)
    for i, piece in enumerate(['{"', "a", '": "', *(["xyz"] * 50), '"}']):
        out += packets.push(
            [ToolArgumentsDelta(0, piece)], now=100 + (i + 1) * FAST, is_last=piece == '"}'
        )
    sizes = [len(text) for text in texts(out)]
    assert "".join(texts(out)) == '{"a": "' + "xyz" * 50 + '"}'
    assert min(sizes) >= 5 and max(sizes) <= 200


def test_the_end_releases_everything() -> None:
    assert sent(["Hello", " [", "S"], step=FAST)[-1] == [" [S"]
