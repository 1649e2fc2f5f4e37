import copy
from typing import Any

import pytest
from message_support import Message, ai, call, result, system, text, user
from template_support import m2_template, m3_template

from negamax.base.errors import InvalidRequestError
from negamax.models.minimax_m2.chat import MINIMAX_M2_FAMILY
from negamax.models.minimax_m3.chat import MINIMAX_M3_FAMILY
from negamax.text.chat_template import ChatTemplate
from negamax.text.messages import (
    normalize_messages,
    plain_text,
    split_inline_reasoning,
    system_note,
)
from tests.speed import cpu_seconds, is_linear


@pytest.fixture(scope="module")
def m2() -> ChatTemplate:
    return m2_template()


def developer(content: Any) -> Message:
    return {"role": "developer", "content": content}


def root(content: Any) -> Message:
    return {"role": "root", "content": content}


def test_instructions_at_the_start_are_joined() -> None:
    messages = [system("A"), developer([text("B"), text("C")]), system(None), user("x")]
    assert normalize_messages(messages) == [system("A\n\nBC"), user("x")]
    assert normalize_messages([developer("D"), user("x")]) == [system("D"), user("x")]


def test_later_instructions_stay_in_their_place() -> None:
    messages = [system("A"), user("x"), ai("y"), developer("from now on"), user("z")]
    expected = [
        system("A"),
        user("x"),
        ai("y"),
        user("<system-reminder>\nfrom now on\n</system-reminder>"),
        user("z"),
    ]
    assert normalize_messages(messages) == expected
    assert system_note("from now on") == expected[3]["content"]
    shorter = normalize_messages(messages[:3])
    assert normalize_messages(messages)[:3] == shorter, (
        "the rendered prefix must not change when a note is added"
    )


@pytest.mark.parametrize("content", [None, "", "\n", [], [text("")]], ids=repr)
def test_later_instructions_without_text_are_left_out(content: Any) -> None:
    for before in ([user("x")], [user("x"), ai("", call()), result("1")]):
        assert normalize_messages([*before, system(content)]) == normalize_messages(before)


def test_note_after_tool_results_stands_in_the_last_result() -> None:
    loop = [
        user("x"),
        ai("", call(id="a"), call(id="b"), reasoning_content="why"),
        result("1", id="a"),
        result("2", id="b"),
    ]
    placed = normalize_messages([*loop, system("N1"), system("N2"), ai("done")])
    assert [message["role"] for message in placed] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert placed[2]["content"] == "1"
    assert placed[3]["content"] == f"2\n\n{system_note('N1')}\n\n{system_note('N2')}"
    in_parts = normalize_messages([*loop[:3], result([text("2")], id="b"), system("N")])
    assert in_parts[3]["content"] == [text("2"), text(system_note("N"))]
    assert normalize_messages([*loop[:3], result("", id="b"), system("N")])[3][
        "content"
    ] == system_note("N")


def test_note_within_a_tool_loop_keeps_the_thinking_before_it(m2: ChatTemplate) -> None:
    loop = [user("x"), ai("", call(), reasoning_content="PLAN"), result("1")]
    plain = m2.render(normalize_messages(loop))
    noted = m2.render(normalize_messages([*loop, system("NOTE")]))
    assert "PLAN" in noted and "NOTE" in noted
    assert noted.startswith(plain[: plain.index("1</response>") + 1])


def test_instructions_between_calls_and_results_move_behind_the_results() -> None:
    calls = [call(id="a"), call(id="b")]
    messages = [
        user("x"),
        ai("", *calls),
        system("N"),
        result("2", id="b"),
        developer("M"),
        result("1", id="a"),
        user("y"),
    ]
    placed = normalize_messages(messages)
    assert [message["role"] for message in placed] == ["user", "assistant", "tool", "tool", "user"]
    assert placed[2]["content"] == "1"
    assert placed[3]["content"] == f"2\n\n{system_note('N')}\n\n{system_note('M')}"


