import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_support import MINIMAX_M2, MINIMAX_M3, TOOLS, new_parser, parse

from negamax.api.common.choice_reader import ChoiceReader, ReadingRules
from negamax.api.common.conversation import ChatPrompt
from negamax.config.embedded import EMBEDDED
from negamax.config.generation import SamplingDefaults
from negamax.engine.client.output import ChoiceStream
from negamax.engine.wire import ModelInfo
from negamax.models.chat_format import ChatFormat
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.step import SequenceUpdate, TokenLogprobs
from negamax.text.detokenizer import TextPiece
from negamax.text.parser.events import ParsedOutput, ParserEvent, collect
from negamax.text.parser.output_format import OutputFormat
from negamax.text.parser.output_parser import Thinking
from negamax.text.tokenizer import Tokenizer

TAG_IDS = {"<think>": 50, "</think>": 51, "<minimax:tool_call>": 52, "</minimax:tool_call>": 53}
WORDS = st.lists(st.sampled_from(["a", "b", "ab", " ", "\n", "\n\n", "<", "`"]), max_size=12)
STOPS = st.sampled_from(["a", "ba", "\n", "\n\n", " ", "b\na", "<", "aba", "x"])
ARGUMENT = '<parameter name="content">a\n\nEND</parameter>\n'
CALL = f'<minimax:tool_call>\n<invoke name="write_file">\n{ARGUMENT}</invoke>\n</minimax:tool_call>'


def truncate(content: str, stop: Sequence[str], *, includes_stop: bool) -> tuple[str, str | None]:
    """Return the content up to the first complete stop string, and that string.

    The function tries every end of the content.
    """
    start = len(content) - len(content.lstrip())
    for end in range(start, len(content) + 1):
        for word in sorted(stop, key=len, reverse=True):
            if content[start:end].endswith(word):
                return content[: end if includes_stop else end - len(word)], word
    return content, None


def read(
    pieces: Sequence[TextPiece], stop: Sequence[str], *, step: int,
    format: OutputFormat = MINIMAX_M2, **options: Any,
) -> tuple[ParsedOutput, str | None]:  # fmt: skip
    values = {"tools": TOOLS, "in_reasoning": True, "tag_ids": TAG_IDS, "stop": stop, **options}
    parser = new_parser(format, **values)
    events: list[ParserEvent] = []
    for start in range(0, len(pieces), step):
        events += parser.feed(pieces[start : start + step])
    return collect([*events, *parser.finish()]), parser.matched_stop


def chars(text: str) -> list[TextPiece]:
    return [TextPiece(char, None) for char in text]


@settings(max_examples=100, deadline=None)
@given(
    thought=WORDS.map("".join),
    content=WORDS.map("".join),
    stop=st.lists(STOPS, min_size=1, max_size=3, unique=True),
    includes_stop=st.booleans(),
    may_call=st.booleans(),
    step=st.sampled_from([1, 3, 99]),
)
def test_content_ends_at_the_first_stop_string_and_thinking_at_none(
    thought: str, content: str, stop: list[str], includes_stop: bool, may_call: bool, step: int
) -> None:
    format = MINIMAX_M2 if may_call else MINIMAX_M2.drop_calls()
    pieces = [*chars(thought), TextPiece("</think>", 51), *chars(content)]
    whole, _ = read(pieces, (), step=step, format=format)
    said, matched = read(pieces, stop, step=step, format=format, includes_stop=includes_stop)
    assert said.reasoning == whole.reasoning
    expected = truncate(whole.content or "", stop, includes_stop=includes_stop)
    assert (said.content or "", matched) == expected


@pytest.mark.parametrize("thinking", list(Thinking))
@pytest.mark.parametrize("step", [1, 100])
def test_thinking_in_the_content_has_no_stop_strings(thinking: Thinking, step: int) -> None:
    pieces = [*chars("one\n\ntwo\n"), TextPiece("</think>", 51), *chars("\n\nThree.\n\nFour.")]
    said, matched = read(pieces, ["\n\n", "o\n\nt"], step=step, thinking=thinking)
    assert matched == "\n\n" and (said.content or "").endswith("Three.")
    assert "two" in (said.reasoning or said.content or "")


@pytest.mark.parametrize("step", [1, 1000])
def test_no_stop_string_spans_a_call_or_a_second_thought(step: int) -> None:
    text = f"Why.\n</think>\n\nTo EN\n{CALL}\nD and END of it"
    whole = parse(MINIMAX_M2, text, tools=TOOLS)
    said, matched = read(chars(text), ["END", "\n\nE"], step=step, tag_ids=None)
    assert said.tool_calls == whole.tool_calls and matched == "END"
    assert whole.content is not None and said.content == whole.content.partition("END")[0]
    thoughts = chars("One. EN<mm:think>Two END.</mm:think>D. END.")
    options: dict[str, Any] = {"format": MINIMAX_M3, "in_reasoning": False, "tag_ids": None}
    said, matched = read(thoughts, ["END"], step=step, **options)
    assert (said.reasoning, said.content, matched) == ("Two END.", "One. END. ", "END")


