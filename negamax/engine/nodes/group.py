"""Let node 0 start and watch the ranks of other nodes, through the agents of these nodes."""

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import IO

import msgspec
import zmq

from negamax.base.errors import ResourceError
from negamax.base.log import get_logger
from negamax.base.private_folder import PrivateFolder
from negamax.base.supervision import Silence
from negamax.engine.core.executor import MultiProcessExecutor
from negamax.engine.nodes import network, wire
from negamax.engine.nodes.facts import find_differences
from negamax.engine.nodes.heartbeats import Address, Datagrams
from negamax.options.nodes import KEY_VARIABLE, NodeOptions
from negamax.parallel.layout import ParallelLayout
from negamax.worker.config import MachineShare, RankAddresses, WorkerConfig
from negamax.worker.node_sockets import ConnectionLimit, bind, has_key, tcp_endpoint

logger = get_logger(__name__)

_POLL_SECONDS = 0.05
_REMINDER_SECONDS = 10.0  # Time between log lines about missing nodes.
_LEAVE_SECONDS = 1.0  # Longest wait until agents confirm that their ranks have ended.
_MESSAGE_BYTES = 2**20  # Size limit of an agent's message.


@dataclass
class _Node:
    """The state of another node. Only the receiving thread changes the state."""

    number: int
    ranks: range
    route: bytes = b""  # ZeroMQ identity of the node's agent.
    connection: int = -1  # File descriptor of the latest message's connection.
    is_disconnected: bool = False  # The agent closed the connection and sent no heartbeat since.
    udp_address: Address | None = None
    join: wire.Join | None = None  # The latest `Join`; None if the node is not joined.
    joined_at: float = 0.0
    last_beat: int = 0
    last_datagram: int = 0
    num_signs: int = 0  # Counter of new heartbeats and `Join` messages from the agent.
    num_frames: int = 0  # Counter of TCP messages from the agent.
    silence: Silence = field(default_factory=Silence)
    stall: Silence = field(default_factory=Silence)
    death: str | None = None
    rank: int = 0
    rank_silence: float = 0.0

    @property
    def name(self) -> str:
        return f"node {self.number}" + (f" ({self.join.host})" if self.join else "")

    def is_agent(self, agent: str) -> bool:
        return self.join is not None and self.join.agent == agent

    def start(self) -> None:
        self.last_beat = self.last_datagram = 0
        self.num_signs = self.num_frames = 1
        self.silence, self.stall = Silence(), Silence()

    def problem(self) -> str | None:
        silence = self.silence.seconds(self.num_signs)
        stall = self.stall.seconds(self.num_frames)
        # Until its first heartbeat, an agent uses only TCP, which recovers slowly from packet loss.
        limit = wire.SILENCE_SECONDS if self.last_beat else wire.STALL_SECONDS
        if self.last_beat and self.is_disconnected:
            limit = wire.DISCONNECTED_SECONDS
        if silence > limit:
            return f"{self.name} sends no heartbeat for {silence:.1f} s"
        if stall > wire.STALL_SECONDS:
            return f"{self.name} sends heartbeats by UDP, but no message by TCP for {stall:.1f} s"
        return None


