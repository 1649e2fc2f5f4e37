"""Check, tokenize and start the conversations and plain prompts of all APIs."""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.responses import Response

from negamax.api.access import get_owner
from negamax.api.common.answer import AnswerSource, AnswerWriter, Choice, ResponseT, start_source
from negamax.api.common.api_request import (
    ApiRequest,
    check_prompt_logprobs,
    check_sampling,
    generate,
    get_cache_salt,
)
from negamax.api.common.blocks import BlockEvent, BlockWriter
from negamax.api.common.choice_reader import ChoiceReader, ReadingRules
from negamax.api.common.context import ApiContext
from negamax.api.common.conversation import ChatPrompt, Conversation
from negamax.api.errors import build_json_response
from negamax.api.http.request_threads import run_off_loop
from negamax.api.schemas.answers import PromptBlocks
from negamax.api.schemas.request_model import refuse
from negamax.api.schemas.sampled_request import EngineRequest, SampledRequest
from negamax.api.schemas.thinking import ReasoningPlace
from negamax.api.schemas.tools import CallChoice
from negamax.base.errors import (
    AbortedError,
    InvalidRequestError,
    NegamaxError,
    PayloadTooLargeError,
)
from negamax.config.grammar import Grammar
from negamax.engine.client.open_request import OpenRequest, OpenRequests
from negamax.engine.client.output import RequestOutput
from negamax.engine.client.placement import hash_blocks
from negamax.models.chat_format import ChatFormat, ReasoningState, may_call
from negamax.scheduler.request import ImageInput, SamplingParams
from negamax.scheduler.step import TokenLogprobs
from negamax.text.grammar.tool_calls import tool_grammar
from negamax.text.parser.events import ParserEvent

_MESSAGE_PLACE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request for an answer to a conversation, in the same format for all APIs."""

    conversation: Conversation
    places: Sequence[str] = ()
    tools: list[dict[str, Any]] | None  # Tools that the model may call.
    calls: CallChoice
    form: Grammar | None  # Grammar of the answer's content.
    sampling: SamplingParams
    reasoning: ReasoningPlace | None = ReasoningPlace.BLOCK
    stream_reasoning: bool = True
    named_call_stops: bool = False  # If True, a call forced by name has finish reason "stop".
    is_prompt_only: bool = False  # True if the request only caches its prompt.


@dataclass(frozen=True, slots=True)
class StartedTurn:
    prompt: ChatPrompt
    readers: list[ChoiceReader]  # One reader per choice of the answer.
    source: OpenRequest
    is_prompt_only: bool


async def build_prompt(
    context: ApiContext,
    request: ApiRequest[SampledRequest],
    turn: Turn,
    *,
    needs_pixels: bool = True,
) -> ChatPrompt:
    """Build the prompt of `turn`. Each error contains the JSON path of the invalid field. Without
    `needs_pixels` the prompt has no image pixels, and is used only to count tokens.
    """
    try:
        return await context.prompts.chat(
            turn.conversation,
            num_bytes=request.num_bytes,
            cache_salt=get_cache_salt(request),
            needs_pixels=needs_pixels,
        )
    except (InvalidRequestError, PayloadTooLargeError) as error:
        raise _replace_place(error, turn.places) from None


def _replace_place(error: NegamaxError, places: Sequence[str]) -> NegamaxError:
    def place(match: re.Match[str]) -> str:
        index = int(match[1])
        return places[index] if index < len(places) else match[0]

    error.message = _MESSAGE_PLACE.sub(place, error.message)
    error.param = None if error.param is None else _MESSAGE_PLACE.sub(place, error.param)
    return error


async def start_turn(
    context: ApiContext,
    request: ApiRequest[SampledRequest],
    turn: Turn,
    *,
    request_id: str,
    names: Sequence[str],
) -> StartedTurn:
    """Check and render `turn`, and start its answer. Raises errors of the checks and the engine."""
    check_sampling(context, turn.sampling)
    conversation, calls, chat_format = turn.conversation, turn.calls, context.chat_format
    grammar = await run_off_loop(
        lambda: build_answer_grammar(
            chat_format, tools=turn.tools, choice=calls, content=_complete_form(context, turn.form)
        ),
        num_bytes=request.num_bytes,
    )
    prompt = await build_prompt(context, request, turn)
    check_prompt_logprobs([(turn.sampling, len(prompt.token_ids))])
    sampling = constrain(
        turn.sampling,
        chat_format,
        reasoning=prompt.reasoning,
        grammar=grammar,
        budget=conversation.thinking.budget,
    )
    rules = ReadingRules(
        tools=calls.callable_tools(turn.tools),
        may_call=calls.mode != "none" and may_call(turn.tools, conversation.messages),
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
    source = generate(
        context,
        request,
        prompt.token_ids,
        sampling,
        request_id=request_id,
        names=names,
        stream_interval=request.params.stream_interval,
        readers=None if turn.is_prompt_only else readers,
        images=prompt.images,
    )
    await start_source(request, source, has_grammar=grammar is not None)
    return StartedTurn(prompt, readers, source, turn.is_prompt_only)


async def answer_blocks(
    context: ApiContext,
    request: ApiRequest[EngineRequest],
    token_ids: Sequence[int],
    images: Sequence[ImageInput] = (),
) -> Response:
    """Answer with the `PromptBlocks` of a prompt. `images` have no pixels."""
    size, salt = context.engine.info.block_size, get_cache_salt(request)
    # The hash of a block with an image needs the pixels, which are missing here.
    hashed = token_ids[: images[0].offset + 1] if images else token_ids

    def answer() -> Response:
        hashes = hash_blocks(hashed, block_size=size, salt=salt)
        return build_json_response(PromptBlocks(len(token_ids), size, hashes))

    return await run_off_loop(answer, num_bytes=request.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPrompt:
    prompt: str | list[int]
    sampling: SamplingParams
    form: Callable[[], Grammar | None]  # Slow function that builds the grammar of the answer.
    reasoning_budget: int | None  # Limit of reasoning tokens, if the prompt ends within reasoning.
    request_id: str
    names: Sequence[str]  # Ids by which the client may abort the prompt.
    stream_interval: int | None


async def start_prompts(
    context: ApiContext, request: ApiRequest[EngineRequest], prompts: Sequence[PlainPrompt]
) -> tuple[list[list[int]], AnswerSource]:
    """Check, tokenize and start `prompts`. Return the prompts' token ids and the source of outputs.

    Raises the errors of the checks and of the engine.
    """
    engine, chat_format = context.engine, context.chat_format
    for prompt in prompts:
        check_sampling(context, prompt.sampling)
    token_ids = await context.prompts.plain(
        [prompt.prompt for prompt in prompts], cache_salt=get_cache_salt(request)
    )
    check_prompt_logprobs(
        (prompt.sampling, len(ids)) for prompt, ids in zip(prompts, token_ids, strict=True)
    )
    grammars = await run_off_loop(
        lambda: [_complete_form(context, prompt.form()) for prompt in prompts],
        num_bytes=request.num_bytes,
    )
    prefills: list[int] = []
    for prompt, ids in zip(prompts, token_ids, strict=True):
        prefills += engine.prefill_tokens(len(ids), prompt.sampling, num_choices=prompt.sampling.n)
    engine.check_room(prefills, owner=get_owner(request.http))
    parts = []
    for index, (prompt, ids, grammar) in enumerate(zip(prompts, token_ids, grammars, strict=True)):
        reasoning = chat_format.reasoning_after(ids)
        sampling = constrain(
            prompt.sampling,
            chat_format,
            reasoning=reasoning,
            grammar=grammar,
            budget=prompt.reasoning_budget if reasoning == "open" else None,
        )
        parts.append(
            generate(
                context,
                request,
                ids,
                sampling,
                request_id=prompt.request_id,
                names=prompt.names,
                stream_interval=prompt.stream_interval,
                index=index,
                num_prompts=len(prompts),
            )
        )
    source = parts[0] if len(parts) == 1 else OpenRequests(parts)
    await start_source(request, source, has_grammar=any(one is not None for one in grammars))
    return token_ids, source


def _complete_form(context: ApiContext, form: Grammar | None) -> Grammar | None:
    """If `form.compact` is None, set `compact` to the server's default."""
    if form is None or form.compact is not None:
        return form
    return replace(form, compact=context.options.compact_json)