def test_root_stands_before_system_in_whatever_order_they_came() -> None:
    messages = [system("S"), root("R1"), developer("D"), root("R2"), user("x")]
    assert normalize_messages(messages) == [system("R1\n\nR2\n\nS\n\nD"), user("x")]
    assert normalize_messages(messages, has_root=True) == [
        root("R1\n\nR2"),
        system("S\n\nD"),
        user("x"),
    ]
    assert normalize_messages([root("R"), user("x")], has_root=True) == [root("R"), user("x")]
    assert normalize_messages([system("S"), user("x")], has_root=True) == [system("S"), user("x")]


def test_no_instruction_vanishes_from_the_prompt(m2: ChatTemplate) -> None:
    messages = [
        developer("DEV"),
        root("ROOT"),
        system("SYS"),
        user("x"),
        system("LATER"),
        developer("LAST"),
    ]
    prompt = m2.render(normalize_messages(messages))
    assert [word for word in ("ROOT", "DEV", "SYS", "LATER", "LAST") if word not in prompt] == []


def test_null_and_empty_contents_become_empty_text() -> None:
    messages = [user(None), {"role": "assistant", "tool_calls": [call()]}, result([])]
    assert [message["content"] for message in normalize_messages(messages)] == ["", "", ""]
    assert "tool_calls" not in normalize_messages([ai("x", tool_calls=None)])[0]
    assert "tool_calls" not in normalize_messages([ai("x", tool_calls=[])])[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning": "r"}, "r"),
        ({"reasoning_content": "r"}, "r"),
        ({"reasoning_content": "r", "reasoning": "r"}, "r"),
        ({"reasoning_content": "", "reasoning": "r"}, "r"),
        ({"reasoning_content": None, "reasoning": "r"}, "r"),
        ({"reasoning_content": ""}, ""),
        (
            {
                "reasoning_details": [
                    {"type": "reasoning.text", "text": "a"},
                    {"type": "reasoning.text", "text": "b"},
                ]
            },
            "ab",
        ),
        (
            {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}, "y", {"text": 5}]},
            None,
        ),
        ({"reasoning_details": []}, None),
        ({"reasoning": "r", "reasoning_details": [{"text": "other"}]}, "r"),
        ({"content": [{"type": "thinking", "thinking": "r"}, text("x")]}, "r"),
        ({"reasoning": None}, None),
        ({}, None),
    ],
)
def test_every_name_of_reasoning(fields: Message, expected: str | None) -> None:
    message = normalize_messages([{"role": "assistant", "content": "x", **fields}])[0]
    assert message.get("reasoning_content") == expected
    assert plain_text(message["content"]) == "x"
    assert "reasoning" not in message and "reasoning_details" not in message


@pytest.mark.parametrize(
    ("content", "reasoning", "rest"),
    [
        ("<think>\nwhy\n</think>\n\nyes", "why", "yes"),
        ("\n<think>why</think>yes", "why", "yes"),
        ("<mm:think>why</mm:think>yes", "why", "yes"),
        ("<think></think>yes", "", "yes"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("Write <think>x</think> around it.", "", "Write <think>x</think> around it."),
        # the template decides whether this tag closes
        ("why</think>yes", None, "why</think>yes"),
        ("The tag `</think>` ends it.", "", "The tag `</think>` ends it."),
        ('if "</mm:think>" in text:', "", 'if "</mm:think>" in text:'),
        ("<mm:think>why `</think>`</mm:think>yes", "why `</think>`", "yes"),
        ("<think>still going", None, "<think>still going"),
        ("no tags", None, "no tags"),
    ],
)
def test_think_block_at_the_start_of_content_is_reasoning(
    content: str, reasoning: str | None, rest: str
) -> None:
    assert split_inline_reasoning(content) == (reasoning, rest)
    (message,) = normalize_messages([ai(content)])
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, rest)
    (message,) = normalize_messages([ai([text(content[:9]), text(content[9:])])])
    assert (message.get("reasoning_content"), plain_text(message["content"])) == (reasoning, rest)


