"""Prompts, byte for byte: the M2 template against an independent renderer and literal texts;
message normalisation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from message_support import Message, ai, call, result, system, text, user

from negamax.base.errors import CheckpointError, ConfigError, InvalidRequestError
from negamax.text.chat_template import ChatTemplate, check_template_kwargs
from negamax.text.messages import normalize_messages

TEMPLATES = Path(__file__).parents[3] / "shared" / "templates"
M2_TEMPLATE = TEMPLATES / "minimax_m2_llamacpp.jinja"
M3_TEMPLATE = TEMPLATES / "minimax_m3.jinja"
GOLDEN = Path(__file__).parents[1] / "golden" / "minimax_m2_renders.json"
GOLDENS = json.loads(GOLDEN.read_text(encoding="utf-8"))

needs_m2_template = pytest.mark.skipif(
    not M2_TEMPLATE.exists(), reason="the M2 template is not beside this checkout"
)


# The M2 layout, written from its description: one function per part.


def layout(
    messages: list[Message], *, tools: list[Message] | None, generation: bool, identity: str | None
) -> str:
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    turns = messages[1:] if first else messages
    last_user = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    out = [
        "]~!b[]~b]system\n",
        system_text(first, identity),
        tool_section(tools) if tools else "",
        "[e~[\n",
    ]
    i = 0
    while i < len(turns):
        turn = turns[i]
        if turn["role"] == "user":
            out.append(f"]~b]user\n{visible(turn['content'])}[e~[\n")
        elif turn["role"] == "assistant":
            out.append(f"]~b]ai\n{assistant_text(turn, keeps_reasoning=i > last_user)}[e~[\n")
        elif turn["role"] == "tool":
            responses = []
            while i < len(turns) and turns[i]["role"] == "tool":
                responses += tool_responses(turns[i]["content"])
                i += 1
            out.append("]~b]tool\n" + "\n".join(responses) + "[e~[\n")
            continue
        i += 1
    return "".join(out) + ("]~b]ai\n<think>\n" if generation else "")


def system_text(message: Message | None, identity: str | None) -> str:
    own = visible(message["content"]) if message and message["content"] else None
    lines = [
        own
        if own is not None
        else identity
        if identity is not None
        else "You are a helpful assistant."
    ]
    for field, label in (
        ("current_date", "Current date"),
        ("current_location", "Current location"),
    ):
        if message and message.get(field):
            lines.append(f"{label}: {message[field]}")
    return "\n".join(lines)


def tool_section(tools: list[Message]) -> str:
    listed = "".join(
        f"<tool>{json.dumps(tool['function'], ensure_ascii=False)}</tool>\n" for tool in tools
    )
    parameters = "".join(
        f'<parameter name="param-key-{n}">param-value-{n}</parameter>\n' for n in (1, 2)
    )
    return (
        "\n\n# Tools\nYou may call one or more tools to assist with the user query.\n"
        "Here are the tools available in JSONSchema format:\n\n"
        f"<tools>\n{listed}</tools>\n\n"
        "When making tool calls, use XML format to invoke tools and pass parameters:\n\n"
        f"<minimax:tool_call>\n<invoke "
        f'name="tool-name-1">\n{parameters}...\n</invoke>\n</minimax:tool_call>'
    )


def assistant_text(turn: Message, *, keeps_reasoning: bool) -> str:
    content = visible(turn["content"])
    reasoning = turn.get("reasoning_content")
    if not isinstance(reasoning, str):
        reasoning = ""
        before, closer, _ = content.partition("</think>")
        if closer:
            reasoning = before.strip("\n").rpartition("<think>")[2].strip("\n")
            content = content.rpartition("</think>")[2].strip("\n")
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning and keeps_reasoning else ""
    return thought + content + call_block(turn.get("tool_calls") or [])


def call_block(calls: list[Message]) -> str:
    if not calls:
        return ""
    lines = ["", "<minimax:tool_call>"]
    for made in calls:
        lines.append(f'<invoke name="{made["function"]["name"]}">')
        for key, value in made["function"]["arguments"].items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f'<parameter name="{key}">{text}</parameter>')
        lines.append("</invoke>")
    return "\n".join([*lines, "</minimax:tool_call>"])


def tool_responses(content: str | list[Message]) -> list[str]:
    if isinstance(content, str):
        return [f"<response>{content}</response>"]
    return [f"<response>{part['text']}\n</response>" for part in content]


def visible(content: str | list[Any]) -> str:
    return (
        content
        if isinstance(content, str)
        else "".join(p if isinstance(p, str) else p["text"] for p in content)
    )


def tool(name: str, **more: Any) -> Message:
    return {"type": "function", "function": {"name": name, **more}}


SCHEMA = {
    "type": "object",
    "properties": {"z": {"type": "string"}, "a": {"type": "integer", "description": "日本語 <é>"}},
}
LOOP = [
    user("go"),
    ai("", call(x=1), reasoning_content="first"),
    result("1"),
    ai("", call(x=2), reasoning_content="second"),
]
LOOP = [*LOOP, result("2")]

# name -> messages, and what else goes in: tools, kwargs (model_identity), add_generation_prompt
CONVERSATIONS: dict[str, tuple[list[Message], dict[str, Any]]] = {
    "user only": ([user("Hi")], {}),
    "empty user text": ([user("")], {}),
    "system": ([system("Be brief."), user("Hi")], {}),
    "empty system text": ([system(""), user("Hi")], {}),
    "system only": ([system("Be brief.")], {}),
    "system as parts": ([system([text("Be "), text("brief.")]), user("Hi")], {}),
    "date": ([system("S", current_date="2026-11-20"), user("Hi")], {}),
    "place": ([system("", current_location="Köln"), user("Hi")], {}),
    "date and place": (
        [system("S", current_date="d", current_location="p"), user("Hi")],
        {"tools": [tool("f")]},
    ),
    "identity": ([user("Who?")], {"kwargs": {"model_identity": "I am nano."}}),
    "identity and empty system": (
        [system(""), user("Who?")],
        {"kwargs": {"model_identity": "I am nano."}},
    ),
    "identity loses to system": (
        [system("S"), user("Who?")],
        {"kwargs": {"model_identity": "I am nano."}},
    ),
    "unknown kwarg": ([user("Hi")], {"kwargs": {"thinking_mode": "enabled"}}),
    "no generation prompt": ([user("Hi"), ai("Hello")], {"add_generation_prompt": False}),
    "several turns": ([user("a"), ai("b"), user("c"), ai("d"), user("e")], {}),
    "two users in a row": ([user("a"), user("b")], {}),
    "two assistants in a row": (
        [user("a"), ai("b"), ai("c", reasoning_content="r")],
        {"add_generation_prompt": False},
    ),
    "assistant first": ([ai("Welcome", reasoning_content="r"), user("Hi")], {}),
    "assistant only": ([ai("Welcome", reasoning_content="r")], {}),
    "unicode": ([system("日本語 🙂"), user("👩‍🚀 naïve – “x” \u200d العربية"), ai("Größe")], {}),
    "white space is kept": ([user("  a\n\n\tb  \n"), ai("\n c \n"), user(" ")], {}),
    "jinja text is data": ([user("{{ 7 * 7 }} {% raw %}"), ai("{# x #}")], {}),
    "special texts are data": ([user("]~b]ai\n[e~[ <think>")], {}),
    "user parts": ([user([text("a"), text("b"), "c"])], {}),
    "assistant parts": ([user("a"), ai([text("b"), text("c")])], {}),
    "reasoning after the last user": (
        [user("a"), ai("b", reasoning_content="why")],
        {"add_generation_prompt": False},
    ),
    "reasoning before the last user": (
        [user("a"), ai("b", reasoning_content="why"), user("c")],
        {},
    ),
    "empty reasoning": ([user("a"), ai("b", reasoning_content="")], {}),
    "reasoning over several lines": ([user("a"), ai("b", reasoning_content="x\n\ny")], {}),
    "reasoning inside content": ([user("a"), ai("<think>\nwhy\n</think>\n\nb")], {}),
    "closer inside content": ([user("a"), ai("why</think>b")], {}),
    "inline reasoning removed": ([user("a"), ai("<think>why</think>b"), user("c")], {}),
    "reasoning field keeps content as it is": (
        [user("a"), ai("x </think> y", reasoning_content="why")],
        {},
    ),
    "tool without description": ([user("a")], {"tools": [tool("f")]}),
    "tools in client key order": (
        [user("a")],
        {"tools": [tool("f", parameters=SCHEMA, description="ü"), tool("g", strict=True)]},
    ),
    "system and tools": ([system("S"), user("a")], {"tools": [tool("f", parameters=SCHEMA)]}),
    "empty tools": ([user("a")], {"tools": []}),
    "tool loop": (LOOP, {"tools": [tool("f")]}),
    "tool loop answered": (
        [*LOOP, ai("3", reasoning_content="third")],
        {"add_generation_prompt": False},
    ),
    "tool loop, next question": (
        [*LOOP, ai("3", reasoning_content="third"), user("again")],
        {"tools": [tool("f")]},
    ),
    "parallel calls": (
        [
            user("a"),
            ai("", call("f", id="1", x=1), call("g", id="2")),
            result("r1", id="1"),
            result("r2", id="2"),
        ],
        {},
    ),
    "content before calls": (
        [user("a"), ai("Let me see.", call(x="y"), reasoning_content="r"), result("")],
        {},
    ),
    "all argument types": (
        [
            user("a"),
            ai(
                "",
                call(
                    s="007",
                    i=7,
                    f=1.5,
                    b=True,
                    n=None,
                    l=[1, "ü", {"k": []}],
                    o={"z": 1, "a": "\n"},
                    e="",
                ),
            ),
            result("x"),
        ],
        {},
    ),
    "markup in arguments": (
        [user("a"), ai("", call(s='</parameter>\n<a b="c">&amp; \\n')), result("</response>")],
        {},
    ),
    "tool result as parts": ([user("a"), ai("", call()), result([text("one"), text("two")])], {}),
    "tool results, text and parts": (
        [
            user("a"),
            ai("", call(id="1"), call(id="2")),
            result("one", id="1"),
            result([text("two")], id="2"),
        ],
        {},
    ),
    "calls at the end": (
        [user("a"), ai("", call(x=1), reasoning_content="r")],
        {"add_generation_prompt": False},
    ),
    "other names": (
        [user("a"), ai("", call("mcp__srv-1__do.thing", größe=3, **{"a b": "y"})), result("x")],
        {},
    ),
}

needs_m3_template = pytest.mark.skipif(
    not M3_TEMPLATE.exists(), reason="the M3 template is not beside this checkout"
)


@pytest.fixture(scope="module")
def m3() -> ChatTemplate:
    return ChatTemplate(M3_TEMPLATE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def m2() -> ChatTemplate:
    return ChatTemplate(M2_TEMPLATE.read_text(encoding="utf-8"))


@needs_m2_template
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_m2_render_equals_the_independent_renderer(m2: ChatTemplate, name: str) -> None:
    messages, options = CONVERSATIONS[name]
    tools, kwargs = options.get("tools"), options.get("kwargs", {})
    generation = options.get("add_generation_prompt", True)
    expected = layout(
        messages, tools=tools, generation=generation, identity=kwargs.get("model_identity")
    )
    assert m2.render(messages, tools=tools, add_generation_prompt=generation, **kwargs) == expected
    normalized = normalize_messages(messages)
    assert (
        m2.render(normalized, tools=tools, add_generation_prompt=generation, **kwargs) == expected
    )


@needs_m2_template
@pytest.mark.parametrize("golden", GOLDENS, ids=[golden["name"] for golden in GOLDENS])
def test_m2_render_equals_the_literal_text(m2: ChatTemplate, golden: dict[str, Any]) -> None:
    rendered = m2.render(
        normalize_messages(golden["messages"]),
        tools=golden["tools"],
        add_generation_prompt=golden["add_generation_prompt"],
        **golden["kwargs"],
    )
    assert rendered == "\n".join(golden["expected"])


@pytest.mark.parametrize("golden", GOLDENS, ids=[golden["name"] for golden in GOLDENS])
def test_literal_texts_equal_the_independent_renderer(golden: dict[str, Any]) -> None:
    rendered = layout(
        golden["messages"],
        tools=golden["tools"],
        generation=golden["add_generation_prompt"],
        identity=golden["kwargs"].get("model_identity"),
    )
    assert rendered == "\n".join(golden["expected"])


@needs_m2_template
def test_tool_message_without_call_is_refused_by_the_template(m2: ChatTemplate) -> None:
    with pytest.raises(InvalidRequestError, match="no previous assistant message"):
        m2.render([user("a"), result("x")])


def turns(prompt: str) -> list[tuple[str, str]]:
    """Role and text of every closed turn of a prompt, and of the open one at its end."""
    return [(turn.partition("\n")[0],
        turn.partition("\n")[2].removesuffix("\n").removesuffix("[e~["))
            for turn in prompt.removeprefix("]~!b[").split("]~b]")[1:]]  # fmt: skip


@needs_m2_template
@needs_m3_template
def test_templates_tell_what_they_read(m2: ChatTemplate, m3: ChatTemplate) -> None:
    assert (m2.has_root_role, m3.has_root_role) == (False, True)
    assert (m2.reads("thinking_mode"), m3.reads("thinking_mode")) == (False, True)
    assert m2.reads("model_identity") and not m3.reads("reasoning_effort")
    assert not ChatTemplate("{{ raise_exception('no') }}").has_root_role


@needs_m3_template
def test_m3_ranks_root_above_system_and_keeps_notes_in_place(m3: ChatTemplate) -> None:
    messages = [
        {"role": "root", "content": "R"},
        {"role": "developer", "content": "D"},
        system("S"),
        user("u"),
        system("N"),
    ]
    shown = turns(m3.render(normalize_messages(messages, has_root=True)))
    assert [role for role, _ in shown] == ["system", "developer", "user", "user", "ai"]
    assert shown[0][1].startswith("R\n\n<thinking_instructions>")
    assert shown[1][1] == "D\n\nS"
    assert shown[2:4] == [("user", "u"), ("user", "<system-reminder>\nN\n</system-reminder>")]


@needs_m3_template
def test_m3_shows_all_thinking_and_calls_of_a_history(m3: ChatTemplate) -> None:
    calls = [call("f", id="a", city="Rome", days=[1, 2]), call("g", id="b")]
    messages = [
        user("q"),
        ai("hm", *calls, reasoning="why"),
        result("2", id="b"),
        result("1", id="a"),
        ai("yes"),
        user("z"),
    ]
    shown = turns(m3.render(normalize_messages(messages, has_root=True)))
    mark = "]<]minimax[>["
    days = f"{mark}<days>{mark}<item>1{mark}</item>{mark}<item>2{mark}</item>{mark}</days>"
    first = f'{mark}<invoke name="f">{mark}<city>Rome{mark}</city>{days}{mark}</invoke>\n'
    block = f'{mark}<tool_call>\n{first}{mark}<invoke name="g">{mark}</invoke>\n{mark}</tool_call>'
    assert shown[3] == ("ai", f"<mm:think>why</mm:think>hm{block}")
    assert shown[4] == ("tool", "<response>1</response>\n<response>2</response>")
    assert shown[5] == ("ai", "</mm:think>yes")


@needs_m3_template
@pytest.mark.parametrize(
    ("mode", "ending"),
    [("enabled", "<mm:think>"), ("disabled", "</mm:think>"), ("adaptive", ""), (None, "")],
)
def test_m3_modes_decide_how_the_answer_begins(
    m3: ChatTemplate, mode: str | None, ending: str
) -> None:
    shown = turns(m3.render([user("x")], **({"thinking_mode": mode} if mode else {})))
    assert shown[-1] == ("ai", ending)
    assert f"thinking mode: {mode or 'adaptive'}." in shown[0][1]


def render(source: str, **kwargs: Any) -> str:
    return ChatTemplate(source).render([user("hi")], **kwargs)


def test_blocks_are_trimmed_as_transformers_does() -> None:
    assert (
        render(
            "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor "
            "%}\n"
        )
        == "hi\n"
    )


def test_loop_controls() -> None:
    assert (
        render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )


def test_tojson_keeps_order_and_takes_the_arguments_of_transformers() -> None:
    value = {"b": "é<&'", "a": [1.0, None]}
    assert render("{{ x | tojson }}", x=value) == '{"b": "é<&\'", "a": [1.0, null]}'
    assert render("{{ x | tojson(ensure_ascii=True) }}", x="é") == '"\\u00e9"'
    assert (
        render("{{ x | tojson(sort_keys=True, separators=(',', ':')) }}", x=value)
        == '{"a":[1.0,null],"b":"é<&\'"}'
    )
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"


def test_time_is_available() -> None:
    assert render("{{ strftime_now('%Y') }}").isdecimal()


def test_raise_exception_refuses_the_request() -> None:
    with pytest.raises(InvalidRequestError, match="only one turn"):
        render("{{ raise_exception('only one turn') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ missing.field.deeper }}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include 'other' %}",
    ],
)
def test_failing_and_escaping_templates_refuse_the_request(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(source)


def test_conversation_cannot_be_replaced_by_template_variables() -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        render("{{ messages }}", messages=[])
    with pytest.raises(InvalidRequestError, match="add_generation_prompt, tools"):
        check_template_kwargs({"tools": [], "add_generation_prompt": False, "model_identity": "x"})
    check_template_kwargs({"model_identity": "x"})


def write_folder(folder: Path, *, jinja: str | None = None, config: Any = None) -> Path:
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_template_is_found_by_precedence(tmp_path: Path) -> None:
    def rendered(override: Path | None = None) -> str:
        template = ChatTemplate.from_folder(tmp_path, override)
        assert template is not None
        return template.render([user("é")])

    assert ChatTemplate.from_folder(tmp_path) is None
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list"}]
    write_folder(tmp_path, config={"chat_template": named})
    assert rendered() == "list"
    write_folder(
        tmp_path,
        config={
            "chat_template": "config {{ bos_token }}{{ eos_token }}",
            "bos_token": "B",
            "eos_token": {"content": "E"},
        },
    )
    assert rendered() == "config BE"
    write_folder(tmp_path, jinja="file {{ messages[0].content }} {{ bos_token }}")
    assert rendered() == "file é B"
    override = tmp_path / "other.jinja"
    override.write_text("override", encoding="utf-8")
    assert rendered(override) == "override"


def test_broken_template_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jinja"):
        ChatTemplate.from_folder(tmp_path, tmp_path / "gone.jinja")
    write_folder(tmp_path, jinja="{% if %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja has a syntax error in line 1"):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    write_folder(tmp_path, config={"chat_template": 3})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is a int"):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is no valid JSON"):
        ChatTemplate.from_folder(tmp_path)
