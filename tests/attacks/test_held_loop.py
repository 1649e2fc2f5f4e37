"""Reading and rendering the largest bodies does not block the event loop.

The tests measure this process's CPU time between two turns of the loop, independent of other load.
"""

import asyncio
import gc
import json
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

import negamax
from negamax.api.common.conversation import Conversation, PromptBuilder
from negamax.api.common.thought_signature import HiddenThoughts, ThoughtSigner
from negamax.api.dialects.chat.schema import ChatRequest
from negamax.api.dialects.messages.history import build_history
from negamax.api.http.request_body import BodyLimits, read_request
from negamax.base.errors import InvalidRequestError
from negamax.models.chat_format import ChatFormat
from negamax.text.chat_template import ChatTemplate
from negamax.text.tokenizer import Tokenizer
from tests.speed import is_quick, slowness

MiB = 2**20
WINDOW = 196_608  # tokens, as of MiniMax-M2
LIMITS = BodyLimits.of(max_bytes=32 * MiB, max_model_len=WINDOW)
PART = 2**16  # bytes that arrive together
HELD = 0.1  # CPU seconds on a core of 2025: twice the need
NANO = Path(negamax.__file__).parent / "assets" / "nano"
UNITS = {  # of the JSON text of a message
    "words": "word ",
    "spaces": " ",
    "control tokens": "]~b]",
    "tags": "<think>",
    "line breaks": "\\n",
    "quotes": '\\"',
    "escaped": "\\u4e2d",
    "pairs": "\\ud83d\\ude00",
    "Chinese": "中",
    "emoji": "😀",
}


def prompt_builder() -> PromptBuilder:
    """Build it as a server does, for nano with M2's context length."""
    tokenizer = Tokenizer.from_folder(NANO)
    chat_format = ChatFormat.of_model(
        "MiniMaxM2ForCausalLM", tokenizer=tokenizer, template=ChatTemplate.from_folder(NANO)
    )
    return PromptBuilder(tokenizer, chat_format, max_model_len=WINDOW)


BUILDER = prompt_builder()


def question(content: str, **fields: Any) -> bytes:
    others = "".join(f'"{name}": {json.dumps(value)}, ' for name, value in fields.items())
    return f'{{{others}"messages": [{{"role": "user", "content": "{content}"}}]}}'.encode()


def repeated(unit: str, num_bytes: int) -> str:
    return unit * (num_bytes // len(unit.encode()))


async def held(work: Awaitable[object]) -> float:
    """Return the longest CPU time for which `work` or its thread blocks the loop."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        last = time.process_time()
        while True:
            await asyncio.sleep(0.0005)
            now = time.process_time()
            longest, last = max(longest, now - last), now

    gc.collect()
    # Collections visit only objects of the work, not of earlier tests. Those stay frozen, because
    # `unfreeze` would make later collections visit all imported modules.
    gc.freeze()
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.005)
    try:
        await work
    finally:
        await asyncio.sleep(0.005)
        ticking.cancel()
    return longest


async def rendered(body: bytes) -> str:
    start = 0

    async def receive() -> dict[str, Any]:
        nonlocal start
        await asyncio.sleep(0.0001)  # until the body has arrived
        start, end = start + PART, start + PART
        return {
            "type": "http.request",
            "body": body[end - PART : end],
            "more_body": end < len(body),
        }

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    try:
        chat, num_bytes = await read_request(request, ChatRequest, LIMITS)
        assert chat.grammar is None
        prompt = await BUILDER.chat(Conversation(messages=chat.messages), num_bytes=num_bytes)
    except InvalidRequestError as error:
        return error.code or ""
    return prompt.text


def check(body: bytes) -> None:
    """It is refused and blocks no other request. Retry: other load makes it slower."""
    outcome = ""

    async def run() -> float:
        async def work() -> None:
            nonlocal outcome
            outcome = await rendered(body)

        return await held(work())

    assert any(asyncio.run(run()) < HELD * slowness() for _ in range(5))
    assert outcome == "context_length_exceeded"


@pytest.mark.parametrize("unit", UNITS)
def test_a_long_text_does_not_block_the_loop(unit: str) -> None:
    check(question(repeated(UNITS[unit], 20 * MiB)))


@pytest.mark.full
@pytest.mark.parametrize("unit", UNITS)
def test_a_text_of_the_largest_size_does_not_block_the_loop(unit: str) -> None:
    check(question(repeated(UNITS[unit], 32 * MiB - 100)))


def test_one_wide_character_does_not_make_a_long_text_four_times_as_long() -> None:
    check(question(repeated("word ", 20 * MiB) + "😀"))


def test_a_long_text_with_half_a_character_does_not_block_the_loop() -> None:
    check(question(repeated("word ", 20 * MiB) + "\\ud83d"))


def test_many_texts_do_not_block_the_loop() -> None:
    message = {"role": "user", "content": repeated("]~b]", 4000)}
    for count in (1000, 8000):  # the largest admissible size, and a larger one
        check(json.dumps({"messages": [message] * count}).encode())


def test_the_longest_text_of_control_tokens_does_not_block_the_loop() -> None:
    check(question(repeated("]~b]", LIMITS.chars - 100) + "😀"))


def test_a_long_image_does_not_count_as_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (20 * MiB)}}
    parts = [image, {"type": "text", "text": "What is this?"}]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    prompt = asyncio.run(rendered(body))
    assert "What is this?" in prompt and len(prompt) < 1000


@pytest.mark.parametrize("unit", UNITS.values())
@pytest.mark.parametrize("shift", range(12))
def test_a_text_read_in_pieces_is_the_text(unit: str, shift: int) -> None:
    content = "x" * shift + repeated(unit.replace("]~b]", "\\\\\\\\"), 600_000)
    limits = BodyLimits.of(max_bytes=MiB, max_model_len=1)
    body = question(content)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    request = Request(
        {"type": "http", "headers": [(b"content-type", b"application/json")]}, receive
    )
    chat, _ = asyncio.run(read_request(request, ChatRequest, limits))
    assert chat.messages == json.loads(body)["messages"]


def test_blocks_of_an_answer_are_joined_once() -> None:
    blocks = [{"type": "text", "text": "a" * 500}] * 40_000
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": blocks}]
    thoughts = HiddenThoughts(ThoughtSigner("nano"), context_length=WINDOW, shows_earlier=False)
    assert is_quick(lambda: build_history(messages, system=None, thoughts=thoughts), 2.0)
    history = build_history(messages, system=None, thoughts=thoughts)
    assert history.messages[-1]["content"] == "a" * 500 * 40_000
