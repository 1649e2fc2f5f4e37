"""Sign thinking blocks. Clients send back a thought with its signature, or only the signature.

The signature of a shown thought is a MAC of its text. Servers of one model compute equal MACs of a
text. The signature of a hidden thought contains the compressed thought, so that the next request
returns the thought to the model. Signatures protect no secret. Anyone can compute the signature of
a text, and the server accepts thoughts with any signature.
"""

import base64
import binascii
import hashlib
import hmac
import zlib

from negamax.base.errors import ContextLengthError

_SHOWN, _HIDDEN = "nm1s.", "nm1h."  # Prefixes of signatures of shown and of hidden thoughts.
_MAC_BYTES = 24
_BYTES_PER_TOKEN = 16  # Limit of a request's decoded thoughts, in bytes per context token.


class ThoughtSigner:
    """Signs the thoughts of one model. Several threads may share a signer."""

    def __init__(self, model: str) -> None:
        self._key = hashlib.sha256(b"negamax thinking signature of " + model.encode()).digest()

    def signature(self, thought: str, *, is_hidden: bool = False) -> str:
        """Sign `thought`. With `is_hidden` the signature contains the thought."""
        text = thought.encode("utf-8", "surrogatepass")
        packed = zlib.compress(text) if is_hidden else b""
        return (_HIDDEN if is_hidden else _SHOWN) + base64.b64encode(
            self._mac(text) + packed
        ).decode()

    def unpack(self, signature: str, *, max_bytes: int) -> tuple[str | None, int]:
        """Return the thought within `signature` and its size, counted up to `max_bytes` + 1.

        The thought is None if the signature has no thought or comes from another model.
        """
        if not signature.startswith(_HIDDEN):
            return None, 0
        unpacker = zlib.decompressobj()
        try:
            signed = base64.b64decode(signature.removeprefix(_HIDDEN), validate=True)
            text = unpacker.decompress(signed[_MAC_BYTES:], max_bytes + 1)
        except (binascii.Error, ValueError, zlib.error):
            return None, 0
        is_ours = unpacker.eof and hmac.compare_digest(self._mac(text), signed[:_MAC_BYTES])
        return text.decode("utf-8", "surrogatepass") if is_ours else None, len(text)

    def _mac(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, "sha256")[:_MAC_BYTES]


class HiddenThoughts:
    """Decodes the hidden thoughts of a request. Only the request's handler changes this object."""

    def __init__(self, signer: ThoughtSigner, *, context_length: int, shows_earlier: bool) -> None:
        """With `shows_earlier` the prompt also shows thoughts from before the last user message."""
        self._signer = signer
        self._context_length = context_length
        self._bytes_left = _BYTES_PER_TOKEN * context_length
        self.shows_earlier = shows_earlier

    def unpack(self, signature: str, *, param: str) -> str | None:
        """Return the thought within `signature`, or None. `param` is the signature's JSON path.

        Raises `ContextLengthError` if all thoughts of the request together are too long.
        """
        thought, num_bytes = self._signer.unpack(signature, max_bytes=self._bytes_left)
        if num_bytes > self._bytes_left:
            raise ContextLengthError(
                f"prompt is too long: its hidden thinking has more than "
                f"{_BYTES_PER_TOKEN * self._context_length} bytes. This model's maximum context "
                f"length is {self._context_length} tokens, output included; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )
        self._bytes_left -= num_bytes
        return thought
