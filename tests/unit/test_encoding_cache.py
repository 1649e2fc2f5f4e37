import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_support import recorded_renders
from text_support import CONTROL, TAGS, config_text, definition_text, make_tokenizer
from tokenizers import Tokenizer as Backend

from negamax.text.encoding_cache import KEPT_CHARS, EncodingCache
from negamax.text.tokenizer import Tokenizer

NANO = Path(__file__).parents[2] / "negamax" / "assets" / "nano"
TRAINED = json.loads(definition_text())
LOOK_AHEAD = {
    "type": "Split", "pattern": {"Regex": r"\s?\w+(?!\S)|\s+|\W"}, "behavior": "Isolated",
    "invert": False,
}  # fmt: skip
BYTE_LEVEL = TRAINED["pre_tokenizer"]
FIRST_PIECE = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x"}]}
TRUNCATION = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}


def token(text: str, **flags: bool) -> dict[str, Any]:
    """Return an added token whose text begins like another added token, or contains one."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": 990 + len(text), "content": text, **plain, **flags}


def in_turn(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def made(*tokens: dict[str, Any], **changes: Any) -> Tokenizer:
    definition = {**TRAINED, "added_tokens": [*TRAINED["added_tokens"], *tokens], **changes}
    return Tokenizer(json.dumps(definition), config={})


SPLIT = {
    "as trained": make_tokenizer(),
    "a space put before each piece": made(pre_tokenizer={**BYTE_LEVEL, "add_prefix_space": True}),
    "pieces that look ahead": made(
        pre_tokenizer=in_turn(LOOK_AHEAD, {**BYTE_LEVEL, "use_regex": False})
    ),
    "composed characters": made(normalizer={"type": "NFC"}),
    "tokens within tokens": made(token("]~b]user"), token("~b]["), token("k><m")),
    "tokens found after normalization": made(
        token("user", normalized=True, single_word=True),
        token("b]é", normalized=True, lstrip=True),
        normalizer={"type": "NFC"},
    ),
    "nano": Tokenizer.from_folder(NANO),
}
NOT_SPLIT = {
    "spaces before a token are part of it": made(token("<l>", lstrip=True)),
    "spaces after a token are part of it": made(token("<r>", rstrip=True)),
    "a token only as a word of its own": made(token("word", single_word=True)),
    "the first piece is another one": made(pre_tokenizer=in_turn(FIRST_PIECE, BYTE_LEVEL)),
    "an unknown normalizer": made(normalizer=PREPEND),
    "truncation": made(truncation=TRUNCATION),
    "chance": made(model={**TRAINED["model"], "dropout": 0.5}),
    "no added token": made(added_tokens=[]),
}

MARKS = (*CONTROL, *TAGS, "]~b", "[e~", "<", "<l>")
WORDS = (*MARKS, "user", "word", "don't", "e\u0301", "é", "日本", "🙂", "_", " ", "\n", "  \t")
UTF8 = st.characters(exclude_categories=["Cs"])
SHORT = st.lists(st.sampled_from(WORDS) | st.text(UTF8, max_size=5), max_size=12).map("".join)
COUNTS = st.integers(1, KEPT_CHARS)
LONG = st.builds(lambda text, count: text * count, SHORT | st.sampled_from(WORDS), COUNTS)
TEXTS = st.lists(st.one_of(SHORT, LONG), max_size=6).map("".join)


def reference(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode the whole text by the other method of the tokenizers library."""
    return tokenizer._backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", SPLIT)
@settings(deadline=None, max_examples=30)
@given(text=TEXTS, ends=st.lists(st.floats(0, 1), max_size=3))
def test_beginnings_have_the_librarys_tokens(name: str, text: str, ends: list[float]) -> None:
    cache = EncodingCache(SPLIT[name])
    for end in (*sorted(ends), 1, *ends):  # The conversation grows, then returns to earlier states.
        beginning = text[: round(end * len(text))]
        assert cache.encode(beginning) == reference(SPLIT[name], beginning)


@pytest.mark.parametrize("name", NOT_SPLIT)
def test_tokenizer_that_looks_beyond_its_added_tokens_is_not_split(name: str) -> None:
    assert NOT_SPLIT[name].cuts is None
    cache = EncodingCache(NOT_SPLIT[name])
    cache.encode(f"]~b]user\n{'some words ' * 100}[e~[\n" * 3)
    assert cache.num_bytes == 0


@pytest.mark.parametrize("name", SPLIT)
def test_prompts_and_long_stretches_have_the_tokens_of_the_library(name: str) -> None:
    cases = (case for case in recorded_renders("m2") if case["expected"])
    texts = [case["expected"] + case["opening"] for case in cases]
    texts += ["".join(texts[:end]) for end in range(2, 1 + len(texts), 6)]
    pairs = ((first, second) for first in WORDS for second in (*MARKS, "user", " "))
    texts.append("".join(f"{first}{second}{'so on ' * 50}" for first, second in pairs))
    cache = EncodingCache(SPLIT[name])
    for text in texts:
        assert cache.encode(text) == reference(SPLIT[name], text)
    assert cache.num_bytes > 0