def build_answer_grammar(
    chat_format: ChatFormat,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: CallChoice,
    content: Grammar | None,
) -> Grammar | None:
    """Build the grammar of an answer from its tools, its tool choice and the content's grammar.

    Raises `InvalidRequestError` if a call is forced but the server does not parse calls.
    """
    if choice.mode == "none":
        return content
    if choice.is_forced and not chat_format.reads_calls:
        refuse(
            "tool_choice",
            "--tool-call-parser none disables forced tool calls; send 'auto' or 'none'",
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


def constrain(
    sampling: SamplingParams,
    chat_format: ChatFormat,
    *,
    reasoning: ReasoningState,
    grammar: Grammar | None,
    budget: int | None,
) -> SamplingParams:
    """Add to `sampling` the reasoning budget, and the grammar of the text after the reasoning."""
    if grammar is None and budget is None:
        return sampling
    return replace(
        sampling,
        grammar=grammar,
        reasoning=chat_format.reasoning(reasoning),
        thinking_token_budget=budget,
    )


class BlockAnswerWriter(AnswerWriter[Choice, ResponseT]):
    is_paced = True
    keeps_parts = True

    def __init__(self, request_id: str, turn: StartedTurn) -> None:
        (self._reader,) = turn.readers
        choice = Choice(0, self._reader, is_prompt_only=turn.is_prompt_only)
        super().__init__(request_id, turn.source, [choice])
        self._writer = BlockWriter(self._reader.calls)
        self.blocks = self._writer.blocks
        self._logprobs: list[TokenLogprobs] = []

    @property
    def finish_reason(self) -> str | None:
        """The finish reason, as in chat completions, or None before the answer ends."""
        return self._reader.finish_reason

    @property
    def stop_string(self) -> str | None:
        reason = self._reader.stop_reason
        return reason if isinstance(reason, str) else None

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return and clear the collected logprobs; [] if the client requested no logprobs."""
        taken, self._logprobs = self._logprobs, []
        return taken

    @abstractmethod
    def block_chunk(self, events: list[BlockEvent]) -> bytes:
        """Return the bytes that a stream sends for the block events."""

    def take(self, choice: Choice, output: RequestOutput, events: list[ParserEvent]) -> None:
        self._grow(output, events)

    def chunk(self, choice: Choice, output: RequestOutput, events: list[ParserEvent]) -> bytes:
        return self.block_chunk(self._grow(output, events))

    def _grow(self, output: RequestOutput, events: list[ParserEvent]) -> list[BlockEvent]:
        if output.finish_reason == "abort":
            raise AbortedError(f"the request {output.request_id} was aborted", code="aborted")
        self._logprobs += output.logprobs or ()
        grown = list(self._writer.push(events))
        if output.finish_reason is not None:
            grown += self._writer.finish(is_truncated=self._reader.finish_reason == "length")
        return grown
