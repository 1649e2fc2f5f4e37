"""Cumulative streams: each list is encoded once, and longer events are sent less often."""

import msgspec

from negamax.api.dialects.generate.growing_json import BYTES_PER_SECOND, GrowingList, RepeatPacing


def test_list_has_all_appended_entries() -> None:
    growing = GrowingList()
    assert msgspec.json.encode(growing.json()) == b"[]"
    growing.extend([])
    growing.extend([(-0.5, 3, None)])
    growing.extend([(-1.5, 4, "a,]"), None])
    decoded = msgspec.json.decode(msgspec.json.encode({"entries": growing.json()}))
    assert decoded == {"entries": [[-0.5, 3, None], [-1.5, 4, "a,]"], None]}


def test_bytes_of_a_stream_grow_with_its_time() -> None:
    """100,000 tokens of 400 bytes each in 100 s: without pacing 2 TB."""
    pacing, num_sent, largest = RepeatPacing(num_choices=2), 0, 0
    for number in range(100_000):
        if pacing.is_due(400 * number, now=100 + number / 1000):
            num_sent += 400 * number
            largest = 400 * number
    assert num_sent <= 100 * BYTES_PER_SECOND / 2 + largest


def test_short_answers_are_sent_with_each_token() -> None:
    pacing = RepeatPacing()
    assert all(pacing.is_due(300 + 11 * number, now=number / 100) for number in range(1500))
