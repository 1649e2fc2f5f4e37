"""Hash the prompts of requests, and build request bodies for prefill/decode pairs."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import urlsplit

import msgspec

from negamax.api.schemas.answers import PromptBlocks
from negamax.engine.client.placement import MAX_BLOCKS

CHUNK_BYTES = 256  # Size of a hashed chunk of a prompt. A hash also covers all earlier chunks.
BYTES_PER_TOKEN = 4  # Approximate size of a token of English text or code.
CHUNK_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN
# Prompt fields in the order of chat templates, so that new messages extend the text.
_PROMPT_FIELDS = [
    "model",
    "cache_salt",
    "tools",
    "system",
    "instructions",
    "previous_response_id",
    "prompt",
    "text",
    "input",
    "input_ids",
    "messages",
]
# Clients add this mark to the latest message. The mark is not part of the prompt.
_CACHE_MARK = re.compile(rb'(?:,\s?)?"cache_control"\s?:\s?(?:\{[^{}]*\}|null)')
_TAG_BYTES = 6  # Size of a hash. A float64 represents integers of 6 bytes exactly.
_ASK_PREFILL = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
# Fields that only affect the answer, and that are not sent to a prefilling server.
_OF_ANSWERS = frozenset(
    [
        "best_of",
        "echo",
        "logprobs",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "prompt_logprobs",
        "stream_options",
        "top_logprobs",
    ]
)
PARAMS, ROOM = "kv_transfer_params", "bootstrap_room"
_ROOM_BITS = 62  # Servers add each prompt's index to the room number, which may have 63 bits.

Fields = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    tags: Sequence[int] = ()  # Hashes of the prompt's full chunks.
    num_tokens: int = 0  # Approximate number of prompt tokens.
    fields: Fields | None = None  # Fields of the body, or None if the body is not an object.
    blocks: PromptBlocks | None = None  # None if no server was asked for the prompt's blocks.


def read_prompt(body: bytes, *, sender: bytes) -> RoutedPrompt:
    """Hash the prompt of a request. Equal prompts of different senders get different hashes."""
    try:
        fields = msgspec.json.decode(body, type=Fields)
    except (msgspec.MsgspecError, RecursionError):
        return RoutedPrompt()  # The server will refuse the body.
    # Omit each field's last bracket or quote, so that `text` is a prefix of the next turn's text.
    parts = [bytes(fields[name])[:-1] for name in _PROMPT_FIELDS if name in fields]
    text = _CACHE_MARK.sub(b"", b"\n".join(parts))
    num_chunks = min(len(text) // CHUNK_BYTES, MAX_BLOCKS)  # a server has MAX_BLOCKS hashes at most
    state = blake2b(sender, digest_size=_TAG_BYTES)
    tags = []
    for start in range(0, num_chunks * CHUNK_BYTES, CHUNK_BYTES):
        state.update(text[start : start + CHUNK_BYTES])
        tags.append(int.from_bytes(state.digest(), "big"))
    return RoutedPrompt(tags, len(text) // BYTES_PER_TOKEN, fields)


def build_prefill_body(fields: Fields) -> bytes:
    """Return the body that asks a prefilling server to keep the prompt."""
    kept = {name: raw for name, raw in fields.items() if name not in _OF_ANSWERS}
    once = {"max_tokens": msgspec.Raw(b"1"), "stream": msgspec.Raw(b"false")}
    return msgspec.json.encode({**kept, **once, PARAMS: _ASK_PREFILL})


def build_room_body(fields: Fields, url: str, ports: Mapping[str, int | None]) -> bytes:
    """Return the request body that both servers get: the prefilling server `url` and the decoding
    server. The body contains the address at which the decoding server finds the prompt.
    """
    room, host = secrets.randbits(_ROOM_BITS), urlsplit(url).hostname
    address = {"bootstrap_host": host, "bootstrap_port": ports[url], ROOM: room}
    return msgspec.json.encode({**fields, **address})


def build_decode_body(fields: Fields, answer: bytes) -> bytes | None:
    """Return a body with the `kv_transfer_params` of `answer`, or None if `answer` has none."""
    try:
        params = msgspec.json.decode(answer, type=Fields).get(PARAMS)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if params is None or bytes(params) == b"null":
        return None
    return msgspec.json.encode({**fields, PARAMS: params})
