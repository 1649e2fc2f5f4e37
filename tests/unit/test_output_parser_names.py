import pytest
from parser_support import MARKER, MINIMAX_M2, MINIMAX_M3

from negamax.base.errors import ConfigError
from negamax.models.chat_format import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ChatFormat,
    check_parsers,
)
from negamax.models.minimax_m2.chat import MINIMAX_M2_FAMILY
from negamax.models.minimax_m3.chat import MINIMAX_M3_FAMILY
from negamax.models.registry import find_chat_family
from negamax.text.chat_family import ChatFamily
from negamax.text.detokenizer import TextPiece
from negamax.text.parser.events import ParsedOutput, collect
from negamax.text.parser.output_parser import Thinking

M2, M3 = "MiniMaxM2ForCausalLM", "minimax_m3"
CALL = '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>'


def read(chat_format: ChatFormat, text: str, *, may_call: bool = True) -> ParsedOutput:
    parser = chat_format.new_parser(
        tools=None, in_reasoning=chat_format.output is MINIMAX_M2, may_call=may_call
    )
    return collect(parser.feed([TextPiece(text, None)]) + parser.finish())


M2_ANSWER = f"why\n</think>\n\nok\n{CALL}"
M3_ANSWER = f'<mm:think>why</mm:think>ok{MARKER}<tool_call>{MARKER}<invoke name="f">'


@pytest.mark.parametrize(
    ("model", "name", "family", "answer"),
    [
        (model, name, family, answer)
        for model, family, answer in (
            (M2, MINIMAX_M2_FAMILY, M2_ANSWER),
            (M3, MINIMAX_M3_FAMILY, M3_ANSWER),
        )
        for name in (*family.parser_names, "auto")
    ],
)
def test_names_of_a_family_split_reasoning_and_find_calls(
    model: str, name: str, family: ChatFamily, answer: str
) -> None:
    chat_format = ChatFormat.of_model(model, tool_call_parser=name, reasoning_parser=name)
    assert chat_format == ChatFormat(family, Thinking.SPLIT, reads_calls=True)
    output = read(chat_format, answer)
    assert (output.reasoning, output.content, len(output.tool_calls)) == ("why", "ok", 1)


def test_the_names_are_those_of_vllm_and_sglang() -> None:
    assert MINIMAX_M2_FAMILY.parser_names == ("minimax_m2", "minimax-m2", "minimax")
    assert MINIMAX_M3_FAMILY.parser_names == ("minimax_m3", "minimax-m3")


@pytest.mark.parametrize("name", ["minimax_m2_append_think", "minimax-append-think"])
def test_append_think_leaves_the_opener_and_the_raw_text_in_content(name: str) -> None:
    chat_format = ChatFormat.of_model(M2, reasoning_parser=name)
    output = read(chat_format, M2_ANSWER)
    assert (output.reasoning, output.content, len(output.tool_calls)) == (
        None,
        "<think>why\n</think>\n\nok",
        1,
    )


@pytest.mark.parametrize("none", [None, "none"])
def test_without_parsers_everything_stays_text(none: str | None) -> None:
    text = M2_ANSWER
    assert read(ChatFormat.of_model(M2, tool_call_parser=none), text) == ParsedOutput(
        "why", f"ok\n{CALL}", []
    )
    assert read(
        ChatFormat.of_model(M2, tool_call_parser=none, reasoning_parser=none), text
    ) == ParsedOutput(None, text, [])
    calls_only = read(ChatFormat.of_model(M2, reasoning_parser=none), text)
    assert (calls_only.reasoning, calls_only.content, len(calls_only.tool_calls)) == (
        None,
        "why\n</think>\n\nok",
        1,
    )


def test_a_request_may_do_without_calls() -> None:
    assert read(ChatFormat.of_model(M2), f"why</think>{CALL}", may_call=False) == ParsedOutput(
        "why", CALL, []
    )


def test_a_named_parser_needs_no_known_model() -> None:
    def chosen(calls: str, reasoning: str) -> ChatFormat:
        return ChatFormat.of_model("Llama", tool_call_parser=calls, reasoning_parser=reasoning)

    assert chosen("minimax_m2", "minimax").output is MINIMAX_M2
    assert chosen("minimax-m3", "auto").output is MINIMAX_M3
    assert not chosen("none", "none").reads_calls


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"tool_call_parser": "hermes"},
            "--tool-call-parser is 'hermes'; allowed: auto, none, minimax_m2",
        ),
        (
            {"tool_call_parser": "minimax_m2_append_think"},
            "--tool-call-parser is 'minimax_m2_append_think'",
        ),
        (
            {"reasoning_parser": "qwen3"},
            "--reasoning-parser is 'qwen3'; allowed: auto, none, minimax_m2",
        ),
        (
            {"tool_call_parser": "minimax_m2", "reasoning_parser": "minimax_m3"},
            "two model families",
        ),
    ],
)
def test_wrong_names_are_refused_with_the_right_ones(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ChatFormat.of_model(M2, **options)
    with pytest.raises(ConfigError, match=says):
        check_parsers(**{"tool_call_parser": "auto", "reasoning_parser": "auto", **options})


def test_auto_refuses_a_model_of_another_family() -> None:
    with pytest.raises(ConfigError, match="no parser is known for 'LlamaForCausalLM'"):
        ChatFormat.of_model("LlamaForCausalLM")
    assert {"auto", "none"} <= set(TOOL_CALL_PARSERS) & set(REASONING_PARSERS)
