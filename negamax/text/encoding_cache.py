"""Caches token ids, so that only the new part of a conversation is tokenized.

A turn repeats all turns before it. No token crosses a control token, so the token ids of the parts
between control tokens can be cached separately.
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

KEPT_CHARS = 256  # longer parts are cached
CACHE_BYTES = 64 << 20

_RUN_CHARS = 1024  # short stretches share a part up to this many characters
_DIGEST_BYTES = 32
_ENTRY_BYTES = 512  # of an entry besides its token ids, rounded up


class EncodingCache:
    """Encodes by `tokenizer`, and caches the latest used long parts. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int = CACHE_BYTES) -> None:
        """`max_bytes` bounds digests, token ids and Python's objects around them."""
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self.num_bytes = 0

    def encode(
        self, text: str, *, salt: str = "", max_tokens: int | None = None, is_escaped: bool = False
    ) -> list[int]:
        """Return `tokenizer.encode(text)`, or `tokenizer.encode_escaped(text)` with `is_escaped`.

        Only texts with the same `salt` share entries, so that timing reveals nothing about others'
        texts.
        """
        if not is_escaped:
            text = valid_unicode(text)
        if self._tokenizer.cuts is None:
            return self._tokenizer.encode_escaped(text, max_tokens=max_tokens)
        key = hashlib.blake2b(
            salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES
        ).digest()
        parts = list(self._split(text))
        digests = [_digest(part, key) if len(part) > KEPT_CHARS else None for part in parts]
        found = [None if digest is None else self._find(digest) for digest in digests]
        num_known = sum(len(ids or ()) for ids in found)
        unknown = [part for part, ids in zip(parts, found, strict=True) if ids is None]
        left = None if max_tokens is None else max_tokens - num_known
        try:
            # without the lock: at worst two threads encode the same part
            encoded = iter(self._tokenizer.encode_parts(unknown, max_tokens=left))
        except TooManyTokensError as error:
            raise TooManyTokensError(num_known + error.count) from None
        ids: list[int] = []
        for digest, known in zip(digests, found, strict=True):
            part_ids = next(encoded) if known is None else known
            if digest is not None and known is None:
                self._keep(digest, part_ids)
            ids += part_ids
        return ids

    def _split(self, text: str) -> Iterator[str]:
        """Yield long stretches without control tokens, and groups of short ones with control
        tokens.

        Later text does not move the end of a part, so a longer text begins with the same parts.
        """
        assert self._tokenizer.cuts is not None
        start = stretch = 0  # starts of the part, and of the stretch since the last control token
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

    def _find(self, digest: bytes) -> array[int] | None:
        with self._lock:
            known = self._entries.get(digest)
            if known is not None:
                self._entries.move_to_end(digest)
        return known

    def _keep(self, digest: bytes, ids: array[int]) -> None:
        """Add an entry and evict the oldest. Entries above half of the limit are not cached."""
        if _count_bytes(ids) > self._max_bytes // 2:
            return
        with self._lock:
            if digest in self._entries:
                return
            self._entries[digest] = ids
            self.num_bytes += _count_bytes(ids)
            while self.num_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.num_bytes -= _count_bytes(oldest)


def _digest(part: str, key: bytes) -> bytes:
    data = part.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=key).digest()


def _count_bytes(ids: array[int]) -> int:
    return _ENTRY_BYTES + ids.itemsize * len(ids)
