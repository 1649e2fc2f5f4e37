"""Convert text to token ids, and token ids to exact bytes, with a byte-level BPE tokenizer."""

from __future__ import annotations

import functools
import itertools
import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from negamax.base.errors import CheckpointError
from negamax.base.pieces import find_all
from negamax.base.unicode import valid_unicode
from negamax.config.embedded import EMBEDDED
from negamax.config.generation import token_text
from negamax.config.json_file import read_file, read_json_object
from negamax.text.confined import Confined
from negamax.text.escaping import ESCAPE, TokenEscaper, unescape

# Tags in answers. The parser needs these tokens, so they stay in the text even if a checkpoint
# flags them as control tokens.
STRUCTURE_TOKENS = frozenset({
    "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>", "<mm:think>",
    "</mm:think>", "]<]minimax[>[",
})  # fmt: skip

# Normalizers and pre-tokenizers that process each text between added tokens separately.
_LOCAL_NORMALIZERS = frozenset({"Sequence", "NFC", "NFD", "NFKC", "NFKD"})
_LOCAL_PRE_TOKENIZERS = frozenset({"Sequence", "Split", "ByteLevel", "Digits"})
_POST_PROCESSORS_WITHOUT_EFFECT = frozenset({"Sequence", "ByteLevel"})  # ids stay unchanged

# Limits of the number and total characters of added tokens, which are searched in each text.
MAX_ADDED_TOKENS, MAX_ADDED_CHARS = 4096, 65_536

_REMEDY = "download the checkpoint again, or copy the file from the original repository"


class TooManyTokensError(Exception):
    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens or more")
        self.count = count


