"""Measure a trained state on held-out problems without generating.

    python -m nano.m3_evaluate --state DIR

A problem counts if each token of its reference answer is the most likely one, as greedy decoding
would write it. This is a lower bound of accuracy. Each suite is measured with selected blocks and,
as a control, with random blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from nano import dialogue, m3_data, reasoning
from nano.dialogue import Conversation
from nano.m3_train import Trainer, assemble, batch_of, pack, parser
from nano.suites import arithmetic, retrieval, tool_calls

SUITES = ("nano-math", "nano-tools", *(f"nano-retrieval-{length}" for length in retrieval.LENGTHS))


def conversations(suite: str, count: int, seed: int) -> Iterator[Conversation]:
    """The problems of a suite with their reference answers."""
    if suite == "nano-math":
        for problem in arithmetic.problems(count, seed):
            chat = Conversation(list(problem.messages))
            chat.answer(reasoning.explain(problem.steps), problem.sentence)
            yield chat
    elif suite == "nano-tools":
        for item in tool_calls.problems(count, seed):
            if item.calls:  # any small talk is accepted without calls
                chat = Conversation(list(item.messages), list(item.tools))
                yield _called(chat, item.calls)
    else:
        length = suite.removeprefix("nano-retrieval-")
        for found in retrieval.problems(length, count, seed):
            messages = [dict(message, trained=False) for message in found.messages]
            chat = Conversation(messages, list(found.tools))
            if found.fact is None:
                yield _called(chat, found.calls)
            else:
                chat.answer(f"{m3_data.LOOKS_UP}{found.fact.line}", found.fact.answer)
                yield chat


def _called(chat: Conversation, calls: tuple[tool_calls.Call, ...]) -> Conversation:
    chat.messages.append(
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": dialogue.plan_text(calls),
            "tool_calls": [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ],
        }
    )
    return chat


@torch.no_grad()
def exact(trainer: Trainer, suite: str, *, count: int, seed: int, mode: str) -> float:
    """The share of problems with the reference answer; `mode` as for `Chooser`."""
    renderer = m3_data.Renderer()
    made = []
    for chat in conversations(suite, count, seed):
        chat.messages[-1]["trained"] = True
        if not m3_data.thinks(chat.messages[-1]):
            del chat.messages[-1]["reasoning_content"]
        made.append(renderer.encode(chat, None))
    shard = {
        "tokens": np.concatenate([ids for ids, _ in made]),
        "mask": np.concatenate([mask for _, mask in made]),
        "lengths": np.array([len(ids) for ids, _ in made], dtype=np.int32),
    }
    rows, row_tokens = trainer.arguments.rows, trainer.arguments.row_tokens
    capacity = int(rows * row_tokens * trainer.arguments.trained_share)
    windows = np.full(rows, row_tokens, dtype=np.int32)
    waiting = np.arange(len(made))
    right = 0
    while len(waiting):
        placed, left = pack(shard["lengths"][waiting], rows, row_tokens, trainer.config)
        members = [[(int(waiting[index]), at) for index, at in row] for row in placed]
        arrays = assemble(
            members, shard, row_tokens=row_tokens, capacity=capacity, config=trainer.config,
            random=np.random.default_rng(0),
        )  # fmt: skip
        batch = batch_of(arrays, windows, trainer.device)
        attend = trainer.attention(batch, mode)
        hidden, _ = trainer.model(batch.tokens, attend, dtype=torch.bfloat16, use=trainer.use)
        logits = trainer.model.logits(hidden.flatten(0, 1)[batch.inputs])
        missed = (logits.argmax(-1) != batch.targets) & (batch.targets >= 0)
        wrong = {
            (int(at) // row_tokens, int(batch.layout.documents.flatten()[at]))
            for at in batch.inputs[missed].tolist()
        }
        right += sum(map(len, members)) - len(wrong)
        waiting = waiting[left]
    return right / len(made)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--eval-seed", type=int, default=0)
    options.add_argument("--suites", nargs="+", default=list(SUITES))
    arguments = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(arguments, device)
    trainer.resume(arguments.state)
    for suite in arguments.suites:
        begun = time.monotonic()
        found = {
            mode: exact(trainer, suite, count=arguments.count, seed=arguments.eval_seed, mode=mode)
            for mode in ("index", "random")
        }
        shown = ", ".join(f"{mode} blocks {share:.1%}" for mode, share in found.items())
        print(f"{suite}: {shown} ({time.monotonic() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
