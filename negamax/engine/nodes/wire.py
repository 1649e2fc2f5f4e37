"""Messages between node 0 and the agents of the other nodes, as MessagePack. Heartbeats between
them are sent twice, over the connection and as a datagram, under the same growing `number`.
"""

from __future__ import annotations

import msgspec

from negamax.worker.config import RankAddresses

BEAT_SECONDS = 0.2  # between two heartbeats, both ways
# Without a heartbeat for so long the other end counts as dead. Clients see an error within 3 s.
SILENCE_SECONDS = 2.0
DISCONNECTED_SECONDS = 1.0  # likewise, once its connection was closed
# Likewise between two agents; longer, so that node 0 is the first to notice a node that is gone.
NEIGHBOUR_SECONDS = 2.4
STALL_SECONDS = 10.0  # without a message over the connection, while datagrams arrive


class Join(msgspec.Struct, frozen=True, tag="join"):
    """An agent asks for its ranks to be started; it repeats that until it gets `Start`."""

    node: int
    agent: str  # id of the agent process
    host: str
    address: tuple[str, int]  # host and UDP port
    facts: dict[str, str]  # `facts.facts_of`
    share: msgspec.Raw  # `MachineShare`, decoded only if the facts agree


class AgentHeartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """From an agent with ranks to node 0: they live, or one of them does not."""

    node: int
    agent: str
    session: str
    number: int
    death: str | None
    rank: int  # the one that has been silent for the longest time
    silence: float  # for so many seconds


class PeerHeartbeat(msgspec.Struct, frozen=True, tag="hello"):
    """From an agent with ranks to the other agents, as a datagram only."""

    node: int
    session: str
    number: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """An agent ends."""

    node: int
    agent: str


FromAgent = Join | AgentHeartbeat | Leave


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Node 0 lives, and cannot start yet."""

    reason: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """This agent can never join."""

    message: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The agent is to start these ranks."""

    session: str
    first_rank: int
    last_rank: int
    addresses: RankAddresses  # without `beats`, a file on the agent's machine
    neighbours: dict[int, tuple[str, int]]  # `Join.address` of the other agents, by node


class Node0Heartbeat(msgspec.Struct, frozen=True, tag="alive"):
    """From node 0 to the agents: it lives and runs this session, or ends it."""

    session: str
    number: int
    end: str | None = None  # why the session ends; None: it does not


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The ranks are to end; `for_good`: the agent, too."""

    reason: str
    for_good: bool


FromNode0 = Wait | Refusal | Start | Node0Heartbeat | Stop

encoder = msgspec.msgpack.Encoder()
from_agent = msgspec.msgpack.Decoder(FromAgent)
agent_heartbeat = msgspec.msgpack.Decoder(AgentHeartbeat)
heartbeat = msgspec.msgpack.Decoder(Node0Heartbeat | PeerHeartbeat)
from_node_0 = msgspec.msgpack.Decoder(FromNode0)
