"""Run an accuracy suite through the engine, and count the exact answers of the model."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from negamax.engine.llm import LLM, Completion
from negamax.evals.suites import GSM8K, MAX_TOKENS, MOST_TOKENS, Problem, load_problems
from negamax.scheduler.request import SamplingParams
from negamax.text.parser.events import ParsedOutput

SHOWN_FAILURES = 5
_SHOWN_CHARS = 400  # a failure shows at most this many characters of the question's end


@dataclass(frozen=True)
class Failure:
    """A problem that the model did not solve."""

    question: str
    expected: str
    answered: str


@dataclass(frozen=True)
class SuiteResult:
    """The result of one suite. Times include the processing of prompts."""

    suite: str
    model: str
    dtype: str
    problems: int
    correct: int
    formatted: int | None  # GSM8K: number of answers with the right result after the first ####
    solved: str  # a character for each problem: "1": solved, "0": not solved
    digest: str  # hash of the problems
    seed: int
    temperature: float
    seconds: float
    output_tokens: int
    failures: tuple[Failure, ...]  # the first `SHOWN_FAILURES` failures
    serving_shape: dict[str, Any] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        return self.correct / self.problems

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, the accuracy and the tokens per second as JSON values."""
        speed = self.output_tokens / self.seconds
        return asdict(self) | {
            "accuracy": self.accuracy,
            "interval": compute_interval(self.correct, self.problems),
            "tokens_per_second": speed,
        }


def compute_interval(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of correct / total (Wilson, 1927)."""
    z, share = 1.959964, correct / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return (centre - spread) / scale, (centre + spread) / scale


def run_suite(
    llm: LLM, suite: str, *, count: int | None = None, seed: int = 0, temperature: float = 0.0,
    data: Path | None = None, max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SuiteResult:  # fmt: skip
    """Run `count` problems of `suite`. Call `progress(done, total)` after each batch.

    Raises the errors of `load_problems`.
    """

    def count_tokens(text: str) -> int:
        return len(llm.tokenizer.encode(text))

    problems = load_problems(suite, count, seed, data=data, count_tokens=count_tokens)
    max_tokens = max_tokens or MAX_TOKENS.get(suite, MOST_TOKENS)
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    text = json.dumps([asdict(each) for each in problems], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    batch = 4 * llm.info.max_num_seqs
    failures: list[Failure] = []
    solved: list[bool] = []
    num_formatted = output_tokens = 0
    started = time.perf_counter()
    for first in range(0, len(problems), batch):
        part = problems[first : first + batch]
        for problem, completion, parsed in _answer(llm, part, sampling):
            output_tokens += len(completion.token_ids)
            solved.append(_solves(parsed, problem))
            num_formatted += suite == GSM8K and problem.is_formatted(parsed.content or "")
            if not solved[-1]:
                content = problem.messages[-1]["content"]
                question = str(content[-1]["text"] if isinstance(content, list) else content)
                question = question[-_SHOWN_CHARS:]
                failures.append(Failure(question, problem.expected, _shown(parsed)))
        if progress is not None:
            progress(first + len(part), len(problems))
    return SuiteResult(
        suite=suite, model=llm.info.model, dtype=llm.info.dtype, problems=len(problems),
        correct=sum(solved), formatted=num_formatted if suite == GSM8K else None,
        solved="".join("01"[each] for each in solved), digest=digest,
        seed=seed, temperature=temperature,
        seconds=time.perf_counter() - started, output_tokens=output_tokens,
        failures=tuple(failures[:SHOWN_FAILURES]), serving_shape=llm.info.shape,
    )  # fmt: skip


def _answer(
    llm: LLM, problems: list[Problem], sampling: SamplingParams
) -> Iterator[tuple[Problem, Completion, ParsedOutput]]:
    if isinstance(problems[0].messages[-1]["content"], list):  # with images
        generations = llm.chat([each.messages for each in problems], sampling)
        for problem, generation in zip(problems, generations, strict=True):
            completion = generation.outputs[0]
            assert completion.message is not None
            yield problem, completion, completion.message
        return
    prompts = [llm.render(each.messages, tools=each.tools) for each in problems]
    generations = llm.generate(prompts, sampling)
    for problem, prompt, generation in zip(problems, prompts, generations, strict=True):
        completion = generation.outputs[0]
        yield problem, completion, llm.parse(prompt, completion, tools=problem.tools)


def _solves(parsed: ParsedOutput, problem: Problem) -> bool:
    if not all(call.is_whole for call in parsed.tool_calls):
        return False  # the output ends inside a tool call
    calls = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
    return problem.is_solved_by(parsed.content or "", calls)


def _shown(parsed: ParsedOutput) -> str:
    if parsed.tool_calls:
        return "; ".join(f"{call.name}({call.arguments})" for call in parsed.tool_calls)
    return (parsed.content or "")[-200:]