def test_explicit_reasoning_leaves_content_alone_unless_it_says_the_same() -> None:
    (message,) = normalize_messages([ai("<think>a</think>b", reasoning_content="other")])
    assert (message["reasoning_content"], message["content"]) == ("other", "<think>a</think>b")
    (message,) = normalize_messages([ai("<think>\na\n</think>\n\nb", reasoning="a")])
    assert (message["reasoning_content"], message["content"]) == ("a", "b")


def test_quoted_think_tags_are_not_cut_out_by_the_template(m2: ChatTemplate) -> None:
    prompt = m2.render(
        normalize_messages([user("x"), ai("Put it in <think>here</think> please."), user("y")])
    )
    assert "Put it in <think>here</think> please." in prompt


@pytest.mark.parametrize(
    "part",
    [{"type": "input_text", "text": "x"}, {"type": "output_text", "text": "x"}, text("x"), "x"],
)
def test_text_parts_of_every_api_are_text(part: Any) -> None:
    assert plain_text(normalize_messages([user([part])])[0]["content"]) == "x"
    assert normalize_messages([ai([{"type": "refusal", "refusal": "no"}])])[0]["content"] == [
        text("no")
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": "\\u00e9"}', {"b": 1, "a": "é"}),
        ({"b": 1}, {"b": 1}),
        ("{}", {}),
        ("", {}),
        (" \n", {}),
        (None, {}),
        ("null", {}),
        ('{"path": "a", "content": "abc', {"arguments": '{"path": "a", "content": "abc'}),
        ("ls -la", {"arguments": "ls -la"}),
        ('"text"', {"arguments": '"text"'}),
        ("[1, 2]", {"arguments": "[1, 2]"}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ('{"a": 1e999}', {"arguments": '{"a": 1e999}'}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
        (5, {"arguments": "5"}),
        (["é"], {"arguments": '["é"]'}),
    ],
)
def test_arguments_become_mappings(arguments: Any, expected: Message) -> None:
    message = ai(
        "", {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    )
    got = normalize_messages([message])[0]["tool_calls"][0]["function"]["arguments"]
    assert got == expected
    assert list(got) == list(expected)


CUT = '{"path": "a", "content": "abc'


@pytest.mark.parametrize("family", ["m2", "m3"])
def test_a_cut_call_is_shown_with_its_raw_text(family: str) -> None:
    template = {"m2": m2_template, "m3": m3_template}[family]()
    calls = ai(
        "", {"id": "c1", "type": "function", "function": {"name": "write", "arguments": CUT}}
    )
    prompt = template.render(normalize_messages([user("x"), calls, result("invalid JSON")]))
    opener = {"m2": '<parameter name="arguments">', "m3": "<arguments>"}[family]
    assert f"{opener}{CUT}" in prompt


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("image_url", "[an image, which this model cannot see]"),
        ("input_image", "[an image, which this model cannot see]"),
        ("image", "[an image, which this model cannot see]"),
        ("file", "[a document, which this model cannot read]"),
        ("input_file", "[a document, which this model cannot read]"),
        ("input_audio", "[a recording, which this model cannot hear]"),
        ("video_url", "[a video, which this model cannot see]"),
    ],
)
def test_what_the_model_cannot_see_becomes_a_note_in_every_message(kind: str, note: str) -> None:
    unseen = {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}
    messages = [
        user([text("Look:"), unseen, unseen, text("Well?")]),
        ai([unseen], call()),
        result([unseen]),
    ]
    contents = [plain_text(message["content"]) for message in normalize_messages(messages)]
    assert contents == [f"Look:\n{note}\n{note}\nWell?", note, note]


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "video_url"])
def test_what_the_model_could_see_is_refused_in_every_message(kind: str) -> None:
    unseen = {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}
    for before, message in (
        ([], user([text("Look:"), unseen])),
        ([user("x")], ai([text("Here:"), unseen], call())),
        ([user("x"), ai("", call())], result([text("Here:"), unseen])),
    ):
        place = rf"messages\[{len(before)}\]\.content\[1\]"
        refusal = rf"{place} has type '{kind}'; MiniMax-M3 supports it"
        with pytest.raises(InvalidRequestError, match=refusal) as caught:
            normalize_messages([*before, message], family=MINIMAX_M3_FAMILY)
        assert caught.value.code == "unsupported_content"
        assert normalize_messages([*before, message], family=MINIMAX_M2_FAMILY)
    document = user([{"type": "file"}, {"type": "input_audio"}])
    assert normalize_messages([document], family=MINIMAX_M3_FAMILY)


