"""`negamax generate MODEL`: answer or continue prompts offline, in this process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.cli.io import check_sampling, loading, print_json, read_text
from negamax.cli.options import add_options, setting, template_option
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import SamplingParams

if TYPE_CHECKING:
    from negamax.engine.llm import Generation

HELP = (
    "Answer prompts with MODEL, without a server. Each prompt is one user message. With `--raw`, "
    "the model continues the text of the prompt."
)

SAMPLING = "Sampling"


@add_options(defaults={"log_level": "warning"})
def command(
    *,
    engine: EngineOptions,
    texts: list[str] | None = typer.Argument(
        None,
        metavar="PROMPT",
        help="Prompts to answer. Default: standard input.",
        show_default=False,
    ),
    prompt: list[str] | None = setting(
        None, "Answer this prompt, too; may be repeated.", "--prompt", "-p", panel=SAMPLING
    ),
    raw: bool = setting(
        False,
        "Continue the prompt without the chat template. Chat models, such as nano, expect "
        "control tokens in a raw prompt.",
        "--raw",
    ),
    max_tokens: int = setting(1024, "Limit the tokens of each answer, thinking included."),
    n: int = setting(1, "Generate this many answers per prompt.", "--n", "-n"),
    temperature: float | None = setting(
        None, "Set the temperature; 0 is greedy (default: set by the model)."
    ),
    top_p: float | None = setting(None, "Set the nucleus probability (default: set by the model)."),
    top_k: int | None = setting(None, "Sample from the top k tokens (default: set by the model)."),
    stop: list[str] | None = setting(None, "End the output before this text; may be repeated."),
    ignore_eos: bool = setting(False, "Always generate --max-tokens tokens.", "--ignore-eos"),
    as_json: bool = setting(
        False, "Print one line of JSON for each answer.", "--json", panel="Output"
    ),
    chat_template: str | None = template_option(),
) -> None:
    """Print the outputs of the model."""
    log.setup(engine.log_level, engine.log_format)
    given = [*(texts or ()), *(prompt or ())]
    prompts = given or [read_text() if not sys.stdin.isatty() else ""]
    if not all(prompts):
        hint = f"pass a PROMPT after MODEL, which is {engine.model!r} here, or pipe text in"
        raise ConfigError("the prompt is empty", hint=hint)
    filters: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    limits: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": ignore_eos}
    sampling = SamplingParams(n=n, stop=tuple(stop or ()), **filters, **limits)
    check_sampling(sampling, engine)
    from negamax import LLM  # this imports torch, which takes seconds; --help needs no torch

    with loading(engine.model):
        llm = LLM(**vars(engine), chat_template=chat_template)
    with llm:
        chats = [[{"role": "user", "content": text}] for text in prompts]
        generations = llm.generate(prompts, sampling) if raw else llm.chat(chats, sampling)
    for text, generation in zip(prompts, generations, strict=True):
        _print(text, generation, as_json=as_json)


def _print(prompt: str, generation: Generation, *, as_json: bool) -> None:
    for completion in generation.outputs:
        message = completion.message
        if not as_json:
            print(completion.text if message is None else message.content or "")
            continue
        fields = {
            "prompt": prompt,
            "index": completion.index,
            "text": completion.text,
            "reasoning": None if message is None else message.reasoning,
            "content": None if message is None else message.content,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "usage": {
                "prompt_tokens": len(generation.prompt_token_ids),
                "completion_tokens": len(completion.token_ids),
                "cached_tokens": generation.num_cached_tokens,
            },
        }
        print_json(fields)
