from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from negamax.base.errors import ConfigError, ResourceError
from negamax.base.private_folder import PrivateFolder
from negamax.engine.core import transfer_sockets
from negamax.engine.core.transfer_sockets import MOST_PEERS, TransferSockets
from negamax.engine.core.transfer_wire import CloseLease, LeaseClosed, RenewLeases
from negamax.options.nodes import KEY_VARIABLE
from negamax.options.transfer import CONSUMER, PRODUCER, KvTransferConfig
from negamax.worker.node_sockets import connect, tcp_endpoint
from tests.e2e.conftest import eventually
from tests.ports import free_port


class Recorder:
    """Record messages in place of `Transfers`."""

    has_timers = True

    def __init__(self) -> None:
        self.messages: list[tuple[Any, Any]] = []
        self.lost: list[tuple[str, int]] = []

    def handle(self, peer: Any, message: Any, *, now: float) -> None:
        self.messages.append((peer, message))

    def lose(self, peer: tuple[str, int]) -> None:
        self.lost.append(peer)

    def advance(self, *, now: float) -> None:
        pass


@contextmanager
def opened(**fields: Any) -> Iterator[tuple[TransferSockets, Recorder]]:
    sockets = TransferSockets(KvTransferConfig(**fields), [], folder=PrivateFolder())
    recorder = Recorder()
    sockets.transfers = recorder  # type: ignore[assignment]
    try:
        yield sockets, recorder
    finally:
        sockets.close()


def test_messages_answers_and_the_loss_of_an_engine() -> None:
    port = free_port()
    peer = ("127.0.0.1", port)
    with opened(role=CONSUMER) as (decoder, arrived):
        with opened(role=PRODUCER, port=port) as (prefiller, asked):
            decoder.send(peer, RenewLeases(["a"]))
            decoder.send(peer, CloseLease("b"))
            assert eventually(lambda: (prefiller.poll(), len(asked.messages) == 2)[1])
            (identity, first), (_, second) = asked.messages
            with pytest.raises(ResourceError, match=r"in use.*another kv_port"), opened(port=port):
                pass
            assert (first, second) == (RenewLeases(["a"]), CloseLease("b"))
            prefiller.send(identity, LeaseClosed("b", True))
            assert eventually(lambda: (decoder.poll(), bool(arrived.messages))[1])
            assert arrived.messages == [(peer, LeaseClosed("b", True))] and not arrived.lost
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                connect(stranger, tcp_endpoint(*peer))
                nested = b"\x93\xa5close\xa1y" + b"\x91" * 50_000
                bad = ([b"\xc1"], [b"", b"", b""], [b"\x92\xa5close\xa1\xff"], [nested + b"\x01"])
                for frames in (*bad, [b"\x92\xa5close\xa1x"]):
                    stranger.send_multipart(frames)
                assert eventually(lambda: (prefiller.poll(), len(asked.messages) == 3)[1])
            assert asked.messages[2][1] == CloseLease("x")
        assert eventually(lambda: (decoder.poll(), bool(arrived.lost))[1])
        assert arrived.lost == [peer]
        decoder.send(peer, CloseLease("b"))  # No engine listens at this address.
        assert eventually(lambda: (decoder.poll(), len(arrived.lost) == 2)[1])


@pytest.mark.parametrize("host", ["bad host", "", "[::1", "a;b", "*", "192.0.2.1", "x" * 300])
@pytest.mark.parametrize("own", ["127.0.0.1", "192.0.2.7"])
def test_hosts_of_clients_end_none(host: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    with opened(role=CONSUMER, host=own) as (sockets, recorder):
        sockets.send((host, 9), CloseLease("a"))
        sockets.poll()
        if own == "127.0.0.1":
            assert recorder.lost == [(host, 9)]
        assert eventually(lambda: (sockets.poll(), bool(recorder.lost))[1], seconds=20)


def test_many_silent_engines_and_many_messages_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with (
        socket.create_server(("", 0), backlog=2000) as silent,
        opened(role=PRODUCER, port=port) as (prefiller, asked),
        opened(role=CONSUMER) as (decoder, arrived),
    ):
        peer = ("127.0.0.1", port)
        decoder.send(peer, CloseLease("a"))
        assert eventually(lambda: (prefiller.poll(), bool(asked.messages))[1])
        prefiller.send(asked.messages[0][0], LeaseClosed("a", True))
        assert eventually(lambda: (decoder.poll(), bool(arrived.messages))[1])
        for number in range(1000):
            address = f"127.1.{number // 250}.{number % 250 + 1}"
            decoder.send((address, silent.getsockname()[1]), CloseLease("b"))
        decoder.poll()
        assert len(arrived.lost) >= 1000 - MOST_PEERS and peer not in arrived.lost
        decoder.send(peer, CloseLease("c"))
        assert eventually(lambda: (prefiller.poll(), len(asked.messages) == 2)[1])
        monkeypatch.setattr(transfer_sockets, "MOST_UNSENT", 100)
        stuck = ("127.2.0.1", silent.getsockname()[1])
        for _ in range(300):  # Sending does not wait for the peer.
            decoder.send(stuck, CloseLease("d"))
        decoder.poll()
        assert arrived.lost.count(stuck) == 1 and peer not in arrived.lost


def test_a_network_address_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=KEY_VARIABLE), opened(host="192.0.2.7"):
        pass
