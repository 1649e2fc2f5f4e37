"""Cache token ids, so that only the new part of a conversation is tokenized.

The prompt of a turn repeats all earlier turns. No token extends across the start or end of a
control token. Token ids of the parts between control tokens can therefore be cached separately.
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

KEPT_CHARS = 256  # prompt parts of more than this number of characters are cached
CACHE_BYTES = 64 << 20

_RUN_CHARS = 1024  # minimum characters of a part that joins several short texts
_DIGEST_BYTES = 32
_ENTRY_BYTES = 512  # assumed bytes of a cache entry, in addition to its token ids


class EncodingCache:
    """Encodes texts and caches the ids of long parts. This class is thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int = CACHE_BYTES) -> None:
        """`max_bytes` limits the memory of all entries."""
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()  # digest of text -> token ids
        self._lock = threading.Lock()
        self.num_bytes = 0

    def encode(
        self, text: str, *, salt: str = "", max_tokens: int | None = None, is_escaped: bool = False
    ) -> list[int]:
        """Return `tokenizer.encode(text)`, or `tokenizer.encode_escaped(text)` with `is_escaped`.

        Texts with different `salt` share no entries, so the time of a call reveals nothing about
        texts with another `salt`.
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
            # No lock is held here, so two threads may encode the same part.
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
        """Split `text` at control tokens.

        A long text between two control tokens is one part. Consecutive short texts and the control
        tokens between them are one part. If a longer text begins with `text`, both texts have the
        same parts, except for the last part of `text`.
        """
        assert self._tokenizer.cuts is not None
        # `start` is the start of the current part; `stretch` is the end of the last control token.
        start = stretch = 0
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
        """Add an entry of up to `max_bytes` / 2, and evict the least recently used entries."""
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
