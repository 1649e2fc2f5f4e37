"""Exchange KV blocks in host memory between engines. The lane of a rank sends host blocks to other
engines on request, and fills host blocks with blocks of other engines. Lanes do not access the GPU,
because plans copy between KV blocks and host blocks.

Engines may have different tensor-parallel sizes. A rank reads each needed head from a rank that
stores the head. One thread answers reads of other engines, and another thread runs imports.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import zmq
from numpy.typing import NDArray

from negamax.base.log import get_logger
from negamax.config.kv_cache import KvCacheSpec, KvCacheSpecs
from negamax.layers.attention import KvCaches
from negamax.options.transfer import NIXL
from negamax.worker import lane_wire as wire
from negamax.worker.config import LaneOptions
from negamax.worker.host_pool import HostPool
from negamax.worker.node_sockets import bind, connect

if TYPE_CHECKING:
    from negamax.worker.nixl_mover import NixlMover

logger = get_logger(__name__)

STALL_SECONDS = 10.0  # an import fails if the other engine sends no reply for this time
_POLL_MS = 100  # interval between checks of the stop flag
_AHEAD = 2  # maximum unanswered reads that this rank has sent to one lane


class LaneError(Exception):
    """An error while reading blocks of another engine."""


@dataclass(frozen=True)
class HostKind:
    """The host blocks of all caches that have the same specification."""

    spec: KvCacheSpec
    blocks: NDArray[np.int64]  # [blocks, layers, heads of this rank, words]

    def heads_of(self, rank: int, ranks: int) -> range:
        """Return the heads that rank `rank` of `ranks` ranks stores."""
        count = self.spec.local_heads(ranks)
        first = 0 if self.spec.replicated else rank * self.spec.heads // ranks
        return range(first, first + count)


@dataclass(frozen=True)
class HeadCopy:
    """Adjacent heads of one kind of cache, as numbered on another rank and on this rank."""

    kind: int
    remote_head: int
    own_head: int
    num_heads: int


class Lane:
    """Sends and fills the host blocks of a rank, until `close`."""

    def __init__(
        self,
        pool: HostPool,
        specs: KvCacheSpecs,
        caches: list[KvCaches],
        options: LaneOptions,
        *,
        rank: int,
        ranks: int,
    ) -> None:
        """`specs` and `caches`: one entry per layer. Raises `ConfigError` if NIXL is configured
        and missing, and `ResourceError` for an address that cannot be used.
        """
        self._pool, self._rank, self._ranks = pool, rank, ranks
        self.kinds = list(_view_kinds(pool, specs, caches, ranks=ranks))
        self._context = zmq.Context()
        self._stop = threading.Event()
        self._description = wire.Description(b"", [])
        self._mover: TcpMover | NixlMover = TcpMover(self._context, self.kinds)
        if options.kind == NIXL:
            from negamax.worker.nixl_mover import NixlMover  # NIXL is optional

            mover = NixlMover(self._context, self.kinds, pool)
            self._mover, self._description = mover, mover.description
        self._reads: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._reads.sndhwm = 4 * _AHEAD  # a peer has at most `_AHEAD` unanswered reads
        self._imports: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        bind(self._reads, options.reads_endpoint(rank))
        bind(self._imports, options.imports_endpoint(rank))
        self.endpoint = self._reads.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._threads = [
            threading.Thread(target=self._run, args=work, daemon=True, name="lane")
            for work in ((self._reads, self._answer), (self._imports, self._import))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._mover.close()
        self._context.destroy(linger=0)

    def _run(self, socket: zmq.Socket[bytes], work: Callable[[bytes], list[bytes]]) -> None:
        while not self._stop.is_set():
            if not socket.poll(_POLL_MS):
                continue
            peer, *frames = socket.recv_multipart()
            try:
                answer = work(frames[-1])
            except Exception as error:  # the message is invalid, or an index is out of range
                logger.warning("a message of another engine is invalid: %r", error)
                answer = [repr(error).encode()]
            socket.send_multipart([peer, *answer], copy=False)

    def _answer(self, frame: bytes) -> list[bytes]:
        message = wire.to_lane_decoder.decode(frame)
        if isinstance(message, wire.Describe):
            return [b"", wire.encode(self._description)]
        if min(message.places, default=0) < 0:
            raise IndexError("a block number is below 0")
        whole = sum(kind.blocks[0].nbytes for kind in self.kinds)
        asked = len(message.places) * sum(
            self.kinds[one.kind].blocks[0, :, one.first : one.stop].nbytes for one in message.ranges
        )
        if asked > max(wire.PIECE_BYTES, whole):
            raise ValueError(f"a read of {asked} bytes exceeds the limit of {wire.PIECE_BYTES}")
        # half of the reader's timeout, so that the reader receives the error below
        if not self._pool.await_copies(message.step_id, seconds=STALL_SECONDS / 2):
            return [b"the blocks were not copied to main memory in time"]
        found = [
            self.kinds[one.kind].blocks[message.places, :, one.first : one.stop]
            for one in message.ranges
        ]
        return [b"", *(np.ascontiguousarray(each).data.cast("B") for each in found)]

    def _import(self, frame: bytes) -> list[bytes]:
        command = wire.import_decoder.decode(frame)
        started, problem = time.monotonic(), ""
        try:
            if not self._pool.await_copies(command.after_step, seconds=STALL_SECONDS):
                raise LaneError("this rank did not copy its KV blocks to main memory in time")
            reads = plan_reads(
                self.kinds, rank=self._rank, ranks=self._ranks, peers=len(command.lanes)
            )
            for peer, parts in reads.items():
                self._mover.fetch(command.lanes[peer], parts, command)
        except Exception as error:
            problem = str(error) if isinstance(error, LaneError) else repr(error)
        seconds = time.monotonic() - started
        logger.debug("import of %d blocks: %.3f s %s", len(command.places), seconds, problem)
        return [wire.encode(wire.ImportDone(command.number, problem))]


def plan_reads(
    kinds: Sequence[HostKind], *, rank: int, ranks: int, peers: int
) -> dict[int, list[HeadCopy]]:
    """For rank `rank` of this engine's `ranks` ranks, map each of another engine's `peers` ranks to
    the heads to read from it. Each head is read once.
    """
    reads: dict[int, list[HeadCopy]] = {}
    first = rank * peers // ranks  # ranks that read the same head start at different peers
    order = [(first + each) % peers for each in range(peers)]
    for index, kind in enumerate(kinds):
        own = kind.heads_of(rank, ranks)
        head = own.start
        while head < own.stop:
            peer = next(each for each in order if head in kind.heads_of(each, peers))
            theirs = kind.heads_of(peer, peers)
            stop = min(own.stop, theirs.stop)
            part = HeadCopy(index, head - theirs.start, head - own.start, stop - head)
            reads.setdefault(peer, []).append(part)
            head = stop
    return reads


class TcpMover:
    """Reads blocks through ZeroMQ sockets. Only the thread of a lane may use a mover."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kinds: list[HostKind]) -> None:
        self._context, self._kinds = context, kinds
        self._sockets: dict[str, tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = {}

    def fetch(self, endpoint: str, parts: Sequence[HeadCopy], command: wire.ImportBlocks) -> None:
        """Fill the heads `parts` of the host blocks `command.places` from the lane at `endpoint`. A
        call that fails with `LaneError` does not write blocks afterwards.
        """
        places = command.places
        # number of 8-byte words of `parts` in one block
        words = sum(self._kinds[part.kind].blocks[0, :, : part.num_heads].size for part in parts)
        size = max(1, wire.PIECE_BYTES // (8 * words))
        pieces = [slice(first, first + size) for first in range(0, len(places), size)]
        ranges = [
            wire.HeadRange(part.kind, part.remote_head, part.remote_head + part.num_heads)
            for part in parts
        ]
        sent = 0
        try:
            for number, piece in enumerate(pieces):
                for ahead in pieces[sent : number + _AHEAD]:
                    remote = command.remote_places[ahead]
                    self.send(endpoint, wire.ReadBlocks(remote, ranges, command.remote_step))
                    sent += 1
                for part, frame in zip(parts, self.receive(endpoint), strict=True):
                    blocks = self._kinds[part.kind].blocks
                    heads = slice(part.own_head, part.own_head + part.num_heads)
                    shape = (len(places[piece]), *blocks[0, :, heads].shape)
                    values = np.frombuffer(frame, np.int64).reshape(shape)
                    blocks[places[piece], :, heads] = values
        except Exception:
            self.drop(endpoint)  # otherwise a later read would receive an old reply
            raise

    def send(self, endpoint: str, message: wire.ToLane) -> None:
        if endpoint not in self._sockets:
            socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
            connect(socket, endpoint)
            self._sockets[endpoint] = socket, monitor
        self._sockets[endpoint][0].send(wire.encode(message))

    def receive(self, endpoint: str) -> list[zmq.Frame]:
        """Return the frames of the next reply after its status frame. Raises `LaneError`."""
        socket, monitor = self._sockets[endpoint]
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        ready = dict(poller.poll(int(1000 * STALL_SECONDS)))
        if socket in ready:
            status, *frames = socket.recv_multipart(copy=False)
            if not status.bytes:
                return frames
            problem = status.bytes.decode(errors="replace")
        else:
            lost = "has disconnected" if ready else f"did not answer for {STALL_SECONDS:.0f} s"
            problem = f"the other engine's rank at {endpoint} {lost}"
        self.drop(endpoint)  # otherwise a later read would receive an old reply
        raise LaneError(problem)

    def drop(self, endpoint: str) -> None:
        for socket in self._sockets.pop(endpoint, ()):
            with contextlib.suppress(zmq.ZMQError):
                socket.close(linger=0)

    def close(self) -> None:
        for endpoint in list(self._sockets):
            self.drop(endpoint)


def _view_kinds(
    pool: HostPool, specs: KvCacheSpecs, caches: list[KvCaches], *, ranks: int
) -> Iterator[HostKind]:
    """Yield the host blocks of each allocation of `caches`, viewed by head."""
    found: dict[int, KvCacheSpec] = {}
    for of_layer, tensors in zip(specs, caches, strict=True):
        for spec in of_layer:
            found.setdefault(tensors[spec.name].untyped_storage().data_ptr(), spec)
    for spec, memory in zip(found.values(), pool.host, strict=True):
        heads = spec.local_heads(ranks)
        blocks, layers, words = memory.shape
        yield HostKind(spec, memory.numpy().reshape(blocks, layers, heads, words // heads))
