"""The checkpoint's byte-level BPE tokenizer: text to token ids, and token ids back to exact
bytes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from negamax.base.errors import CheckpointError
from negamax.base.pieces import find_all
from negamax.base.unicode import valid_unicode
from negamax.config.json_file import read_json_object
from negamax.text.escaping import ESCAPE, TokenEscaper, unescaped

# Tokens that carry the structure of an answer. They stay in the text even where a re-saved
# checkpoint flags them as control tokens: without them reasoning cannot be separated from content.
STRUCTURE_TOKENS = frozenset(
    {
        "<think>",
        "</think>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<mm:think>",
        "</mm:think>",
        "]<]minimax[>[",
    }
)

# Parts of a tokenizer that work on each piece of a text between added tokens alone.
_LOCAL_NORMALIZERS = frozenset({"Sequence", "NFC", "NFD", "NFKC", "NFKD"})
_LOCAL_PRE_TOKENIZERS = frozenset({"Sequence", "Split", "ByteLevel", "Digits"})
_POST_PROCESSORS_WITHOUT_EFFECT = frozenset({"Sequence", "ByteLevel"})  # on ids

_REMEDY = "download the checkpoint again, or copy the file from the original repository"


class TooManyTokensError(Exception):
    """A text has more tokens than it may have."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens or more")
        self.count = count


