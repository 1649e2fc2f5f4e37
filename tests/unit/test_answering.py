import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from parser_support import write_block
from request_support import make_output

from negamax.api.common.answer import AnswerWriter, Choice
from negamax.api.common.blocks import BlockKind, BlockWriter
from negamax.api.common.choice_reader import PlainReader, StartedCall
from negamax.api.common.content_logprobs import ContentLogprobs
from negamax.api.common.logprobs import TextLogprobWriter
from negamax.api.schemas.answers import ChatLogprob
from negamax.base.errors import EngineError
from negamax.engine.client.output import RequestOutput
from negamax.models.chat_format import ChatFormat
from negamax.scheduler.step import TokenLogprobs
from negamax.text.detokenizer import Detokenizer
from negamax.text.parser.events import ParserEvent, ToolCallStart
from negamax.text.parser.packets import Packets
from negamax.text.tokenizer import Tokenizer

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


def test_prompt_only_requests_count_no_generated_token() -> None:
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


TOKENIZER = Tokenizer.from_folder(Path(__file__).parents[2] / "negamax" / "assets" / "nano")
M2, M3 = (ChatFormat.of_model(f"minimax_{name}", tokenizer=TOKENIZER) for name in ("m2", "m3"))
RAW = ChatFormat.of_model("minimax_m2", tokenizer=TOKENIZER, reasoning_parser="none")
CALLS = [("f", {"x": "Done. It is"})]
M2_CALL, M3_CALL = (write_block(chat_format.output, CALLS) for chat_format in (M2, M3))

HM, LOOK, SUM = "Hm\n</think>\n\n", "Look\n</think>\n\n", "The sum.</mm:think>"
# Each answer alternates between other text and content.
ANSWERS = {
    "plain": (M2, ["The sum.\n</think>\n\n", "47 + 38 = 85, so 85 apples."]),
    "content that the reasoning has too": (M2, ["Say: Hello there!\n</think>\n\n", "Hello there!"]),
    "content that a tag has too": (M2, [HM, "think about it"]),
    "no reasoning": (M2, ["</think>\n\n", "th\n\n ink </ and more"]),
    "emoji in several tokens": (M2, ["A 🙂 is 🙂🙂\n</think>\n\n", "🙂🙂 日本語 🙂 Größe"]),
    "spaces before the first word": (M2, [HM, "    indented = 1\n\n    code = 2"]),
    "content around a call": (M2, [LOOK, "I look.", M2_CALL, "\n\nDone. It is so."]),
    "content between calls": (M2, [LOOK, "So:", M2_CALL, "\nDone. It is", M2_CALL]),
    "tags in the content": (M2, [HM, "a <think> b <think> c"]),
    "quoted calls": (M2, [HM, 'Write <invoke name="f"> and <minimax:tool_call> like this']),
    "m3": (M3, [SUM, "The sum. Is 85 ]<] apples."]),
    "m3 call": (M3, [SUM, "I look.", M3_CALL, "Done. It is so."]),
    "m3 thinks again": (M3, [SUM, "Two. Three.", "<mm:think>Three.</mm:think>", "Three. Two."]),
    "raw": (RAW, ["", "Hm, what?\n</think>\n\nHello </think> there"]),
}


def entries(token_ids: Sequence[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token_id, -place / 1024, 1, [token_id], [-place / 1024])
        for place, token_id in enumerate(token_ids)
    ]


def steps_of(
    token_ids: Sequence[int], *, chat_format: ChatFormat, size: int
) -> Iterator[tuple[int, list[ParserEvent]]]:
    detokenizer = Detokenizer(TOKENIZER)
    parser = chat_format.new_parser(tools=None, in_reasoning=True)
    for start in range(0, len(token_ids), size):
        step = token_ids[start : start + size]
        yield len(step), parser.feed(detokenizer.push(step))
    yield 0, [*parser.feed(detokenizer.finish()), *parser.finish()]


def read(
    token_ids: Sequence[int], chat_format: ChatFormat, *, size: int, fragments: int
) -> list[list[ChatLogprob]]:
    """Return the tokens of each content block from a stream; check that a whole answer agrees."""
    streamed, whole = (ContentLogprobs(TOKENIZER, chat_format) for _ in range(2))
    packets, calls = Packets(min_chars=1, max_chars=fragments), list[StartedCall]()
    writer = BlockWriter(calls)
    in_deltas: dict[int, list[ChatLogprob]] = {}
    waiting = iter(entries(token_ids))
    for num_tokens, events in [*steps_of(token_ids, chat_format=chat_format, size=size), (0, [])]:
        arrived = list(itertools.islice(waiting, num_tokens))
        streamed.add(arrived)
        whole.add(arrived)
        sized = packets.push(events) + ([] if num_tokens else packets.flush())
        started = (event for event in sized if isinstance(event, ToolCallStart))
        calls += [StartedCall("c", event.name) for event in started]
        for event in writer.push(sized):
            if event.change == "grew":
                found = streamed.take(event.block, event.text)
                in_deltas.setdefault(event.block.index, []).extend(found)
    for block in writer.blocks:
        tokens = whole.list_tokens(block)
        assert streamed.list_tokens(block) == tokens == in_deltas.get(block.index, [])
        assert block.kind is BlockKind.CONTENT or whole.list_tokens(block) == []
    return [whole.list_tokens(block) for block in writer.blocks if block.kind is BlockKind.CONTENT]


