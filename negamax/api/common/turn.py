"""An answer to a conversation, whatever its dialect: checked, rendered, started, and written in
blocks where the dialect has them.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request

from negamax.api.access import salt_of
from negamax.api.common.answer import AnswerWriter, Choice, ResponseT, start_source
from negamax.api.common.blocks import Block, BlockEvent, BlockWriter
from negamax.api.common.choice_reader import ChoiceReader, ReadingRules
from negamax.api.common.context import ApiContext
from negamax.api.common.conversation import ChatPrompt, Conversation, off_loop
from negamax.api.schemas.request_model import refuse
from negamax.api.schemas.sampled_request import SampledRequest, TurnRequest
from negamax.api.schemas.thinking import ReasoningPlace, ThinkingChoice, other_variables
from negamax.api.schemas.tools import CallChoice
from negamax.base.errors import AbortedError, InvalidRequestError
from negamax.config.grammar import Grammar
from negamax.engine.client.open_request import OpenRequest
from negamax.engine.client.output import RequestOutput
from negamax.models.chat_format import ChatFormat, ReasoningState, may_call
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import TokenLogprobs
from negamax.text.grammar.tool_calls import tool_grammar
from negamax.text.parser.events import ParserEvent

_MESSAGE_PLACE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a request asks for, whatever its dialect. `places` says for each message where in the
    request it comes from; empty: they are its field `messages`.
    """

    conversation: Conversation
    places: Sequence[str] = ()
    calls: CallChoice
    form: Grammar | None  # of the content
    sampling: SamplingParams
    reasoning: ReasoningPlace | None = ReasoningPlace.BLOCK
    stream_reasoning: bool = True
    named_call_stops: bool = False  # an answer whose call is forced by name ends with "stop"
    is_prompt_only: bool = False  # the prompt is read into the cache, nothing is answered


@dataclass(frozen=True, slots=True)
class StartedTurn:
    """A turn that the engine answers."""

    prompt: ChatPrompt
    readers: list[ChoiceReader]  # one for each choice
    source: OpenRequest
    is_prompt_only: bool


