"""Heartbeats between agents. Node 0 cannot see when two other nodes do not reach each other."""

from __future__ import annotations

from collections.abc import Mapping

from negamax.base.supervision import Silence
from negamax.engine.nodes import wire


class Neighbours:
    """The other agents of one session. Single user: a thread that looks several times a second."""

    def __init__(self, session: str, addresses: Mapping[int, tuple[str, int]]) -> None:
        """`addresses`: host and UDP port by node."""
        self.addresses = addresses
        self._session = session
        self._numbers = dict.fromkeys(addresses, 0)  # of the latest heartbeat of each
        self._silences = {node: Silence() for node in addresses}

    def receive(self, message: wire.PeerHeartbeat) -> None:
        node, number = message.node, message.number
        if message.session == self._session and number > self._numbers.get(node, number):
            self._numbers[node] = number

    def lost(self) -> str | None:
        """Return which node has stopped to send heartbeats, or None. A node that never sent any may
        be behind a firewall; node 0 watches it.
        """
        for node, silence in self._silences.items():
            seconds = silence.seconds(self._numbers[node])
            if seconds > wire.NEIGHBOUR_SECONDS:
                return f"node {node} sent no heartbeat for {seconds:.1f} s"
        return None
