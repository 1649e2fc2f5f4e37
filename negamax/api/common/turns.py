"""One answer to one conversation, for the dialects that tell it in blocks: from the request's parts
to block events.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from negamax.api.access import salt_of
from negamax.api.common.blocks import Block, BlockEvent, BlockWriter
from negamax.api.common.constraints import answer_grammar, constrained
from negamax.api.common.context import ApiContext
from negamax.api.common.conversation import (
    ChatPrompt,
    ChoiceReader,
    Conversation,
    ReadingRules,
    UsageMeter,
    off_loop,
    without_tokens,
)
from negamax.api.http.pacing import PacedPackets
from negamax.api.http.sse import FIRST_OUTPUT_SECONDS, first_output
from negamax.api.schemas.answers import Usage
from negamax.api.schemas.conversation import TurnRequest
from negamax.api.schemas.thinking import ReasoningPlace, ThinkingChoice, other_variables
from negamax.api.schemas.tools import CallChoice
from negamax.base.errors import AbortedError, InvalidRequestError
from negamax.config.grammar import Grammar
from negamax.engine.client.generation import Generation
from negamax.engine.client.output import RequestOutput
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import TokenLogprobs
from negamax.text.chat_format import may_call
from negamax.text.parser.output_parser import Thinking

_MESSAGE_PLACE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a request asks for, whatever its dialect. `places` says for each message where in the
    request it comes from.
    """

    messages: Sequence[dict[str, Any]]
    places: Sequence[str]
    tools: list[dict[str, Any]] | None
    calls: CallChoice
    thinking: ThinkingChoice
    form: Grammar | None  # of the content
    sampling: SamplingParams
    continues: bool = False  # the answer goes on with the last message
    reads_only: bool = False  # the prompt is read into the cache, nothing is answered

    def conversation(self, request: TurnRequest) -> Conversation:
        """The conversation to render."""
        return Conversation(
            messages=self.messages,
            tools=self.tools,
            thinking=self.thinking,
            template_kwargs=other_variables(request.chat_template_kwargs or {}),
            add_generation_prompt=not self.continues,
            continue_final_message=self.continues,
        )


async def turn_prompt(
    context: ApiContext, request: Request, turn: Turn, params: TurnRequest, *, num_bytes: int
) -> ChatPrompt:
    """The prompt of `turn`; what is refused is named by its place in the client's request."""
    try:
        salt = salt_of(request, params.cache_salt)
        return await context.prompts.chat(
            turn.conversation(params), num_bytes=num_bytes, cache_salt=salt
        )
    except InvalidRequestError as error:
        raise _placed(error, turn.places) from None


def _placed(error: InvalidRequestError, places: Sequence[str]) -> InvalidRequestError:
    def place(match: re.Match[str]) -> str:
        index = int(match[1])
        return places[index] if index < len(places) else match[0]

    error.message = _MESSAGE_PLACE.sub(place, error.message)
    error.param = None if error.param is None else _MESSAGE_PLACE.sub(place, error.param)
    return error


class TurnAnswer:
    """An answer while it is generated. Single writer: the request's handler."""

    __slots__ = ("_logprobs", "_meter", "_reader", "_reads_only", "_writer", "generation")

    def __init__(self, generation: Generation, reader: ChoiceReader, *, reads_only: bool) -> None:
        self.generation = generation
        self._reader = reader
        self._reads_only = reads_only
        self._meter = UsageMeter()
        self._writer = BlockWriter(reader.calls)
        self._logprobs: list[TokenLogprobs] = []

    @property
    def blocks(self) -> list[Block]:
        """The blocks so far."""
        return self._writer.blocks

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        return self._meter.usage()

    def take_logprobs(self) -> list[TokenLogprobs]:
        """One entry per token since the last call, if the request asks for them."""
        taken, self._logprobs = self._logprobs, []
        return taken

    @property
    def finish_reason(self) -> str | None:
        """As in chat completions; None while it goes on."""
        return self._reader.finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        reason = self._reader.stop_reason
        return reason if isinstance(reason, str) else None

    async def run(self, send: Callable[[list[BlockEvent]], None], *, is_paced: bool) -> None:
        """Tell what each output of the engine brought, the first with the counts of the prompt;
        paced for a stream.

        Errors: those of `Generation.run`, `AbortedError`.
        """
        packets = PacedPackets() if is_paced else None

        def take(output: RequestOutput) -> None:
            if self._reads_only:
                output = without_tokens(output)
            if output.finish_reason == "abort":
                raise AbortedError(f"the request {output.request_id} was aborted", code="aborted")
            is_last = output.finish_reason is not None
            parsed = self._reader.push(output)
            self._meter.update(
                output, prompt=0, choice=0, reasoning_tokens=self._reader.num_reasoning_tokens
            )
            if packets is not None:
                parsed = packets.push(parsed, now=time.monotonic(), is_last=is_last)
            self._logprobs += output.logprobs or ()
            events = list(self._writer.push(parsed))
            if is_last:
                events += self._writer.finish(is_cut=self._reader.finish_reason == "length")
            send(events)

        await self.generation.run(take)

    async def whole(self) -> None:
        """Wait for its end."""
        await self.run(lambda events: None, is_paced=False)


async def begin_answer(
    context: ApiContext,
    request: Request,
    turn: Turn,
    params: TurnRequest,
    *,
    request_id: str,
    num_bytes: int,
    arrival: float,
) -> TurnAnswer:
    """Check, render and start `turn`. Errors: everything that can be refused, also what only the
    engine can tell.
    """
    context.check_sampling(turn.sampling)
    grammar = await off_loop(
        lambda: answer_grammar(
            context.chat_format, tools=turn.tools, choice=turn.calls, content=turn.form
        ),
        num_bytes=num_bytes,
    )
    prompt = await turn_prompt(context, request, turn, params, num_bytes=num_bytes)
    sampling = constrained(
        turn.sampling,
        context.chat_format,
        reasoning=prompt.reasoning,
        grammar=grammar,
        budget=turn.thinking.budget,
    )
    callable_tools = turn.calls.callable_tools(turn.tools)
    rules = ReadingRules(
        tools=callable_tools,
        may_call=turn.calls.mode != "none" and may_call(turn.tools, turn.messages),
        parallel_calls=turn.calls.parallel,
        reasoning=ReasoningPlace.FIELD if context.chat_format.thinking is Thinking.APPEND else None,
        stop=sampling.stop,
        includes_stop=sampling.include_stop_str_in_output,
    )
    reader = ChoiceReader(context.chat_format, prompt=prompt, rules=rules)
    generation = context.generate(
        prompt.token_ids,
        sampling,
        params,
        request_id=request_id,
        names=[request_id],
        arrival=arrival,
        stream_interval=params.stream_interval,
        http=request,
        readers=None if turn.reads_only else [reader],
    )
    if params.stream:  # a grammar is compiled first, and may be refused
        seconds = FIRST_OUTPUT_SECONDS if grammar is None else None
        await first_output(request.receive, generation, seconds=seconds)
    return TurnAnswer(generation, reader, reads_only=turn.reads_only)
