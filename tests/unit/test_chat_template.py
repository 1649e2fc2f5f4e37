import json
from pathlib import Path
from typing import Any

import pytest
from message_support import user
from template_support import check_render, m2_template, m3_template, recorded_renders

from negamax.base.errors import CheckpointError, ConfigError, InvalidRequestError
from negamax.config.embedded import EMBEDDED
from negamax.text.chat_template import ChatTemplate, check_template_kwargs, require_template
from negamax.text.messages import normalize_messages

RENDERS = [(family, case) for family in ("m2", "m3") for case in recorded_renders(family)]
M2, M3 = m2_template(), m3_template()


@pytest.mark.parametrize(
    ("family", "case"), RENDERS, ids=[f"{family}: {case['name']}" for family, case in RENDERS]
)
def test_renders_are_those_of_the_models_own_templates(family: str, case: dict[str, Any]) -> None:
    template = M2 if family == "m2" else M3
    if case["expected"] is None:
        with pytest.raises(InvalidRequestError, match="tool message needs an earlier assistant"):
            template.render(case["messages"])
        return
    check_render(template, case, case["messages"])
    if case["is_normal"]:
        check_render(template, case, normalize_messages(case["messages"], has_root=family == "m3"))


def test_templates_report_their_variables_and_have_a_replaceable_identity() -> None:
    assert (M2.has_root_role, M3.has_root_role) == (False, True)
    assert (M2.reads("thinking_mode"), M3.reads("thinking_mode")) == (False, True)
    assert M2.reads("model_identity") and not M3.reads("reasoning_effort")
    assert not ChatTemplate("{{ raise_exception('no') }}").has_root_role
    nano = ChatTemplate.from_folder(EMBEDDED["nano"])
    assert nano is not None
    assert nano.render([user("Hi")]).startswith(
        "]~!b[]~b]system\nYou are a helpful assistant. Your name is Nano, the small demonstration "
        "model that ships with Negamax.[e~[\n]~b]user\n"
    )
    assert "]~b]system\nI am X.[e~[" in nano.render([user("Hi")], model_identity="I am X.")


def render(source: str, **kwargs: Any) -> str:
    return ChatTemplate(source).render([user("hi")], **kwargs)


VALUE = {"b": "é<&'", "a": [1.0, None]}
TRIMMED = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
LOOP = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
COMPACT = "{{ x | tojson(sort_keys=True, separators=(',', ':')) }}"


@pytest.mark.parametrize(
    ("source", "value", "expected"),
    [
        (TRIMMED, None, "hi\n"),
        (LOOP, None, "1"),
        ("{{ x | tojson }}", VALUE, '{"b": "é<&\'", "a": [1.0, null]}'),
        ("{{ x | tojson(ensure_ascii=True) }}", "é", '"\\u00e9"'),
        (COMPACT, VALUE, '{"a":[1.0,null],"b":"é<&\'"}'),
        ("{{ x | tojson(indent=1) }}", [1], "[\n 1\n]"),
        ("a{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}", 2, "a12"),
    ],
)
def test_syntax_and_filters_of_transformers(source: str, value: Any, expected: str) -> None:
    assert render(source, x=value) == expected
    assert render("{{ strftime_now('%Y') }}").isdecimal()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ missing.field.deeper }}",
        "{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}",
        "{% include 'other' %}",
    ],
)  # fmt: skip
def test_refuses_requests_whose_template_fails_or_escapes(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(source)
    with pytest.raises(InvalidRequestError, match="only one turn"):
        render("{{ raise_exception('only one turn') }}")


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
    for entry in (named, {"default": "list", "rag": "no"}, [{"name": "a", "template": "list"}]):
        write_folder(tmp_path, config={"chat_template": entry})
        assert rendered() == "list"
    config = {"chat_template": "config {{ bos_token }}{{ eos_token }}", "bos_token": "B"}
    write_folder(tmp_path, config=config | {"eos_token": {"content": "E"}})
    assert rendered() == "config BE"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "older"}', encoding="utf-8")
    assert rendered() == "older"
    write_folder(tmp_path, jinja="\ufefffile {{ messages[0].content }} {{ bos_token }}")
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
    write_folder(tmp_path, config={"chat_template": {"rag": "a", "tool_use": "b"}})
    with pytest.raises(CheckpointError, match="several templates and no default: rag, tool_use"):
        ChatTemplate.from_folder(tmp_path)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        require_template(None)
    write_folder(tmp_path, config={"chat_template": 3})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json has the type int"):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read as JSON"):
        ChatTemplate.from_folder(tmp_path)
