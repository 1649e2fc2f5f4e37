"""Run a model in your own process: `LLM("nano").chat([{"role": "user", "content": "Hello"}])`."""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, cast

from negamax.base.errors import ConfigError, EngineError, InvalidRequestError
from negamax.engine.client.image_loader import ImageLoader
from negamax.engine.client.output import (
    ChoiceStream,
    RequestOutput,
    admit,
    check_served,
    split_choices,
)
from negamax.engine.core.planned_sizes import choose_parallel_sizes
from negamax.engine.core.setup import start_loop
from negamax.engine.core.source import locate
from negamax.engine.wire import EngineStats
from negamax.models.chat_format import ChatFormat, may_call
from negamax.options.engine import EngineOptions
from negamax.options.foreign import own_value
from negamax.scheduler.request import GenerateRequest, ImageInput, SamplingParams
from negamax.scheduler.step import SequenceUpdate, TokenLogprobs
from negamax.text.chat_template import ChatTemplate, require_template
from negamax.text.detokenizer import TextPiece
from negamax.text.escaping import unescape
from negamax.text.messages import ImagePart, normalize_messages
from negamax.text.parser.events import ParsedOutput, ParserEvent, collect
from negamax.text.parser.output_parser import OutputParser
from negamax.text.tokenizer import Tokenizer

P = ParamSpec("P")
Prompt = str | Sequence[int]
# (index of the prompt, request, stream that converts updates to outputs).
_Sequence = tuple[int, GenerateRequest, ChoiceStream]
Messages = Sequence[Mapping[str, Any]]


