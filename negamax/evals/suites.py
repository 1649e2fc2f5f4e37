"""The suites of `negamax bench accuracy`: problems with exact answers.

The problems of nano's suites are fixed. `gsm8k` reads GSM8K's published file. Suites such as
`needle-8k` are generated for a context length.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from negamax.base.errors import InvalidRequestError
from negamax.evals import needle

FOLDER = Path(__file__).parent / "problems"
# suite name -> number of problems
SUITES = {"nano-math": 1000, "nano-tools": 500}
SUITES |= dict.fromkeys(("nano-retrieval-2k", "nano-retrieval-4k", "nano-retrieval-8k"), 200)
SUITES["nano-vision"] = 400  # questions about images
DEFAULT_SUITES = ("nano-math", "nano-tools")  # Other suites need up to 8,192 tokens of context.
GSM8K = "gsm8k"
GSM8K_ADDRESS = "hf://datasets/openai/gsm8k/main/test-00000-of-00001.parquet"
MAX_TOKENS = {GSM8K: 16_384}  # suite -> maximum output tokens, instead of `MOST_TOKENS`
MOST_TOKENS = 1024
_STEPS = {
    "role": "system",
    "content": "Solve problems step by step. End with a line of #### and the answer as a number.",
}
_NEEDLE = re.compile(r"needle-([1-9]\d{0,3})k")  # the group is the number of prompt tokens / 1024
_STRICT = re.compile(r"#### (-?[$\d.,]+)")
_FLEXIBLE = re.compile(r"-?\$?\d[\d.,]*")
_MAX_ANSWER_CHARS = 200  # A longer answer is wrong, because it may quote the whole text.

Calls = Sequence[tuple[str, dict[str, Any]]]  # (name, arguments) of each call, in order


@dataclass(frozen=True)
class Problem:
    """A conversation with declared tools, and either the expected answer or expected calls."""

    suite: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    answer: str = ""
    calls: list[dict[str, Any]] | None = None

    @property
    def expected(self) -> str:
        return self.answer if self.calls is None else json.dumps(self.calls, ensure_ascii=False)

    def is_solved_by(self, content: str, calls: Calls) -> bool:
        """Return whether an answer, with its `content` and `calls`, is correct.

        Calls must equal the expected calls in names, order, values and JSON types. In arithmetic
        suites, the last integer of the text must be the expected answer. In GSM8K, the last number
        must be the answer. In retrieval suites, the text must be short and contain the answer.
        """
        if self.calls is not None:
            expected = [(each["name"], each["arguments"]) for each in self.calls]
            return _canonical(calls) == _canonical(expected)
        if calls:
            return False
        if self.suite == "nano-math":
            return extract_answer(content) == int(self.answer)
        if self.suite == GSM8K:
            return _read_number((_FLEXIBLE.findall(content) or [""])[-1]) == Decimal(self.answer)
        return len(content) <= _MAX_ANSWER_CHARS and self.answer in re.findall(r"\w+", content)

    def is_formatted(self, content: str) -> bool:
        """For GSM8K, return whether the number after the first #### of `content` is the answer."""
        found = _STRICT.search(content)
        return found is not None and _read_number(found[1]) == Decimal(self.answer)


def explain_unknown(name: str) -> str | None:
    """Return a text with the allowed names if no suite is called `name`, else None."""
    if name in SUITES or name == GSM8K or _NEEDLE.fullmatch(name):
        return None
    return f"allowed: {', '.join(SUITES)}, {GSM8K} and needle-8k (or another length)"


def load_problems(
    suite: str,
    count: int | None = None,
    seed: int = 0,
    *,
    data: Path | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> list[Problem]:
    """Load the first `count` problems of a suite, or a random sample if `seed` is not 0. None loads
    all problems. `data` is the path of GSM8K's file. Generated suites need `count_tokens`, which
    returns the number of tokens of a text.

    Raises `InvalidRequestError` for an unknown suite, for a suite with fewer than `count` problems,
    and for an unusable file.
    """
    if reason := explain_unknown(suite):
        raise InvalidRequestError(f"no accuracy suite is called {suite!r}; {reason}", param="suite")
    if found := _NEEDLE.fullmatch(suite):
        if count_tokens is None:
            raise InvalidRequestError(f"{suite} needs a tokenizer", param="suite")
        texts = needle.draw(
            random.Random(seed), 1024 * int(found[1]), count or needle.PROBLEMS, count_tokens
        )
        return [Problem(suite, [{"role": "user", "content": t}], answer=a) for t, a in texts]
    problems = _read_gsm8k(data) if suite == GSM8K else _read_bundled(suite)
    if count is not None and count > len(problems):
        raise InvalidRequestError(
            f"{count} problems are requested; {suite} has {len(problems)}", param="count"
        )
    count = count or len(problems)
    return random.Random(seed).sample(problems, count) if seed else problems[:count]


def _read_bundled(suite: str) -> list[Problem]:
    import lzma  # some builds of Python lack this module

    with lzma.open(FOLDER / f"{suite}.jsonl.xz", "rt", encoding="utf-8") as file:
        return [Problem(suite, **json.loads(line)) for line in file]


def _read_gsm8k(file: Path | None) -> list[Problem]:
    """Read rows with a `question` and an `answer` that ends with #### and a number."""
    if file is None:
        raise InvalidRequestError(f"{GSM8K} needs a file of problems", param="data")
    problems = []
    try:
        for fields in _read_rows(file):
            answer = _read_number((_STRICT.findall(fields["answer"]) or [""])[-1])
            if answer.is_nan():
                raise ValueError("no number follows ####")
            user = {"role": "user", "content": fields["question"]}
            problems.append(Problem(GSM8K, [_STEPS, user], answer=f"{answer:f}"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidRequestError(
            f"--data {str(file)!r}: problem {len(problems) + 1} is unreadable: {error}",
            hint='each line is {"question": "...", "answer": "... #### 42"}',
            param="data",
        ) from None
    if not problems:
        raise InvalidRequestError(f"--data {str(file)!r} has no problems", param="data")
    return problems


def _read_rows(file: Path) -> Iterator[Any]:
    """Read the lines of a JSONL file, or the rows of a Parquet file."""
    if file.suffix != ".parquet":
        yield from map(json.loads, filter(str.strip, file.read_text("utf-8").splitlines()))
        return
    check_can_read(file.name)
    from pyarrow.parquet import read_table

    yield from read_table(file, columns=["question", "answer"]).to_pylist()


def check_can_read(address: str) -> None:
    """Raise `InvalidRequestError` if `address` is a Parquet file and pyarrow is missing."""
    if address.endswith(".parquet") and find_spec("pyarrow") is None:
        raise InvalidRequestError(
            f"{address} is a Parquet file, which needs the package pyarrow",
            hint="pip install 'negamax[parquet]', or use the file test.jsonl of GSM8K",
            param="data",
        )


def _read_number(text: str) -> Decimal:
    """Return the number in a text such as "$1,234.50.", or NaN."""
    try:
        return Decimal(re.sub(r"[$,]", "", text).rstrip("."))
    except InvalidOperation:
        return Decimal("NaN")


def extract_answer(content: str) -> int | None:
    """Return the last integer of a text, or None. The integer may have thousands separators."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.0+(?!\d))?", content)
    if not numbers:
        return None
    digits = re.sub(r"\.0+$", "", numbers[-1].rstrip(",")).replace(",", "")
    return int(digits)


def _canonical(calls: Calls) -> list[tuple[str, str]]:
    return [(name, json.dumps(arguments, sort_keys=True)) for name, arguments in calls]
