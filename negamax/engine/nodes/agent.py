"""Run the agent of a node other than node 0. The agent joins node 0 and starts its node's ranks."""

import contextlib
import secrets
import signal
import socket as sockets
import time
from dataclasses import replace

import msgspec
import zmq

from negamax.base import env
from negamax.base.errors import ConfigError
from negamax.base.log import get_logger
from negamax.base.private_folder import PrivateFolder
from negamax.base.supervision import Silence
from negamax.engine.core.executor import LocalRanks
from negamax.engine.core.setup import choose_num_threads, find_device
from negamax.engine.core.source import locate
from negamax.engine.nodes import network, wire
from negamax.engine.nodes.facts import collect_facts
from negamax.engine.nodes.health import NodeHealth
from negamax.engine.nodes.heartbeats import Datagrams, Neighbours
from negamax.options.engine import EngineOptions
from negamax.options.nodes import KEY_VARIABLE, NodeOptions
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.split import check_split
from negamax.worker.config import MachineShare
from negamax.worker.node_sockets import connect, tcp_endpoint

logger = get_logger(__name__)

SHUTDOWN_SECONDS = 5.0  # Time for ranks to end before they are killed.
ABORT_SECONDS = 0.3  # Time for aborted kernels to return.
_POLL_MS = 50
_RECONNECT_MS = 100
_REMINDER_SECONDS = 10.0  # Time between log lines or probes while node 0 is silent.
_LINGER_MS = 500
_PROBE_SECONDS = 1.0


