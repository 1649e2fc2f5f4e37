"""The server's side of the engine: starts the engine process, sends it requests, and hands out their results."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from negamax.base import process
from negamax.base.errors import ConfigError, EngineDeadError, EngineError, InvalidRequestError, OverloadedError
from negamax.base.log import get_logger
from negamax.config.options import EngineOptions
from negamax.engine import wire
from negamax.engine.output import ChoiceStream, RequestOutput, admit
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.step import SequenceUpdate
from negamax.text.chat_template import ChatTemplate
from negamax.text.tokenizer import Tokenizer

logger = get_logger(__name__)

SHUTDOWN_SECONDS = 10.0
LIVENESS_SECONDS = 0.5


@dataclass(frozen=True)
class EngineAddress:
    """The two sockets of an engine process, in a folder only this user can enter."""

    folder: str

    @property
    def requests(self) -> str:
        return f"ipc://{self.folder}/requests"

    @property
    def outputs(self) -> str:
        return f"ipc://{self.folder}/outputs"


class AsyncEngine:
    """An engine process and the requests it is serving. Single writer: the event loop it was started on."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        address: EngineAddress,
        context: zmq.asyncio.Context,
    ) -> None:
        """Use `AsyncEngine.start`."""
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.info: wire.ModelInfo
        self.stats = wire.EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
        self.alive = False
        self._options = options
        self._address = address
        self._context = context
        self._to_engine = context.socket(zmq.PUSH)
        self._from_engine = context.socket(zmq.PULL)
        self._to_engine.linger = self._from_engine.linger = 0
        self._to_engine.bind(address.requests)
        self._from_engine.bind(address.outputs)
        self._process = process.spawn("negamax.engine.process", address.folder)
        self._queues: dict[str, asyncio.Queue[tuple[str, SequenceUpdate]]] = {}
        self._seeds = random.Random(options.seed)
        self._death: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, options: EngineOptions, *, chat_template: Path | None = None) -> AsyncEngine:
        """Spawn the engine process for `options` and wait until it can serve.

        `chat_template` is a file that replaces the checkpoint's own. Errors: `ConfigError` and its kin, with the message of
        whatever refused to start; nothing is left running then.
        """
        address = EngineAddress(tempfile.mkdtemp(prefix="negamax-"))
        try:
            from negamax.engine.source import locate

            source = await asyncio.to_thread(locate, options)
            engine = cls(
                options,
                tokenizer=await asyncio.to_thread(Tokenizer.from_folder, source.tokenizer_folder),
                chat_template=ChatTemplate.from_folder(source.tokenizer_folder, chat_template),
                address=address,
                context=zmq.asyncio.Context(),
            )
        except BaseException:
            shutil.rmtree(address.folder, ignore_errors=True)
            raise
        try:
            await engine._handshake()
        except BaseException:
            await engine.shutdown()
            raise
        engine._tasks = [asyncio.create_task(engine._receive()), asyncio.create_task(engine._watch())]
        return engine

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; the outputs of the `n` choices come interleaved as they are generated.

        Closing the iterator before its end aborts what still runs. Errors, at the call: `InvalidRequestError`,
        `ContextLengthError`, `OverloadedError`, `EngineDeadError`; while iterating: `EngineError`, `EngineDeadError`.
        """
        if not self.alive:
            raise EngineDeadError(self._death or "the engine is not running")
        sampling = admit(prompt_token_ids, sampling, info=self.info)
        self.check_room(sampling.n)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        choices = [msgspec.structs.replace(sampling, n=1, seed=seed + index) for index in range(sampling.n)]
        prompt = tuple(prompt_token_ids)
        requests = [
            GenerateRequest(
                request_id=f"{request_id}/{index}",
                prompt_token_ids=prompt,
                sampling=choice,
                priority=priority,
                cache_salt=cache_salt,
            )
            for index, choice in enumerate(choices)
        ]
        return self._stream(requests, request_id=request_id)

    def check_room(self, num_sequences: int) -> None:
        """Refuse a request for `num_sequences` sequences: `InvalidRequestError` where they never fit, `OverloadedError` where
        they do not fit now."""
        limit = self._options.max_queued_requests + self.info.max_num_seqs
        if num_sequences > limit:
            raise InvalidRequestError(
                f"the request asks for {num_sequences} sequences (prompts times n); allowed: {limit}",
                param="n",
                code="invalid_value",
            )
        if len(self._queues) + num_sequences > limit:
            raise OverloadedError(
                f"{len(self._queues)} sequences run or wait and {num_sequences} more were asked for; allowed: {limit}",
                hint="retry later",
                code="overloaded",
            )

    async def shutdown(self) -> None:
        """Stop the engine process and end every open request with `EngineDeadError`."""
        self._die("the engine was stopped", is_planned=True)
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(zmq.ZMQError):
            await self._to_engine.send(wire.encoder.encode(wire.Shutdown()), zmq.NOBLOCK)
        await asyncio.to_thread(process.stop, self._process, timeout=SHUTDOWN_SECONDS)
        self._context.destroy(linger=0)
        shutil.rmtree(self._address.folder, ignore_errors=True)

    async def _handshake(self) -> None:
        """Send the options, wait for the engine's word."""
        await self._to_engine.send(msgspec.msgpack.encode(self._options))
        while not await self._from_engine.poll(int(LIVENESS_SECONDS * 1000)):
            code = self._process.poll()
            if code is not None and not await self._from_engine.poll(100):
                raise EngineDeadError(f"the engine process ended with exit code {code} while starting")
        message = wire.from_engine_decoder.decode(await self._from_engine.recv())
        if isinstance(message, wire.EngineFailed):
            error = ConfigError(message.message)
            error.exit_code = message.exit_code
            raise error
        assert isinstance(message, wire.EngineReady), message
        self.info = message.info
        self.alive = True

    async def _stream(self, requests: list[GenerateRequest], *, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        queue: asyncio.Queue[tuple[str, SequenceUpdate]] = asyncio.Queue()
        streams = {
            request.request_id: ChoiceStream(
                self.tokenizer,
                request.sampling,
                info=self.info,
                request_id=request_id,
                index=index,
                num_prompt_tokens=len(request.prompt_token_ids),
            )
            for index, request in enumerate(requests)
        }
        try:
            self._queues.update((request.request_id, queue) for request in requests)
            await self._submit(requests[:1])
            unsent = requests[1:]
            while streams:
                sequence_id, update = await queue.get()
                if update.finish_reason == "dead":
                    raise EngineDeadError(update.error or "the engine died")
                # The first choice has run the prompt: the others find it in the prefix cache.
                await self._submit(unsent)
                unsent = []
                stream = streams.get(sequence_id)
                if stream is None:
                    continue  # an update that crossed with our abort
                try:
                    output = stream.push(update)
                except Exception as error:
                    logger.exception("request %s: its output cannot be turned into text", sequence_id)
                    raise EngineError("the output could not be turned into text") from error
                if stream.finished:
                    del streams[sequence_id]
                    if update.finish_reason is None:  # a stop string: the engine does not know it yet
                        await self._abort([sequence_id])
                    else:
                        self._queues.pop(sequence_id, None)
                yield output
        finally:
            if streams:
                await self._abort(list(streams))

    async def _submit(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            await self._to_engine.send(wire.encoder.encode(wire.AddRequest(request)))

    async def _abort(self, sequence_ids: list[str]) -> None:
        for sequence_id in sequence_ids:
            self._queues.pop(sequence_id, None)
        if self.alive:
            await self._to_engine.send(wire.encoder.encode(wire.AbortRequests(sequence_ids)))

    async def _receive(self) -> None:
        while True:
            message = wire.from_engine_decoder.decode(await self._from_engine.recv())
            if isinstance(message, wire.StepOutputs):
                self.stats = message.stats
                for update in message.updates:
                    queue = self._queues.get(update.request_id)
                    if queue is not None:
                        queue.put_nowait((update.request_id, update))
            elif isinstance(message, wire.EngineFailed):
                self._die(message.message)

    async def _watch(self) -> None:
        """Notice a dead engine process even if it could not say so."""
        while self.alive:
            await asyncio.sleep(LIVENESS_SECONDS)
            code = self._process.poll()
            if code is not None:
                self._die(f"the engine process ended with exit code {code}")

    def _die(self, reason: str, *, is_planned: bool = False) -> None:
        if self.alive and not is_planned:
            logger.warning("%s", reason)
        self.alive = False
        self._death = reason
        dead = SequenceUpdate("", [], None, None, "dead", None, 0, reason)
        for sequence_id, queue in self._queues.items():
            queue.put_nowait((sequence_id, dead))
        self._queues.clear()