class NodeGroup:
    """Ranks of all nodes except node 0. After `start`, a thread receives agents' messages."""

    def __init__(
        self, options: NodeOptions, layout: ParallelLayout, *, facts: dict[str, str]
    ) -> None:
        """Listen for agents. Raises `ConfigError` (bad address), `ResourceError` (used port)."""
        self.ranks = range(layout.ranks_per_node, layout.world_size)
        self._facts = facts
        self._place = network.find_place_of_node_0(options)
        self._session = secrets.token_hex(8)
        self._nodes = [_Node(node, layout.ranks_of_node(node)) for node in range(1, layout.nodes)]
        self._has_warned = False
        self._stop: wire.StopRanks | None = None
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._folder = PrivateFolder()
        reader, writer = os.pipe()
        # When a node is lost, the reader is closed, so that poll() reports POLLERR on the writer.
        self._alarm = os.fdopen(reader, "rb", 0), os.fdopen(writer, "wb", 0)
        self._context = zmq.Context()
        ports = itertools.count(options.master_port)
        agents_port = next(ports)
        self.addresses = self._addresses(layout, ports)
        all_ports = range(agents_port, next(ports))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.heartbeat_ivl = wire.PING_MS
        self._socket.heartbeat_timeout = wire.CLOSE_MS
        self._num_peers = 4 * layout.world_size  # Ranks of earlier engines may connect, too.
        self._limits: list[ConnectionLimit] = []  # One limit per socket, that of `_socket` first.
        self.limit_connections(self._socket)
        self._datagrams: Datagrams | None = None
        self._num_sent = 0
        try:
            network.check_ports(self._place.address, all_ports)
            endpoint = tcp_endpoint(self._place.address, agents_port)
            bind(self._socket, endpoint, most_bytes=_MESSAGE_BYTES)
            self._datagrams = Datagrams(self._place.address, agents_port)
        except ResourceError:
            self.close()
            raise
        self._log_ports(all_ports)

    def _addresses(self, layout: ParallelLayout, ports: Iterator[int]) -> RankAddresses:
        """Return the endpoints of all ranks. Ranks of this machine use Unix sockets."""
        own, address = self._folder.path, self._place.address
        local = RankAddresses.local(own, layout)
        rendezvous = tcp_endpoint(address, next(ports))
        results, plans = list(local.results), list(local.plans)
        for dp_rank in sorted({layout.replace_rank(rank).dp_rank for rank in self.ranks}):
            results[dp_rank] = tcp_endpoint(address, next(ports))
        for rank in self.ranks:
            plans[rank] = tcp_endpoint(address, next(ports))
        return RankAddresses(
            tuple(plans), tuple(results), rendezvous, local.beats, self._place.interface
        )

    def _log_ports(self, ports: range) -> None:
        logger.info(
            "node 0 is at %s; open its TCP ports %d-%d and its UDP port %d for the other nodes, "
            "and open the ports that gloo and NCCL take (%s) between all nodes",
            self._place,
            ports[0],
            ports[-1],
            ports[0],
            network.ephemeral_ports(),
        )
        if not has_key():
            logger.warning(
                "%s is not set, so any program on this machine can join; set the key on all nodes",
                KEY_VARIABLE,
            )

    def meet(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until every node has joined. `check` raises an error if an agent cannot join."""
        logged_at, logged = float("-inf"), ""
        while True:
            self._receive(0.1)
            check()
            now = time.monotonic()
            for node in self._nodes:
                if node.join is not None and now > node.joined_at + wire.SILENCE_SECONDS:
                    logger.warning("%s has joined, but no longer answers", node.name)
                    node.join = None
            missing = [node.number for node in self._nodes if node.join is None]
            if not missing:
                break
            waiting = f"waiting for node {', '.join(map(str, missing))} of {len(self._nodes) + 1}"
            if waiting != logged or now > logged_at + _REMINDER_SECONDS:
                logger.info("%s at %s", waiting, self._place.address)
                logged, logged_at = waiting, now
        logger.info("all nodes have joined: %s", ", ".join(node.name for node in self._nodes))

    def start(self) -> None:
        for node in self._nodes:
            node.start()
            self._send_start(node)
        self._thread = threading.Thread(target=self._watch, name="nodes", daemon=True)
        self._thread.start()

    def config_of(self, rank: int, config: WorkerConfig) -> WorkerConfig:
        layout = config.layout.replace_rank(rank)
        join = self._nodes[layout.node - 1].join
        assert join is not None
        share = msgspec.msgpack.decode(join.share, type=MachineShare)
        return replace(config, layout=layout).on_machine(share, self.addresses)

    @property
    def alarms(self) -> Sequence[IO[bytes]]:
        return [self._alarm[1]]

    def death(self) -> str | None:
        return next((node.death for node in self._nodes if node.death is not None), None)

    def longest_silence(self) -> tuple[int, float]:
        node = max(self._nodes, key=lambda each: each.rank_silence)
        return node.rank, node.rank_silence

    def limit_connections(self, socket: zmq.Socket[bytes]) -> None:
        self._limits.append(ConnectionLimit(socket, num_peers=self._num_peers))

    def abort(self) -> None:
        """Do nothing, because each agent aborts the kernels of its own ranks."""

    def expect_end(self) -> None:
        self._is_ending = True

    def stop(self, *, timeout: float, restarts: bool) -> None:
        """Let the agents end their ranks. If `restarts` is set, agents wait for the next engine."""
        self.expect_end()
        reason = self.death() or ("the engine is started again" if restarts else "node 0 ends")
        self._stop = wire.StopRanks(reason, for_good=not restarts)
        if self._thread is not None:
            self._thread.join()
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)
        if self._datagrams is not None:
            self._datagrams.close()
        for end in self._alarm:
            end.close()
        self._folder.remove()

    def _watch(self) -> None:
        next_beat = 0.0
        while self._stop is None:
            self._receive(_POLL_SECONDS)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + wire.BEAT_SECONDS
                self._send_heartbeats()
            for node in self._nodes:
                if wrong := node.problem():
                    self._lost(node, wrong)
        for node in self._nodes:
            self._send(node.route, self._stop)
        # `close` drops messages that agents have not read, so wait until the agents answer.
        wait = _LEAVE_SECONDS if self._stop.for_good else _POLL_SECONDS
        deadline = time.monotonic() + wait
        while any(node.join for node in self._nodes) and time.monotonic() < deadline:
            self._receive(_POLL_SECONDS)

    def _send_heartbeats(self) -> None:
        self._num_sent += 1
        reason = self.death()
        message = wire.Node0Heartbeat(self._session, self._num_sent, reason)
        for node in self._nodes:
            self._send(node.route, wire.StopRanks(reason, for_good=False) if reason else message)
            if node.udp_address is not None and self._datagrams is not None:
                self._datagrams.send(wire.encoder.encode(message), node.udp_address)

    def _lost(self, node: _Node, reason: str) -> None:
        if node.death is None and not self._is_ending:
            is_first = self.death() is None
            node.death = reason
            if is_first:
                logger.error("%s", reason)
                self._alarm[0].close()

    def _receive(self, seconds: float) -> None:
        if self._socket.poll(round(1000 * seconds)):
            with contextlib.suppress(zmq.Again):
                while True:
                    route, frame = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    try:
                        message = wire.from_agent.decode(frame.buffer)
                    except msgspec.DecodeError as error:
                        logger.warning("an agent sent an invalid message: %s", error)
                        continue
                    self._handle(route.bytes, message, connection=int(frame.get(zmq.SRCFD)))
        if self._datagrams is not None:
            for datagram, sender in self._datagrams.receive():
                with contextlib.suppress(msgspec.DecodeError):
                    self._handle_datagram(wire.agent_heartbeat.decode(datagram), sender)
        for limit in self._limits[1:]:
            limit.apply()
        for event, connection in self._limits[0].apply():
            if event == zmq.EVENT_DISCONNECTED:
                # ZeroMQ also closes a connection that delivers nothing: the agent may be alive.
                for node in self._nodes:
                    if node.connection == connection:
                        stall = node.stall.seconds(node.num_frames)
                        node.is_disconnected = stall < wire.DISCONNECTED_SECONDS
            elif event != zmq.EVENT_ACCEPTED and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "refused a peer without this node's key; set the same %s on all nodes",
                    KEY_VARIABLE,
                )

    def _handle(self, route: bytes, message: wire.FromAgent, *, connection: int) -> None:
        node = next((each for each in self._nodes if each.number == message.node), None)
        if node is None:
            refusal = f"--node-rank is {message.node}; allowed: 0 to {len(self._nodes)}"
            self._send(route, wire.Refusal(refusal))
            return
        is_known = node.is_agent(message.agent)
        if isinstance(message, wire.Join):
            self._handle_join(route, node, message, connection=connection)
        elif not is_known or (
            isinstance(message, wire.AgentHeartbeat) and message.session != self._session
        ):
            self._send(route, wire.StopRanks("node 0 has started again", for_good=False))
        elif isinstance(message, wire.Leave):
            if self._thread is not None:
                self._lost(node, f"{node.name} was stopped")
            node.join = None
        else:
            node.route, node.connection = route, connection  # The agent may have a new connection.
            node.num_frames += 1
            self._handle_heartbeat(node, message)

    def _handle_datagram(self, beat: wire.AgentHeartbeat, sender: Address) -> None:
        for node in self._nodes:
            if node.is_agent(beat.agent) and beat.session == self._session:
                if beat.number > node.last_datagram:
                    node.last_datagram = beat.number
                    node.udp_address = sender
                self._handle_heartbeat(node, beat)

    def _handle_heartbeat(self, node: _Node, beat: wire.AgentHeartbeat) -> None:
        """Handle a heartbeat of this session unless a later heartbeat of the node has arrived."""
        if beat.number <= node.last_beat:
            return
        node.last_beat = beat.number
        node.is_disconnected = False
        node.num_signs += 1
        node.rank, node.rank_silence = beat.rank, beat.silence
        if beat.death is not None:
            self._lost(node, f"{beat.death} on {node.name}")

    def _handle_join(self, route: bytes, node: _Node, join: wire.Join, *, connection: int) -> None:
        different = "; ".join(find_differences(self._facts, join.facts, name=f"node {node.number}"))
        if different:
            message = f"node {node.number} ({join.host}) differs from node 0: {different}"
            logger.error("%s", message)
            self._send(route, wire.Refusal(message))
            return
        if node.join is not None and not node.is_agent(join.agent):
            self._send(route, wire.Wait(f"{node.name} has already joined"))
            return
        node.route, node.connection = route, connection
        if self._thread is not None:
            if node.last_beat > join.last_beat:
                return  # The agent sent heartbeats after this `Join`, which is therefore old.
            if node.last_beat:
                self._lost(node, f"{node.name} has lost its ranks")
            else:  # The message `StartRanks` may be lost: send it again.
                node.num_signs += 1
                self._send_start(node)
            return
        if node.join is None:
            logger.info("node %d (%s) has joined", node.number, join.host)
        node.join, node.joined_at = join, time.monotonic()
        missing = ", ".join(str(each.number) for each in self._nodes if each.join is None)
        self._send(route, wire.Wait(f"node {missing} is missing" if missing else "node 0 starts"))

    def _send_start(self, node: _Node) -> None:
        first, last = node.ranks.start, node.ranks.stop - 1
        addresses = replace(self.addresses, beats="")
        others = {
            each.number: each.join.address
            for each in self._nodes
            if each.join is not None and each is not node
        }
        self._send(node.route, wire.StartRanks(self._session, first, last, addresses, others))

    def _send(self, route: bytes, message: wire.FromNode0) -> None:
        """Send a message to one agent. Drop the message if the agent has disconnected."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([route, wire.encoder.encode(message)], zmq.NOBLOCK)


def start_on_nodes(
    config: WorkerConfig,
    options: NodeOptions,
    *,
    facts: dict[str, str],
    check: Callable[[], None] = lambda: None,
) -> MultiProcessExecutor:
    """Wait for all nodes, and start the ranks. Raises the errors of `NodeGroup` and `meet`."""
    group = NodeGroup(options, config.layout, facts=facts)
    try:
        group.meet(check)
    except BaseException:
        group.close()
        raise
    return MultiProcessExecutor(config, group.addresses, others=group)
