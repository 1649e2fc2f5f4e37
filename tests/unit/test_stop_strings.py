import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_support import MINIMAX_M2, MINIMAX_M3, outputs, parse
from test_choice_stream import EOS, TOKENIZER, info

from negamax.api.common.choice_reader import ChoiceReader, ReadingRules
from negamax.api.common.conversation import ChatPrompt
from negamax.engine.client.output import ChoiceStream
from negamax.models.chat_format import ChatFormat
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import SequenceUpdate
from negamax.text.detokenizer import TextPiece
from negamax.text.parser.events import ParsedOutput, ParserEvent, collect
from negamax.text.parser.output_format import OutputFormat
from negamax.text.parser.output_parser import OutputParser, Thinking

TAG_IDS = {"<think>": 50, "</think>": 51, "<minimax:tool_call>": 52, "</minimax:tool_call>": 53}
WORDS = st.lists(st.sampled_from(["a", "b", "ab", " ", "\n", "\n\n", "<", "`"]), max_size=12).map(
    "".join
)
STOPS = st.lists(
    st.sampled_from(["a", "ba", "\n", "\n\n", " ", "b\na", "<", "aba", "x"]),
    min_size=1,
    max_size=3,
    unique=True,
)
ARGUMENT = '<parameter name="content">a\n\nEND</parameter>\n'
CALL = f'<minimax:tool_call>\n<invoke name="write_file">\n{ARGUMENT}</invoke>\n</minimax:tool_call>'


def cut(content: str, stop: Sequence[str], *, includes_stop: bool) -> tuple[str, str | None]:
    """Return content up to the first complete stop string, found by trying every end, and the
    string.
    """
    start = len(content) - len(content.lstrip())
    for end in range(start, len(content) + 1):
        for word in sorted(stop, key=len, reverse=True):
            if content[start:end].endswith(word):
                return content[: end if includes_stop else end - len(word)], word
    return content, None


def read(
    pieces: Sequence[TextPiece],
    stop: Sequence[str],
    *,
    step: int,
    format: OutputFormat = MINIMAX_M2,
    **options: bool | Thinking,
) -> tuple[ParsedOutput, str | None]:
    values = {"tools": outputs.TOOLS, "in_reasoning": True, "tag_ids": TAG_IDS, "stop": stop}
    parser = OutputParser(format, **{**values, **options})  # type: ignore[arg-type]
    events: list[ParserEvent] = []
    for start in range(0, len(pieces), step):
        events += parser.feed(pieces[start : start + step])
    return collect([*events, *parser.finish()]), parser.matched_stop


def chars(text: str) -> list[TextPiece]:
    return [TextPiece(char, None) for char in text]


@settings(max_examples=200, deadline=None)
@given(
    thought=WORDS,
    content=WORDS,
    stop=STOPS,
    includes_stop=st.booleans(),
    may_call=st.booleans(),
    step=st.sampled_from([1, 3, 99]),
)
def test_content_ends_at_the_first_stop_string_and_thinking_at_none(
    thought: str, content: str, stop: list[str], includes_stop: bool, may_call: bool, step: int
) -> None:
    format = MINIMAX_M2 if may_call else MINIMAX_M2.without_calls()
    pieces = [*chars(thought), TextPiece("</think>", 51), *chars(content)]
    whole, _ = read(pieces, (), step=step, format=format)
    said, matched = read(pieces, stop, step=step, format=format, includes_stop=includes_stop)
    assert said.reasoning == whole.reasoning
    assert (said.content or "", matched) == cut(
        whole.content or "", stop, includes_stop=includes_stop
    )


@pytest.mark.parametrize("thinking", list(Thinking))
@pytest.mark.parametrize("step", [1, 100])
def test_thinking_that_stays_in_the_content_has_no_stop_strings_either(
    thinking: Thinking, step: int
) -> None:
    pieces = [*chars("one\n\ntwo\n"), TextPiece("</think>", 51), *chars("\n\nThree.\n\nFour.")]
    said, matched = read(pieces, ["\n\n", "o\n\nt"], step=step, thinking=thinking)
    assert (
        matched == "\n\n"
        and (said.content or "").endswith("Three.")
        and "two" in (said.reasoning or said.content or "")
    )


