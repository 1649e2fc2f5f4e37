import pytest
from parser_support import MARKER, MINIMAX_M2, MINIMAX_M3

from negamax.base.errors import ConfigError
from negamax.models import chat_format as module
from negamax.models.chat_format import REASONING_PARSERS, TOOL_CALL_PARSERS, ChatFormat
from negamax.models.minimax_m2.chat import MINIMAX_M2_FAMILY
from negamax.models.minimax_m3.chat import MINIMAX_M3_FAMILY
from negamax.models.registry import CALL_STYLES, CHAT_FAMILIES, find_chat_family
from negamax.text.chat_family import ChatFamily
from negamax.text.detokenizer import TextPiece
from negamax.text.messages import THINK_TAGS
from negamax.text.parser.events import ParsedOutput, collect
from negamax.text.parser.output_parser import Thinking
from negamax.text.tokenizer import STRUCTURE_TOKENS

M2, M3 = "MiniMaxM2ForCausalLM", "minimax_m3"
CALL = '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>'
M2_ANSWER = f"why\n</think>\n\nok\n{CALL}"
M3_ANSWER = f'<mm:think>why</mm:think>ok{MARKER}<tool_call>{MARKER}<invoke name="f">'


def read(chat_format: ChatFormat, text: str, *, may_call: bool = True) -> ParsedOutput:
    in_reasoning = chat_format.output is MINIMAX_M2
    parser = chat_format.new_parser(tools=None, in_reasoning=in_reasoning, may_call=may_call)
    return collect(parser.feed([TextPiece(text, None)]) + parser.finish())


def read_parts(text: str, **parsers: str | None) -> tuple[str | None, str | None, int]:
    output = read(ChatFormat.of_model(M2, **parsers), text)
    return output.reasoning, output.content, len(output.tool_calls)


def test_families_have_distinct_names_and_shared_tags() -> None:
    families = CHAT_FAMILIES.values()
    outputs = [family.output for family in families]
    assert {tag for one in outputs for tag in (*one.literals, one.call_open)} == STRUCTURE_TOKENS
    assert {(output.think_open, output.think_close) for output in outputs} == {*THINK_TAGS}
    assert len(CALL_STYLES) == len({output.name for output in outputs}) == len(families)
    names = [name for family in families for name in (*family.parser_names, *family.append_names)]
    assert len(set(names)) == len(names)
    assert {*names, "auto", "none"} == {*REASONING_PARSERS} >= {*TOOL_CALL_PARSERS}


@pytest.mark.parametrize("key", CHAT_FAMILIES)
def test_an_answer_without_thinking_begins_after_closed_reasoning(key: str) -> None:
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
    parser = chat_format.new_parser(tools=None, in_reasoning=True)
    text = f"Why.{family.closing_text}Yes."
    parsed = collect([*parser.feed([TextPiece(text, None)]), *parser.finish()])
    assert (parsed.reasoning, parsed.content) == ("Why.", "Yes.")


# vLLM and SGLang use these parser names.
NAMES = {M2: ("minimax_m2", "minimax-m2", "minimax", "auto"), M3: ("minimax_m3", "minimax-m3")}


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model, names in NAMES.items() for name in names]
)
def test_names_of_a_family_split_reasoning_and_find_calls(model: str, name: str) -> None:
    family, answer = (MINIMAX_M2_FAMILY, M2_ANSWER)
    if model == M3:
        family, answer = (MINIMAX_M3_FAMILY, M3_ANSWER)
    chat_format = ChatFormat.of_model(model, tool_call_parser=name, reasoning_parser=name)
    assert chat_format == ChatFormat(family, Thinking.SPLIT, reads_calls=True)
    output = read(chat_format, answer)
    assert (output.reasoning, output.content, len(output.tool_calls)) == ("why", "ok", 1)


@pytest.mark.parametrize("name", ["minimax_m2_append_think", "minimax-append-think"])
def test_append_think_leaves_the_opener_and_the_raw_text_in_content(name: str) -> None:
    assert read_parts(M2_ANSWER, reasoning_parser=name) == (None, "<think>why\n</think>\n\nok", 1)


@pytest.mark.parametrize("none", [None, "none"])
def test_without_parsers_everything_stays_text(none: str | None) -> None:
    assert read_parts(M2_ANSWER, tool_call_parser=none) == ("why", f"ok\n{CALL}", 0)
    both = read_parts(M2_ANSWER, tool_call_parser=none, reasoning_parser=none)
    assert both == (None, M2_ANSWER, 0)
    assert read_parts(M2_ANSWER, reasoning_parser=none) == (None, "why\n</think>\n\nok", 1)


def test_a_named_parser_needs_no_known_model() -> None:
    m2, m3 = ("minimax_m2", "minimax", MINIMAX_M2), ("minimax-m3", "auto", MINIMAX_M3)
    for calls, reasoning, output in (m2, m3, ("none", "none", MINIMAX_M2)):
        parsers = {"tool_call_parser": calls, "reasoning_parser": reasoning}
        chat_format = ChatFormat.of_model("Llama", **parsers)
        assert (chat_format.output, chat_format.reads_calls) == (output, calls != "none")
    with pytest.raises(ConfigError, match="no parser is known for 'LlamaForCausalLM'"):
        ChatFormat.of_model("LlamaForCausalLM")


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("MiniMaxM2ForCausalLM", MINIMAX_M2_FAMILY),
        ("minimax_m2", MINIMAX_M2_FAMILY),
        ("minimax-m2.5", MINIMAX_M2_FAMILY),
        ("MiniMaxM3SparseForConditionalGeneration", MINIMAX_M3_FAMILY),
        ("minimax_m3", MINIMAX_M3_FAMILY),
        ("minimax_m3_vl", MINIMAX_M3_FAMILY),
    ],
)
def test_a_family_is_found_by_architecture_and_model_type(model: str, family: ChatFamily) -> None:
    assert find_chat_family(model) is family


APPEND = "minimax_m2_append_think"


@pytest.mark.parametrize(
    ("calls", "reasoning", "words"),
    [
        ("hermes", "auto", "--tool-call-parser is 'hermes'; allowed: auto, none, minimax_m2"),
        (APPEND, "auto", f"--tool-call-parser is '{APPEND}'"),
        ("auto", "qwen3", "--reasoning-parser is 'qwen3'; allowed: auto, none, minimax_m2"),
        ("minimax_m2", "minimax_m3", "different model families"),
    ],
)
def test_refuses_unknown_parsers(calls: str, reasoning: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ChatFormat.of_model(M2, tool_call_parser=calls, reasoning_parser=reasoning)
    with pytest.raises(ConfigError, match=words):
        module.check_parsers(tool_call_parser=calls, reasoning_parser=reasoning)
