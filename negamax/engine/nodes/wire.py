"""MessagePack messages between node 0 and agents. Heartbeats are sent by TCP and by UDP."""

import msgspec

from negamax.worker.config import RankAddresses

BEAT_SECONDS = 0.1  # Time between two heartbeats of node 0 or of an agent.
# A node is dead after `SILENCE_SECONDS` without messages, so that clients get errors within 3 s.
SILENCE_SECONDS = 2.0
DISCONNECTED_SECONDS = 1.0  # Time without a message until a disconnected node is considered dead.
# Agents report a dead agent after `NEIGHBOUR_SECONDS` without heartbeats, later than node 0.
NEIGHBOUR_SECONDS = 2.4
STALL_SECONDS = 10.0  # Seconds without a TCP message after which a node is considered dead.
# ZeroMQ sends a ping every `PING_MS`, and closes a connection that delivers no data for `CLOSE_MS`.
PING_MS, CLOSE_MS = 1000, 5000  # TCP needs up to 4 s to deliver data after a gap of 1.4 s.


class Join(msgspec.Struct, frozen=True, tag="join"):
    """An agent offers to run ranks. The agent repeats this message until `StartRanks` arrives."""

    node: int
    agent: str  # Id of the agent process.
    host: str
    address: tuple[str, int]  # Host and UDP port of the agent.
    facts: dict[str, str]  # Name -> value of options and versions that must match node 0.
    share: msgspec.Raw  # `MachineShare`, which node 0 decodes only if the facts are equal.
    last_beat: int  # Number of the agent's latest heartbeat.


class AgentHeartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """An agent whose ranks run sends this heartbeat to node 0."""

    node: int
    agent: str
    session: str
    number: int
    death: str | None  # Reason why this node's ranks are lost.
    rank: int  # Rank on this node with the oldest heartbeat.
    silence: float  # Age of the heartbeat of `rank` in seconds.


class PeerHeartbeat(msgspec.Struct, frozen=True, tag="hello"):
    """An agent whose ranks run sends this heartbeat to other agents, by UDP only."""

    node: int
    session: str
    number: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    node: int
    agent: str


FromAgent = Join | AgentHeartbeat | Leave


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Node 0 tells an agent why the agent must wait."""

    reason: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Node 0 tells an agent that the agent can never join."""

    message: str


class StartRanks(msgspec.Struct, frozen=True, tag="start"):
    """Node 0 asks an agent to start ranks."""

    session: str
    first_rank: int
    last_rank: int
    addresses: RankAddresses  # The receiving agent replaces `beats` by a file on its machine.
    neighbours: dict[int, tuple[str, int]]  # Node number -> `Join.address` of that agent.


class Node0Heartbeat(msgspec.Struct, frozen=True, tag="alive"):
    """Node 0 sends this heartbeat to the agents."""

    session: str
    number: int
    end: str | None = None  # Reason why node 0 ends the session.


class StopRanks(msgspec.Struct, frozen=True, tag="stop"):
    """Node 0 asks an agent to end its ranks. If `for_good` is set, the agent process ends, too."""

    reason: str
    for_good: bool


FromNode0 = Wait | Refusal | StartRanks | Node0Heartbeat | StopRanks

encoder = msgspec.msgpack.Encoder()
from_agent = msgspec.msgpack.Decoder(FromAgent)
agent_heartbeat = msgspec.msgpack.Decoder(AgentHeartbeat)
heartbeat = msgspec.msgpack.Decoder(Node0Heartbeat | PeerHeartbeat)
from_node_0 = msgspec.msgpack.Decoder(FromNode0)
