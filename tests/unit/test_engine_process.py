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
from negamax.engine.core.executor import RowFailureLog
from negamax.engine.core.process import Outbox
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import NewRow, RowFailures, SequenceUpdate, StepPlan, StepResult
from tests.stub_engine import Novelist, StubEngine

OPTIONS = EngineOptions("nano")
MODULE = "tests.unit.test_engine_process"
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


STATS = wire.EngineStats(1, 0, 8, 8, 1, 0, 0, 0, 1)


@pytest.mark.parametrize("request_id", ["x", "chatcmpl-a/b", "me@home/7@3", "generate-a@2-ff"])
@pytest.mark.parametrize("server", [0, 1, 17])
def test_ids_of_sequences_name_their_server(request_id: str, server: int) -> None:
    ids = {wire.sequence_id(request_id, choice, server=server) for choice in range(12)}
    assert len(ids) == 12
    assert {wire.server_of(name) for name in ids} == {server}
    others = (wire.sequence_id(request_id, choice, server=server + 1) for choice in range(12))
    assert ids.isdisjoint(others)


def update(name: str, token_id: int) -> SequenceUpdate:
    return SequenceUpdate(name, [token_id], None, None, None, None, 0, None)


def test_each_server_gets_its_own_updates_and_steps_are_counted_once(tmp_path: Path) -> None:
    address = wire.EngineAddress(str(tmp_path))
    with zmq.Context() as context:
        servers = [context.socket(zmq.PULL) for _ in range(3)]
        for index, socket in enumerate(servers[:2]):
            socket.bind(address.outputs(index))
        with Outbox(context, address, num_servers=3, linger=1000) as outbox:
            names = [wire.sequence_id("r", choice, server=choice % 3) for choice in range(6)]
            updates = [update(name, number) for number, name in enumerate(names)]
            admitted = [(names[4], 1.5), (names[2], 2.5)]
            outbox.send(outbox.frames(wire.StepOutputs(updates, STATS, admitted, [7, 8])))
            outbox.send(outbox.frames(wire.StepOutputs([update(names[1], 9)], STATS, [], [1])))
            servers[2].bind(address.outputs(2))  # Binding late loses no message.
            messages = []
            for socket in servers:
                socket.rcvtimeo = 5000
                messages.append(wire.from_engine_decoder.decode(socket.recv()))
            second = wire.from_engine_decoder.decode(servers[1].recv())
            assert not servers[0].poll(100) and not servers[2].poll(100)
        for socket in servers:
            socket.close(linger=0)
    found = [[entry.token_ids for entry in message.updates] for message in messages]
    assert found == [[[0], [3]], [[1], [4]], [[2], [5]]]
    assert [message.admitted for message in messages] == [[], [(names[4], 1.5)], [(names[2], 2.5)]]
    assert [message.step_tokens for message in messages] == [[7, 8], [], []]
    assert second.step_tokens == [1] and [entry.token_ids for entry in second.updates] == [[9]]


def plan(step_id: int, slots: list[int], *, new: tuple[int, ...] = ()) -> StepPlan:
    rows = [NewRow(slot, [1], 1, 0, [0], SamplingParams()) for slot in new]
    count = len(slots)
    return StepPlan(step_id, rows, [], [], slots, [1] * count, [0] * count, [True] * count)


def result(step_id: int, errors: dict[int, str] | None = None) -> StepResult:
    return StepResult(step_id, [7], {}, {}, errors or {})


def test_a_failure_is_in_the_row_of_its_slot_unless_rank_0_reports_one() -> None:
    log = RowFailureLog()
    log.launched(plan(1, [4, 5], new=(4, 5)))
    log.launched(plan(2, [5, 4]))
    log.add(RowFailures(1, {5: "broken"}))
    assert log.complete(result(1)).errors == {1: "broken"}
    assert log.complete(result(2, {1: "other"})).errors == {0: "broken", 1: "other"}
    log = RowFailureLog()
    log.launched(plan(1, [4], new=(4,)))
    log.add(RowFailures(1, {4: "broken"}))
    assert log.complete(result(1, {0: "not finite"})).errors == {0: "not finite"}
    log = RowFailureLog()
    log.launched(plan(1, [4], new=(4,)))
    log.add(RowFailures(1, {4: "broken"}))
    assert log.complete(result(1)).errors == {0: "broken"}
    log.launched(plan(2, [4], new=(4,)))
    log.add(RowFailures(1, {4: "late"}))
    assert log.complete(result(2)).errors == {}
