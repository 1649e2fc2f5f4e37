import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from negamax.base.errors import ConfigError
from negamax.engine import wire
from negamax.engine.client import connection
from negamax.engine.client.connection import EngineChannel, EngineConnection
from negamax.engine.core.process import Outbox
from negamax.options.engine import EngineOptions
from tests.stub_engine import Novelist, StubEngine

OPTIONS = EngineOptions("nano")
MODULE = "tests.unit.test_engine_connection"
WORDS = "there is no room for the weights"


def ended() -> EngineConnection:
    sizes = {"num_servers": 1, "hang_seconds": 300.0}
    return EngineConnection(OPTIONS, receive=lambda _: None, module=MODULE, **sizes)


@pytest.fixture(autouse=True)
def all_the_time_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LAST_WORDS_SECONDS", 120.0)


def test_failures_report_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> str:
        engine = ended()
        try:
            await engine.handshake()
            return await engine.ended
        finally:
            await engine.close(kill=True)

    with pytest.raises(ConfigError, match=WORDS):
        asyncio.run(scene())
    monkeypatch.setenv("HAS_STARTED", "1")
    assert asyncio.run(scene()) == WORDS


def test_counters_do_not_decrease_when_a_heartbeat_is_late(tmp_path: Path) -> None:
    def stats(at: float, generated: int) -> wire.EngineStats:
        return wire.EngineStats(0, 0, 1, 1, 0, 0, 0, 0, generated, at=at)

    async def scene() -> list[int]:
        address, arrived = wire.EngineAddress(str(tmp_path)), asyncio.Event()
        channel = EngineChannel(
            address, 0, receive=lambda steps: arrived.set(), failed=lambda reason: None
        )
        found = []
        channel.start_reading()
        with zmq.Context() as context, Outbox(context, address, num_servers=1, linger=0) as outbox:
            for at, generated in ((2.0, 300), (1.0, 299), (3.0, 301)):
                arrived.clear()
                outbox.send_all(wire.Heartbeat(0, True, stats(at, generated)))
                outbox.send([(0, wire.encoder.encode(wire.StepOutputs([], stats(0.0, 0))))])
                await asyncio.wait_for(arrived.wait(), 120)
                assert channel.stats is not None
                found.append(channel.stats.generated_tokens)
        channel.close()
        return found

    assert asyncio.run(scene()) == [300, 300, 301]


def send(folder: str, message: wire.EngineReady | wire.EngineFailed, *, is_first: bool) -> None:
    """Send a message as an engine does. If `is_first`, wait for the client's first message."""
    address = wire.EngineAddress(folder)
    with zmq.Context() as context, context.socket(zmq.PULL) as requests:
        requests.connect(address.requests(0))
        if is_first:
            requests.recv()
        with Outbox(context, address, num_servers=1, linger=120_000) as outbox:
            outbox.send_first(message)


if __name__ == "__main__":
    has_started = "HAS_STARTED" in os.environ
    if sys.argv[2:]:
        time.sleep(0.5)
        send(sys.argv[1], wire.EngineFailed(WORDS, 2), is_first=not has_started)
    else:
        if has_started:
            info = StubEngine(OPTIONS, new_author=Novelist).info
            send(sys.argv[1], wire.EngineReady(info), is_first=True)
        subprocess.Popen([sys.executable, "-m", MODULE, sys.argv[1], "late"])
        sys.exit(1)
