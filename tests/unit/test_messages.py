import copy
from typing import Any

import pytest
from message_support import Message, ai, call, result, system, text, user
from template_support import m2_template, m3_template

from negamax.base.errors import InvalidRequestError
from negamax.models.minimax_m2.chat import MINIMAX_M2_FAMILY
from negamax.models.minimax_m3.chat import MINIMAX_M3_FAMILY
from negamax.text import messages as module
from negamax.text.messages import normalize_messages, plain_text, system_note
from tests.speed import cpu_seconds, is_linear
from tests.tables import read_table

M2 = m2_template()
CUT = '{"path": "a", "content": "abc'


def developer(content: Any) -> Message:
    return {"role": "developer", "content": content}


def root(content: Any) -> Message:
    return {"role": "root", "content": content}


def raw_call(arguments: Any, *, id: str = "c1") -> Message:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def normalize(message: Message) -> Message:
    (normal,) = normalize_messages([message])
    return normal


def contents(messages: list[Message]) -> list[tuple[str, str]]:
    return [(one["role"], plain_text(one["content"])) for one in normalize_messages(messages)]


def test_instructions_at_the_start_are_joined_after_root() -> None:
    messages = [system("A"), developer([text("B"), text("C")]), system(None), user("x")]
    assert normalize_messages(messages) == [system("A\n\nBC"), user("x")]
    assert normalize_messages([developer("D"), user("x")]) == [system("D"), user("x")]
    messages = [system("S"), root("R1"), developer("D"), root("R2"), user("x")]
    assert normalize_messages(messages) == [system("R1\n\nR2\n\nS\n\nD"), user("x")]
    placed = normalize_messages(messages, has_root=True)
    assert placed == [root("R1\n\nR2"), system("S\n\nD"), user("x")]
    for one in (root("R"), system("S")):
        assert normalize_messages([one, user("x")], has_root=True) == [one, user("x")]


def test_later_instructions_stay_in_their_place() -> None:
    messages = [system("A"), user("x"), ai("y"), developer("later"), user("z")]
    note = "<system-reminder>\nlater\n</system-reminder>"
    assert system_note("later") == note
    placed = normalize_messages(messages)
    assert placed == [system("A"), user("x"), ai("y"), user(note), user("z")]
    assert placed[:3] == normalize_messages(messages[:3]), "the note changed the prompt's prefix"
    loop = [user("x"), ai("", call(), reasoning_content="PLAN"), result("1")]
    plain = M2.render(normalize_messages(loop))
    noted = M2.render(normalize_messages([*loop, system("NOTE")]))
    assert "PLAN" in noted and "NOTE" in noted
    assert noted.startswith(plain[: plain.index("1</response>") + 1])


@pytest.mark.parametrize("content", [None, "", "\n", [], [text("")]], ids=repr)
def test_later_instructions_without_text_are_left_out(content: Any) -> None:
    for before in ([user("x")], [user("x"), ai("", call()), result("1")]):
        assert normalize_messages([*before, system(content)]) == normalize_messages(before)


LOOP = [user("x"), ai("", call(id="a"), call(id="b"), reasoning_content="why"), result("1", id="a")]


@pytest.mark.parametrize(
    ("after", "last"), read_table("messages.instructions_in_a_tool_loop_become_notes")
)
def test_instructions_in_a_tool_loop_become_notes(after: list[Message], last: str) -> None:
    placed = contents([*LOOP, *after, ai("done")])
    results = [("tool", "1"), ("tool", last)]
    assert placed == [("user", "x"), ("assistant", ""), *results, ("assistant", "done")]


def test_null_contents_are_empty_and_input_is_not_changed() -> None:
    messages = [user(None), {"role": "assistant", "tool_calls": [call()]}, result([])]
    assert [message["content"] for message in normalize_messages(messages)] == ["", "", ""]
    for calls in (None, []):
        assert "tool_calls" not in normalize(ai("x", tool_calls=calls))
    messages = [system("a"), system("b"), ai(None, raw_call("{}"), reasoning="r")]
    messages += [result("x"), system("note")]
    before = copy.deepcopy(messages)
    normalize_messages(messages)
    assert messages == before