@pytest.mark.parametrize("step", [1, 1000])
def test_calls_have_no_stop_strings_and_none_spans_them(step: int) -> None:
    text = f"Why.\n</think>\n\nTo EN\n{CALL}\nD and END of it"
    whole = parse(MINIMAX_M2, text, tools=outputs.TOOLS, in_reasoning=True)
    said, matched = read(chars(text), ["END", "\n\nE"], step=step, tag_ids=None)  # type: ignore[arg-type]
    assert said.tool_calls == whole.tool_calls and matched == "END"
    assert whole.content is not None and said.content == whole.content.partition("END")[0]


@pytest.mark.parametrize("step", [1, 1000])
def test_no_stop_string_spans_a_second_thought(step: int) -> None:
    text = "One. EN<mm:think>Two END.</mm:think>D. END."
    options = {"format": MINIMAX_M3, "in_reasoning": False, "tag_ids": None}
    said, matched = read(chars(text), ["END"], step=step, **options)  # type: ignore[arg-type]
    assert (said.reasoning, said.content, matched) == ("Two END.", "One. END. ", "END")


def answered(
    sizes: list[int], text: str, stop: tuple[str, ...], *, min_tokens: int = 0, tools: bool = False
) -> tuple[ParsedOutput, int, int, str | None, int | str | None, int]:
    chat_format = ChatFormat.of_model("minimax_m2", tokenizer=TOKENIZER)
    rules = ReadingRules(tools=outputs.TOOLS if tools else None, may_call=tools, stop=stop)
    reader = ChoiceReader(chat_format, prompt=ChatPrompt("", [1], "open"), rules=rules)
    sampling = SamplingParams(stop=stop, min_tokens=min_tokens)
    stream = ChoiceStream(
        TOKENIZER,
        sampling,
        info=info(),
        request_id="r",
        index=0,
        num_prompt_tokens=1,
        reader=reader,
    )
    ids, position = [*TOKENIZER.encode(text), EOS], 0
    events: list[ParserEvent] = []
    num_kept = 0
    while not stream.finished:
        group = ids[position : position + (sizes.pop(0) if sizes else 1)]
        position += len(group)
        end = "stop" if position >= len(ids) else None
        output = stream.push(SequenceUpdate("r/0", group, None, None, end, None, 0, None))
        num_kept += len(output.token_ids)
        events += reader.push(output)
    said = collect(events)
    return (
        said,
        num_kept,
        output.num_output_tokens,
        reader.finish_reason,
        reader.stop_reason,
        reader.num_reasoning_tokens,
    )


@pytest.mark.parametrize("tools", [False, True])
def test_any_grouping_of_tokens_gives_the_same_answer(tools: bool) -> None:
    rng = random.Random(1)
    text = (
        f"The keeper counts.\n\nEND of it.\n</think>\n\nI "
        f"look.\n{CALL if tools else 'Again'}\n\nSo be it.\n\nEND"
    )
    num_tokens = len(TOKENIZER.encode(text)) + 1
    for stop in (("\n\n",), ("END",), ("it.\n\nE", "look"), ("absent",)):
        for min_tokens in (0, 40):
            options = {"min_tokens": min_tokens, "tools": tools}
            one_by_one = answered([1] * num_tokens, text, stop, **options)  # type: ignore[arg-type]
            said, num_kept, num_told, _, stop_reason, num_thought = one_by_one
            assert said.reasoning == "The keeper counts.\n\nEND of it." and num_kept == num_told
            assert 0 < num_thought < num_told
            if min_tokens == 0:
                assert stop_reason == (None if stop == ("absent",) else stop[-1])
            for _ in range(20):
                sizes = [rng.randint(1, 9) for _ in range(num_tokens)]
                assert answered(sizes, text, stop, **options) == one_by_one  # type: ignore[arg-type]


def test_without_tools_the_answer_ends_with_the_token_that_completes_the_stop_string() -> None:
    text = "Why.\n</think>\n\nOne.\n\n"
    answer = answered([], text + "Two.", ("\n\n",))
    assert (answer[0].content, answer[4]) == ("One.", "\n\n")
    assert answer[1] == len(TOKENIZER.encode(text))
