import json
from pathlib import Path
from typing import Any

import pytest
from message_support import ai, call, result, system, user
from template_support import check_render, m2_template, m3_template, recorded_renders

from negamax.base.errors import CheckpointError, ConfigError, InvalidRequestError
from negamax.config.embedded import EMBEDDED
from negamax.text.chat_template import ChatTemplate, check_template_kwargs
from negamax.text.messages import normalize_messages

RENDERS = [
    pytest.param(family, case, id=f"{family}: {case['name']}")
    for family in ("m2", "m3")
    for case in recorded_renders(family)
]


@pytest.fixture(scope="module")
def m3() -> ChatTemplate:
    return m3_template()


@pytest.fixture(scope="module")
def m2() -> ChatTemplate:
    return m2_template()


@pytest.mark.parametrize(("family", "case"), RENDERS)
def test_renders_are_those_of_the_models_own_templates(
    m2: ChatTemplate, m3: ChatTemplate, family: str, case: dict[str, Any]
) -> None:
    template = m2 if family == "m2" else m3
    if case["expected"] is None:
        with pytest.raises(InvalidRequestError, match="tool message needs an earlier assistant"):
            template.render(case["messages"])
        return
    check_render(template, case, case["messages"])
    if case["is_normal"]:
        check_render(template, case, normalize_messages(case["messages"], has_root=family == "m3"))


def test_the_embedded_models_default_identity_is_its_own_and_can_be_replaced() -> None:
    nano = ChatTemplate.from_folder(EMBEDDED["nano"])
    assert nano is not None
    assert nano.render([user("Hi")]).startswith(
        "]~!b[]~b]system\nYou are a helpful assistant. Your name is Nano, the small demonstration "
        "model that ships with Negamax.[e~[\n]~b]user\n"
    )
    assert "]~b]system\nI am X.[e~[" in nano.render([user("Hi")], model_identity="I am X.")


def turns(prompt: str) -> list[tuple[str, str]]:
    """Return role and text of every closed turn of a prompt, and of the open one at its end."""
    return [(turn.partition("\n")[0],
        turn.partition("\n")[2].removesuffix("\n").removesuffix("[e~["))
            for turn in prompt.removeprefix("]~!b[").split("]~b]")[1:]]  # fmt: skip


def test_templates_tell_what_they_read(m2: ChatTemplate, m3: ChatTemplate) -> None:
    assert (m2.has_root_role, m3.has_root_role) == (False, True)
    assert (m2.reads("thinking_mode"), m3.reads("thinking_mode")) == (False, True)
    assert m2.reads("model_identity") and not m3.reads("reasoning_effort")
    assert not ChatTemplate("{{ raise_exception('no') }}").has_root_role


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
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read as JSON"):
        ChatTemplate.from_folder(tmp_path)