@dataclass
class Completion:
    index: int
    text: str = ""
    # Pieces of `text`, each with a token id if a single token contains the piece.
    pieces: list[TextPiece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None
    message: ParsedOutput | None = None  # Parsed `text`; set by `LLM.chat` only.


@dataclass
class Generation:
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class LLMOptions(EngineOptions):
    chat_template: str | None = None  # Path of a file that replaces the checkpoint's chat template.


def _takes_fields_of(
    options: Callable[P, LLMOptions],
) -> Callable[[Callable[[LLM, LLMOptions], None]], Callable[Concatenate[LLM, P], None]]:
    """Let type checkers and editors see a dataclass's fields as the parameters of `__init__`."""

    def decorate(init: Callable[[LLM, LLMOptions], None]) -> Callable[Concatenate[LLM, P], None]:
        def wrapper(self: LLM, *args: P.args, **kwargs: P.kwargs) -> None:
            for name, value in kwargs.items():
                if isinstance(value, str):
                    kwargs[name] = own_value(name, value)
            init(self, options(*args, **kwargs))

        signature = inspect.signature(options)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [first, *signature.parameters.values()]
        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return wrapper

    return decorate


class LLM:
    """Runs a model in this process. Keyword arguments are the fields of `EngineOptions`, and
    `chat_template` (a file path). vLLM's values, such as `dtype="half"`, are valid, too.

    An `LLM` is a context manager; `shutdown` ends the workers. An `LLM` is not thread-safe. Raises
    `ConfigError` or `ResourceError` for a model or options that cannot work on this machine.
    """

    @_takes_fields_of(LLMOptions)
    def __init__(self, options: LLMOptions) -> None:
        if options.num_replicas > 1:
            raise ConfigError(
                f"--num-replicas is {options.num_replicas}; LLM runs one engine",
                hint="omit the option, or use `negamax serve`",
            )
        if options.kv_transfer is not None:
            raise ConfigError(
                "--kv-transfer-config is set, but `LLM` cannot exchange KV caches",
                hint="omit the option, or use `negamax serve`",
            )
        engine = {one.name: getattr(options, one.name) for one in fields(EngineOptions)}
        self._options = choose_parallel_sizes(EngineOptions(**engine))
        source = locate(self._options)
        self.tokenizer = Tokenizer.from_folder(source.tokenizer_folder)
        template = None if options.chat_template is None else Path(options.chat_template)
        self.chat_template = ChatTemplate.from_folder(source.tokenizer_folder, template)
        self._loop, self.info = start_loop(self._options)
        vision, limit = self.info.vision, self.info.max_model_len
        self._images = None if vision is None else ImageLoader(vision, max_model_len=limit)
        self._seeds = random.Random(self._options.seed)
        self._request_numbers = count()
        # Updates by request id. A stream that runs the loop also gets updates of other requests.
        self._updates: dict[str, deque[SequenceUpdate]] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def stats(self) -> EngineStats:
        """Return the numbers of running and waiting requests, and counters since the start."""
        return self._loop.stats()

    def shutdown(self) -> None:
        self._loop.shutdown()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Continue each prompt (text or token ids). Results are in the order of the prompts.

        Pass one `sampling_params` for all prompts, one per prompt, or None for the model's
        defaults. Raises `InvalidRequestError` before the first step if a prompt or parameter is
        invalid, and `EngineError` if the engine fails.
        """
        token_ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        params = self._admit(token_ids, sampling_params)
        generations = _make_results(token_ids, params)
        for position, output in self._run(token_ids, params):
            _collect(generations[position], output)
        return generations

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the outputs of one prompt step by step. Closing the iterator aborts the prompt."""
        prompts = [self._encode(prompt)]
        return _drop_positions(self._run(prompts, self._admit(prompts, sampling_params)))

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[Generation]:
        """Answer one or several conversations. `outputs[i].message` contains reasoning, content and
        tool calls. Stop strings apply to the content only.

        `template_options` are variables of the chat template. Raises the errors of `generate`, and
        `InvalidRequestError` for messages that the template cannot express.
        """
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        chats: list[Any] = [conversations] if single else list(conversations)
        parts: list[list[ImagePart]] = [[] for _ in chats]
        prompts = [
            self._render(chat, tools, own, **template_options)
            for chat, own in zip(chats, parts, strict=True)
        ]
        token_ids = [self.tokenizer.encode_escaped(prompt) for prompt in prompts]
        images: list[list[ImageInput]] = [[] for _ in chats]
        for position, own in enumerate(parts):
            if own and self._images is not None:
                loaded = self._images.load_blocking(own)
                token_ids[position], images[position] = self._images.expand(
                    token_ids[position], loaded
                )
        params = self._admit(token_ids, sampling_params)
        parsers = [
            [
                self._parser(prompt, tools=tools, messages=chat, sampling=sampling)
                for _ in range(sampling.n)
            ]
            for prompt, chat, sampling in zip(prompts, chats, params, strict=True)
        ]
        generations = _make_results(token_ids, params)
        events: dict[tuple[int, int], list[ParserEvent]] = {}  # Events by (prompt, choice).
        for position, output in self._run(token_ids, params, parsers, images):
            _collect(generations[position], output)
            said = events.setdefault((position, output.index), [])
            parser = parsers[position][output.index]
            said += parser.feed(output.pieces) if output.events is None else output.events
            if output.finish_reason is not None:
                if output.events is None:
                    said += parser.finish(is_truncated=output.finish_reason != "stop")
                generations[position].outputs[output.index].message = collect(said)
        return generations

    def parse(
        self,
        prompt: str,
        completion: Completion,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        messages: Messages = (),
    ) -> ParsedOutput:
        """Parse a completion. Parse tool calls if `tools` are set or `messages` have calls."""
        parser = self._parser(prompt, tools=tools, messages=messages, sampling=SamplingParams())
        return collect(
            [
                *parser.feed(completion.pieces),
                *parser.finish(is_truncated=completion.finish_reason != "stop"),
            ]
        )

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> str:
        """Render a conversation to its prompt text. If a message contains the text of a control
        token, `generate` encodes the control token, but `chat` encodes plain text.
        """
        return unescape(self._render(messages, tools, [], **template_options))

    def _render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        images: list[ImagePart],
        /,
        **options: Any,
    ) -> str:
        """Return the escaped prompt. Append the images of the messages to `images`."""
        template = require_template(self.chat_template)
        normal = normalize_messages(
            [dict(message) for message in messages],
            has_root=template.has_root_role,
            family=ChatFormat.of_model(self.info.architecture).family,
            images=None if self._images is None else images,
        )
        listed = None if tools is None else list(tools)
        return template.render(normal, self.tokenizer.escaper, tools=listed, **options)

    def _parser(
        self,
        prompt: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        messages: Messages,
        sampling: SamplingParams,
    ) -> OutputParser:
        chat_format = ChatFormat.of_model(self.info.architecture, tokenizer=self.tokenizer)
        return chat_format.new_parser(
            tools=tools,
            in_reasoning=chat_format.output.opens_reasoning(prompt),
            may_call=may_call(tools, messages),
            stop=sampling.stop,
            includes_stop=sampling.include_stop_str_in_output,
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _admit(
        self,
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(prompts)
        else:
            params = list(sampling_params)
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"{len(params)} sampling parameters do not fit {len(prompts)} prompts",
                hint="pass one SamplingParams for all prompts, or one for each prompt",
            )
        return [
            admit(prompt, param, info=self.info)
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def _run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        parsers: Sequence[Sequence[OutputParser]] | None = None,
        images: Sequence[list[ImageInput]] | None = None,
    ) -> Generator[tuple[int, RequestOutput]]:
        """Run the loop until all choices have ended. Yield (index of the prompt, output)."""
        waiting = deque(self._sequences(prompts, params, parsers, images))
        running: dict[str, tuple[int, ChoiceStream]] = {}
        updates: deque[SequenceUpdate] = deque()
        # Request id of choice 0 -> choices that wait until choice 0 has filled the prefix cache.
        held: dict[str, list[_Sequence]] = {}

        def start(sequence: _Sequence) -> None:
            position, request, stream = sequence
            running[request.request_id] = position, stream
            self._updates[request.request_id] = updates
            self._loop.add(request)

        def end(request_ids: list[str]) -> None:
            for request_id in request_ids:
                del running[request_id], self._updates[request_id]
            self._loop.abort(request_ids)

        try:
            while waiting or running:
                while waiting and len(running) < self._options.max_queued_requests:
                    first, *others = waiting.popleft()
                    start(first)
                    held[first[1].request_id] = others
                if not updates:
                    self._step()
                while updates:
                    update = updates.popleft()
                    if update.request_id not in running:
                        continue  # The update's sequence was aborted.
                    for sequence in held.pop(update.request_id, ()):
                        start(sequence)
                    position, stream = running[update.request_id]
                    check_served(update)
                    if update.error is not None:
                        raise EngineError(update.error)
                    output = stream.push(update)
                    if stream.finished:
                        end([update.request_id])  # The engine loop does not stop at stop strings.
                    yield position, output
        finally:
            end(list(running))

    def _step(self) -> None:
        """Run one step, and store each update for the stream of its request."""
        for update in self._loop.step():
            updates = self._updates.get(update.request_id)
            if updates is not None:  # None: the request was aborted.
                updates.append(update)

    def _sequences(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        parsers: Sequence[Sequence[OutputParser]] | None = None,
        images: Sequence[list[ImageInput]] | None = None,
    ) -> Iterator[list[_Sequence]]:
        for position, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            request = GenerateRequest(
                request_id=f"llm-{next(self._request_numbers)}",
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                images=[] if images is None else images[position],
            )
            readers = None if parsers is None else parsers[position]
            choices = split_choices(
                request, self.tokenizer, info=self.info, seeds=self._seeds, readers=readers
            )
            yield [(position, *choice) for choice in choices]


def _drop_positions(outputs: Generator[tuple[int, RequestOutput]]) -> Iterator[RequestOutput]:
    """Yield the outputs. In Python 3.12, closing a generator expression would leave `outputs` open
    until the expression is deleted.
    """
    with closing(outputs):
        for _, output in outputs:
            yield output


def _make_results(prompts: list[list[int]], params: list[SamplingParams]) -> list[Generation]:
    return [
        Generation(
            prompt_token_ids=prompt, outputs=[Completion(index) for index in range(sampling.n)]
        )
        for prompt, sampling in zip(prompts, params, strict=True)
    ]


def _collect(generation: Generation, output: RequestOutput) -> None:
    completion = generation.outputs[output.index]
    completion.text += output.text
    completion.pieces += output.pieces
    completion.token_ids += output.token_ids
    if output.logprobs is not None:
        completion.logprobs = (completion.logprobs or []) + output.logprobs
    if output.prompt_logprobs is not None:
        generation.prompt_logprobs = output.prompt_logprobs
    generation.num_cached_tokens = output.num_cached_tokens
    completion.finish_reason = output.finish_reason
    completion.stop_reason = output.stop_reason


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
