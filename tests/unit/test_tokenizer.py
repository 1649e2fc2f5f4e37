import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_support import TAGS, config_text, definition_text, make_tokenizer

from negamax.base.errors import CheckpointError
from negamax.text.tokenizer import Tokenizer

TOKENIZER = make_tokenizer()
UTF8 = st.characters(exclude_categories=["Cs"])


def write(folder: Path, *, definition: str | None = None, config: str | None = None) -> Path:
    (folder / "tokenizer.json").write_text(definition or definition_text())
    (folder / "tokenizer_config.json").write_text(config or config_text())
    return folder


def edited_definition(**changes: object) -> str:
    return json.dumps({**json.loads(definition_text()), **changes})


def test_folder_is_read_and_named_tokens_must_exist(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path))
    assert tokenizer.bos_token_id == tokenizer.token_id("]~!b[")
    assert tokenizer.eos_token_id == tokenizer.token_id("[e~[")
    assert tokenizer.vocab_size == 1 + tokenizer.token_id("</minimax:tool_call>")
    config = json.dumps({"eos_token": {"content": "<gone>"}})
    with pytest.raises(CheckpointError, match=r"eos_token .* is '<gone>'"):
        Tokenizer.from_folder(write(tmp_path, config=config))
    tokenizer = Tokenizer.from_folder(write(tmp_path, config="{}"))
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_id is None


@settings(deadline=None)
@given(text=st.text(UTF8))
def test_text_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, allow_special=False)) == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, TOKENIZER.vocab_size + 5)), skip=st.booleans())
def test_decode_equals_the_library(ids: list[int], skip: bool) -> None:
    kept = [i for i in ids if not (skip and TOKENIZER.is_special(i))]
    expected = TOKENIZER._backend.decode(kept, skip_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=skip) == expected


def test_special_texts_become_tokens_and_control_tokens_are_dropped() -> None:
    text = "]~b]user\nhi<think>[e~["
    found = [TOKENIZER.token_text(i) for i in TOKENIZER.encode(text) if TOKENIZER.is_added(i)]
    assert found == ["]~b]", "<think>", "[e~["]
    plain = TOKENIZER.encode(text, allow_special=False)
    assert not any(map(TOKENIZER.is_added, plain))
    assert TOKENIZER.decode(plain) == text
    tags = "a<think>b</think><minimax:tool_call></minimax:tool_call>"
    ids = TOKENIZER.encode(f"]~b]{tags}[e~[")
    assert TOKENIZER.decode(ids) == tags
    assert TOKENIZER.decode(ids, skip_special_tokens=False).endswith("[e~[")
    assert not any(TOKENIZER.is_special(TOKENIZER.token_id(tag)) for tag in TAGS)


def test_flags_of_the_config_count_except_for_tags(tmp_path: Path) -> None:
    definition = json.loads(definition_text())
    for token in definition["added_tokens"]:
        token["special"] = True
    tokenizer = Tokenizer.from_folder(write(tmp_path, definition=json.dumps(definition)))
    assert tokenizer.decode(tokenizer.encode("a<think>b[e~[")) == "a<think>b"
    token_id = TOKENIZER.token_id("<reponame>")
    flags = {str(token_id): {"content": "<reponame>", "special": False}}
    config = {**json.loads(config_text()), "added_tokens_decoder": flags}
    tokenizer = Tokenizer.from_folder(write(tmp_path, config=json.dumps(config)))
    assert TOKENIZER.is_special(token_id)
    assert not tokenizer.is_special(token_id)


def test_token_bytes_are_exact(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("né 🙂", allow_special=False)
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == "né 🙂".encode()
    assert TOKENIZER.token_bytes(TOKENIZER.token_id("]<]vision pad[>[")) == b"]<]vision pad[>["
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size) == TOKENIZER.token_bytes(-1) == b""
    single = {TOKENIZER.token_bytes(i) for i in range(TOKENIZER.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= single
    assert TOKENIZER.encode("ab\ud800c") == TOKENIZER.encode("ab\ufffdc")
    definition = json.loads(definition_text())
    vocab = definition["model"]["vocab"]
    token_id = vocab["日 本"] = vocab.pop(max(vocab, key=vocab.get))
    definition["model"]["merges"].pop()
    tokenizer = Tokenizer.from_folder(write(tmp_path, definition=json.dumps(definition)))
    assert tokenizer.token_bytes(token_id) == "日 本".encode()
    assert tokenizer.decode([token_id]) == tokenizer._backend.decode([token_id])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe"])
def test_missing_or_broken_file_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    write(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as error:
        Tokenizer.from_folder(tmp_path)
    assert error.value.hint


METASPACE = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}


@pytest.mark.parametrize(
    "definition",
    [
        edited_definition(decoder=None),
        edited_definition(decoder=METASPACE),
        edited_definition(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
        edited_definition(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}),
        edited_definition(model=None),
    ],
)
def test_unsupported_or_inconsistent_tokenizer_is_refused(tmp_path: Path, definition: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(write(tmp_path, definition=definition))
