import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest
from request_support import make_output

from negamax.api.common.answer import AnswerWriter, Choice
from negamax.api.common.choice_reader import PlainReader
from negamax.base.errors import EngineError
from negamax.engine.client.output import RequestOutput
from negamax.models.chat_format import ChatFormat
from negamax.scheduler.step import TokenLogprobs
from negamax.text.parser.events import ParserEvent

FORMAT = ChatFormat.of_model("minimax_m2")


class Texts(msgspec.Struct):
    texts: list[str]


class Outputs:
    def __init__(self, *outputs: tuple[int, RequestOutput]) -> None:
        self._outputs = outputs

    async def run(self, take: Callable[[int, RequestOutput], object]) -> None:
        for number, output in self._outputs:
            take(number, output)


class Writer(AnswerWriter[Choice, Texts]):
    def __init__(self, *outputs: tuple[int, RequestOutput], choices: list[Choice]) -> None:
        super().__init__("answer-1", Outputs(*outputs), choices)  # type: ignore[arg-type]
        self.texts = ["" for _ in choices]
        self.threads: list[str] = []  # names of the threads that took outputs

    def take(self, choice: Choice, output: RequestOutput, events: list[ParserEvent]) -> None:
        self.threads.append(threading.current_thread().name)
        self.texts[choice.index] += str(output.num_output_tokens)

    def chunk(self, choice: Choice, output: RequestOutput, events: list[ParserEvent]) -> bytes:
        self.take(choice, output, events)
        return b"" if output.finish_reason is None else b"%d;" % choice.index

    def response(self) -> Texts:
        return Texts(self.texts)


def output(index: int = 0, *, finish: str | None = None, error: str | None = None) -> RequestOutput:
    counts = {"num_prompt_tokens": 5, "num_output_tokens": 1}
    return make_output(index=index, token_ids=[7], finish_reason=finish, error=error, **counts)


def choice(index: int, *, prompt: int = 0, is_prompt_only: bool = False) -> Choice:
    reader = PlainReader(FORMAT, [1])
    return Choice(index, reader, prompt_index=prompt, is_prompt_only=is_prompt_only)


@pytest.mark.parametrize("is_prompt_only", [False, True])
def test_a_failed_request_is_an_error(is_prompt_only: bool) -> None:
    failed = output(finish="error", error="no memory")
    choices = [choice(0, is_prompt_only=is_prompt_only)]
    with pytest.raises(EngineError, match="no memory"):
        asyncio.run(Writer((0, failed), choices=choices).whole())
    written: list[bytes] = []
    asyncio.run(Writer((0, failed), choices=choices).stream(written.append))
    assert b'"error"' in written[-1] and written[-1].endswith(b"data: [DONE]\n\n")


def test_outputs_find_their_choice_among_those_of_all_prompts() -> None:
    """Send two choices of the first prompt and one of the second, as /generate does."""
    outputs = [(1, output(finish="stop")), (0, output(1, finish="length")), (0, output(0))]
    choices = [choice(0), choice(1), choice(2, prompt=1)]
    written: list[bytes] = []
    writer = Writer(*outputs, choices=choices)
    asyncio.run(writer.stream(written.append))
    assert written == [b"2;", b"1;", b"data: [DONE]\n\n"]
    assert [one.reader.finish_reason for one in choices] == [None, "length", "stop"]
    assert writer.usage.prompt_tokens == 10 and writer.usage.completion_tokens == 3


def test_where_only_the_prompt_is_read_no_token_is_counted() -> None:
    writer = Writer((0, output(finish="stop")), choices=[choice(0, is_prompt_only=True)])
    assert asyncio.run(writer.whole()).texts == ["0"]
    assert writer.usage.completion_tokens == 0
    assert writer.choices[0].reader.finish_reason == "length"


def test_events_with_many_logprobs_are_built_in_a_thread_and_stay_in_order() -> None:
    entries = [TokenLogprobs(7, -1.0, 1, [7] * 20, [-1.0] * 20)] * 10
    many = msgspec.structs.replace(output(0, finish="stop"), logprobs=entries)
    outputs = [(0, many), (0, output(1, finish="stop")), (0, output(2, finish="length"))]
    written: list[bytes] = []
    writer = Writer(*outputs, choices=[choice(0), choice(1), choice(2)])
    asyncio.run(writer.stream(written.append))
    assert written == [b"0;", b"1;", b"2;", b"data: [DONE]\n\n"]
    assert writer.threads[0].startswith("request")

    failed = Writer((0, many), (0, output(1, error="x", finish="error")), choices=writer.choices)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="x"):
        asyncio.run(failed.whole())
    assert not failed.threads  # The loop converts no output for a disconnected client.