@pytest.mark.parametrize(
    ("fields", "expected"), read_table("messages.reasoning_is_found_under_every_name")
)
def test_reasoning_is_found_under_every_name(fields: Message, expected: str | None) -> None:
    message = normalize({"role": "assistant", "content": "x", **fields})
    assert message.get("reasoning_content") == expected
    assert plain_text(message["content"]) == "x"
    assert "reasoning" not in message and "reasoning_details" not in message


@pytest.mark.parametrize(
    ("messages", "shown"), read_table("messages.parts_of_other_types_never_end_a_session")
)
def test_other_parts_are_shown_or_skipped(messages: list[Message], shown: list[list[str]]) -> None:
    assert [list(pair) for pair in contents(messages)] == shown
    made = [one["tool_calls"] for one in normalize_messages(messages) if "tool_calls" in one]
    names = [each["function"]["name"] for calls in made for each in calls]
    assert names == (["f"] if "tool" in dict(shown) else [])


@pytest.mark.parametrize(
    ("content", "reasoning", "rest"), read_table("messages.a_leading_think_block_is_reasoning")
)
def test_a_leading_think_block_is_reasoning(content: str, reasoning: str | None, rest: str) -> None:
    assert module.split_inline_reasoning(content) == (reasoning, rest)
    for given in (content, [text(content[:9]), text(content[9:])]):
        message = normalize(ai(given))
        found = message.get("reasoning_content"), plain_text(message["content"])
        assert found == (reasoning, rest)


def test_think_tags_and_lone_surrogates_stay_text() -> None:
    message = normalize(ai("<think>a</think>b", reasoning_content="other"))
    assert (message["reasoning_content"], message["content"]) == ("other", "<think>a</think>b")
    message = normalize(ai("<think>\na\n</think>\n\nb", reasoning="a"))
    assert (message["reasoning_content"], message["content"]) == ("a", "b")
    quoted = "Put it in <think>here</think> please."
    assert quoted in M2.render(normalize_messages([user("x"), ai(quoted), user("y")]))
    calls = ai("", raw_call('{"a": "\\ud83d"}'))
    loop = [user("a\ud83db"), calls, result("\ude00 \ud83d\ude00")]
    prompt = M2.render(normalize_messages(loop))
    assert "a\ufffdb" in prompt and '"a">\ufffd<' in prompt and "\ufffd \U0001f600" in prompt


@pytest.mark.parametrize(
    "part",
    [{"type": "input_text", "text": "x"}, {"type": "output_text", "text": "x"}, text("x"), "x"],
)
def test_text_parts_of_every_api_are_text(part: Any) -> None:
    assert contents([user([part])]) == [("user", "x")]
    assert normalize(ai([{"type": "refusal", "refusal": "no"}]))["content"] == [text("no")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": "\\u00e9"}', {"b": 1, "a": "é"}),
        ({"b": 1}, {"b": 1}),
        *((empty, {}) for empty in ("{}", "", " \n", None, "null")),
        *((raw, {"arguments": raw}) for raw in (CUT, "ls -la", '"text"', "[1, 2]", '{"a": NaN}')),
        *((raw, {"arguments": raw}) for raw in ('{"a": 1e999}', "[" * 100_000)),
        (5, {"arguments": "5"}),
        (["é"], {"arguments": '["é"]'}),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_arguments_become_mappings(arguments: Any, expected: Message) -> None:
    (found,) = normalize(ai("", raw_call(arguments)))["tool_calls"]
    assert list(found["function"]["arguments"].items()) == list(expected.items())


@pytest.mark.parametrize(
    ("template", "opener"),
    [(M2, '<parameter name="arguments">'), (m3_template(), "<arguments>")],
    ids=["m2", "m3"],
)
def test_truncated_and_deep_calls_are_shown_with_their_raw_text(template: Any, opener: str) -> None:
    deep = {n: '{"a": ' * n + "1" + "}" * n for n in (64, 65, 500, 2_000, 50_000)}
    for raw in (CUT, *deep.values()):
        messages = [user("x"), ai("", raw_call(raw)), result("invalid JSON")]
        is_raw = f"{opener}{raw}" in template.render(normalize_messages(messages))
        assert is_raw == (raw != deep[64])


def unseen_part(kind: str) -> Message:
    return {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("kind", "note"), read_table("messages.parts_that_the_model_cannot_see_become_notes")
)
def test_parts_that_the_model_cannot_see_become_notes(kind: str, note: str) -> None:
    unseen = unseen_part(kind)
    asked = user([text("Look:"), unseen, unseen, text("Well?")])
    found = [content for _, content in contents([asked, ai([unseen], call()), result([unseen])])]
    assert found == [f"Look:\n{note}\n{note}\nWell?", note, note]


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "video_url"])
def test_refuses_parts_that_the_model_could_see(kind: str) -> None:
    parts = [text("Look:"), unseen_part(kind)]
    begun = [user("x"), ai("", call())]
    for count, message in enumerate((user(parts), ai(parts, call()), result(parts))):
        before = begun[:count]
        place = rf"messages\[{len(before)}\]\.content\[1\]"
        refusal = rf"{place} has type '{kind}'; MiniMax-M3 supports this type"
        with pytest.raises(InvalidRequestError, match=refusal) as caught:
            normalize_messages([*before, message], family=MINIMAX_M3_FAMILY)
        assert caught.value.code == "unsupported_content"
        assert ("--encoder-cache-tokens" in str(caught.value)) == (kind != "video_url")
        assert normalize_messages([*before, message], family=MINIMAX_M2_FAMILY)
    document = user([{"type": "file"}, {"type": "input_audio"}])
    assert normalize_messages([document], family=MINIMAX_M3_FAMILY)