class Tokenizer:
    """A byte-level BPE tokenizer read from `tokenizer.json` and `tokenizer_config.json`.

    Build it with `from_folder`. Reads only after construction, so threads may share it.
    """

    def __init__(
        self, definition: str, *, config: Mapping[str, Any], source: str = "tokenizer.json"
    ) -> None:
        """`definition` is the text of tokenizer.json, `config` the content of
        tokenizer_config.json; `source` is for errors.
        """
        try:
            self._backend = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception for every defect
            raise CheckpointError(
                f"{source} is no valid tokenizer: {error}", hint=_REMEDY
            ) from error
        parsed = json.loads(definition)
        _check_byte_level(parsed, source=source)
        self._definition = parsed
        self.config = config  # the content of tokenizer_config.json
        self._added: dict[int, str] = {}
        special: set[int] = set()
        config_flags = _config_special_flags(config)
        for token_id, token in self._backend.get_added_tokens_decoder().items():
            self._added[token_id] = token.content
            if (
                config_flags.get(token.content, token.special)
                and token.content not in STRUCTURE_TOKENS
            ):
                special.add(token_id)
        self._special = frozenset(special)
        self._bytes: dict[int, bytes] = {
            token_id: text.encode() for token_id, text in self._added.items()
        }
        self.vocab_size: int = 1 + max(
            [*parsed["model"]["vocab"].values(), *self._added], default=-1
        )
        self.bos_token_id: int | None = self._named_token(config, "bos_token", source=source)
        self.eos_token_id: int | None = self._named_token(config, "eos_token", source=source)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read the tokenizer of the checkpoint folder `path`.

        Errors: `CheckpointError` naming the file that is missing or broken.
        """
        file = path / "tokenizer.json"
        read_json_object(file)  # checks it
        config = read_json_object(path / "tokenizer_config.json")
        return cls(file.read_text(encoding="utf-8"), config=config, source=str(file))

    def encode(
        self, text: str, *, allow_special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of `text`; nothing is put before or after it. Errors: `TooManyTokensError`.

        Texts of added tokens (`[e~[`, `<think>`, …) become those tokens; with `allow_special=False`
        they are ordinary text. A lone surrogate counts as U+FFFD.
        """
        backend = self._backend if allow_special else self._plain_backend
        # fast: no offsets
        (encoding,) = backend.encode_batch_fast([valid_unicode(text)], add_special_tokens=False)
        _check_count(len(encoding), max_tokens)  # a list of millions of ids is not even made
        return encoding.ids

    def encode_escaped(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt whose texts were escaped (`text.escaping`): added tokens that are
        whole become those tokens, all else is ordinary text, without the escapes. Errors:
        `TooManyTokensError`."""
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

    @functools.cached_property
    def escaper(self) -> TokenEscaper:
        """Keeps texts of a conversation from becoming added tokens of this tokenizer."""
        return TokenEscaper(self._added_ids, structure=STRUCTURE_TOKENS)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. Control tokens are left out by
        default.
        """
        kept = (i for i in ids if not (skip_special_tokens and i in self._special))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """Id of the token spelled `text` in the vocabulary (byte-level spelling for ordinary
        tokens), or None.
        """
        return self._backend.token_to_id(text)

    def token_text(self, token_id: int) -> str:
        """Text of one token; its bytes that are no UTF-8 become U+FFFD. An id without a token has
        no text.
        """
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token (empty for an id without a token, such as the padding of the
        vocabulary).
        """
        known = self._bytes.get(token_id)
        if known is None:
            spelling = (
                self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            )
            known = self._bytes[token_id] = _spelled_bytes(spelling or "")
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether this is a control token, which `skip_special_tokens` drops. `<think>` and the
        call tags are not.
        """
        return token_id in self._special

    def is_added(self, token_id: int) -> bool:
        """Whether this token was added beside the BPE vocabulary: control tokens and the visible
        tags.
        """
        return token_id in self._added

    @functools.cached_property
    def cuts(self) -> re.Pattern[str] | None:
        """Finds the added tokens at whose ends a text may be cut: the tokens of the parts, joined,
        are those of the whole.

        None if there are none, or if this tokenizer looks beyond them.
        """
        # Tokens that are found after normalisation are looked for between those found before it, so
        # they are no ends.
        found_first = [
            token
            for token in self._backend.get_added_tokens_decoder().values()
            if not token.normalized
        ]
        looks_beyond = any(
            token.lstrip or token.rstrip or token.single_word for token in found_first
        )
        # the longest one counts
        texts = sorted({token.content for token in found_first} - {""}, key=len, reverse=True)
        if not texts or looks_beyond or not _works_locally(self._definition):
            return None
        return re.compile("|".join(map(re.escape, texts)))

    def _encode_plain(self, text: str, max_tokens: int | None) -> list[int]:
        return (
            self.encode(unescaped(text), allow_special=False, max_tokens=max_tokens) if text else []
        )

    @functools.cached_property
    def longest_added(self) -> int:
        """Characters of the longest added token."""
        return max(map(len, self._added_ids), default=1)

    @functools.cached_property
    def _added_ids(self) -> dict[str, int]:
        return {text: token_id for token_id, text in self._added.items() if text}

    @functools.cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        """Finds added tokens, of several that begin at one place the longest; none of them is found
        where there are none.
        """
        return re.compile(
            "|".join(map(re.escape, sorted(self._added_ids, key=len, reverse=True))) or "(?!)"
        )

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same BPE without any added token. Both share the vocabulary, so this one costs next
        to nothing.
        """
        plain = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer
        return plain

    def _named_token(self, config: Mapping[str, Any], field: str, *, source: str) -> int | None:
        value = config.get(field)
        if value is None:
            return None
        text = token_text(value)
        token_id = None if text is None else self.token_id(text)
        if token_id is None:
            shown = value if text is None else text
            raise CheckpointError(
                f"tokenizer_config.json names {field} {shown!r}, which {source} does not have",
                hint=_REMEDY,
            )
        return token_id


def _check_count(count: int, max_tokens: int | None) -> None:
    if max_tokens is not None and count > max_tokens:
        raise TooManyTokensError(count)


def token_text(value: Any) -> str | None:
    """The text of a token as tokenizer_config.json names it: by itself, or as the content of an
    object.
    """
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character of the byte-level spelling: printable Latin-1 stands for itself, the
    rest from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def _spelled_bytes(spelling: str) -> bytes:
    """Bytes behind a byte-level spelling; a spelling with a character outside the alphabet stands
    for itself.
    """
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
            f"{source} holds {found}; only byte-level BPE is supported",
            hint="use a MiniMax checkpoint",
        )


def _works_locally(definition: Mapping[str, Any]) -> bool:
    """Whether what stands on one side of an added token has no influence on the tokens of the
    other, nor chance on any.
    """
    if (
        definition.get("truncation")
        or definition.get("padding")
        or definition["model"].get("dropout")
    ):
        return False
    return (
        _kinds(definition.get("normalizer")) <= _LOCAL_NORMALIZERS
        and _kinds(definition.get("pre_tokenizer")) <= _LOCAL_PRE_TOKENIZERS
        and _kinds(definition.get("post_processor")) <= _POST_PROCESSORS_WITHOUT_EFFECT
    )


def _kinds(part: Mapping[str, Any] | None) -> set[str]:
    """The types of a part of the definition and of the parts in it."""

    def walk(part: Mapping[str, Any]) -> Iterator[str]:
        yield str(part.get("type"))
        for field in ("normalizers", "pretokenizers", "processors"):
            for inner in part.get(field, ()):
                yield from walk(inner)

    return set(walk(part)) if part else set()


def _config_special_flags(config: Mapping[str, Any]) -> dict[str, bool]:
    """The `special` flag that tokenizer_config.json gives each added token, by text; it overrules
    tokenizer.json.
    """
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, Mapping):
        return {}
    tokens = [token for token in entries.values() if isinstance(token, Mapping)]
    return {
        str(token.get("content")): token["special"] is True
        for token in tokens
        if "special" in token
    }
