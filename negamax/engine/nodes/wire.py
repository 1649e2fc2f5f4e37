"""What node 0 and the agents of the other nodes tell each other, as MessagePack. Signs of life
(`Beat`, `Alive`) go over the connection and as datagrams, each once; `number` grows.
"""

from __future__ import annotations

import msgspec

from negamax.worker.config import RankAddresses

BEAT_SECONDS = 0.2  # between two signs of life, both ways
# without one the other end counts as dead; clients are told within 3 s
SILENCE_SECONDS = 2.0
# the same once a connection was closed
HANG_UP_SECONDS = 1.0
# the same between two others; node 0 itself is to notice one that is gone first
NEIGHBOUR_SECONDS = 2.4
# without one over the connection, while there are datagrams
STALL_SECONDS = 10.0


class Join(msgspec.Struct, frozen=True, tag="join"):
    """An agent that waits for its ranks to be started, said until it hears `Start`."""

    node: int
    agent: str  # who it is, for as long as it lives
    host: str
    address: tuple[str, int]  # of its datagrams
    facts: dict[str, str]  # `facts.facts_of`
    share: msgspec.Raw  # `MachineShare`, to be read where the facts agree


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The ranks of a node live, or one does not."""

    node: int
    agent: str
    session: str
    number: int
    death: str | None
    rank: int  # the one that is silent for the longest time
    silence: float  # its seconds


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """An agent with ranks lives: a datagram to the others."""

    node: int
    session: str
    number: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """An agent ends."""

    node: int
    agent: str


FromAgent = Join | Beat | Leave


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Node 0 lives, and something is missing."""

    reason: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """This agent can never join."""

    message: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Ranks are to be started."""

    session: str
    first_rank: int
    last_rank: int
    addresses: RankAddresses  # without the file of beats, which is the agent's
    neighbours: dict[int, tuple[str, int]]  # `Join.address` of the other agents


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Node 0 lives and runs this session, or ends it: a connection may not say that in time."""

    session: str
    number: int
    end: str | None = None  # why


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The ranks are to end; `for_good`: the agent, too."""

    reason: str
    for_good: bool


FromLeader = Wait | Refusal | Start | Alive | Stop

encoder = msgspec.msgpack.Encoder()
from_agent = msgspec.msgpack.Decoder(FromAgent)
beat = msgspec.msgpack.Decoder(Beat)
sign = msgspec.msgpack.Decoder(Alive | Hello)
from_leader = msgspec.msgpack.Decoder(FromLeader)
