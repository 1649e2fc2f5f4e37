import asyncio
import dataclasses
from typing import Any

import pytest
from message_support import ai, user
from request_support import make_output
from text_support import make_tokenizer

from negamax.api.common.choice_reader import ChoiceReader, ReadingRules
from negamax.api.common.conversation import ChatPrompt, Conversation, PromptBuilder
from negamax.api.schemas.thinking import ReasoningPlace, ThinkingChoice
from negamax.base.errors import InvalidRequestError
from negamax.engine.client.output import RequestOutput
from negamax.models.chat_format import ChatFormat
from negamax.text.chat_template import ChatTemplate
from negamax.text.detokenizer import TextPiece
from negamax.text.parser.events import ParserEvent, ReasoningDelta, ToolCallStart, collect

TURNS = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
ALWAYS_THINKS = TURNS + "{% if add_generation_prompt %}ai:<think>\n{% endif %}"
HAS_MODES = (
    TURNS + "ai:{% if thinking_mode == 'enabled' %}<think>{% elif thinking_mode == 'disabled' "
    "%}</think>{% endif %}"
)

FORMAT = ChatFormat.of_model("minimax_m2")
CALLS = "".join(
    f'<invoke name="f">\n<parameter name="x">{n}</parameter>\n</invoke>\n' for n in (1, 2)
)
ANSWER = (
    f"I think.\nHard.\n</think>\n\nSome text.\n<minimax:tool_call>\n{CALLS}</minimax:tool_call>"
)


def greeting(**fields: Any) -> Conversation:
    return Conversation(messages=[user("Hi")], **fields)


def prompt(template: str, conversation: Conversation, **options: Any) -> ChatPrompt:
    chat_format = dataclasses.replace(FORMAT, template=ChatTemplate(template))
    builder = PromptBuilder(make_tokenizer(), chat_format, max_model_len=1000, **options)
    return asyncio.run(builder.chat(conversation, num_bytes=0))


@pytest.mark.parametrize(
    ("template", "thinking", "ending", "state"),
    [
        (ALWAYS_THINKS, ThinkingChoice(), "<think>\n", "open"),
        (ALWAYS_THINKS, ThinkingChoice("adaptive"), "<think>\n", "open"),
        (ALWAYS_THINKS, ThinkingChoice("disabled"), "<think>\n</think>\n\n", "none"),
        (ALWAYS_THINKS, ThinkingChoice(effort="none"), "<think>\n</think>\n\n", "none"),
        (HAS_MODES, ThinkingChoice(), "ai:", "optional"),
        (HAS_MODES, ThinkingChoice("enabled"), "ai:<think>", "open"),
        (HAS_MODES, ThinkingChoice("disabled"), "ai:</think>", "none"),
    ],
)
def test_prompt_endings(template: str, thinking: ThinkingChoice, ending: str, state: str) -> None:
    made = prompt(template, greeting(thinking=thinking))
    assert made.text.endswith(ending) and made.reasoning == state
    assert make_tokenizer().decode(made.token_ids, skip_special_tokens=False) == made.text


def test_the_request_chooses_the_mode_before_variables_and_the_server() -> None:
    for thinking, kwargs, ending in (
        (ThinkingChoice(), {"thinking_mode": "enabled"}, "<think>"),
        (ThinkingChoice(), {"enable_thinking": False}, "</think>"),
        (ThinkingChoice(), {"thinking": True}, "<think>"),
        (ThinkingChoice("disabled"), {"thinking_mode": "enabled"}, "</think>"),
    ):
        made = prompt(HAS_MODES, greeting(thinking=thinking, template_kwargs=kwargs))
        assert made.text.endswith(f"ai:{ending}")
    with pytest.raises(InvalidRequestError, match="thinking_mode is 'off'; allowed: enabled"):
        prompt(HAS_MODES, greeting(template_kwargs={"thinking_mode": "off"}))
    for template, default, thinking, state in (
        (HAS_MODES, {"thinking_mode": "enabled"}, ThinkingChoice(), "open"),
        (HAS_MODES, {"thinking_mode": "enabled"}, ThinkingChoice("disabled"), "none"),
        (HAS_MODES, {"thinking_mode": "enabled"}, ThinkingChoice(effort="none"), "none"),
        (HAS_MODES, {"enable_thinking": False}, ThinkingChoice(), "none"),
        (ALWAYS_THINKS, {"enable_thinking": False}, ThinkingChoice(), "none"),
        (ALWAYS_THINKS, {"enable_thinking": False}, ThinkingChoice("enabled"), "open"),
    ):
        made = prompt(template, greeting(thinking=thinking), default_template_kwargs=default)
        assert made.reasoning == state