class Tokenizer:
    """A byte-level BPE tokenizer. Threads may share an object of this class."""

    def __init__(
        self, definition: str, *, config: Mapping[str, Any], source: str = "tokenizer.json"
    ) -> None:
        """`definition` is the text of tokenizer.json, and `source` is the name of this file in
        errors. `config` is the object in tokenizer_config.json. Raises `CheckpointError`.
        """
        try:
            self._backend = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises `Exception` for every defect
            raise CheckpointError(
                f"{source} is not a valid tokenizer: {error}", hint=_REMEDY
            ) from error
        parsed = json.loads(definition)
        _check_byte_level(parsed, source=source)
        self._definition = parsed
        self._confined: Confined | None = None
        self.config = config  # content of tokenizer_config.json
        added, flags = self._backend.get_added_tokens_decoder(), _read_special_flags(config)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(
            token_id
            for token_id, token in added.items()
            if flags.get(token.content, token.special) and token.content not in STRUCTURE_TOKENS
        )
        size = sum(map(len, self._added.values()))
        if len(self._added) > MAX_ADDED_TOKENS or size > MAX_ADDED_CHARS:
            raise CheckpointError(
                f"{source} adds {len(self._added)} tokens with {size} characters in all; at most "
                f"{MAX_ADDED_TOKENS} tokens with {MAX_ADDED_CHARS} characters are allowed",
                hint="use a MiniMax checkpoint",
            )
        self._bytes = {token_id: text.encode() for token_id, text in self._added.items()}
        ids = [*parsed["model"]["vocab"].values(), *self._added]
        self.vocab_size: int = 1 + max(ids, default=-1)
        self.bos_token_id: int | None = self._find_named(config, "bos_token", source=source)
        self.eos_token_id: int | None = self._find_named(config, "eos_token", source=source)

    @classmethod
    def from_folder(cls, path: Path, *, is_trusted: bool | None = None) -> Self:
        """Read a checkpoint's tokenizer. Raises `CheckpointError` with the bad file's name.

        Only a trusted tokenizer encodes in this process. If `is_trusted` is None, the tokenizers of
        built-in models are trusted. Other tokenizers encode in processes with limits (`Confined`).
        """
        file, confined = path / "tokenizer.json", None
        if not (path in EMBEDDED.values() if is_trusted is None else is_trusted):
            confined = Confined("tokenizer", str(path.absolute()), origin=str(file))
            confined.load()
        read_json_object(file)  # raises `CheckpointError` if the file is malformed
        config = read_json_object(path / "tokenizer_config.json")
        tokenizer = cls(read_file(file).decode("utf-8-sig"), config=config, source=str(file))
        tokenizer._confined = confined
        return tokenizer

    @property
    def is_confined(self) -> bool:
        """Whether `encode` waits for another process, so event loops must call it in a thread."""
        return self._confined is not None

    def encode(
        self, text: str, *, allow_special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of `text`, without added start or end tokens.

        The text of an added token (`[e~[`, `<think>`, …) becomes the id of this token, or
        ordinary text with `allow_special=False`. A lone surrogate becomes
        U+FFFD. Raises `TooManyTokensError` above `max_tokens`, and the errors of `Confined.call`.
        """
        if self._confined is not None:
            assert allow_special
            return self.encode_escaped(valid_unicode(text), max_tokens=max_tokens)
        backend = self._backend if allow_special else self._plain_backend
        # `encode_batch_fast` is faster than `encode`, because it computes no offsets
        (encoding,) = backend.encode_batch_fast([valid_unicode(text)], add_special_tokens=False)
        _check_count(len(encoding), max_tokens)  # raise before `encoding.ids` builds a long list
        return encoding.ids

    def encode_escaped(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of an escaped prompt (`text.escaping`). Raises errors of `encode`.

        The text of an added token that contains no escape becomes the id of this token. All other
        text is encoded as ordinary text without its escapes.
        """
        if self._confined is not None:
            return self.encode_parts([text], max_tokens=max_tokens)[0].tolist()
        if ESCAPE not in text:
            return self.encode(text, max_tokens=max_tokens)
        ids: list[int] = []
        end = 0
        for token in find_all(self._added_pattern, text, longest=self.longest_added):
            ids += self._encode_plain(text[end : token.start()], max_tokens)
            _check_count(len(ids), max_tokens)
            ids.append(self._added_ids[token[0]])
            end = token.end()
        return ids + self._encode_plain(text[end:], max_tokens)

    def encode_parts(
        self, parts: Sequence[str], *, max_tokens: int | None = None
    ) -> list[array[int]]:
        """Encode the parts of a prompt, up to `max_tokens` ids in total. Raises like `encode`."""
        if self._confined is not None and parts:
            numbers = array("I", self._confined.call(parts))
            _check_count(len(numbers) - len(parts), max_tokens)
            ends = list(itertools.accumulate(numbers[: len(parts)], initial=len(parts)))
            return [numbers[start:end] for start, end in itertools.pairwise(ends)]
        encoded: list[array[int]] = []
        total = 0
        for part in parts:
            encoded.append(array("I", self.encode_escaped(part, max_tokens=max_tokens)))
            total += len(encoded[-1])
            _check_count(total, max_tokens)
        _check_count(total, max_tokens)
        return encoded

    @functools.cached_property
    def escaper(self) -> TokenEscaper:
        return TokenEscaper(self._added_ids, structure=STRUCTURE_TOKENS)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode `ids` to text without control tokens. Invalid UTF-8 becomes U+FFFD."""
        kept = (i for i in ids if not (skip_special_tokens and i in self._special))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """Return the id of the token whose byte-level spelling is `text`, or None."""
        return self._backend.token_to_id(text)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, or "" for an unused id. Invalid UTF-8 becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token, or b"" for an unused id."""
        known = self._bytes.get(token_id)
        if known is None:
            is_token = 0 <= token_id < self.vocab_size
            spelling = self._backend.id_to_token(token_id) if is_token else None
            known = self._bytes[token_id] = _decode_spelling(spelling or "")
        return known

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` drops this token. `STRUCTURE_TOKENS` are kept."""
        return token_id in self._special

    def is_added(self, token_id: int) -> bool:
        """Return whether this token is an added token: a control token or a tag."""
        return token_id in self._added

    @functools.cached_property
    def cuts(self) -> re.Pattern[str] | None:
        """Pattern of the added tokens at which a text can be split before it is encoded.

        The joined token ids of the parts equal the token ids of the whole text. The pattern is None
        if the tokenizer does not allow texts to be split.
        """
        # The tokenizer searches normalized tokens last, in the text between the other added tokens,
        # so a split at a normalized token could change the result.
        added = self._backend.get_added_tokens_decoder().values()
        found_first = [token for token in added if not token.normalized]
        looks_beyond = any(one.lstrip or one.rstrip or one.single_word for one in found_first)
        # longest first, because the tokenizer prefers the longest match
        texts = sorted({token.content for token in found_first} - {""}, key=len, reverse=True)
        if not texts or looks_beyond or not _works_locally(self._definition):
            return None
        return re.compile("|".join(map(re.escape, texts)))

    def _encode_plain(self, text: str, max_tokens: int | None) -> list[int]:
        if not text:
            return []
        return self.encode(unescape(text), allow_special=False, max_tokens=max_tokens)

    @functools.cached_property
    def longest_added(self) -> int:
        return max(map(len, self._added_ids), default=1)

    @functools.cached_property
    def _added_ids(self) -> dict[str, int]:
        return {text: token_id for token_id, text in self._added.items() if text}

    @functools.cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        """Pattern of all added tokens, longest first, or a pattern that matches nothing."""
        longest_first = sorted(self._added_ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A BPE tokenizer without added tokens, which shares the vocabulary of `_backend`."""
        plain = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer
        return plain

    def _find_named(self, config: Mapping[str, Any], field: str, *, source: str) -> int | None:
        value = config.get(field)
        if value is None:
            return None
        text = token_text(value)
        token_id = None if text is None else self.token_id(text)
        if token_id is None:
            shown = value if text is None else text
            raise CheckpointError(
                f"{field} in tokenizer_config.json is {shown!r}, which is not a token of {source}",
                hint=_REMEDY,
            )
        return token_id


def _check_count(count: int, max_tokens: int | None) -> None:
    if max_tokens is not None and count > max_tokens:
        raise TooManyTokensError(count)


def _make_byte_alphabet() -> dict[str, int]:
    """Map each character of byte-level spellings to the byte that it represents."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    moved = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved


_BYTE_OF = _make_byte_alphabet()


def _decode_spelling(spelling: str) -> bytes:
    """Return the bytes of a byte-level spelling, or its UTF-8 if a character represents no byte."""
    try:
        return bytes([_BYTE_OF[char] for char in spelling])
    except KeyError:
        return spelling.encode()


def _check_byte_level(definition: Mapping[str, Any], *, source: str) -> None:
    model = definition.get("model")
    decoder = definition.get("decoder") or {}
    kinds = [part.get("type") for part in decoder.get("decoders", [decoder])]
    if not isinstance(model, Mapping) or model.get("type") != "BPE" or kinds != ["ByteLevel"]:
        found = f"{model.get('type') if isinstance(model, Mapping) else None} with decoder {kinds}"
        raise CheckpointError(
            f"{source} is a {found}; only byte-level BPE is supported",
            hint="use a MiniMax checkpoint",
        )


def _works_locally(definition: Mapping[str, Any]) -> bool:
    """Return whether text before an added token cannot influence tokens after the added token."""
    changes_all = definition.get("truncation") or definition.get("padding")
    if changes_all or definition["model"].get("dropout"):
        return False
    return (
        _list_kinds(definition.get("normalizer")) <= _LOCAL_NORMALIZERS
        and _list_kinds(definition.get("pre_tokenizer")) <= _LOCAL_PRE_TOKENIZERS
        and _list_kinds(definition.get("post_processor")) <= _POST_PROCESSORS_WITHOUT_EFFECT
    )


def _list_kinds(part: Mapping[str, Any] | None) -> set[str]:
    """Return the type of a normalizer, pre-tokenizer or post-processor, and of all its parts."""
    if not part:
        return set()
    fields = ("normalizers", "pretokenizers", "processors")
    inner = (_list_kinds(each) for field in fields for each in part.get(field, ()))
    return {str(part.get("type"))}.union(*inner)


def _read_special_flags(config: Mapping[str, Any]) -> dict[str, bool]:
    """Return the `special` flags in tokenizer_config.json, which override tokenizer.json."""
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, Mapping):
        return {}
    tokens = [one for one in entries.values() if isinstance(one, Mapping) and "special" in one]
    return {str(token.get("content")): token["special"] is True for token in tokens}
