"""The training mixture: seeded conversations, rendered by the chat template, with a loss mask.

    python -m nano.data --show 5                  print examples
    python -m nano.data --out DIR --workers 14    keep --max-shards unread shards in DIR

A shard is an .npz with `tokens` uint16, `mask` bool (true for trained tokens) and `lengths` int32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from nano import dialogue, openings, talk
from nano.dialogue import Conversation

ASSETS = Path(__file__).resolve().parents[1] / "negamax" / "assets" / "nano"
MAX_TOKENS = 4096
EOS_ID, THINK_ID, THINK_END_ID = 4116, 4146, 4147
_CLOSED_BLOCK = "<think>\n</think>\n\n"
_CLOSED = "(closed)"  # stands for an empty thinking block

SINGLE_TURNS = (
    (dialogue.math_turn, 36), (dialogue.tool_turn, 42), (dialogue.talk_turn, 9),
    (dialogue.unknown_turn, 11),
    (dialogue.fact_turn, 2), (dialogue.opening_turn, 5),
    (dialogue.beyond_turn, 5), (dialogue.missing_turn, 2),
)  # fmt: skip
LATER_TURNS = (
    (dialogue.math_turn, 14), (dialogue.follow_up_turn, 16), (dialogue.fact_turn, 26),
    (dialogue.stock_turn, 10),
    (dialogue.talk_turn, 10),
    (dialogue.unknown_turn, 7), (dialogue.tool_turn, 22), (dialogue.age_turn, 3),
    (dialogue.home_turn, 5),
    (dialogue.again_turn, 3),
    (dialogue.missing_turn, 2), (dialogue.beyond_turn, 1),
)  # fmt: skip


# (seed, number of tokens) -> arrays of a shard
Maker = Callable[[str, int], dict[str, np.ndarray]]


def draw(rng: random.Random) -> Conversation:
    """Draw a conversation of the mixture, whose last user turn is trained."""
    single = rng.random() < 0.68
    turns = (
        1
        if single
        else rng.choices((2, 3, 4, 5, 6, 8, 12, 20, 40), weights=(30, 24, 16, 10, 8, 6, 4, 2, 0.6))[
            0
        ]
    )
    table = SINGLE_TURNS if single else LATER_TURNS
    functions, weights = [turn for turn, _ in table], [weight for _, weight in table]
    chat = Conversation()
    system, chat.persona = talk.draw_system(rng)
    if chat.persona is None and rng.random() < 0.04:
        system = openings.agent_system(rng)
    if system is not None:
        message: dict[str, Any] = {"role": "system", "content": system}
        if rng.random() < 0.08:
            message["current_date"] = dialogue.common.iso_date(rng)
        chat.messages.append(message)
    first = rng.choices(functions, weights=weights)[0]
    needs_tools = first in (dialogue.tool_turn, dialogue.missing_turn)
    if needs_tools or rng.random() < (0.12 if single else 0.35):
        dialogue.declare_tools(chat, rng)
    if single:
        while not first(chat, rng):
            first = rng.choices(functions, weights=weights)[0]
    else:
        made = 0
        while made < turns:
            made += rng.choices(functions, weights=weights)[0](chat, rng)
    return _close(_cut(chat, rng), rng)


def _cut(chat: Conversation, rng: random.Random) -> Conversation:
    """Sometimes end after the call, or drop the reasoning of a call, as many clients do."""
    last_user = max(
        index for index, message in enumerate(chat.messages) if message["role"] == "user"
    )
    tail = chat.messages[last_user + 1 :]
    if len(tail) > 1:
        roll = rng.random()
        if roll < 0.45:
            chat.messages = chat.messages[: last_user + 2]
        elif roll < 0.65:
            tail[0].pop("reasoning_content")
    return chat


def _close(chat: Conversation, rng: random.Random) -> Conversation:
    """Sometimes answer without thinking, except for arithmetic."""
    last_user = max(
        index for index, message in enumerate(chat.messages) if message["role"] == "user"
    )
    said = [message for message in chat.messages[last_user + 1 :] if message["role"] == "assistant"]
    if rng.random() < 0.06 and not any(
        "ones " in message.get("reasoning_content", "") for message in said
    ):
        for message in said:
            message.pop("reasoning_content", None)
        said[-1]["reasoning_content"] = _CLOSED
    return chat


class Renderer:
    """Convert conversations to token ids and loss masks, by chat template and tokenizer."""

    def __init__(self, folder: Path = ASSETS, *, tokenizer: bool = True) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self.template = environment.from_string(
            (folder / "chat_template.jinja").read_text(encoding="utf-8")
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")) if tokenizer else None

    def text(self, chat: Conversation, *, prompt: bool = False) -> str:
        """Render a conversation. If `prompt`, add the opening of the next answer."""
        text = self.template.render(
            messages=chat.messages, tools=chat.tools or None, add_generation_prompt=prompt
        )
        return text.replace(f"<think>\n{_CLOSED}\n</think>\n\n", _CLOSED_BLOCK)

    def encode(self, chat: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Encode to (token ids uint16, mask bool).

        The mask covers each answer from `<think>` to its end.
        """
        assert self.tokenizer is not None
        text = self.text(chat)
        if text.endswith("[e~[\n"):
            text = text[:-1]
        # The split prevents merges across the end of a block.
        head, closed, rest = text.partition(_CLOSED_BLOCK)
        ids = [
            number
            for part in (head + closed, rest)
            for number in self.tokenizer.encode(part, add_special_tokens=False).ids
        ]
        tokens = np.array(ids, dtype=np.uint16)
        mask = np.zeros(len(tokens), dtype=bool)
        for start in np.flatnonzero(tokens == THINK_ID):
            ends = np.flatnonzero(tokens[start:] == EOS_ID)
            # An empty block belongs to the prompt.
            first = start + 4 if tokens[start + 2] == THINK_END_ID else start + 2
            mask[first : start + int(ends[0]) + 1] = True
        return tokens, mask


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


