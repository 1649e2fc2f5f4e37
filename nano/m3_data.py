"""The mixture of nano-m3: nano's conversations in M3's chat format, and long contexts.

    python -m nano.m3_data --show 5
    python -m nano.m3_data --out DIR --workers 14    keep --max-shards unread shards in DIR

Shards have the format of `nano.data`. A conversation uses one of M3's thinking modes: enabled (each
turn thinks), disabled (no turn thinks) or adaptive (turns with calls or arithmetic think).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from nano import data, dialogue, m3_tokenizer, talk
from nano.dialogue import Conversation
from nano.suites import retrieval, tool_calls

WINDOW = m3_tokenizer.WINDOW
LONG_SHARE = 0.06  # share of the conversations, which is about 45 % of the tokens
_READ = "I have read it."
LOOKS_UP = "The text says: "
_NEEDS_THOUGHT = ("ones ", " = ", " needs ", " larger")


def draw(rng: random.Random) -> tuple[Conversation, str | None]:
    """Draw a conversation and its thinking mode (None: the default, adaptive).

    Assistant messages have the field `trained`, and `reasoning_content` if they think.
    """
    chat = draw_long(rng) if rng.random() < LONG_SHARE else data.draw(rng)
    said = [message for message in chat.messages if message["role"] == "assistant"]
    last_user = max(i for i, m in enumerate(chat.messages) if m["role"] == "user")
    tail = [m for m in chat.messages[last_user:] if m["role"] == "assistant"]
    closed = any(m.get("reasoning_content") == data._CLOSED for m in tail)
    for message in said:
        # A turn whose reasoning is missing is not trained.
        message["trained"] = closed or "reasoning_content" in message
    can_close = not any(_arithmetic(m) for m in said)
    mode = rng.choices((None, "adaptive", "enabled", "disabled"), weights=(50, 14, 26, 10))[0]
    if closed or (mode == "disabled" and can_close):
        mode = "disabled"
    elif mode == "disabled":
        mode = None
    keeps = mode != "disabled" and rng.random() < 0.7
    for message in said:
        is_history = all(message is not m for m in tail)
        if is_history and not keeps:
            message["trained"] = message["trained"] and mode == "disabled" and not closed
            message.pop("reasoning_content", None)
        elif mode == "disabled" or (mode != "enabled" and not thinks(message)):
            message.pop("reasoning_content", None)
    return chat, mode


def _arithmetic(message: dict[str, Any]) -> bool:
    return "ones " in message.get("reasoning_content", "")


def thinks(message: dict[str, Any]) -> bool:
    """Return whether an adaptive turn thinks: before calls and arithmetic, not for retrieval."""
    thought = message.get("reasoning_content", "")
    if thought.startswith(LOOKS_UP):
        return False
    return bool(message.get("tool_calls")) or any(sign in thought for sign in _NEEDS_THOUGHT)


def draw_long(rng: random.Random) -> Conversation:
    """Draw a conversation of 900 to nearly 8,192 tokens with questions about distant text."""
    most = WINDOW - 500
    tokens = math.exp(rng.uniform(math.log(900), math.log(most)))
    if rng.random() < 0.5:
        tokens = rng.uniform(3000, most)
    kind = rng.choices(("sentences", "settings", "tools", "chat"), weights=(36, 26, 26, 12))[0]
    chat = Conversation()
    if rng.random() < 0.2 and kind != "chat":
        chat.messages.append({"role": "system", "content": talk.draw_system(rng)[0] or "Read."})
    match kind:
        case "tools":
            _tools(chat, tokens, rng)
        case "chat":
            _chat(chat, tokens, rng)
        case style:
            _facts(chat, tokens, style, rng)
    return chat


def _facts(chat: Conversation, tokens: float, style: str, rng: random.Random) -> None:
    """Add one to three texts, with questions about any text so far."""
    texts = rng.choices((1, 2, 3), weights=(60, 25, 15))[0]
    number = rng.choices((1, 3, 10, 20, 40), weights=(12, 18, 25, 25, 20))[0]
    number = min(number, int(tokens / 150) + 1)
    room = max(tokens - 130 - 36 * number, 300) / texts
    known: dict[str, retrieval.Fact] = {}
    for part in range(texts):
        text, facts = retrieval.draw_facts(rng, room, style=style)
        # A fact that two texts state is not asked for.
        twice = known.keys() & {fact.subject for fact in facts}
        known |= {fact.subject: fact for fact in facts if not fact.is_held_out}
        known = {subject: fact for subject, fact in known.items() if subject not in twice}
        asked = rng.sample(list(known.values()), min(len(known), -(-number // texts)))
        if part == 0 and texts == 1 and rng.random() < 0.15:
            if chat.messages:
                chat.messages[0]["content"] += f"\n\n{text}"
            else:
                chat.messages.append({"role": "system", "content": text})
        elif rng.random() < 0.5 and asked:
            first = asked.pop()
            chat.user(f"{text}\n\n{first.question}")
            chat.answer(f"{LOOKS_UP}{first.line}", first.answer)
        else:
            chat.user(text)
            chat.answer("The user gives me a text.", _READ)
        for fact in asked:
            chat.user(fact.question)
            chat.answer(f"{LOOKS_UP}{fact.line}", fact.answer)


def _tools(chat: Conversation, tokens: float, rng: random.Random) -> None:
    """Add many tools, and consecutive requests for one of them."""
    number = rng.choices((1, 2, 4, 8), weights=(35, 30, 20, 15))[0]
    number = min(number, int(tokens / 400) + 1)
    pairs = retrieval.draw_tools(rng, max(tokens - 190 - 220 * number, 300))
    chat.tools = [declared for _, declared in pairs]
    composed = [tool for tool, _ in pairs if tool.action and tool.parameters]
    made = 0
    while composed and made < number:
        text, call = tool_calls._single_request(rng.choice(composed), rng)
        if not retrieval.is_request_held_out(text):
            chat.user(text)
            dialogue._call_and_report(chat, (call,), rng)
            made += 1
    if not composed:
        chat.user("Hello!")
        chat.answer("The user greets me.", "Hello! How can I help you?")
    elif rng.random() < 0.5:
        del chat.messages[-2:]  # The conversation ends with the call.


def _chat(chat: Conversation, tokens: float, rng: random.Random) -> None:
    """Add a long conversation over shared facts, sometimes with a pasted text."""
    functions = [turn for turn, _ in data.LATER_TURNS]
    weights = [weight for _, weight in data.LATER_TURNS]
    dialogue.declare_tools(chat, rng)
    while tokens > 300:
        before = len(chat.messages)
        rng.choices(functions, weights=weights)[0](chat, rng)
        tokens -= sum(
            retrieval.estimated_tokens(json.dumps(message)) for message in chat.messages[before:]
        )
        if rng.random() < 0.15:
            text, _ = retrieval.draw_facts(rng, rng.uniform(100, 600), style="sentences")
            chat.user(text)
            chat.answer("The user gives me a text.", _READ)
            tokens -= retrieval.estimated_tokens(text) + 20
    if not any(message["role"] == "user" for message in chat.messages):
        chat.user("Hello!")
        chat.answer("The user greets me.", "Hello! How can I help you?")


class Renderer:
    """Convert conversations to token ids and loss masks, by nano-m3's template and tokenizer."""

    def __init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = data._to_json
        environment.globals["raise_exception"] = data._refuse
        source = Path(__file__).with_name("m3_chat_template.jinja").read_text(encoding="utf-8")
        self.template = environment.from_string(source)
        self.tokenizer = Tokenizer.from_str(json.dumps(m3_tokenizer.documents()[0]))
        self.opening = self.tokenizer.encode("]~b]ai\n", add_special_tokens=False).ids

    def text(self, chat: Conversation, mode: str | None, *, prompt: bool = False) -> str:
        """Render a conversation. If `prompt`, add the opening of the next answer."""
        variables = {} if mode is None else {"thinking_mode": mode}
        return self.template.render(
            messages=chat.messages, tools=chat.tools or None, add_generation_prompt=prompt,
            **variables,
        )  # fmt: skip

    def encode(self, chat: Conversation, mode: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Encode to (token ids uint16, mask bool). The mask covers the answers of trained turns."""
        text = self.text(chat, mode)
        if text.endswith("[e~[\n"):
            text = text[:-1]
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        tokens = np.array(ids, dtype=np.uint16)
        mask = np.zeros(len(tokens), dtype=bool)
        size = len(self.opening)
        starts = [
            int(at)
            for at in np.flatnonzero(tokens == self.opening[0])
            if ids[at : at + size] == self.opening
        ]
        said = [message for message in chat.messages if message["role"] == "assistant"]
        ends = np.flatnonzero(tokens == m3_tokenizer.EOS_ID)
        for start, message in zip(starts, said, strict=True):
            if message["trained"]:
                # In these modes the prompt contains the tag.
                first = start + size + (mode in ("enabled", "disabled"))
                mask[first : int(ends[np.searchsorted(ends, first)]) + 1] = True
        return tokens, mask


def make_shard(renderer: Renderer, seed: str, num_tokens: int) -> dict[str, np.ndarray]:
    """Draw conversations of this seed until they have `num_tokens` tokens."""
    rng = random.Random(f"nano-m3-data:{seed}")
    made: list[tuple[np.ndarray, np.ndarray]] = []
    count = 0
    while count < num_tokens:
        ids, mask = renderer.encode(*draw(rng))
        if len(ids) <= WINDOW and mask.any():
            made.append((ids, mask))
            count += len(ids)
    return {
        "tokens": np.concatenate([ids for ids, _ in made]),
        "mask": np.concatenate([mask for _, mask in made]),
        "lengths": np.array([len(ids) for ids, _ in made], dtype=np.int32),
    }


def new_maker() -> Callable[[str, int], dict[str, np.ndarray]]:
    """Make the function that makes shards in a worker."""
    renderer = Renderer()
    return lambda seed, num_tokens: make_shard(renderer, seed, num_tokens)


if __name__ == "__main__":
    data.run(lambda rng: Renderer().text(*draw(rng)), new_maker, max_shards=200)
