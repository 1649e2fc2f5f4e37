import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from message_support import user
from text_support import config_text, definition_text

from negamax.api.common.conversation import Conversation, PromptBuilder
from negamax.base.errors import CheckpointError, InvalidRequestError
from negamax.models.chat_format import ChatFormat
from negamax.text.chat_template import ChatTemplate
from negamax.text.tokenizer import Tokenizer, TooManyTokensError

GROW = "{%% set n = namespace(x=%s) %%}{%% for _ in range(99) %%}{%% set n.x = %s %%}{%% endfor %%}"
# template source by the value of `case`
TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{m(40)}}",
    "shared lists": GROW % ("[1]", "[n.x, n.x]") + "{{ n.x | string | length }}",
    "product": "{{ messages[0].content * 10**10 }}",
    "large answer": "{{ messages[0].content * 10**8 }}",
    "padding": "{{ messages[0].content | center(10**10) }}",
    "format": "{{ '%*d' | format(10**9 * one, 1) }}",
    "replacement": "{% set x = 'x' * 10**6 %}{{ x.replace('', x) }}",
    "integer": GROW % ("3", "n.x * n.x"),
    "text": GROW % ("'x'", "n.x ~ n.x"),
}


def in_process(source: str, folder: Path) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(source)
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    return template


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """Make a template that runs the source of the variable `case` for messages "go"."""
    cases = "".join(
        f"{{% if messages[0].content == 'go' and case == '{name}' %}}{source}{{% endif %}}"
        for name, source in TEMPLATES.items()
    )
    return in_process(cases + "{{ messages[0].content }}", tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("case", TEMPLATES)
def test_hostile_templates_fail_one_request(hostile: ChatTemplate, case: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        hostile.render([user("go")], case=case, one=1)
    assert hostile.render([user("hi")], case=case) == "hi"


def test_other_requests_go_on_beside_a_hostile_one(hostile: ChatTemplate, tmp_path: Path) -> None:
    chat_format = ChatFormat.of_model("minimax_m2", template=hostile)
    builder = PromptBuilder(write_tokenizer(tmp_path), chat_format, max_model_len=1000)

    async def ask(text: str) -> str:
        conversation = Conversation(messages=[user(text)], template_kwargs={"case": "loops"})
        return (await builder.chat(conversation, num_bytes=100)).text

    async def main() -> None:
        looping = asyncio.ensure_future(ask("go"))
        assert [await ask("hi") for _ in range(3)] == ["hi"] * 3 and not looping.done()
        with pytest.raises(InvalidRequestError, match="or used more than"):
            await looping

    asyncio.run(main())


def test_confined_templates_render_as_others_do(tmp_path: Path) -> None:
    source = (
        "{{ x | tojson }}{{ messages[0].content }}{{ raise_exception('n' ~ 'o' * 9999) if no }}"
    )
    template, messages = in_process(source, tmp_path), [user("é\udfff")]
    x = [1, None, "\ud800"]
    assert template.render(messages, x=x) == ChatTemplate(source).render(messages, x=x)
    assert template.reads("x") and not template.has_root_role
    with pytest.raises(InvalidRequestError, match=r"refuses these messages: no{1999}$"):
        template.render(messages, x=1, no=True)
    with pytest.raises(InvalidRequestError, match="a non-JSON value"):
        template.render(messages, x=object())


def write_tokenizer(folder: Path, **changes: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(definition_text()) | changes))
    (folder / "tokenizer_config.json").write_text(config_text())
    return Tokenizer.from_folder(folder)


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
GROWTH = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
HOSTILE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "normalizer": {"normalizer": {"type": "Sequence", "normalizers": [GROWTH] * 6}},
    "exponential pattern": {"pre_tokenizer": SPLIT | {"pattern": {"Regex": r"(a+)+b"}}},
    "quadratic pattern": {"pre_tokenizer": SPLIT | {"pattern": {"Regex": r"(?:a|b)*(?<=z)"}}},
}


@pytest.mark.parametrize("case", HOSTILE_TOKENIZERS)
def test_hostile_tokenizers_fail_one_request(tmp_path: Path, case: str) -> None:
    tokenizer = write_tokenizer(tmp_path, **HOSTILE_TOKENIZERS[case])
    with pytest.raises(InvalidRequestError, match="the tokenizer failed on this request"):
        tokenizer.encode("a" * 20_000)
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_confined_tokenizers_encode_as_others_do(tmp_path: Path) -> None:
    tokenizer, own = write_tokenizer(tmp_path), Tokenizer.from_folder(tmp_path, is_trusted=True)
    texts = ["", "hi<think>[e~[", "[\udffee~[ é 🙂", "\ud800"]
    assert tokenizer.encode_parts(texts) == own.encode_parts(texts)
    with pytest.raises(TooManyTokensError):
        tokenizer.encode_parts(texts, max_tokens=4)


@pytest.mark.parametrize(("count", "size"), [(5000, 6), (1, 70_000)])
def test_masses_of_added_tokens_are_refused(tmp_path: Path, count: int, size: int) -> None:
    token = json.loads(definition_text())["added_tokens"][0]
    added = [token | {"id": 10**5 + i, "content": f"{i:<{size}}"} for i in range(count)]
    with pytest.raises(CheckpointError, match=f"adds {count} tokens with {count * size} char"):
        write_tokenizer(tmp_path, added_tokens=added)
