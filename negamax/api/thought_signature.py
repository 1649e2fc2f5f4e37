"""Signatures of thinking: what clients that store thinking blocks expect beside the text, and can bring back instead of it.

The signature of a shown thought is a MAC of its text, the same for the same text on every server of the model. A hidden thought
travels inside its signature, so that the model gets it back with the next request. Nothing here is a secret: whoever has the
text can make its signature, and a thought that somebody else signed is a thought too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import zlib

_SHOWN, _HIDDEN = "nm1s.", "nm1h."  # what a signature begins with
_MAC_BYTES = 24
MAX_THOUGHT_BYTES = 8 * 2**20  # of a hidden thought, unpacked


class ThoughtSigner:
    """Signs the thoughts of one model. Stateless: threads may share it."""

    def __init__(self, model: str) -> None:
        self._key = hashlib.sha256(b"negamax thinking signature of " + model.encode()).digest()

    def signature(self, thought: str, *, is_hidden: bool = False) -> str:
        """The signature of `thought`; one that is hidden is within it."""
        text = thought.encode("utf-8", "surrogatepass")
        packed = zlib.compress(text) if is_hidden else b""
        return (_HIDDEN if is_hidden else _SHOWN) + base64.b64encode(self._mac(text) + packed).decode()

    def hidden_thought(self, signature: str) -> str | None:
        """The thought within `signature`; None if there is none, or if it is not this model's."""
        if not signature.startswith(_HIDDEN):
            return None
        try:
            signed = base64.b64decode(signature.removeprefix(_HIDDEN), validate=True)
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(signed[_MAC_BYTES:], MAX_THOUGHT_BYTES)
        except (binascii.Error, ValueError, zlib.error):
            return None
        is_ours = unpacker.eof and hmac.compare_digest(self._mac(text), signed[:_MAC_BYTES])
        return text.decode("utf-8", "surrogatepass") if is_ours else None

    def _mac(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, "sha256")[:_MAC_BYTES]
