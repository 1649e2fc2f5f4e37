"""A text that begins as earlier ones did is tokenised only where it is new.

A turn of a conversation repeats all turns before it. Rendered, these are parts between control
tokens, which no other token crosses, so the tokens of each part can be kept by themselves.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator

from negamax.base.pieces import find_all
from negamax.base.unicode import valid_unicode
from negamax.text.tokenizer import Tokenizer, TooManyTokensError

KEPT_CHARS = 256  # parts of more characters than this are kept
CACHE_BYTES = 64 << 20

_RUN_CHARS = 1024  # short stretches share a part until it has this many characters
_DIGEST_BYTES = 32
_ENTRY_BYTES = 512  # what an entry takes beside its token ids, rounded up


class EncodingCache:
    """Encodes as `tokenizer` does, and keeps the tokens of the latest used long parts by the digest
    of their text, not by the text. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int = CACHE_BYTES) -> None:
        """`max_bytes` bounds what is kept: digests, token ids, and Python's objects around them."""
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()  # the latest use last
        self._lock = threading.Lock()
        self.num_bytes = 0

    def encode(
        self, text: str, *, salt: str = "", max_tokens: int | None = None, is_escaped: bool = False
    ) -> list[int]:
        """The same as `tokenizer.encode(text)`; with `is_escaped`, for a prompt that is escaped
        (`text.escaping`), as `tokenizer.encode_escaped(text)`.

        Only texts with the same `salt` share what is kept, so that the time that this takes says
        nothing about the texts of others.
        """
        if not is_escaped:
            text = valid_unicode(text)
        if self._tokenizer.cuts is None:
            return self._tokenizer.encode_escaped(text, max_tokens=max_tokens)
        key = hashlib.blake2b(
            salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES
        ).digest()
        ids: list[int] = []
        for part in self._parts(text):
            is_long = len(part) > KEPT_CHARS
            ids += (
                self._kept(part, key, max_tokens)
                if is_long
                else self._tokenizer.encode_escaped(part)
            )
            if max_tokens is not None and len(ids) > max_tokens:
                raise TooManyTokensError(len(ids))
        return ids

    def _parts(self, text: str) -> Iterator[str]:
        """`text` in parts: long stretches without control tokens, and between them control tokens
        with short stretches.

        What follows has no influence on where a part ends, so a longer text begins with the same
        parts.
        """
        assert self._tokenizer.cuts is not None
        start = stretch = 0  # of the part, and of the stretch since the last control token
        for token in find_all(self._tokenizer.cuts, text, longest=self._tokenizer.longest_added):
            if token.start() - stretch > KEPT_CHARS:
                if start < stretch:
                    yield text[start:stretch]
                yield text[stretch : token.start()]
                start = token.start()
            elif token.start() - start > _RUN_CHARS:
                yield text[start : token.start()]
                start = token.start()
            stretch = token.end()
        if start < stretch:
            yield text[start:stretch]
        if stretch < len(text):
            yield text[stretch:]

    def _kept(self, part: str, key: bytes, max_tokens: int | None) -> list[int]:
        """The tokens of a part, kept from now on."""
        digest = hashlib.blake2b(
            part.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, key=key
        ).digest()
        with self._lock:
            known = self._entries.get(digest)
            if known is not None:
                self._entries.move_to_end(digest)
        if known is not None:
            return known.tolist()
        # without the lock: at worst two threads do the same
        ids = self._tokenizer.encode_escaped(part, max_tokens=max_tokens)
        self._keep(digest, array("I", ids))
        return ids

    def _keep(self, digest: bytes, ids: array[int]) -> None:
        """Add an entry and drop the oldest ones that no longer fit; what would take more than half
        of the room is not kept.
        """
        if _num_bytes(ids) > self._max_bytes // 2:
            return
        with self._lock:
            if digest in self._entries:
                return
            self._entries[digest] = ids
            self.num_bytes += _num_bytes(ids)
            while self.num_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.num_bytes -= _num_bytes(oldest)


def _num_bytes(ids: array[int]) -> int:
    return _ENTRY_BYTES + ids.itemsize * len(ids)
