"""Where the updates of one request wait for their reader: however slow the reader, it holds one update per sequence."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from negamax.scheduler.step import SequenceUpdate


class Mailbox:
    """Updates of the sequences of one request. What is not taken in time is joined to one update per sequence, so that a
    backlog costs the memory of its token ids and no more. Single reader; filled by the engine's connection, in one event loop.
    """

    __slots__ = ("_failure", "_updates", "_waiting")

    def __init__(self) -> None:
        self._updates: dict[str, SequenceUpdate] = {}
        self._failure: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None

    def put(self, update: SequenceUpdate) -> None:
        """Add an update, which now belongs to the mailbox."""
        earlier = self._updates.get(update.request_id)
        self._updates[update.request_id] = update if earlier is None else joined(earlier, update)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the request with `error`, after what has arrived. The first error counts."""
        if self._failure is None:
            self._failure = error
            self._wake()

    async def take(self) -> list[SequenceUpdate]:
        """What has arrived since the last call, at least one update. Errors: the one of `fail`, when nothing is left."""
        while not self._updates:
            if self._failure is not None:
                raise self._failure
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        updates = list(self._updates.values())
        self._updates.clear()
        return updates

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def joined(earlier: SequenceUpdate, later: SequenceUpdate) -> SequenceUpdate:
    """One update for two of the same sequence; the lists of `earlier` are used up."""
    earlier.token_ids.extend(later.token_ids)
    logprobs = earlier.logprobs
    if logprobs is not None:
        logprobs.extend(later.logprobs or ())
    if later.finish_reason is None:
        return earlier
    return replace(later, token_ids=earlier.token_ids, logprobs=logprobs, prompt_logprobs=earlier.prompt_logprobs)
