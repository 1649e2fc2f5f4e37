"""Connect `Transfers` to other engines, and to this engine's ranks by one socket per rank.

Other engines connect to one socket of this engine. This engine opens a socket to each engine that
it reads from. ZeroMQ's thread sends heartbeats, so connections survive long steps of an engine.
"""

import contextlib
import ipaddress
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import zmq

from negamax.base.errors import ConfigError, ResourceError
from negamax.base.log import get_logger
from negamax.base.private_folder import PrivateFolder
from negamax.engine.core import transfer_wire as wire
from negamax.engine.core.transfers import Peer, PullPeer, Transfers
from negamax.options.nodes import KEY_VARIABLE
from negamax.options.transfer import CONSUMER, KvTransferConfig
from negamax.worker import lane_wire
from negamax.worker.node_sockets import FRAME_BYTES, bind, connect, has_key, tcp_endpoint

logger = get_logger(__name__)

TICK_SECONDS = 0.2  # Time between two checks of the time limits of pulls and leases.
_HEARTBEAT_MS, _SILENCE_MS = 1000, 5000
MOST_PEERS = 200  # Largest number of engines to read from; ZeroMQ allows about 340 sockets.
MOST_UNSENT = 100_000  # Largest number of queued messages to an engine.
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
Socket = zmq.Socket[bytes]
T = TypeVar("T")


def check_transfer_address(config: KvTransferConfig) -> None:
    """Raise `ConfigError` if other machines reach the address and NEGAMAX_NODE_KEY is not set."""
    if not config.is_loopback and not has_key():
        raise ConfigError(
            f"--kv-transfer-config: kv_ip is {config.host}, and {KEY_VARIABLE} is not set: any "
            f"program that reaches the port could read prompts",
            hint=f"set {KEY_VARIABLE} to the same secret for all engines, for example to the "
            f"output of `openssl rand -hex 32`",
        )


class TransferSockets:
    """Sends and receives messages of `Transfers`. Only the engine loop may use an instance."""

    def __init__(
        self, config: KvTransferConfig, imports: Sequence[str], *, folder: PrivateFolder
    ) -> None:
        """Open the sockets. `imports` lists the endpoints of this engine's ranks. `folder` contains
        the ranks' sockets until `close` is called. Raises `ConfigError` if NEGAMAX_NODE_KEY is
        needed but not set, and `ResourceError` if the address cannot be used.
        """
        check_transfer_address(config)
        self.transfers: Transfers  # The caller must set `transfers` before it calls a method.
        self._config, self._folder = config, folder
        self._context = zmq.Context()
        self._peers: dict[PullPeer, tuple[Socket, Socket]] = {}  # (socket, its monitor).
        self._answered: set[PullPeer] = set()  # Prefilling engines that have answered.
        self._lost: dict[PullPeer, None] = {}  # Lost engines; `poll` fails the pulls from them.
        self._server: Socket = self._context.socket(zmq.ROUTER)
        self._server.heartbeat_ivl, self._server.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
        self._lanes: list[Socket] = []
        try:
            if config.role != CONSUMER:
                self._listen(tcp_endpoint(config.host, config.port))
            for endpoint in imports:
                self._lanes.append(self._context.socket(zmq.DEALER))
                connect(self._lanes[-1], endpoint)
        except BaseException:
            self.close()
            raise

    def send(self, peer: Peer, message: wire.Message) -> None:
        frame = wire.encode(message)
        if isinstance(peer, bytes):
            self._server.send_multipart([peer, frame])
            return
        if peer in self._lost:
            return
        try:
            if peer not in self._peers:
                self._open(*peer)
            self._peers[peer][0].send(frame, zmq.NOBLOCK)
        except (ConnectionError, zmq.ZMQError) as error:  # The address is from a client's request.
            logger.warning("no message can be sent to %r, port %d: %s", *peer, error)
            self._lose(peer)

    def copy(self, command: lane_wire.ImportBlocks) -> None:
        for lane in self._lanes:
            lane.send(lane_wire.encode(command))

    def poll(self) -> None:
        """Handle all messages that have arrived, then call `Transfers.advance`."""
        transfers, now = self.transfers, time.monotonic()
        for lane in self._lanes:
            for (frame,) in _receive_all(lane):
                transfers.take_copied(lane_wire.done_decoder.decode(frame), now=now)
        for peer, *frames in _receive_all(self._server):
            if (message := _decode(wire.from_decoder, frames)) is not None:
                transfers.handle(peer, message, now=now)
        for address, (socket, monitor) in list(self._peers.items()):
            for frames in _receive_all(socket):
                if (answer := _decode(wire.from_prefiller, frames)) is not None:
                    self._answered.add(address)
                    transfers.handle(address, answer, now=now)
            if any(_receive_all(monitor)):
                self._lose(address)
        lost, self._lost = self._lost, {}
        for address in lost:
            transfers.lose(address)
        transfers.advance(now=now)

    def wait(self, requests: Socket) -> bool:
        """Wait for a request, a message or a timer. Return whether a request has arrived."""
        poller = zmq.Poller()
        poller.register(requests, zmq.POLLIN)
        for socket in (*self._lanes, self._server, *sum(self._peers.values(), ())):
            poller.register(socket, zmq.POLLIN)
        milliseconds = int(1000 * TICK_SECONDS) if self.transfers.has_timers else None
        return requests in dict(poller.poll(0 if self._lost else milliseconds))

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._folder.remove()

    def _listen(self, endpoint: str) -> None:
        try:
            bind(self._server, endpoint)
        except ResourceError as error:
            hint = "choose another kv_port or kv_ip in --kv-transfer-config"
            raise ResourceError(str(error), hint=hint) from None

    def _open(self, host: str, port: int) -> None:
        """Connect to a prefilling engine. Raises `ConnectionError` or `ZMQError`."""
        if self._config.is_loopback and not _is_loopback(host):
            raise ConnectionError(f"kv_ip is a loopback address, so {host} is unreachable")
        if len(self._peers) == MOST_PEERS:  # Close the oldest peer that has not answered.
            silent = [peer for peer in self._peers if peer not in self._answered]
            if not silent:
                raise ConnectionError(f"{MOST_PEERS} engines are connected, which is the limit")
            self._lose(silent[0])
        socket: Socket = self._context.socket(zmq.DEALER)
        socket.linger, socket.sndhwm, socket.maxmsgsize = 0, MOST_UNSENT, FRAME_BYTES
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
        self._peers[host, port] = socket, socket.get_monitor_socket(_LOST)
        connect(socket, tcp_endpoint(host, port))

    def _lose(self, peer: PullPeer) -> None:
        """Close the connection to engine `peer`. The next `poll` ends the pulls from `peer`."""
        self._lost[peer] = None
        self._answered.discard(peer)
        if peer in self._peers:
            socket, monitor = self._peers.pop(peer)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)


def _decode(decoder: msgspec.msgpack.Decoder[T], frames: list[bytes]) -> T | None:
    """Decode a message; return None if the frames are not a valid message."""
    try:
        return decoder.decode(b"".join(frames))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("dropped an invalid message of another engine: %s", error)
        return None


def _receive_all(socket: Socket) -> Iterator[list[bytes]]:
    while True:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
