import os
from collections.abc import Iterator

import pytest

from tests.dist.link_emulator import Link, Settings

PACKET_BYTES = 100


def packet(number: int, *, port: int = 80, flags: int = 0x10) -> bytes:
    head = bytes([0x45, *bytes(8), 6, *bytes(10)])
    tcp = bytes(2) + port.to_bytes(2, "big") + bytes(9) + bytes([flags]) + bytes(6)
    return (head + tcp).ljust(PACKET_BYTES - 2, b"\0") + number.to_bytes(2, "big")


class Ends:
    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK)
        self.link = Link(self._writer, seed=3)

    def arrived(self, now: float) -> list[int]:
        self.link.deliver(now)
        try:
            data = os.read(self._reader, 60_000)
        except BlockingIOError:
            return []
        ends = range(PACKET_BYTES, len(data) + 1, PACKET_BYTES)
        return [int.from_bytes(data[end - 2 : end], "big") for end in ends]


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    os.close(found._reader)
    os.close(found._writer)


def test_packets_are_late_and_in_order(ends: Ends) -> None:
    ends.link.settings = Settings(delay=0.1, jitter=0.05)
    for number in range(20):
        ends.link.take(packet(number), now=number / 1000)
    assert ends.arrived(0.049) == []
    some = ends.arrived(0.11)
    assert 0 < len(some) < 20 and some == list(range(len(some)))
    assert some + ends.arrived(0.17) == list(range(20))


def test_the_share_that_is_lost_and_a_cut(ends: Ends) -> None:
    ends.link.settings = Settings(loss=0.25)
    for number in range(400):
        ends.link.take(packet(number), now=0.0)
    kept = ends.arrived(0.0)
    assert 260 < len(kept) < 340 and ends.link.num_dropped == 400 - len(kept)
    ends.link.settings = Settings(cut=True)
    ends.link.take(packet(1), now=1.0)
    assert ends.arrived(1.0) == []


def test_a_limited_rate_delays_and_drops_what_waits_too_long(ends: Ends) -> None:
    ends.link.settings = Settings(rate=8 * PACKET_BYTES * 100, queue=0.1)  # 100 packets per second
    for number in range(50):
        ends.link.take(packet(number), now=0.0)
    assert ends.link.num_dropped == 40
    assert ends.arrived(0.055) == [0, 1, 2, 3, 4]
    assert ends.arrived(0.101) == [5, 6, 7, 8, 9]


def test_no_connection_is_made_except_to_open_ports(ends: Ends) -> None:
    ends.link.settings = Settings(open_ports=[[1, 999], [2001, 65535]])
    syn, syn_ack, ack = 0x02, 0x12, 0x10
    for number, (port, flags) in enumerate(
        [(1000, syn), (2000, syn), (999, syn), (2001, syn), (1500, ack), (1500, syn_ack)]
    ):
        ends.link.take(packet(number, port=port, flags=flags), now=0.0)
    assert ends.arrived(0.0) == [2, 3, 4, 5]