# --- streams of a choice -------------------------------------------------------------------------

TOKENIZER = Tokenizer.from_folder(EMBEDDED["nano"])
EOS = 4116
TEXT = (
    "The keeper counts the ships that pass, writes their names down and wonders. Nobody asks "
    "him; ✓ nobody. END of it all."
)
INFO = ModelInfo(
    model="nano", served_model_name="nano", architecture="MiniMaxM2ForCausalLM",
    max_model_len=4096, vocab_size=10_000, eos_token_ids=(EOS,), bos_token_id=None,
    sampling_defaults=SamplingDefaults(), max_logprobs=20, max_num_seqs=1, block_size=16,
    num_kv_blocks=1, device="cpu", dtype="float32",
)  # fmt: skip
Answer = dict[str, Any]


def push(text: str, sizes: list[int], reader: ChoiceReader | None, **params: Any) -> Answer:
    """Push the tokens of `text` in groups of `sizes`, then one by one. Return the answer."""
    sampling = SamplingParams(**params)
    prompt = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling)
    stream = ChoiceStream(TOKENIZER, prompt, 0, info=INFO, reader=reader)
    ids, position = [*TOKENIZER.encode(text), EOS], 0
    events: list[ParserEvent] = []
    said, kept, logprobs = "", list[int](), 0
    while not stream.finished:
        group = ids[position : position + (sizes.pop(0) if sizes else 1)]
        position += len(group)
        entries = [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in group]
        end = "stop" if position >= len(ids) else None
        output = stream.push(SequenceUpdate("r/0", group, entries, None, end, None, 0, None))
        said += output.text
        kept += output.token_ids
        logprobs += len(output.logprobs or ())
        events += reader.push(output) if reader else []
    ended = reader or output
    return {
        "said": collect(events) if reader else said,
        "kept": kept,
        "counts": (len(kept), output.num_output_tokens, logprobs),
        "thought": reader.num_reasoning_tokens if reader else 0,
        "reasons": (ended.finish_reason, ended.stop_reason),
    }


def push_read(
    text: str, sizes: list[int], stop: tuple[str, ...], *, tools: bool = False, **params: Any
) -> Answer:
    chat_format = ChatFormat.of_model("minimax_m2", tokenizer=TOKENIZER)
    rules = ReadingRules(tools=TOOLS if tools else None, may_call=tools, stop=stop)
    reader = ChoiceReader(chat_format, prompt=ChatPrompt("", [1], "open"), rules=rules)
    return push(text, sizes, reader, stop=stop, **params)


def check_groupings(text: str, answer: Callable[[list[int]], Answer]) -> Answer:
    """Check that any grouping of tokens gives the same answer. Return the answer."""
    rng, num_tokens = random.Random(1), len(TOKENIZER.encode(text)) + 1
    one_by_one = answer([])
    for _ in range(15):
        assert answer([rng.randint(1, 9) for _ in range(num_tokens)]) == one_by_one
    assert answer([num_tokens]) == one_by_one
    assert one_by_one["counts"][0] == one_by_one["counts"][1]
    return one_by_one


@pytest.mark.parametrize("min_tokens", [0, 12])
@pytest.mark.parametrize("stop", [(), ("END",), ("ships that pass", "Nobody"), ("absent",), ("✓",)])
def test_any_grouping_of_tokens_gives_the_same_text(stop: tuple[str, ...], min_tokens: int) -> None:
    params = {"stop": stop, "min_tokens": min_tokens}
    answer = check_groupings(TEXT, lambda sizes: push(TEXT, sizes, None, **params))
    if stop == ("END",):  # Tokens after the stop string are not counted.
        assert answer["said"] == TEXT.partition("END")[0]
        assert answer["reasons"] == ("stop", "END")
        assert answer["counts"][0] == answer["counts"][2] < len(TOKENIZER.encode(TEXT))


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 40])
@pytest.mark.parametrize("stop", [("\n\n",), ("END",), ("it.\n\nE", "look"), ("absent",)])
def test_grouping_changes_no_answer(stop: tuple[str, ...], min_tokens: int, tools: bool) -> None:
    second = CALL if tools else "Again"
    text = f"The keeper counts.\n\nEND of it.\n</think>\n\nI look.\n{second}\n\nSo be it.\n\nEND"
    options: dict[str, Any] = {"min_tokens": min_tokens, "tools": tools}
    answer = check_groupings(text, lambda sizes: push_read(text, sizes, stop, **options))
    assert answer["said"].reasoning == "The keeper counts.\n\nEND of it."
    assert 0 < answer["thought"] < answer["counts"][1]
    if min_tokens == 0:
        assert answer["reasons"][1] == (None if stop == ("absent",) else stop[-1])


def test_an_answer_without_tools_ends_with_the_token_that_completes_the_stop_string() -> None:
    text = "Why.\n</think>\n\nOne.\n\n"
    answer = push_read(text + "Two.", [], ("\n\n",))
    assert (answer["said"].content, answer["reasons"][1]) == ("One.", "\n\n")
    assert answer["counts"][0] == len(TOKENIZER.encode(text))