def turn_conversation(
    params: TurnRequest,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    thinking: ThinkingChoice,
    *,
    continues: bool = False,
) -> Conversation:
    """The conversation of a request; `continues`: the answer goes on with the last message."""
    return Conversation(
        messages=messages,
        tools=tools,
        thinking=thinking,
        template_kwargs=other_variables(params.chat_template_kwargs or {}),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


async def turn_prompt(
    context: ApiContext, request: Request, turn: Turn, params: SampledRequest, *, num_bytes: int
) -> ChatPrompt:
    """The prompt of `turn`; what is refused is named by its place in the client's request."""
    try:
        salt = salt_of(request, params.cache_salt)
        return await context.prompts.chat(turn.conversation, num_bytes=num_bytes, cache_salt=salt)
    except InvalidRequestError as error:
        raise _placed(error, turn.places) from None


def _placed(error: InvalidRequestError, places: Sequence[str]) -> InvalidRequestError:
    def place(match: re.Match[str]) -> str:
        index = int(match[1])
        return places[index] if index < len(places) else match[0]

    error.message = _MESSAGE_PLACE.sub(place, error.message)
    error.param = None if error.param is None else _MESSAGE_PLACE.sub(place, error.param)
    return error


async def start_turn(
    context: ApiContext,
    request: Request,
    turn: Turn,
    params: SampledRequest,
    *,
    request_id: str,
    names: Sequence[str],
    num_bytes: int,
    arrival: float,
) -> StartedTurn:
    """Check, render and start `turn`. Errors: everything that can be refused, also what only the
    engine knows.
    """
    context.check_sampling(turn.sampling)
    conversation, calls, chat_format = turn.conversation, turn.calls, context.chat_format
    tools = conversation.tools
    grammar = await off_loop(
        lambda: answer_grammar(chat_format, tools=tools, choice=calls, content=turn.form),
        num_bytes=num_bytes,
    )
    prompt = await turn_prompt(context, request, turn, params, num_bytes=num_bytes)
    sampling = constrained(
        turn.sampling,
        chat_format,
        reasoning=prompt.reasoning,
        grammar=grammar,
        budget=conversation.thinking.budget,
    )
    rules = ReadingRules(
        tools=calls.callable_tools(tools),
        may_call=calls.mode != "none" and may_call(tools, conversation.messages),
        parallel_calls=calls.parallel,
        is_call_forced_by_name=turn.named_call_stops and calls.name is not None,
        reasoning=turn.reasoning,
        stream_reasoning=turn.stream_reasoning,
        stop=sampling.stop,
        includes_stop=sampling.include_stop_str_in_output,
    )
    on_call = partial(context.metrics.measured.events.add, "tool_calls")
    readers = [
        ChoiceReader(chat_format, prompt=prompt, rules=rules, on_call=on_call)
        for _ in range(sampling.n)
    ]
    source = context.generate(
        prompt.token_ids,
        sampling,
        params,
        request_id=request_id,
        names=names,
        arrival=arrival,
        stream_interval=params.stream_interval,
        http=request,
        readers=None if turn.is_prompt_only else readers,
    )
    await start_source(request, params, source, has_grammar=grammar is not None)
    return StartedTurn(prompt, readers, source, turn.is_prompt_only)


def answer_grammar(
    chat_format: ChatFormat,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: CallChoice,
    content: Grammar | None,
) -> Grammar | None:
    """The grammar of an answer that may or must call `tools`, and whose content has the form
    `content` otherwise.

    Errors: `InvalidRequestError` for a call that is forced but cannot be made.
    """
    if choice.mode == "none":
        return content
    if choice.is_forced and not chat_format.reads_calls:
        refuse(
            "tool_choice",
            "this server reads no calls (--tool-call-parser none); allowed: 'auto', 'none'",
        )
    return tool_grammar(
        tools or (),
        chat_format.call_style(),
        choice=choice.mode,
        name=choice.name,
        allowed=choice.allowed,
        parallel=choice.parallel,
        content=content,
    )


def constrained(
    sampling: SamplingParams,
    chat_format: ChatFormat,
    *,
    reasoning: ReasoningState,
    grammar: Grammar | None,
    budget: int | None,
) -> SamplingParams:
    """`sampling` with the grammar, which begins after the reasoning, and with a budget of reasoning
    tokens.
    """
    if grammar is None and budget is None:
        return sampling
    return replace(
        sampling,
        grammar=grammar,
        reasoning=chat_format.reasoning(reasoning),
        thinking_token_budget=budget,
    )


class BlockAnswerWriter(AnswerWriter[Choice, ResponseT]):
    """Answers with one choice in blocks."""

    is_paced = True

    def __init__(self, request_id: str, turn: StartedTurn) -> None:
        (self._reader,) = turn.readers
        choice = Choice(0, self._reader, is_prompt_only=turn.is_prompt_only)
        super().__init__(request_id, turn.source, [choice])
        self._writer = BlockWriter(self._reader.calls)
        self._logprobs: list[TokenLogprobs] = []

    @property
    def blocks(self) -> list[Block]:
        """The blocks so far."""
        return self._writer.blocks

    @property
    def finish_reason(self) -> str | None:
        """As in chat completions; None while it goes on."""
        return self._reader.finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        reason = self._reader.stop_reason
        return reason if isinstance(reason, str) else None

    def take_logprobs(self) -> list[TokenLogprobs]:
        """One entry per token since the last call, if the request asks for them."""
        taken, self._logprobs = self._logprobs, []
        return taken

    @abstractmethod
    def block_chunk(self, events: list[BlockEvent]) -> bytes:
        """What a stream sends of the next events of blocks."""

    def take(self, choice: Choice, output: RequestOutput, events: list[ParserEvent]) -> None:
        self._grow(output, events)

    def chunk(self, choice: Choice, output: RequestOutput, events: list[ParserEvent]) -> bytes:
        return self.block_chunk(self._grow(output, events))

    def _grow(self, output: RequestOutput, events: list[ParserEvent]) -> list[BlockEvent]:
        """Errors: `AbortedError`."""
        if output.finish_reason == "abort":
            raise AbortedError(f"the request {output.request_id} was aborted", code="aborted")
        self._logprobs += output.logprobs or ()
        grown = list(self._writer.push(events))
        if output.finish_reason is not None:
            grown += self._writer.finish(is_cut=self._reader.finish_reason == "length")
        return grown