class CountingTokenizer(Tokenizer):
    num_chars = 0

    def encode(
        self, text: str, *, allow_special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, allow_special=allow_special, max_tokens=max_tokens)


def counting() -> CountingTokenizer:
    return CountingTokenizer(definition_text(), config=json.loads(config_text()))


def turns(count: int, *, chars: int) -> Iterator[str]:
    text = "]~!b[]~b]system\nYou are a helpful assistant.[e~[\n"
    for turn in range(count):
        said = f"turn {turn} " * (chars // 7)
        text += f"]~b]user\n{said[:chars]}[e~[\n]~b]ai\n<think>\nso "
        text += f"{said[::-1][:chars]}</think>\n\n{said[3:chars]}[e~[\n"
        yield text


# With 2000 characters each part is one long stretch; with 40, parts are runs of short ones.
@pytest.mark.parametrize("chars", [2000, 40])
def test_a_turn_costs_only_its_addition(chars: int) -> None:
    tokenizer = counting()
    cache = EncodingCache(tokenizer)
    before = 0
    for text in turns(40, chars=chars):
        tokenizer.num_chars = 0
        cache.encode(text)
        # At most 2048 characters at the end of the previous turn are encoded again.
        assert tokenizer.num_chars <= len(text) - before + 2048
        before = len(text)
    assert before > 30 * 3 * chars


def test_cached_parts_are_shared_only_within_a_salt() -> None:
    tokenizer = counting()
    cache = EncodingCache(tokenizer)
    text = "]~b]user\n" + "Keep this. " * 50
    cache.encode(text, salt="two").clear()  # The caller may change the list that it got.
    costs = []
    for salt in ("", "one", "two", "one", "", "\ud800"):
        tokenizer.num_chars = 0
        assert cache.encode(text, salt=salt) == reference(make_tokenizer(), text)
        costs.append(tokenizer.num_chars > 500)
    assert costs == [True, True, False, False, False, True]


def test_bytes_are_bounded_and_large_parts_drop_no_others() -> None:
    tokenizer = counting()
    cache = EncodingCache(tokenizer, max_bytes=100_000)
    kept = "]~b]user\n" + "Keep this. " * 50
    cache.encode(kept)
    for turn in range(300):
        cache.encode(f"]~b]user\n{f'question {turn}, ' * 60}")
        cache.encode(kept)
        assert cache.num_bytes <= 100_000
    assert cache.num_bytes > 50_000
    tokenizer.num_chars = 0
    cache.encode(kept)
    assert tokenizer.num_chars < 20
    cache = EncodingCache(make_tokenizer(), max_bytes=10_000)
    cache.encode("]~b]" + "Keep this. " * 50)
    kept = cache.num_bytes
    for text in ("]~b]" + "z" * 5000, "]~b]user\nHi[e~[\n]~b]ai\n"):
        assert cache.encode(text) == reference(make_tokenizer(), text)
    assert cache.num_bytes == kept > 0


def test_threads_share_a_cache_that_is_too_small() -> None:
    tokenizer = make_tokenizer()
    cache = EncodingCache(tokenizer, max_bytes=20_000)
    texts = list(turns(12, chars=600))
    expected = [reference(tokenizer, text) for text in texts]

    def differ(first: int) -> list[int]:
        turns = [(first + i) % len(texts) for i in range(len(texts) * 2)]
        return [turn for turn in turns if cache.encode(texts[turn]) != expected[turn]]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(differ, range(0, 12, 3))) == [[]] * 4
    assert 0 < cache.num_bytes <= 20_000
    assert cache.num_bytes == sum(512 + 4 * len(ids) for ids in cache._entries.values())


def test_lone_surrogate_counts_as_a_replacement_character() -> None:
    text = "]~b]user\n" + "\ud800x" * 500 + "[e~[\n\udc00"
    replaced = re.sub("[\ud800-\udfff]", "\ufffd", text)
    assert EncodingCache(make_tokenizer()).encode(text) == reference(make_tokenizer(), replaced)


def test_library_reads_the_definitions_of_this_test() -> None:
    """Each variant must differ from the plain tokenizer, or the tests above prove nothing."""
    text = "]~b]user e\u0301 k><m\u00e9 <think>word"
    plain = reference(SPLIT["as trained"], text)
    variants = [name for name in SPLIT if name not in ("as trained", "pieces that look ahead")]
    assert [name for name in variants if reference(SPLIT[name], text) == plain] == []
    assert Backend.from_str(definition_text()).encode(text).ids == plain
