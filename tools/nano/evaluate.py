"""Greedy accuracy of an exported checkpoint on the held-out suites, with a small batched KV-cache
generator.

python tools/nano/evaluate.py --checkpoint negamax/assets/nano --math 1000 --tools 500
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import data
import export
import model
import torch
import torch.nn.functional as F
from dialogue import Conversation
from model import NanoModel
from torch import Tensor

from negamax.evals import nano_math, nano_tools

EOS_ID = 4116


class Generator:
    """Generates for a batch of prompts, left-padded, with one cache per layer."""

    def __init__(
        self,
        nano: NanoModel,
        *,
        dtype: torch.dtype,
        activation_fp8: bool = False,
        temperature: float = 0.0,
    ) -> None:
        self.nano, self.dtype, self.temperature = nano, dtype, temperature
        self.use = model.precision(dtype, weights=False, activations=activation_fp8)
        self.device = nano.embed.device

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], *, max_new: int) -> list[list[int]]:
        """Token ids that follow each prompt, the end-of-turn token excluded."""
        config, batch, width = self.nano.config, len(prompts), max(map(len, prompts))
        pads = torch.tensor([width - len(prompt) for prompt in prompts], device=self.device)
        tokens = torch.tensor(
            [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=self.device
        )
        shape = (
            config.num_hidden_layers,
            2,
            batch,
            config.num_key_value_heads,
            width + max_new,
            config.head_dim,
        )
        cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        columns = torch.arange(width + max_new, device=self.device)
        done = torch.zeros(batch, dtype=torch.bool, device=self.device)
        made: list[Tensor] = []
        start = 0
        for step in range(max_new):
            size = tokens.shape[1]
            spot = columns[start : start + size]
            visible = (columns[: start + size] <= spot[:, None]) & (
                columns[: start + size] >= pads[:, None, None]
            )
            # a padding row sees itself, so that no row is empty
            visible |= columns[: start + size] == spot[:, None]
            hidden = self._forward(
                tokens, (spot - pads[:, None]).clamp(min=0), cache, start, visible[:, None]
            )
            start += size
            logits = self.nano.logits(hidden[:, -1])
            if self.temperature:
                chosen = torch.multinomial(torch.softmax(logits.float() / self.temperature, -1), 1)[
                    :, 0
                ]
            else:
                chosen = logits.argmax(-1)
            chosen = torch.where(done, EOS_ID, chosen)
            made.append(chosen)
            done |= chosen == EOS_ID
            tokens = chosen[:, None]
            if step % 16 == 15 and bool(done.all()):  # host-sync: early stop
                break
        rows = torch.stack(made, dim=1).tolist()
        return [row[: row.index(EOS_ID)] if EOS_ID in row else row for row in rows]

    def _forward(
        self, tokens: Tensor, positions: Tensor, cache: Tensor, start: int, visible: Tensor
    ) -> Tensor:
        layer = 0
        end = start + tokens.shape[1]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal layer
            cache[layer, 0, :, :, start:end], cache[layer, 1, :, :, start:end] = k, v
            keys, values = cache[layer, 0, :, :, :end], cache[layer, 1, :, :, :end]
            layer += 1
            return F.scaled_dot_product_attention(
                q, keys, values, attn_mask=visible, enable_gqa=True
            )

        hidden, _ = self.nano(tokens, positions[:, None], attend, dtype=self.dtype, use=self.use)
        return hidden


def parse(text: str) -> tuple[str, list[tuple[str, dict[str, str]]]]:
    """(content, calls with raw argument texts) of a finished answer that starts inside its
    reasoning.
    """
    _, _, rest = text.partition("</think>")
    content, _, block = rest.partition("<minimax:tool_call>")
    calls: list[tuple[str, dict[str, str]]] = []
    for name, body in re.findall(
        r'<invoke name="([^"]*)">\n(.*?)</invoke>', block, flags=re.DOTALL
    ):
        calls.append(
            (
                name,
                dict(
                    re.findall(
                        r'<parameter name="([^"]*)">(.*?)</parameter>\n', body, flags=re.DOTALL
                    )
                ),
            )
        )
    return content.strip("\n"), calls


def typed(
    call: tuple[str, dict[str, str]], tools: Sequence[dict[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Argument texts converted by the declared types."""
    name, raw = call
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    properties = functions.get(name, {}).get("parameters", {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for key, text in raw.items():
        kind = properties.get(key, {}).get("type", "string")
        try:
            arguments[key] = text if kind == "string" else json.loads(text)
        except json.JSONDecodeError:
            arguments[key] = text
    return name, arguments


def answers(
    generator: Generator, chats: Sequence[Conversation], *, max_new: int, batch: int
) -> list[str]:
    """Generated text for each conversation."""
    renderer = data.Renderer()
    assert renderer.tokenizer is not None
    prompts = [
        renderer.tokenizer.encode(renderer.text(chat, prompt=True), add_special_tokens=False).ids
        for chat in chats
    ]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    texts = [""] * len(prompts)
    for begin in range(0, len(order), batch):
        members = order[begin : begin + batch]
        for index, ids in zip(
            members,
            generator.run([prompts[index] for index in members], max_new=max_new),
            strict=True,
        ):
            texts[index] = renderer.tokenizer.decode(ids, skip_special_tokens=False)
    return texts


def evaluate(
    generator: Generator, *, math_count: int, tools_count: int, seed: int, batch: int, show: int
) -> dict[str, float]:
    """Accuracy by suite; prints up to `show` failures of each."""
    scores: dict[str, float] = {}
    if math_count:
        problems = nano_math.problems(math_count, seed)
        texts = answers(
            generator,
            [Conversation(list(problem.messages)) for problem in problems],
            max_new=420,
            batch=batch,
        )
        wrong = [
            (problem.text, text, problem.answer)
            for problem, text in zip(problems, texts, strict=True)
            if not nano_math.grade(problem, parse(text)[0])
        ]
        scores["nano-math"] = 1 - len(wrong) / len(problems)
        for item in wrong[:show]:
            print("WRONG", *item, sep="\n  | ")
    if tools_count:
        requests = nano_tools.problems(tools_count, seed)
        texts = answers(
            generator,
            [Conversation(list(item.messages), list(item.tools)) for item in requests],
            max_new=420,
            batch=batch,
        )
        failures = []
        for item, text in zip(requests, texts, strict=True):
            if not nano_tools.grade(item, [typed(call, item.tools) for call in parse(text)[1]]):
                failures.append(
                    (item.text, text, [(call.name, call.arguments) for call in item.calls])
                )
        scores["nano-tools"] = 1 - len(failures) / len(requests)
        for failure in failures[:show]:
            print("WRONG", *failure, sep="\n  | ")
    return scores


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=data.ASSETS)
    parser.add_argument("--math", type=int, default=1000)
    parser.add_argument("--tools", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--show", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--activation-fp8", action="store_true")
    parser.add_argument("--ask", nargs="*", default=[])
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nano = export.load(arguments.checkpoint, device, torch.bfloat16)
    generator = Generator(
        nano,
        dtype=torch.bfloat16,
        activation_fp8=arguments.activation_fp8,
        temperature=arguments.temperature,
    )
    begin = time.monotonic()
    for question in arguments.ask:
        print(
            question,
            "->",
            answers(
                generator,
                [Conversation([{"role": "user", "content": question}])],
                max_new=400,
                batch=1,
            )[0],
        )
    scores = evaluate(
        generator,
        math_count=arguments.math,
        tools_count=arguments.tools,
        seed=arguments.seed,
        batch=arguments.batch,
        show=arguments.show,
    )
    print(
        {name: round(score, 4) for name, score in scores.items()},
        f"{time.monotonic() - begin:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
