"""Messages between node 0 and agents, as MessagePack. Heartbeats go by TCP and by UDP."""

import msgspec

from negamax.worker.config import RankAddresses

BEAT_SECONDS = 0.2  # between two heartbeats, both ways
# Without a heartbeat for this time the other end counts as dead. Clients see an error within 3 s.
SILENCE_SECONDS = 2.0
DISCONNECTED_SECONDS = 1.0  # the same, after its connection was closed
# The same between two agents. Longer, so that node 0 is the first to notice a dead node.
NEIGHBOUR_SECONDS = 2.4
STALL_SECONDS = 10.0  # without a message over TCP, while datagrams arrive


class Join(msgspec.Struct, frozen=True, tag="join"):
    """An agent asks to start its ranks, repeatedly until it gets `StartRanks`."""

    node: int
    agent: str  # id of the agent process
    host: str
    address: tuple[str, int]  # host and UDP port
    facts: dict[str, str]  # `facts.collect_facts`
    share: msgspec.Raw  # `MachineShare`, decoded only if the facts agree
    last_beat: int  # number of the agent's last heartbeat, in any session


class AgentHeartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """From an agent with ranks to node 0; `death`: how a rank ended."""

    node: int
    agent: str
    session: str
    number: int
    death: str | None
    rank: int  # rank without a heartbeat for the longest time
    silence: float  # seconds since that heartbeat


class PeerHeartbeat(msgspec.Struct, frozen=True, tag="hello"):
    """From an agent with ranks to the other agents, by UDP only."""

    node: int
    session: str
    number: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    node: int
    agent: str


FromAgent = Join | AgentHeartbeat | Leave


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Node 0 runs and cannot start yet."""

    reason: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """This agent can never join."""

    message: str


class StartRanks(msgspec.Struct, frozen=True, tag="start"):
    """The agent must start these ranks."""

    session: str
    first_rank: int
    last_rank: int
    addresses: RankAddresses  # without `beats`, a file on the agent's machine
    neighbours: dict[int, tuple[str, int]]  # `Join.address` of the other agents, by node


class Node0Heartbeat(msgspec.Struct, frozen=True, tag="alive"):
    """From node 0 to the agents: it runs this session, or ends it."""

    session: str
    number: int
    end: str | None = None  # why the session ends


class StopRanks(msgspec.Struct, frozen=True, tag="stop"):
    """The ranks must end; `for_good`: the agent too."""

    reason: str
    for_good: bool


FromNode0 = Wait | Refusal | StartRanks | Node0Heartbeat | StopRanks

encoder = msgspec.msgpack.Encoder()
from_agent = msgspec.msgpack.Decoder(FromAgent)
agent_heartbeat = msgspec.msgpack.Decoder(AgentHeartbeat)
heartbeat = msgspec.msgpack.Decoder(Node0Heartbeat | PeerHeartbeat)
from_node_0 = msgspec.msgpack.Decoder(FromNode0)
