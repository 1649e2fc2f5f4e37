"""Accuracy suites: generated problems with exact answers, solved greedily by a model through the
real engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from negamax.base.errors import InvalidRequestError
from negamax.engine.llm import LLM
from negamax.evals import nano_math, nano_retrieval, nano_tools
from negamax.scheduler.request import SamplingParams
from negamax.text.parser.events import ParsedOutput

_RETRIEVAL = "nano-retrieval-"
# name -> problems by default
SUITES = {"nano-math": 1000, "nano-tools": 500} | {
    f"{_RETRIEVAL}{length}": 200 for length in nano_retrieval.LENGTHS
}
DEFAULT_SUITES = ("nano-math", "nano-tools")  # the others need a window of up to 8,192 tokens
MAX_TOKENS = 1024
SHOWN_FAILURES = 5
_SHOWN_CHARS = 400  # of a question, from its end


@dataclass(frozen=True)
class Failure:
    """A problem that was not solved."""

    question: str
    expected: str
    answered: str


@dataclass(frozen=True)
class SuiteResult:
    """The outcome of one suite. Rates are per problem; times are of the whole run, prompts
    included.
    """

    suite: str
    model: str
    dtype: str
    problems: int
    correct: int
    seed: int
    temperature: float
    seconds: float
    output_tokens: int
    failures: tuple[Failure, ...]  # the first few

    @property
    def accuracy(self) -> float:
        return self.correct / self.problems

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self) | {
            "accuracy": self.accuracy,
            "tokens_per_second": self.output_tokens / self.seconds,
        }


@dataclass(frozen=True)
class _Task:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    expected: str
    solved_by: Callable[[ParsedOutput], bool]


def run_suite(
    llm: LLM,
    suite: str,
    *,
    count: int,
    seed: int = 0,
    temperature: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> SuiteResult:
    """Solve `count` held-out problems of `suite`. `progress(done, total)` is called after each
    batch.

    Errors: `InvalidRequestError` for an unknown suite.
    """
    tasks = _tasks(suite, count=count, seed=seed)
    sampling = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=seed)
    batch = 4 * llm.info.max_num_seqs
    failures: list[Failure] = []
    num_failed = output_tokens = 0
    started = time.perf_counter()
    for first in range(0, len(tasks), batch):
        part = tasks[first : first + batch]
        prompts = [llm.render(task.messages, tools=task.tools) for task in part]
        generations = llm.generate(prompts, sampling)
        for task, prompt, generation in zip(part, prompts, generations, strict=True):
            output_tokens += len(generation.outputs[0].token_ids)
            parsed = llm.parse(prompt, generation.outputs[0], tools=task.tools)
            if not task.solved_by(parsed):
                num_failed += 1
                failures.append(
                    Failure(
                        str(task.messages[-1]["content"])[-_SHOWN_CHARS:],
                        task.expected,
                        _shown(parsed),
                    )
                )
        if progress is not None:
            progress(first + len(part), len(tasks))
    return SuiteResult(
        suite=suite,
        model=llm.info.model,
        dtype=llm.info.dtype,
        problems=len(tasks),
        correct=len(tasks) - num_failed,
        seed=seed,
        temperature=temperature,
        seconds=time.perf_counter() - started,
        output_tokens=output_tokens,
        failures=tuple(failures[:SHOWN_FAILURES]),
    )


def _tasks(suite: str, *, count: int, seed: int) -> list[_Task]:
    if suite == "nano-math":
        return [_math_task(problem) for problem in nano_math.problems(count, seed)]
    if suite == "nano-tools":
        return [_tool_task(problem) for problem in nano_tools.problems(count, seed)]
    if suite in SUITES:
        length = suite.removeprefix(_RETRIEVAL)
        return [
            _retrieval_task(problem) for problem in nano_retrieval.problems(length, count, seed)
        ]
    raise InvalidRequestError(
        f"no accuracy suite is called {suite!r}; known: {', '.join(SUITES)}", param="suite"
    )


def _math_task(problem: nano_math.MathProblem) -> _Task:
    return _Task(
        messages=list(problem.messages),
        tools=None,
        expected=str(problem.answer),
        solved_by=lambda parsed: (
            not parsed.tool_calls and nano_math.grade(problem, parsed.content or "")
        ),
    )


def _tool_task(problem: nano_tools.ToolProblem) -> _Task:
    def solved_by(parsed: ParsedOutput) -> bool:
        calls = _whole_calls(parsed)
        return calls is not None and nano_tools.grade(problem, calls)

    return _Task(
        messages=list(problem.messages),
        tools=list(problem.tools),
        expected=_expected(problem.calls),
        solved_by=solved_by,
    )


def _retrieval_task(problem: nano_retrieval.RetrievalProblem) -> _Task:
    def solved_by(parsed: ParsedOutput) -> bool:
        calls = _whole_calls(parsed)
        return calls is not None and nano_retrieval.grade(problem, parsed.content or "", calls)

    return _Task(
        messages=list(problem.messages),
        tools=list(problem.tools) or None,
        expected=problem.fact.value if problem.fact else _expected(problem.calls),
        solved_by=solved_by,
    )


def _whole_calls(parsed: ParsedOutput) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls with their arguments; None where one was cut."""
    if not all(call.is_whole for call in parsed.tool_calls):
        return None
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


def _expected(calls: Sequence[nano_tools.Call]) -> str:
    return json.dumps([asdict(call) for call in calls], ensure_ascii=False)


def _shown(parsed: ParsedOutput) -> str:
    if parsed.tool_calls:
        return "; ".join(f"{call.name}({call.arguments})" for call in parsed.tool_calls)
    return (parsed.content or "")[-200:]
