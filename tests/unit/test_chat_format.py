import pytest

from negamax.models.chat_format import REASONING_PARSERS, TOOL_CALL_PARSERS, ChatFormat
from negamax.models.registry import CALL_STYLES, CHAT_FAMILIES, find_chat_family
from negamax.text.detokenizer import TextPiece
from negamax.text.messages import THINK_TAGS
from negamax.text.parser.events import collect
from negamax.text.tokenizer import STRUCTURE_TOKENS


def test_tags_of_all_families_stay_in_the_text() -> None:
    tags = {
        tag
        for family in CHAT_FAMILIES.values()
        for tag in (*family.output.literals, family.output.call_open)
    }
    assert tags == STRUCTURE_TOKENS


def test_reasoning_in_the_content_is_found_by_the_tags_of_all_families() -> None:
    outputs = [family.output for family in CHAT_FAMILIES.values()]
    assert {(output.think_open, output.think_close) for output in outputs} == {*THINK_TAGS}


def test_no_two_families_share_a_name() -> None:
    families = CHAT_FAMILIES.values()
    assert len(CALL_STYLES) == len({family.output.name for family in families}) == len(families)
    names = [name for family in families for name in (*family.parser_names, *family.append_names)]
    assert len(set(names)) == len(names)
    assert (
        set(names)
        == {*REASONING_PARSERS} - {"auto", "none"}
        >= {*TOOL_CALL_PARSERS} - {"auto", "none"}
    )


@pytest.mark.parametrize("key", CHAT_FAMILIES)
def test_an_answer_that_may_not_think_begins_behind_its_closed_reasoning(key: str) -> None:
    family = CHAT_FAMILIES[key]
    output = family.output
    chat_format = ChatFormat.of_model(output.name)
    assert chat_format.family is find_chat_family(output.name) is family
    opened = f"{output.turn_open}{output.assistant}\n{output.think_open}\n"
    assert chat_format.begin_answer(opened, may_think=True) == (opened, "open")
    closed, state = chat_format.begin_answer(opened, may_think=False)
    assert closed.startswith(opened) and state == "none"
    assert chat_format.begin_answer(opened + output.think_close, may_think=True)[1] == "none"
    assert chat_format.begin_answer("Hello", may_think=False) == ("Hello", "optional")


@pytest.mark.parametrize("key", CHAT_FAMILIES)
def test_the_closing_text_ends_the_reasoning_and_nothing_of_it_is_content(key: str) -> None:
    chat_format = ChatFormat.of_model(CHAT_FAMILIES[key].output.name)
    parser = chat_format.new_parser(tools=None, in_reasoning=True)
    text = f"Why.{CHAT_FAMILIES[key].closing_text}Yes."
    parsed = collect([*parser.feed([TextPiece(text, None)]), *parser.finish()])
    assert (parsed.reasoning, parsed.content) == ("Why.", "Yes.")
