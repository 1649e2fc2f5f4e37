"""The engine process: `python -m negamax.engine.process FOLDER`, started by `engine.client`.

The first frame holds the options; then requests come in, and after every step the updates go out with the statistics.
"""

from __future__ import annotations

import gc
import signal
import sys

import msgspec
import zmq

from negamax.base import log
from negamax.base.errors import NegamaxError
from negamax.base.log import get_logger
from negamax.base.process import exit_with_parent
from negamax.config.options import EngineOptions
from negamax.engine import wire
from negamax.engine.client import EngineAddress
from negamax.engine.loop import EngineLoop

logger = get_logger(__name__)


def main(folder: str) -> int:
    """Serve one client until it says stop; the exit code of the process."""
    exit_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
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
        try:
            serve(loop, requests=requests, outputs=outputs)
        except Exception as error:
            logger.exception("the engine stops")
            outputs.send(wire.encoder.encode(wire.EngineFailed(f"the engine failed: {error!r}", 1)))
            return 1
        finally:
            loop.shutdown()
    return 0


def serve(loop: EngineLoop, *, requests: zmq.Socket[bytes], outputs: zmq.Socket[bytes]) -> None:
    """Take requests in, step, send updates out, until told to stop. Blocks on the socket while there is no work."""
    while True:
        while not loop.has_work or requests.poll(0):
            try:
                message = wire.to_engine_decoder.decode(requests.recv())
            except msgspec.DecodeError:
                logger.exception("a message that cannot be decoded was dropped")
                continue
            if isinstance(message, wire.AddRequest):
                loop.add(message.request)
            elif isinstance(message, wire.AbortRequests):
                loop.abort(message.request_ids)
            else:
                return
        updates = loop.step()
        if updates:
            outputs.send(wire.encoder.encode(wire.StepOutputs(updates, loop.stats())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
