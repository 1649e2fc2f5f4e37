"""Check that reading and rendering the largest bodies does not block the event loop.

The tests measure the CPU time of this process between two turns of the loop, which does not depend
on other load.
"""

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

import negamax
from negamax.api.common.conversation import Conversation, PromptBuilder
from negamax.api.common.thought_signature import HiddenThoughts, ThoughtSigner
from negamax.api.dialects.chat.schema import ChatRequest
from negamax.api.dialects.messages.history import build_history
from negamax.api.http.body_budget import BodyBudget, BodyShare
from negamax.api.http.request_body import BodyLimits, read_request
from negamax.base.errors import InvalidRequestError
from negamax.models.chat_format import ChatFormat
from negamax.text.chat_template import ChatTemplate
from negamax.text.tokenizer import Tokenizer
from tests.speed import is_quick, slowness

MiB = 2**20
WINDOW = 196_608  # tokens, the context length of MiniMax-M2
LIMITS = BodyLimits.of(max_bytes=32 * MiB, max_model_len=WINDOW)
PART = 2**16  # bytes that arrive together
HELD = 0.1  # CPU seconds on a core of 2025, twice as much as needed
NANO = Path(negamax.__file__).parent / "assets" / "nano"
UNITS = {  # units that the JSON text of a message repeats
    "words": "word ", "spaces": " ", "control tokens": "]~b]", "tags": "<think>",
    "line breaks": "\\n", "quotes": '\\"', "escaped": "\\u4e2d", "pairs": "\\ud83d\\ude00",
    "Chinese": "中", "emoji": "😀",
}  # fmt: skip


def prompt_builder() -> PromptBuilder:
    """Build prompts as a server does, for nano with M2's context length."""
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
    # Collections visit only objects of this work. Objects of earlier tests stay frozen, because
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


def request_with(parts: Sequence[bytes]) -> Request:
    waiting = list(parts)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.0001)  # The body needs time to arrive.
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "headers": headers}
    BodyShare(BodyBudget(0), scope)
    return Request(scope, receive)


async def rendered(body: bytes) -> str:
    request = request_with([body[start : start + PART] for start in range(0, len(body), PART)])
    try:
        chat, num_bytes = await read_request(request, ChatRequest, LIMITS)
        assert chat.grammar is None
        prompt = await BUILDER.chat(Conversation(messages=chat.messages), num_bytes=num_bytes)
    except InvalidRequestError as error:
        return error.code or ""
    return prompt.text


def check(body: bytes) -> None:
    """Check that `body` is refused and blocks no other request. Retry on a busy machine."""
    outcome = ""

    async def run() -> float:
        async def work() -> None:
            nonlocal outcome
            outcome = await rendered(body)

        return await held(work())

    assert any(asyncio.run(run()) < HELD * slowness() for _ in range(5))
    assert outcome == "context_length_exceeded"


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("unit", "num_bytes", "end"),
    [
        full("pairs", 20 * MiB, ""),
        *(full(unit, 20 * MiB, "") for unit in UNITS if unit != "pairs"),
        *(full(unit, 32 * MiB - 100, "") for unit in UNITS),
        full("words", 20 * MiB, "😀"),  # The emoji makes all characters wide.
        ("words", 20 * MiB, "\\ud83d"),  # The escape is half a character.
        ("control tokens", LIMITS.chars - 100, "😀"),  # This is the longest text that is tokenized.
    ],
)
def test_long_text_does_not_block_the_loop(unit: str, num_bytes: int, end: str) -> None:
    check(question(repeated(UNITS[unit], num_bytes) + end))


@pytest.mark.parametrize("count", [full(1000), 8000])  # the largest admissible size, and more
def test_many_texts_do_not_block_the_loop(count: int) -> None:
    message = {"role": "user", "content": repeated("]~b]", 4000)}
    check(json.dumps({"messages": [message] * count}).encode())


def test_a_long_image_does_not_count_as_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (20 * MiB)}}
    parts = [image, {"type": "text", "text": "What is this?"}]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    prompt = asyncio.run(rendered(body))
    assert "What is this?" in prompt and len(prompt) < 1000


@pytest.mark.parametrize("unit", UNITS.values())
def test_text_read_in_pieces_is_the_text(unit: str) -> None:
    limits = BodyLimits.of(max_bytes=MiB, max_model_len=1)
    for shift in range(12):
        content = "x" * shift + repeated(unit.replace("]~b]", "\\\\\\\\"), 600_000)
        chat, _ = asyncio.run(read_request(request_with([question(content)]), ChatRequest, limits))
        assert chat.messages == json.loads(question(content))["messages"]


def test_blocks_of_an_answer_are_joined_once() -> None:
    blocks = [{"type": "text", "text": "a" * 500}] * 40_000
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": blocks}]
    thoughts = HiddenThoughts(ThoughtSigner("nano"), context_length=WINDOW, shows_earlier=False)
    assert is_quick(lambda: build_history(messages, system=None, thoughts=thoughts), 2.0)
    history = build_history(messages, system=None, thoughts=thoughts)
    assert history.messages[-1]["content"] == "a" * 500 * 40_000