class Agent:
    """The agent of one node, which does all its work in the thread that calls `run`."""

    def __init__(
        self,
        options: NodeOptions,
        *,
        facts: dict[str, str],
        share: MachineShare,
        waits_again: bool = True,
        health: NodeHealth | None = None,
    ) -> None:
        """`share` describes this machine. With `waits_again`, keep running when the ranks end."""
        self._health = health
        self._options = options
        self._facts = facts
        self._share = share
        self._waits_again = waits_again
        self._id = secrets.token_hex(8)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._datagrams: Datagrams | None = None
        self._place: network.Place | None = None
        self._connected_at = float("-inf")
        self._next_probe = 0.0
        self._silence = Silence()
        self._num_received = 1
        self._node_0 = ""
        self._waiting = f"waiting for node 0 at {options.master_addr}:{options.master_port}"
        self._logged, self._logged_at = "", 0.0
        self._folder: PrivateFolder | None = None
        self._session = ""  # Id of node 0's session, kept until node 0 learns that the ranks ended.
        self._ranks: LocalRanks | None = None
        self._death: str | None = None  # Reason why this agent ended the ranks.
        self._num_sent = 0
        self._last_heartbeat = 0
        self._neighbours = Neighbours("", {})
        self._is_stopped = False

    def run(self) -> None:
        """Run until node 0 or a signal ends the agent; raise `ConfigError` if node 0 refuses it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        next_beat = 0.0
        if self._health is not None:
            self._health.watch(self._explain_unready)
        try:
            while not self._is_stopped:
                if self._health is not None:
                    self._health.turn()
                if self._socket is None:
                    self._connect()
                self._receive()
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + wire.BEAT_SECONDS
                    self._report()
                self._check_silence(now)
            self._send_leave()
        finally:
            self._end_ranks()
            self._disconnect()
            self._context.term()

    def _on_signal(self, *_: object) -> None:
        self._is_stopped = True

    def _connect(self) -> None:
        now = time.monotonic()
        if now < self._connected_at + wire.BEAT_SECONDS:
            time.sleep(_POLL_MS / 1000)
            return
        self._connected_at = now
        options = self._options
        try:
            address = network.resolve(options.master_addr or "")
            place = network.find_place_of_agent(options, address)
        except network.UnreachableError as error:
            self._log_waiting(str(error))
            return
        if self._place != place:
            logger.info("node %d is at %s", options.node_rank, place)
            self._place = place
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = _LINGER_MS
        self._socket.immediate = True  # Do not queue messages while disconnected.
        self._socket.reconnect_ivl = _RECONNECT_MS
        self._socket.heartbeat_ivl = wire.PING_MS
        self._socket.heartbeat_timeout = wire.CLOSE_MS
        self._node_0 = address
        connect(self._socket, tcp_endpoint(address, options.master_port))
        self._datagrams = Datagrams(place.address)
        if not self._logged:
            self._log_waiting("")

    def _disconnect(self) -> None:
        if self._socket is not None and self._datagrams is not None:
            self._socket.close()
            self._datagrams.close()
            self._socket = self._datagrams = None

    def _check_silence(self, now: float) -> None:
        """If node 0 is silent for too long, end the ranks, and connect to node 0 again."""
        seconds = self._silence.seconds(self._num_received)
        if self._ranks is not None and seconds > wire.SILENCE_SECONDS:
            logger.error("node 0 sends no heartbeat for %.1f s: the ranks end", seconds)
            self._death = f"node 0 sent no heartbeat for {seconds:.1f} s"
            self._report()  # Node 0 may be alive and receive this report.
            self._end_ranks(death=self._death)
        elif self._socket is not None and seconds > wire.SILENCE_SECONDS and now > self._next_probe:
            self._next_probe = now + _REMINDER_SECONDS
            self._log_waiting(self._explain_silence())
            self._disconnect()  # The next connection resolves the name of node 0 again.

    def _explain_silence(self) -> str:
        address = (self._node_0, self._options.master_port)
        try:
            sockets.create_connection(address, timeout=_PROBE_SECONDS).close()
        except OSError as error:
            return error.strerror or str(error)
        return f"another program uses the port, or {KEY_VARIABLE} differs from node 0's value"

    def _explain_unready(self) -> str:
        """Return why this node is not ready, or "". The thread of `NodeHealth` calls it."""
        return self._waiting if self._ranks is None else ""

    def _log_waiting(self, reason: str) -> None:
        """Log why this node waits. An unchanged reason is logged only every `_REMINDER_SECONDS`."""
        text = f"{self._waiting} ({reason})" if reason else self._waiting
        if text != self._logged or time.monotonic() > self._logged_at + _REMINDER_SECONDS:
            logger.info("%s", text)
            self._logged, self._logged_at = text, time.monotonic()

    def _receive(self) -> None:
        if self._socket is None:
            return
        self._socket.poll(_POLL_MS)
        self._receive_datagrams()
        with contextlib.suppress(zmq.Again):
            while self._socket is not None:
                frame = self._socket.recv(zmq.NOBLOCK)
                self._num_received += 1
                try:
                    message = wire.from_node_0.decode(frame)
                except msgspec.DecodeError as error:
                    raise ConfigError(
                        f"node 0 sent an invalid message: {error}",
                        hint="run the same version on all nodes",
                    ) from None
                self._handle(message)

    def _receive_datagrams(self) -> None:
        for frame, _ in self._datagrams.receive() if self._datagrams is not None else ():
            with contextlib.suppress(msgspec.DecodeError):
                message = wire.heartbeat.decode(frame)
                if isinstance(message, wire.PeerHeartbeat):
                    self._neighbours.receive(message)
                elif message.session == self._session and message.number > self._last_heartbeat:
                    self._last_heartbeat = message.number
                    self._num_received += 1
                    if message.end is not None:
                        self._handle(wire.StopRanks(message.end, for_good=False))

    def _handle(self, message: wire.FromNode0) -> None:
        if isinstance(message, wire.Refusal):
            raise ConfigError(message.message)
        if isinstance(message, wire.Wait):
            self._log_waiting(message.reason)
        elif isinstance(message, wire.StartRanks):
            if self._ranks is None:
                self._start_ranks(message)
        elif isinstance(message, wire.StopRanks):
            if message.for_good:
                logger.info("node 0 ends, so this node ends")
                self._send_leave()
                self._end_ranks(timeout=SHUTDOWN_SECONDS)
                self._is_stopped = True
            else:
                if self._ranks is not None:
                    logger.warning("the ranks end: %s", message.reason)
                self._leave_session()
        elif message.session == self._session:
            self._last_heartbeat = max(self._last_heartbeat, message.number)
        else:
            self._leave_session()

    def _report(self) -> None:
        if self._session:
            self._send_heartbeats()
        elif self._place is not None and self._datagrams is not None:
            self._send_join(self._place, self._datagrams)

    def _send_heartbeats(self) -> None:
        node = self._options.node_rank
        rank, silence = (0, 0.0) if self._ranks is None else self._ranks.longest_silence()
        death = self._death or (None if self._ranks is None else self._ranks.death())
        death = death or self._neighbours.lost()
        self._num_sent = number = self._num_sent + 1
        beat = wire.AgentHeartbeat(node, self._id, self._session, number, death, rank, silence)
        self._send(beat)
        if self._datagrams is not None:
            node_0 = self._node_0, self._options.master_port
            self._datagrams.send(wire.encoder.encode(beat), node_0)
            to_peers = wire.encoder.encode(wire.PeerHeartbeat(node, self._session, number))
            for address in self._neighbours.addresses.values():
                self._datagrams.send(to_peers, address)

    def _send_join(self, place: network.Place, datagrams: Datagrams) -> None:
        if self._folder is None:
            self._folder = PrivateFolder()
        share = replace(self._share, beats=f"{self._folder.path}/beats", interface=place.interface)
        raw = msgspec.Raw(wire.encoder.encode(share))
        host, node = f"{sockets.gethostname()}, {place.address}", self._options.node_rank
        address, beat = datagrams.address, self._num_sent
        self._send(wire.Join(node, self._id, host, address, self._facts, raw, beat))

    def _send_leave(self) -> None:
        self._send(wire.Leave(self._options.node_rank, self._id))

    def _send(self, message: wire.FromAgent) -> None:
        if self._socket is not None:
            with contextlib.suppress(zmq.Again):  # The socket is not connected: drop the message.
                self._socket.send(wire.encoder.encode(message), zmq.NOBLOCK)

    def _start_ranks(self, start: wire.StartRanks) -> None:
        assert self._folder is not None
        self._session, self._death, self._last_heartbeat = start.session, None, 0
        self._neighbours = Neighbours(start.session, start.neighbours)
        ranks = range(start.first_rank, start.last_rank + 1)
        addresses = replace(start.addresses, beats=f"{self._folder.path}/beats")
        logger.info("starting rank %s", ", ".join(map(str, ranks)))
        ranks_here = LocalRanks(ranks, addresses)
        ranks_here.start()
        self._ranks = ranks_here
        self._logged = ""

    def _leave_session(self) -> None:
        if self._ranks is not None:
            self._end_ranks()
        self._session, self._death = "", None

    def _end_ranks(self, *, timeout: float = ABORT_SECONDS, death: str | None = None) -> None:
        """Wait at most `timeout` s for ranks to end, then kill them. Report `death` to node 0."""
        if self._ranks is not None:
            if timeout < SHUTDOWN_SECONDS:
                self._ranks.abort()
            self._ranks.stop(timeout=timeout)
            self._is_stopped |= not self._waits_again
        if self._folder is not None:
            self._folder.remove()
        self._ranks = self._folder = None
        self._death = death
        if death is None:
            self._session = ""


def run_agent(
    options: EngineOptions,
    *,
    waits_again: bool = True,
    health_address: tuple[str, int] | None = None,
) -> None:
    """Run the agent of node `options.node_rank` and answer probes at `health_address`. Raises
    `ConfigError` or `CheckpointError` if the cluster key is missing, if model files are wrong, or
    if the split does not fit this machine. Also raises the errors of `NodeHealth` and `Agent.run`.
    """
    network.check_key(options.nodes)
    health = None if health_address is None else NodeHealth(*health_address)
    source = locate(options)
    layout = ParallelLayout.of(options.parallel, nodes=options.nnodes)
    device, gpus = find_device(options.device)
    check_split(layout, source.spec, gpus=None if gpus is None else gpus * layout.nodes)
    if device == "cpu":
        env.set_batch_invariant_gemms()
    share = MachineShare(
        folder=None if source.weights_folder is None else str(source.weights_folder),
        draft_folder=source.draft.folder if source.draft else None,
        weight_cache=options.weight_cache,
        crash_dump_dir=options.crash_dump_dir,
        kv_offloading_path=options.file_folder,
        num_threads=choose_num_threads(options, layout),
        beats="",
        interface=None,
    )
    facts = collect_facts(options, source, device=device)
    Agent(options.nodes, facts=facts, share=share, waits_again=waits_again, health=health).run()
