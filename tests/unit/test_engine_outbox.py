from pathlib import Path

import pytest
import zmq

from negamax.engine import wire
from negamax.engine.core.process import Outbox
from negamax.scheduler.step import SequenceUpdate

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
