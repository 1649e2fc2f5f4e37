"""The engine process: `python -m negamax.engine.process FOLDER`, started by `engine.connection`.

The first frame holds the options; then requests come in, and after every step the updates go out with the statistics. A thread
of its own tells twice a second that the process lives and whether its loop goes round.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from negamax.base import log
from negamax.base.errors import NegamaxError
from negamax.base.log import get_logger
from negamax.base.process import exit_with_parent
from negamax.config.options import EngineOptions
from negamax.engine import wire
from negamax.engine.connection import BEAT_SECONDS, EngineAddress
from negamax.engine.loop import EngineLoop

logger = get_logger(__name__)


def main(folder: str) -> int:
    """Serve one client until it says stop; the exit code of the process."""
    exit_with_parent()
    address = EngineAddress(folder)
    with zmq.Context() as context, context.socket(zmq.PULL) as requests, context.socket(zmq.PUSH) as outputs:
        outputs.linger = 1000
        requests.connect(address.requests)
        outputs.connect(address.outputs)
        options = msgspec.msgpack.decode(requests.recv(), type=EngineOptions)
        log.setup(options.log_level)
        try:
            from negamax.engine.setup import start_loop  # torch: seconds of import, after the connection stands

            loop, info = start_loop(options)
        except NegamaxError as error:
            outputs.send(wire.encoder.encode(wire.EngineFailed(str(error), error.exit_code)))
            return error.exit_code
        except Exception as error:
            logger.exception("the engine cannot start")
            outputs.send(wire.encoder.encode(wire.EngineFailed(f"the engine cannot start: {error!r}", 1)))
            return 1
        gc.freeze()  # what the start left behind lives as long as the process: later collections need not visit it
        outputs.send(wire.encoder.encode(wire.EngineReady(info)))
        pulse = Pulse(loop)
        try:
            with pulse.beating(context, address.outputs):
                serve(loop, requests=requests, outputs=outputs, pulse=pulse)
        except Exception as error:
            logger.exception("the engine stops")
            outputs.send(wire.encoder.encode(wire.EngineFailed(f"the engine failed: {error!r}", 1)))
            return 1
        finally:
            loop.shutdown()
    return 0


def serve(loop: EngineLoop, *, requests: zmq.Socket[bytes], outputs: zmq.Socket[bytes], pulse: Pulse) -> None:
    """Take requests in, step, send updates out, until told to stop. Blocks on the socket while there is no work."""
    while True:
        while not loop.has_work or requests.poll(0):
            pulse.is_idle = not loop.has_work
            frame = requests.recv()
            pulse.is_idle = False
            try:
                message = wire.to_engine_decoder.decode(frame)
            except msgspec.DecodeError:
                logger.exception("a message that cannot be decoded was dropped")
                continue
            if isinstance(message, wire.AddRequest):
                loop.add(message.request)
            elif isinstance(message, wire.AbortRequests):
                loop.abort(message.request_ids)
            elif isinstance(message, wire.ForgetPrefixes):
                loop.forget_prefixes()
            else:
                return
        updates = loop.step()
        pulse.num_rounds += 1
        if updates:
            report = wire.StepOutputs(updates, loop.stats(), loop.take_admitted(), loop.take_step_tokens())
            outputs.send(wire.encoder.encode(report))


class Pulse:
    """What the beats tell. Single writer: the loop's thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self.num_rounds = 0
        self.is_idle = False

    @contextmanager
    def beating(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> Iterator[None]:
        """Send a heartbeat twice a second while inside."""
        stop = threading.Event()
        thread = threading.Thread(target=self._beat, args=(context, address, stop), name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _beat(self, context: zmq.Context[zmq.Socket[bytes]], address: str, stop: threading.Event) -> None:
        with context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            socket.connect(address)
            while not stop.wait(BEAT_SECONDS):
                beat = wire.Heartbeat(self.num_rounds, self.is_idle, self._loop.stats())
                socket.send(wire.encoder.encode(beat))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