_PLAIN: list[Renderer] = []


def plain_text(chat: Conversation) -> str:
    """Render without markers, to train the tokenizer."""
    if not _PLAIN:
        _PLAIN.append(Renderer(tokenizer=False))
    text = _PLAIN[0].text(chat)
    for marker in (
        "]~!b[",
        "]~b]",
        "[e~[",
        "<think>",
        "</think>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
    ):
        text = text.replace(marker, "\n" if marker != "]~b]" else "")
    return text


def make_shard(renderer: Renderer, seed: str, num_tokens: int) -> dict[str, np.ndarray]:
    """Draw conversations of this seed until they have `num_tokens` tokens."""
    rng = random.Random(f"nano-data:{seed}")
    tokens: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    count = 0
    while count < num_tokens:
        ids, mask = renderer.encode(draw(rng))
        if len(ids) > MAX_TOKENS:
            continue
        tokens.append(ids)
        masks.append(mask)
        count += len(ids)
    lengths = np.array([len(ids) for ids in tokens], dtype=np.int32)
    return {"tokens": np.concatenate(tokens), "mask": np.concatenate(masks), "lengths": lengths}


def new_maker() -> Maker:
    """Make the function that makes shards in a worker."""
    renderer = Renderer()
    return lambda seed, num_tokens: make_shard(renderer, seed, num_tokens)


def _work(
    worker: int, folder: Path, seed: int, shard_tokens: int, max_shards: int,
    new_maker: Callable[[], Maker],
) -> None:  # fmt: skip
    make = new_maker()
    index = 0
    while True:
        while len(list(folder.glob("*.npz"))) >= max_shards:
            time.sleep(0.5)
        arrays = make(f"{seed}:{worker}:{index}", shard_tokens)
        name = f"shard-{index:05d}-{worker:02d}"
        part = folder / f"{name}.part"
        with part.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        part.replace(folder / f"{name}.npz")
        index += 1


def serve(
    folder: Path, *, workers: int, seed: int, shard_tokens: int, max_shards: int,
    new_maker: Callable[[], Maker],
) -> None:  # fmt: skip
    """Run worker processes that keep the folder filled. The reader deletes shards after reading."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    processes = [
        multiprocessing.Process(
            target=_work,
            args=(worker, folder, seed, shard_tokens, max_shards, new_maker),
            daemon=True,
        )
        for worker in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def run(
    draw_text: Callable[[random.Random], str],
    new_maker: Callable[[], Maker],
    *,
    max_shards: int,
    shard_tokens: int = 1_000_000,
) -> None:
    """Run the command line of a mixture."""
    parser = argparse.ArgumentParser(description="Show examples of a mixture, or write shards.")
    parser.add_argument("--show", type=int, default=0, help="number of examples to print")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder to keep filled with shards")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--shard-tokens", type=int, default=shard_tokens)
    parser.add_argument("--max-shards", type=int, default=max_shards)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    for _ in range(given.show):
        print(draw_text(rng), "=" * 80, sep="\n")
    if given.out:
        serve(
            given.out, workers=given.workers, seed=given.seed, shard_tokens=given.shard_tokens,
            max_shards=given.max_shards, new_maker=new_maker,
        )  # fmt: skip


if __name__ == "__main__":
    run(lambda rng: Renderer(tokenizer=False).text(draw(rng)), new_maker, max_shards=400)