def test_tool_results_are_put_in_call_order_and_truncated_calls_left_out() -> None:
    calls = ai("", *(call(id=id) for id in "abc"))
    messages = [user("x"), calls, *(result(id, id=id) for id in "cab"), user("y")]
    assert [content for _, content in contents(messages)] == ["x", "", "a", "b", "c", "y"]
    again = [ai("", call()), result("1"), ai("", call()), result("2")]  # Ids may repeat.
    assert [content for _, content in contents(again)] == ["", "1", "", "2"]
    assert normalize_messages([user("x"), ai("", call())])[1]["tool_calls"]
    whole, cut = call(id="1"), raw_call('{"a": "b', id="2")
    read = normalize_messages([user("x"), ai("text", whole, cut), result("r", id="1"), user("y")])
    assert [one["id"] for one in read[1]["tool_calls"]] == ["1"]
    assert [message["role"] for message in read] == ["user", "assistant", "tool", "user"]
    _, alone, _ = normalize_messages([user("x"), ai("text", cut), user("y")])
    assert "tool_calls" not in alone and alone["content"] == "text"
    answered = [user("x"), ai("", cut), result("Broken call.", id="2"), user("y")]
    assert len(normalize_messages(answered)[1]["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("messages", "problem"), read_table("messages.refuses_bad_conversations_by_position")
)
def test_refuses_bad_conversations_by_position(messages: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        normalize_messages(messages)
    assert problem in str(error.value)
    assert error.value.param is not None and error.value.param.startswith("messages")


def make_history(kind: str, count: int) -> list[Message]:
    ids = [f"c{i}" for i in range(count)]
    if kind == "turns":
        turns = ([user("x"), ai("", call(id=id)), result("r", id=id), system("n")] for id in ids)
        return [message for turn in turns for message in turn]
    if kind == "calls of one turn":
        results = (result("r", id=id) for id in reversed(ids))
        return [user("x"), ai("", *(call(id=id) for id in ids)), *results]
    if kind == "notes after one result":
        return [user("x"), ai("", call()), result("r"), *(system("n") for _ in ids)]
    return [user([text("x")] * count)]


@pytest.mark.parametrize(
    "kind", ["turns", "calls of one turn", "notes after one result", "parts of one message"]
)
def test_long_histories_take_linear_time(kind: str) -> None:
    histories = {count: make_history(kind, count) for count in (1_000, 4_000)}
    assert is_linear(lambda num: cpu_seconds(lambda: normalize_messages(histories[num])), 4_000)
