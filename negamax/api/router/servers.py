"""Track the health and load of the servers behind the router, and choose among the servers."""

import asyncio
import ssl
import time
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult

import msgspec

from negamax.api.http.connections import Connection, ConnectionPool
from negamax.api.http.exchange import Exchange, Headers
from negamax.api.router.kv_events import BlockIndex
from negamax.api.router.prompt import CHUNK_TOKENS, RoutedPrompt
from negamax.api.schemas.answers import PromptBlocks
from negamax.base.errors import UnavailableError
from negamax.base.log import get_logger
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.client.placement import (
    MAX_BLOCKS,
    NUM_COLUMNS,
    PrefixTable,
    ReplicaLoad,
    choose_replica,
)

logger = get_logger(__name__)

_CONNECT_SECONDS = 5.0
_HEALTH_SECONDS = 5.0  # Time limit of a health probe; a busy server answers slowly.
# A server may close an idle connection while a request is on its way. If a reused connection ends
# within this time, its request is sent again.
_CROSSED_SECONDS = 1.0
_BLOCKS_SECONDS = 2.0  # Time limit of a request for the blocks of a prompt.
_BLOCKS_BYTES = 2**22  # Size limit of the answer with the blocks of a prompt.
_PAUSE_SECONDS = 5.0  # After a failed request for blocks, the server gets no other for this time.
_RETRY_SECONDS = 1.0  # Value of the header Retry-After if no server answers.


class RoutedServer:
    """A server behind the router. Only the event loop changes this object."""

    def __init__(
        self, address: SplitResult, *, role: str, load: ReplicaLoad, indexes: Sequence[BlockIndex]
    ) -> None:
        """`role` is the server's label in metrics. Only the router writes `load`. `indexes` follow
        the KV events of the server's caches.
        """
        self.url, self.role, self.load = address.geturl(), role, load
        self.is_up, self.num_open = False, 0
        self._indexes = indexes
        self._next_ask = 0.0  # Monotonic time before which the server is not asked for blocks.
        self.open_prompts: dict[str, PromptBlocks] = {}  # open request's name -> prompt's blocks
        self.limits: set[asyncio.Timeout] = set()  # A failed probe ends these timeouts of prefills.
        # `num_*`: counters of requests since the start of the router.
        self.num_requests = self.num_failures = self.num_retries = self.num_prefix_hits = 0
        self.num_event_hits = 0
        is_https = address.scheme == "https"
        self.connections = ConnectionPool(
            address.hostname or "",
            address.port or (443 if is_https else 80),
            tls=ssl.create_default_context() if is_https else None,
        )
        self._host = [(b"host", address.netloc.encode())]
        self._path = address.path.encode()

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._indexes))

    @property
    def num_event_losses(self) -> int:
        return sum(index.num_losses for index in self._indexes)

    @property
    def can_find_blocks(self) -> bool:
        """Whether the router follows the server's cache, and may ask the server for blocks."""
        return any(index.is_live for index in self._indexes) and time.monotonic() >= self._next_ask

    async def find_blocks(self, path: str, *, headers: Headers, body: bytes) -> PromptBlocks | None:
        """Ask the server for a prompt's blocks. Return None if the answer comes too late."""
        target = f"{path}/kv_blocks".encode()
        try:
            async with asyncio.timeout(_BLOCKS_SECONDS):
                exchange = await self.send(b"POST", target, headers=headers, body=body)
                with closing(exchange):
                    answer = await exchange.read(max_bytes=_BLOCKS_BYTES)
                if exchange.status == 200:
                    found = msgspec.json.decode(answer, type=PromptBlocks)
                    num_hashed = found.block_size * len(found.block_hashes)
                    if found.block_size > 0 and num_hashed < found.num_tokens:
                        return found
                elif exchange.status < 500 and exchange.status != 404:
                    return None  # With this prompt, the server will refuse the request.
        except (UnavailableError, TimeoutError, msgspec.MsgspecError):
            pass
        self._next_ask = time.monotonic() + _PAUSE_SECONDS
        return None

    def count_cached(self, prompt: PromptBlocks | None) -> int | None:
        """Return how many tokens of a prompt are in the server's caches, or None if unknown.

        The prompts of open requests count as cached, because their events may arrive later.
        """
        live = [index for index in self._indexes if index.is_live]
        if prompt is None or not live:
            return None
        hashes = prompt.block_hashes
        cached = max(index.count_leading(hashes) for index in live)
        others = self.open_prompts.values()
        computed = (_count_common(hashes, other.block_hashes) for other in others)
        return max([cached, *computed]) * prompt.block_size

    async def send(
        self, method: bytes, target: bytes, *, headers: Headers, body: bytes
    ) -> Exchange:
        """Send a request. Wait for the answer's status and headers, or raise `UnavailableError`."""
        connection, began = self.connections.take(), time.monotonic()
        if connection is not None:
            try:
                return await self._send(connection, method, target, headers=headers, body=body)
            except UnavailableError:
                if time.monotonic() > began + _CROSSED_SECONDS or connection[0].has_received:
                    raise
        return await self._send(None, method, target, headers=headers, body=body)

    async def _send(
        self,
        kept: Connection | None,
        method: bytes,
        target: bytes,
        *,
        headers: Headers,
        body: bytes,
    ) -> Exchange:
        gone = UnavailableError(
            f"the server {self.url} does not answer, or ended its answer early",
            hint="send the request again",
            code="server_gone",
            retry_after=_RETRY_SECONDS,
        )
        try:
            connection = await self._connect() if kept is None else kept
        except OSError:
            raise gone from None
        return await Exchange.begin(
            connection,
            method,
            self._path + target,
            headers=headers,
            body=body,
            gone=gone,
            keep=lambda: self.connections.keep(connection),
        )

    async def probe(self) -> bool:
        """Return whether the server answers /health with status 200."""
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                # A new connection shows whether the server still accepts connections.
                exchange = await self._send(None, b"GET", b"/health", headers=self._host, body=b"")
                exchange.close()
                return exchange.status == 200
        except (TimeoutError, UnavailableError):
            return False

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await self.connections.open()
        except OSError as error:
            if self.is_up:
                logger.warning("%s gets no requests until it answers: %s", self.url, error)
            self.is_up = False
            raise


