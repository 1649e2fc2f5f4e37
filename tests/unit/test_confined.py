import asyncio
import dataclasses
import json
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from message_support import user
from text_support import config_text, definition_text, make_tokenizer

from negamax.api.common.conversation import ChatPrompt, Conversation, PromptBuilder
from negamax.base.errors import CheckpointError, InvalidRequestError
from negamax.models.chat_format import ChatFormat
from negamax.text.chat_template import ChatTemplate
from negamax.text.tokenizer import Tokenizer, TooManyTokensError

TREE = (
    "{% set n = namespace(x=[1]) %}{% for _ in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
# what a template does for messages "go"; a loop or a growth
HOSTILE_TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(40) }}",
    "shared lists": TREE + "{{ n.x | string | length }}",
    "comparison": TREE + "{% set a = n.x %}" + TREE + "{{ a == n.x }}",
    "product": "{{ messages[0].content * 10**10 }}",
    "large answer": "{{ messages[0].content * 10**8 }}",
    "padding": "{{ messages[0].content | center(10**10) }}",
    "method": "{{ messages[0].content.ljust(10**10) }}",
    "format": "{{ '%*d' | format(10**9 * one, 1) }}",
    "replacement": "{% set x = 'x' * 10**6 %}{{ x.replace('', x) }}",
    "integer": "{% set n = namespace(x=3) %}"
    "{% for _ in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "kept": "{% set n = namespace(x='x' * 1000) %}"
    "{% for _ in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
}


def split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip


def in_process(source: str, folder: Path) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(source)
    template = ChatTemplate.from_folder(folder)
    assert template is not None and template.is_confined
    return template


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """A template that does what the variable `case` says for messages "go"."""
    cases = "".join(
        f"{{% if messages[0].content == 'go' and case == '{name}' %}}{source}{{% endif %}}"
        for name, source in HOSTILE_TEMPLATES.items()
    )
    return in_process(cases + "{{ messages[0].content }}", tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("case", HOSTILE_TEMPLATES)
def test_hostile_templates_fail_one_request(hostile: ChatTemplate, case: str) -> None:
    start = time.process_time()
    with pytest.raises(InvalidRequestError, match="chat template"):
        hostile.render([user("go")], case=case, one=1)
    assert hostile.render([user("hi")], case=case) == "hi"
    assert time.process_time() - start < 0.5  # of this process


def test_other_requests_go_on_beside_a_hostile_one(hostile: ChatTemplate) -> None:
    chat_format = dataclasses.replace(ChatFormat.of_model("minimax_m2"), template=hostile)
    builder = PromptBuilder(make_tokenizer(), chat_format, max_model_len=1000)

    def ask(text: str) -> Coroutine[Any, Any, ChatPrompt]:
        kwargs = {"case": "loops"}
        conversation = Conversation(messages=[user(text)], template_kwargs=kwargs)
        return builder.chat(conversation, num_bytes=100)

    async def main() -> None:
        looping = [asyncio.ensure_future(ask("go")) for _ in range(2)]
        answered = 0
        while not looping[0].done():
            assert (await ask("hi")).text == "hi"
            answered += 1
        assert answered > 5
        for each in looping:
            with pytest.raises(InvalidRequestError, match="used more than 1 s"):
                await each

    asyncio.run(main())


def test_confined_templates_render_as_others_do(tmp_path: Path) -> None:
    source = "{{ x | tojson }}{{ messages[0].content }}{{ raise_exception('no') if no }}"
    template = in_process(source, tmp_path)
    assert template.render([user("é\udfff")], x=[1, None, "\ud800"]) == ChatTemplate(source).render(
        [user("é\udfff")], x=[1, None, "\ud800"]
    )
    assert template.reads("x") and not template.has_root_role
    with pytest.raises(InvalidRequestError, match="refuses these messages: no"):
        template.render([user("hi")], x=1, no=True)
    with pytest.raises(InvalidRequestError, match="only JSON values"):
        template.render([user("hi")], x=object())


def test_templates_that_cannot_be_compiled_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja has a syntax error in line 1"):
        in_process("{% if %}", tmp_path)


def write_tokenizer(folder: Path, **changes: Any) -> Tokenizer:
    definition = {**json.loads(definition_text()), **changes}
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text(config_text())
    return Tokenizer.from_folder(folder)


GROWTH = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
HOSTILE_TOKENIZERS = {
    "normalizer": {"normalizer": {"type": "Sequence", "normalizers": [GROWTH] * 6}},
    "exponential pattern": {"pre_tokenizer": split(r"(a+)+b")},
    "quadratic pattern": {"pre_tokenizer": split(r"(?:a|b)*(?<=z)")},
    "padding": {
        "padding": {
            "strategy": {"Fixed": 10**9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_TOKENIZERS)
def test_hostile_tokenizers_fail_one_request(tmp_path: Path, case: str) -> None:
    tokenizer = write_tokenizer(tmp_path, **HOSTILE_TOKENIZERS[case])
    with pytest.raises(InvalidRequestError, match="the tokenizer failed on this request"):
        tokenizer.encode("a" * 20_000)
    assert case == "padding" or tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_confined_tokenizers_encode_as_others_do(tmp_path: Path) -> None:
    tokenizer, own = write_tokenizer(tmp_path), Tokenizer.from_folder(tmp_path, is_trusted=True)
    for text in ("", "hi<think>[e~[", "[\udffee~[ é 🙂", "\ud800"):
        assert tokenizer.encode(text) == own.encode(text)
        assert tokenizer.encode(text, allow_special=False) == own.encode(text, allow_special=False)
        assert tokenizer.encode_escaped(text) == own.encode_escaped(text)
    parts = ["a b", "", "[e~[c"]
    assert tokenizer.encode_parts(parts) == own.encode_parts(parts)
    with pytest.raises(TooManyTokensError):
        tokenizer.encode_parts(["a b c", "d e f"], max_tokens=4)


@pytest.mark.parametrize("texts", [[f"<{i}>" for i in range(5000)], ["<" * 70_000]])
def test_masses_of_added_tokens_are_refused(tmp_path: Path, texts: list[str]) -> None:
    added = [
        {
            "id": 10**5 + i, "content": text, "special": True, "normalized": False,
            "single_word": False, "lstrip": False, "rstrip": False,
        }
        for i, text in enumerate(texts)
    ]  # fmt: skip
    with pytest.raises(CheckpointError, match=r"adds 5000 tokens|of 70000 characters"):
        write_tokenizer(tmp_path, added_tokens=added)
