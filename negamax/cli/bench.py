"""`negamax bench` and its command `accuracy`. Other benchmarks are in `bench_*.py`."""

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.bench.drafts import NO_DRAFTS, DraftCounts
from negamax.checkpoint.huggingface import fetch_data_file
from negamax.cli import bench_compare, bench_kernels, bench_offline, bench_profile, bench_serve
from negamax.cli.bench_options import json_option, write_json
from negamax.cli.examples import make_epilog
from negamax.cli.options import add_command, add_options, setting, template_option
from negamax.evals.suites import (
    DEFAULT_SUITES,
    GSM8K,
    GSM8K_ADDRESS,
    SUITES,
    check_can_read,
    explain_unknown,
    load_problems,
)
from negamax.options.engine import EngineOptions

app = typer.Typer(
    help="Measure the accuracy and the speed of a model, a server or the kernels.",
    rich_markup_mode="markdown",
)
for _name, _module in {
    "offline": bench_offline,
    "kernels": bench_kernels,
    "profile": bench_profile,
    "serve": bench_serve,
    "compare": bench_compare,
}.items():
    add_command(app, _name, _module, group="bench")


@app.callback()
def bench() -> None:
    """Measure a model, a server or the kernels."""


@app.command(epilog=make_epilog("bench accuracy"))
@add_options(defaults={"log_level": "warning"}, needs_model=False, explains=False)
def accuracy(
    *,
    engine: EngineOptions,
    suite: list[str] | None = setting(
        None,
        "Solve this suite: nano-math, nano-tools, nano-retrieval-2k, nano-retrieval-4k, "
        "nano-retrieval-8k, nano-vision (images), gsm8k, or needle-8k to needle-1024k, which hide "
        "a number in a text of this length; may be repeated. Default: nano-math and nano-tools.",
        choices=(*SUITES, GSM8K),
    ),
    count: int | None = setting(
        None, "Solve this many problems per suite (default: all problems; needle 20).", min=1
    ),
    data: str | None = setting(
        None,
        "Read the problems of gsm8k from this file (JSONL or Parquet), or from a file on the "
        "Hugging Face hub, such as hf://datasets/OWNER/NAME/test.jsonl. Default: the Parquet file "
        "of hf://datasets/openai/gsm8k, which needs negamax[parquet].",
    ),
    max_tokens: int | None = setting(
        None, "Generate at most this many tokens per problem (default: 1024; gsm8k 16384).", min=1
    ),
    temperature: float = setting(0.0, "Set the temperature; 0 is greedy.", min=0.0, max=2.0),
    json_file: Path | None = json_option(),
    chat_template: str | None = template_option(),
) -> None:
    """Solve problems with exact answers, and count the correct answers. MODEL defaults to `nano`.
    `--seed` selects the problems. `negamax bench compare` compares two files of `--json`.
    """
    if data is None and GSM8K in (suite or ()):
        data = GSM8K_ADDRESS
    file = None
    if data is not None:
        check_can_read(data)
        file = fetch_data_file(data) if data.startswith("hf:") else Path(data)
    for name in suite or ():
        if reason := explain_unknown(name):
            raise ConfigError(f"--suite is {name[:60]!r}; {reason}")
        if name == GSM8K:  # Report an invalid file before the model is loaded.
            load_problems(name, count, data=file)
    from negamax.engine.llm import LLM
    from negamax.evals.accuracy import run_suite  # imports torch

    log.setup(engine.log_level, engine.log_format)
    console = Console(markup=False)  # brackets in answers are not markup
    results, counted = [], NO_DRAFTS
    options = vars(engine) | {"model": engine.model or "nano", "chat_template": chat_template}
    with LLM(**options) as llm:
        for name in suite or DEFAULT_SUITES:
            columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(name, total=None)

                def show(done: int, total: int, bar: Progress = bar, task: TaskID = task) -> None:
                    bar.update(task, completed=done, total=total)

                how: dict[str, Any] = {"seed": engine.seed, "temperature": temperature}
                how |= {"data": file, "max_tokens": max_tokens}
                result = run_suite(llm, name, count=count, progress=show, **how)
            results.append(result.as_dict())
            rate = result.output_tokens / result.seconds
            tokens = (
                f"{result.output_tokens} tokens in {result.seconds:.1f} s ({rate:.0f} tokens/s)"
            )
            low, high = results[-1]["interval"]
            console.print(
                f"{result.suite}: {result.correct} of {result.problems} exact "
                f"({result.accuracy:.1%}, 95 % interval {low:.1%} to {high:.1%}), {tokens}, "
                f"{result.dtype}, temperature {result.temperature:g}, seed {result.seed}"
            )
            if result.formatted is not None:
                console.print(f"  {result.formatted} answers follow ####, as the prompt requests")
            drafts = DraftCounts.of_stats(llm.stats(), llm.info.speculation)
            if shown := drafts.subtract(counted).summary():
                length = shown["spec_decode_acceptance_length"]
                console.print(f"  {length:.2f} tokens per row with drafts")
                results[-1] |= shown
            counted = drafts
            for failure in result.failures:
                right = f"expected {failure.expected}, got {failure.answered!r}"
                console.print(f"  asked {failure.question!r}: {right}", style="dim")
    write_json(json_file, results)