def continued(last: dict[str, Any]) -> ChatPrompt:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    return prompt(ALWAYS_THINKS, Conversation(messages=[user("Hi"), last], **options))


@pytest.mark.parametrize(
    ("last", "ending", "state", "content"),
    [
        (ai("So far"), "So far", "none", "So far"),
        (ai([{"type": "text", "text": "So "}, "far"]), "So far", "none", "So far"),
        (ai("So far", reasoning="why"), "why|So far", "none", "So far"),
        (ai("", reasoning="I thi"), "I thi", "open", ""),
    ],
)
def test_continued_messages(last: dict[str, Any], ending: str, state: str, content: str) -> None:
    made = continued(last)
    assert made.text.endswith(ending)
    assert (made.reasoning, made.continued) == (state, content)


@pytest.mark.parametrize(
    "last", [user("x"), ai(""), ai("", {"id": "1", "function": {"name": "f"}})]
)
def test_refuses_to_continue_anything_else(last: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        continued(last)


def output(text: str, *, finish: str | None = None, **fields: Any) -> RequestOutput:
    pieces = [TextPiece(text, None)] if text else []
    return make_output(**{"pieces": pieces, "finish_reason": finish, **fields})


def reader_of(state: Any = "open", *, has_tags: bool = False, **rules: Any) -> ChoiceReader:
    chat_format = dataclasses.replace(FORMAT, tag_ids=TAGS) if has_tags else FORMAT
    return ChoiceReader(chat_format, prompt=ChatPrompt("", [1], state), rules=ReadingRules(**rules))


def read(
    text: str, *, finish: str = "stop", step: int = 3, **rules: Any
) -> tuple[ChoiceReader, list[ParserEvent]]:
    reader = reader_of(**rules)
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    events = [event for piece in pieces for event in reader.push(output(piece))]
    return reader, [*events, *reader.push(output("", finish=finish))]


def test_the_reader_lists_calls_as_far_as_rules_allow_them() -> None:
    reader, events = read(ANSWER)
    parsed = collect(events)
    assert (parsed.reasoning, parsed.content) == ("I think.\nHard.", "Some text.")
    assert [call.name for call in reader.calls] == [call.name for call in parsed.tool_calls]
    assert [call.arguments for call in parsed.tool_calls] == ['{"x": "1"}', '{"x": "2"}']
    assert len({call.id for call in reader.calls}) == 2
    assert reader.finish_reason == "tool_calls"
    reader, events = read(ANSWER, parallel_calls=False)
    assert [event.index for event in events if isinstance(event, ToolCallStart)] == [0]
    (call,) = collect(events).tool_calls
    assert len(reader.calls) == 1 and call.arguments == '{"x": "1"}'
    assert reader.finish_reason == "tool_calls"
    reader, events = read(ANSWER, may_call=False)
    said = collect(events)
    assert reader.calls == [] == said.tool_calls
    assert said.content and said.content.startswith("Some text.") and "<invoke" in said.content
    assert (said.reasoning, reader.finish_reason) == ("I think.\nHard.", "stop")


@pytest.mark.parametrize(
    ("text", "finish", "rules", "expected"),
    [
        (ANSWER, "stop", {}, "tool_calls"),
        (ANSWER, "length", {}, "length"),
        (ANSWER, "abort", {}, "abort"),
        (ANSWER, "stop", {"is_call_forced_by_name": True}, "stop"),
        ("So.</think>\n\nYes.", "stop", {}, "stop"),
    ],
)
def test_finish_reasons(text: str, finish: str, rules: dict[str, Any], expected: str) -> None:
    assert read(text, finish=finish, **rules)[0].finish_reason == expected


@pytest.mark.parametrize("closer", ["", "</parameter>\n", "</invoke>\n", "</minimax:tool_call>"])
@pytest.mark.parametrize("finish", ["length", "abort", "stop"])
def test_a_call_that_ends_too_early_stays_truncated(closer: str, finish: str) -> None:
    opener = '<invoke name="f">\n<parameter name="x">'
    text = f"So.</think>\n\n<minimax:tool_call>\n{opener}half{closer}"
    tools = [{"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}]
    reader, events = read(text, finish=finish, tools=tools)
    (call,) = collect(events).tool_calls
    model_closed_it = finish == "stop" and closer.startswith(("</i", "</m"))
    assert call.is_whole is model_closed_it and call.arguments.startswith('{"x": "half')
    assert call.arguments.endswith("}") is model_closed_it
    assert reader.finish_reason == ("tool_calls" if finish == "stop" else finish)


def test_a_continued_answer_keeps_its_line_breaks_and_no_closer() -> None:
    asked = ChatPrompt("", [1], "none", continued="One,")
    chat_format = dataclasses.replace(FORMAT, tag_ids=TAGS)
    reader = ChoiceReader(chat_format, prompt=asked, rules=ReadingRules())
    texts = {"\n": 1, "two": 2, "</think>": 51, " `</think>`": None}
    pieces = [TextPiece(text, token_id) for text, token_id in texts.items()]
    answer = reader.push(output("", pieces=pieces, token_ids=[1, 2, 51, 3], finish="stop"))
    assert collect(answer).content == "\ntwo `</think>`"


def test_reasoning_in_the_content_is_between_tags_or_is_omitted() -> None:
    said = collect(read(ANSWER, reasoning=ReasoningPlace.CONTENT)[1])
    assert said.reasoning is None
    assert said.content == "<think>I think.\nHard.\n</think>\n\nSome text."
    _, events = read("I thi", finish="length", reasoning=ReasoningPlace.CONTENT)
    assert collect(events).content == "<think>I thi"
    appended = ChatFormat.of_model("minimax_m2", reasoning_parser="minimax_m2_append_think")
    of_server = ChoiceReader(appended, prompt=ChatPrompt("", [1], "open"), rules=ReadingRules())
    assert collect(of_server.push(output("I thi", finish="length"))).content == "<think>I thi"
    said = collect(read(ANSWER, reasoning=ReasoningPlace.NOWHERE)[1])
    assert (said.reasoning, said.content, len(said.tool_calls)) == (None, "Some text.", 2)


@pytest.mark.parametrize("text", [ANSWER, "I think.\nHard.\n</think>", "I think.\nHard."])
def test_reasoning_that_is_not_streamed_comes_at_once_before_the_rest(text: str) -> None:
    _, events = read(text, stream_reasoning=False)
    assert events[0] == ReasoningDelta("I think.\nHard.")
    assert not any(isinstance(event, ReasoningDelta) for event in events[1:])
    assert collect(events).content == collect(read(text)[1]).content


TAGS = {"<think>": 50, "</think>": 51, "<minimax:tool_call>": 52, "</minimax:tool_call>": 53}
OPENER = "<minimax:tool_call>"
REAL_CALL = [OPENER, "\n", '<invoke name="f">\n', "</invoke>\n", "</minimax:tool_call>"]


@pytest.mark.parametrize("begins", ["open", "optional"])
@pytest.mark.parametrize("step", [1, 2, 100])
@pytest.mark.parametrize(
    ("thought", "end"),
    [
        (["why", " not"], ["</think>", "\n\n", "text", "<think>", "no", "</think>"]),
        (["the", " tag `", OPENER, "` opens"], ["</think>", "text"]),
        (["the", " tag `", OPENER, "` opens", " it", "<think>", OPENER, " so"], REAL_CALL),
        (["never", " closed"], REAL_CALL),
        ([], ["</think>", "\n", *REAL_CALL, "<think>"]),
    ],
)
def test_tokens_of_the_reasoning_are_counted_with_the_tags_that_it_quotes(
    begins: Any, step: int, thought: list[str], end: list[str]
) -> None:
    opener = ["<think>"] if thought and begins == "optional" else []
    texts = [*opener, *thought, *end]
    reader = reader_of(begins, has_tags=True)
    for start in range(0, len(texts), step):
        part = texts[start : start + step]
        pieces = [TextPiece(text, TAGS.get(text, 1)) for text in part]
        reader.push(output("", token_ids=[TAGS.get(text, 1) for text in part], pieces=pieces))
    reader.push(output("", finish="stop"))
    assert reader.num_reasoning_tokens == len(thought)