def expected(parts: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of an answer, and for each content part the positions of its tokens."""
    token_ids = TOKENIZER.encode("".join(parts))
    ends = list(itertools.accumulate(map(len, map(TOKENIZER.token_bytes, token_ids))))
    assert ends[-1] == len("".join(parts).encode())
    places, start = [], 0
    for number, part in enumerate(parts):
        end = start + len(part.encode())
        if number % 2:
            spans = enumerate(zip([0, *ends], ends, strict=False))
            places.append([i for i, (first, last) in spans if last > start and first < end])
        start = end
    return token_ids, places


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize(
    ("size", "fragments"), [(1, 200), (1, 3), (3, 200), (1000, 5), (1000, 10_000)]
)
def test_content_has_its_tokens_and_no_others(name: str, size: int, fragments: int) -> None:
    chat_format, parts = ANSWERS[name]
    token_ids, places = expected(parts)
    found = read(token_ids, chat_format, size=size, fragments=fragments)
    assert [[-1024 * entry.logprob for entry in block] for block in found] == places
    for block, content in zip(found, parts[1::2], strict=True):
        assert content.encode() in b"".join(bytes(entry.bytes) for entry in block)


@pytest.mark.parametrize("size", [1, 1000])
def test_a_think_closer_outside_the_content_is_not_among_its_tokens(size: int) -> None:
    token_ids = TOKENIZER.encode("Hm\n</think>\n\nOne,</think> two.")
    (found,) = read(token_ids, M2, size=size, fragments=200)
    assert b"".join(bytes(entry.bytes) for entry in found).strip() == b"One, two."


def test_unfinished_and_long_answers_keep_their_tokens() -> None:
    token_ids = TOKENIZER.encode("Hm\n</think>\n\nGood 🙂")
    raw = [TOKENIZER.token_bytes(token_id) for token_id in token_ids]
    assert len(raw[-1]) < 4  # A shorter part cannot be split.
    (found,) = read(token_ids[:-1], M2, size=1, fragments=200)
    assert b"".join(bytes(entry.bytes) for entry in found).startswith(b"Good \xf0")
    assert found[-1].logprob == (2 - len(token_ids)) / 1024
    token_ids, places = expected(["Thought. " * 2_000 + "\n</think>\n\n", "Content. " * 2_000])
    (found,) = read(token_ids, M2, size=50, fragments=200)
    assert [-1024 * entry.logprob for entry in found] == places[0]


# --- completions ---------------------------------------------------------------------------------

FIRST, SECOND, THIRD = (
    next(number for number in range(300) if TOKENIZER.token_bytes(number) == bytes([byte]))
    for byte in (0xE2, 0x82, 0xAC)
)


@pytest.mark.parametrize("chosen", [FIRST, SECOND, THIRD])
def test_the_chosen_token_has_its_own_logprob_among_tokens_of_one_text(chosen: int) -> None:
    assert {TOKENIZER.token_text(number) for number in (FIRST, SECOND, THIRD)} == {"\ufffd"}
    logprobs = {FIRST: -0.5, SECOND: -1.0, THIRD: -9.0}
    writer = TextLogprobWriter(TOKENIZER)
    writer.push(TokenLogprobs(chosen, logprobs[chosen], 1, [FIRST, SECOND], [-0.5, -1.0]))
    taken = writer.take()
    assert taken.token_logprobs == [logprobs[chosen]]
    assert taken.top_logprobs == [{"\ufffd": logprobs[chosen]}]


def test_the_likeliest_of_other_tokens_with_one_text_counts() -> None:
    writer = TextLogprobWriter(TOKENIZER)
    letter = next(number for number in range(300) if TOKENIZER.token_bytes(number) == b"a")
    writer.push(TokenLogprobs(letter, -2.0, 3, [FIRST, SECOND], [-0.5, -1.0]))
    assert writer.take().top_logprobs == [{"\ufffd": -0.5, "a": -2.0}]
