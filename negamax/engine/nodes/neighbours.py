"""The other agents, as an agent hears them: what node 0 cannot see is a way between two others."""

from __future__ import annotations

from collections.abc import Mapping

from negamax.base.silence import Silence
from negamax.engine.nodes import wire


class Neighbours:
    """Of one session. Single user: the thread that looks several times a second."""

    def __init__(self, session: str, addresses: Mapping[int, tuple[str, int]]) -> None:
        """`addresses`: host and UDP port of each, by its number."""
        self.addresses = addresses
        self._session = session
        self._heard = dict.fromkeys(addresses, 0)
        self._silences = {node: Silence() for node in addresses}

    def hear(self, word: wire.Hello) -> None:
        """A sign of life."""
        if word.session == self._session and word.number > self._heard.get(word.node, word.number):
            self._heard[word.node] = word.number

    def lost(self) -> str | None:
        """Which one was heard, and is not any more; None: none."""
        for node, silence in self._silences.items():
            seconds = silence.seconds(self._heard[node])
            if seconds > wire.NEIGHBOUR_SECONDS:
                return f"node {node} was not heard for {seconds:.1f} s"
        return None