def test_lone_surrogates_become_replacement_characters(m2: ChatTemplate) -> None:
    loop = [
        user("a\ud83db"),
        ai(
            "",
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'},
            },
        ),
        result("\ude00 \ud83d\ude00"),
    ]
    prompt = m2.render(normalize_messages(loop))
    assert "a\ufffdb" in prompt and '"a">\ufffd<' in prompt and "\ufffd \U0001f600" in prompt


def test_tool_results_are_put_in_call_order() -> None:
    calls = [call(id="a"), call(id="b"), call(id="c")]
    messages = [
        user("x"),
        ai("", *calls),
        result("3", id="c"),
        result("1", id="a"),
        result("2", id="b"),
        user("y"),
    ]
    assert [m["content"] for m in normalize_messages(messages)] == ["x", "", "1", "2", "3", "y"]


def test_same_ids_may_be_used_again_in_a_later_turn() -> None:
    messages = [ai("", call()), result("1"), ai("", call()), result("2")]
    assert [m["content"] for m in normalize_messages(messages)] == ["", "1", "", "2"]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages is empty"),
        ("hello", "messages is a str"),
        ({"role": "user"}, "messages is a dict"),
        (["hello"], r"messages\[0\] is a str"),
        ([user("x"), {"role": "function", "content": "x"}], r"messages\[1\] has role 'function'"),
        ([{"content": "x"}], r"messages\[0\] has role None"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\] has role \['user'\]"),
        ([user(5)], r"messages\[0\]\.content is a int"),
        ([user({"text": "x"})], r"messages\[0\]\.content is a dict"),
        ([user([{"type": "magic", "text": "x"}])], r"messages\[0\]\.content\[0\] has type 'magic'"),
        ([user([text("x"), 5])], r"messages\[0\]\.content\[1\] has type 'int'"),
        ([user([{"type": "text"}])], r"messages\[0\]\.content\[0\] is a text part without text"),
        ([ai("x", reasoning=["r"])], r"messages\[0\]\.reasoning is a list"),
        ([ai("x", reasoning_details="r")], r"messages\[0\]\.reasoning_details is a str"),
        (
            [user([{"type": "thinking", "thinking": "x"}])],
            r"messages\[0\]\.content\[0\] has type 'thinking'",
        ),
        ([ai("x", tool_calls="f()")], r"messages\[0\]\.tool_calls is a str"),
        ([ai("x", {"id": "1", "name": "f"})], r"messages\[0\]\.tool_calls\[0\] has no function"),
        ([ai("x", call(""))], r"messages\[0\]\.tool_calls\[0\]\.function\.name is ''"),
        ([ai("x", call(), call())], r"messages\[0\]\.tool_calls has the ids"),
        (
            [ai("x", {"type": "function", "function": {"name": "f"}})],
            r"messages\[0\]\.tool_calls has the ids",
        ),
        ([user("x"), result("y")], r"messages\[1\] answers no call"),
        (
            [ai("", call()), user("x"), result("y")],
            r"messages\[0\]\.tool_calls has calls without a result: \['c1'\]",
        ),
        ([ai("", call()), result("x"), user("y"), result("z")], r"messages\[3\] answers no call"),
        (
            [ai("", call()), result("x", id="c9")],
            r"messages\[1\]\.tool_call_id is 'c9'; the calls before it are \['c1'\]",
        ),
        (
            [ai("", call()), {"role": "tool", "content": "x"}],
            r"messages\[1\]\.tool_call_id is None",
        ),
        (
            [ai("", call()), {"role": "tool", "content": "x", "tool_call_id": ["c1"]}],
            r"messages\[1\]\.tool_call_id is \['c1'\]",
        ),
        (
            [ai("", call()), result("x"), result("y")],
            r"messages\[2\]\.tool_call_id is 'c1', which was answered already",
        ),
        (
            [ai("", call(id="a"), call(id="b")), result("x", id="b"), user("y")],
            r"without a result: \['a'\]",
        ),
        ([ai("", call(id="a"), call(id="b")), result("x", id="a")], r"without a result: \['b'\]"),
        (
            [
                ai("", call(id="a"), call(id="b")),
                result("x", id="a"),
                system("s"),
                user("y"),
                result("x", id="b"),
            ],
            r"without a result: \['b'\]",
        ),
        ([ai("", call()), result({"ok": True})], r"messages\[1\]\.content is a dict"),
    ],
)
def test_bad_conversations_are_refused_by_position(messages: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as error:
        normalize_messages(messages)
    assert error.value.param is not None
    assert error.value.param.startswith("messages")


def test_positions_count_the_messages_as_sent() -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[3\]"):
        normalize_messages([system("a"), system("b"), user("x"), result("y")])


def test_calls_at_the_end_need_no_result_yet() -> None:
    assert normalize_messages([user("x"), ai("", call())])[1]["tool_calls"]


def test_cut_calls_without_a_result_are_left_out() -> None:
    whole, cut = call(id="1"), {"id": "2", "function": {"name": "f", "arguments": '{"a": "b'}}
    messages = [user("x"), ai("text", whole, cut), result("r", id="1"), user("Go on.")]
    read = normalize_messages(messages)
    assert [one["id"] for one in read[1]["tool_calls"]] == ["1"]
    assert [message["role"] for message in read] == ["user", "assistant", "tool", "user"]
    (alone,) = [
        m
        for m in normalize_messages([user("x"), ai("text", cut), user("y")])
        if m["role"] == "assistant"
    ]
    assert "tool_calls" not in alone and alone["content"] == "text"
    answered = normalize_messages(
        [user("x"), ai("", cut), result("Broken call.", id="2"), user("y")]
    )
    assert len(answered[1]["tool_calls"]) == 1


def test_input_is_not_changed() -> None:
    messages = [
        system("a"),
        system("b"),
        ai(None, {"id": "1", "function": {"name": "f", "arguments": "{}"}}, reasoning="r"),
    ]
    messages += [result("x", id="1"), system("note")]
    before = copy.deepcopy(messages)
    normalize_messages(messages)
    assert messages == before


@pytest.mark.parametrize(
    "kind", ["turns", "calls of one turn", "notes after one result", "parts of one message"]
)
def test_long_histories_take_linear_time(kind: str) -> None:
    def history(num: int) -> list[Message]:
        if kind == "turns":
            return [
                m
                for i in range(num)
                for m in (user("x"), ai("", call(id=f"c{i}")), result("r", id=f"c{i}"), system("n"))
            ]
        if kind == "calls of one turn":
            ids = [f"c{i}" for i in range(num)]
            return [
                user("x"),
                ai("", *(call(id=i) for i in ids)),
                *(result("r", id=i) for i in reversed(ids)),
            ]
        if kind == "notes after one result":
            return [user("x"), ai("", call()), result("r"), *(system("n") for _ in range(num))]
        return [user([text("x")] * num)]

    histories = {num: history(num) for num in (2_000, 8_000)}
    assert is_linear(lambda num: cpu_seconds(lambda: normalize_messages(histories[num])), 8_000)