@dataclass(slots=True, eq=False)
class OpenCall:
    """A request that is open until `close` is called. Only the handler changes this object."""

    server: RoutedServer
    prompt: RoutedPrompt
    num_pending: int  # number of prompt tokens that `server` probably computes
    exchange: Exchange | None = None  # `close` closes it
    prefill: asyncio.Task[Any] | None = None  # prefill on another server; `close` cancels the task
    _name: str = field(init=False)
    _is_open: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._name = str(id(self))
        self.server.num_open += 1
        self.server.load.enter(self._name, context=self.prompt.num_tokens, pending=self.num_pending)
        if self.prompt.blocks is not None:
            self.server.open_prompts[self._name] = self.prompt.blocks

    def note_first_bytes(self) -> None:
        self.server.load.computed(self._name)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.server.num_open -= 1
            self.server.load.leave(self._name)
            self.server.open_prompts.pop(self._name, None)
            if self.exchange is not None:
                self.exchange.close()
            if self.prefill is not None:
                self.prefill.cancel()


def _count_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the equal hashes at the start of both lists. Equal hashes mean equal earlier blocks."""
    places = range(min(len(left), len(right)))
    return bisect_left(places, True, key=lambda at: left[at] != right[at])


class ServerPool:
    """Servers that can answer the same requests. Only the event loop changes this object."""

    def __init__(
        self,
        addresses: Sequence[SplitResult],
        *,
        role: str,
        indexes: Mapping[str, Sequence[BlockIndex]] | None = None,
    ) -> None:
        """`indexes` maps a server's URL to the indexes that follow the KV events of its caches."""
        numbers = SharedNumbers(NUM_COLUMNS * len(addresses))
        self._prefixes = PrefixTable(SharedNumbers(MAX_BLOCKS, num_rows=len(addresses)))
        self.servers = [
            RoutedServer(
                address,
                role=role,
                load=ReplicaLoad(numbers, replica=at, index=0),
                indexes=(indexes or {}).get(address.geturl(), ()),
            )
            for at, address in enumerate(addresses)
        ]

    def list_ready(self, without: Collection[RoutedServer] = ()) -> list[RoutedServer]:
        return [each for each in self.servers if each.is_up and each not in without]

    def open(
        self,
        prompt: RoutedPrompt,
        *,
        without: Collection[RoutedServer] = (),
        is_computed: bool = False,
    ) -> OpenCall:
        """Choose a server for a prompt. Raises `UnavailableError` if no server is left.

        `without` lists failed servers. With `is_computed`, a prefilling server computes the prompt.
        """
        ready = self.list_ready(without)
        if not ready:
            urls = ", ".join(each.url for each in self.servers)
            raise UnavailableError(
                f"no server of the router answers: {urls[:500]}",
                hint="send the request again later",
                code="no_server",
                retry_after=_RETRY_SECONDS,
            )
        found = [each.count_cached(prompt.blocks) for each in ready]
        cached = [
            self._estimate_cached(each, prompt) if count is None else count
            for each, count in zip(ready, found, strict=True)
        ]
        loads = [each.load for each in ready]
        at, num_pending = choose_replica(loads, cached=cached, num_tokens=prompt.num_tokens)
        server = ready[at]
        self._prefixes.add(prompt.tags, server.load.replica)
        server.num_requests += 1
        server.num_prefix_hits += num_pending < prompt.num_tokens
        server.num_event_hits += bool(found[at])
        server.num_retries += bool(without)
        return OpenCall(server, prompt, 0 if is_computed else num_pending)

    def pick_renderer(self, prompt: RoutedPrompt) -> RoutedServer | None:
        """Return the server to ask for a prompt's blocks, or None if none should be asked.

        The server that received the longest prefix of the prompt has probably cached the prefix.
        """
        ready = self.list_ready()
        able = [each for each in ready if each.can_find_blocks]
        if len(ready) < 2 or not able:
            return None
        return max(able, key=lambda each: (self._estimate_cached(each, prompt), -each.num_open))

    def _estimate_cached(self, server: RoutedServer, prompt: RoutedPrompt) -> int:
        """Estimate the number of cached prompt tokens from the prompts that the router has sent."""
        count = CHUNK_TOKENS * self._prefixes.matches(prompt.tags, server.load.replica)
        return min(count, prompt.num_tokens)

    async def watch(self, interval: float) -> None:
        """Probe the servers every `interval` seconds until cancelled."""
        await asyncio.gather(*(self._watch(each, interval) for each in self.servers))

    async def probe(self) -> None:
        """Probe all servers once."""
        await asyncio.gather(*(self._probe(each) for each in self.servers))

    async def _watch(self, server: RoutedServer, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            await self._probe(server)

    async def _probe(self, server: RoutedServer) -> None:
        server.connections.prune()
        is_up = await server.probe()
        if server.is_up and not is_up:
            logger.warning("%s fails its health probe", server.url)
        elif is_up and not server.is_up:
            logger.info("%s answers", server.url)
            self._prefixes.discard(server.load.replica)  # The server's cache is probably lost.
        server.is_up = is_up
        while server.limits and not is_up:
            server.limits.pop().reschedule(0.0)
