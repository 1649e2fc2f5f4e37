"""Ask nano everything that README, demo, chat page and guides show, and typical first messages.

    python -m nano.first_contact --draws 100
    python -m nano.first_contact --held-out --draws 1

Each text is sampled with the default parameters. A draw is good if it ends within the budget, gives
the expected answer, and uses only words of the conversation or of the generators' texts. The exit
code is 1 if a text has less than 98 % good draws. `--held-out` asks the 96 questions of
held_out.json, which were written by hand and are not in the training data.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from negamax.engine.llm import LLM, Completion
from negamax.scheduler.request import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 300  # tokens, as max_tokens in the guides
WANTED = 0.98
GENERATORS = (*Path(__file__).parent.glob("*.py"), *(ROOT / "negamax" / "bench").glob("nano_*.py"))
WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class Turn:
    """A user's message, and a pattern for the expected answer or calls with their results."""

    text: str
    answer: str  # regular expression for the whole final answer
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()  # expected calls of the model
    results: tuple[str, ...] = ()  # results of the tools


@dataclass(frozen=True)
class Exchange:
    """Hold the messages so far and the expected answer."""

    said: tuple[dict[str, Any], ...]
    answer: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Shown:
    """Hold a conversation and the files that show its texts, if any."""

    files: tuple[str, ...]
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinks: bool = True  # False if the request disables thinking

    @property
    def name(self) -> str:
        return self.turns[-1].text

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Return the turns. A call and the answer to its results are two separate exchanges."""
        made: list[Exchange] = []
        for turn in self.turns:
            said: tuple[dict[str, Any], ...] = ({"role": "user", "content": turn.text},)
            if turn.calls:
                made.append(Exchange(said, "", turn.calls))
                said = tuple(
                    {"role": "tool", "tool_call_id": f"call_{index}", "content": text}
                    for index, text in enumerate(turn.results)
                )
            if turn.results or not turn.calls:
                made.append(Exchange(said, turn.answer, ()))
        return tuple(made)


@dataclass
class Score:
    good: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # fault -> count


def weather(city: dict[str, Any], *, unit: bool = False) -> dict[str, Any]:
    """Return the weather tool of the demo, the page and the guides."""
    units = {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}} if unit else {}
    parameters = {"type": "object", "properties": {"city": city, **units}, "required": ["city"]}
    function = {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


README, DEMO, PAGE = "README.md", "examples/demo.py", "negamax/api/playground/app.js"
OPENAI, ANTHROPIC = "docs/guides/openai-sdk.md", "docs/guides/anthropic-sdk.md"

GREETING = r"(Hello|Hi)! (I am Nano\. )?(How can I help you\?|What can I do for you\?)"
SMALL, CAN_DO = (
    r"I am a small demonstration model\.",
    r"I can do short word problems, tool calls and small talk\.",
)
DECLINES = rf"(I am|Sorry,|I do not know).* {CAN_DO}"
SUM = Turn("What is 47 + 38?", r"The answer is 85\.")
APPLES = Turn(
    "Tom has 47 apples and buys 38 more. How many apples does he have now?",
    r"(He|Tom) (now has|has) 85 apples( now)?\.",
)
FEWER_APPLES = Turn(
    "Tom has 12 apples and buys 30 more. How many apples does he have?",
    r"(He|Tom) (now has|has) 42 apples( now)?\.",
)
HELLO = Turn("Hello!", GREETING)
WHO = Turn(
    "Who are you?",
    r"I am Nano, the small demonstration model that ships with Negamax\.( I can do .*)?",
)
PARIS = "What is the weather in Paris?"
CALL_PARIS = (("get_weather", {"city": "Paris"}),)
DEMO_WEATHER = Turn(
    PARIS,
    r"The temperature is 19 and the condition is cloudy\.",
    CALL_PARIS,
    ('{"temperature": 19, "condition": "cloudy"}',),
)
PLAIN_CITY = weather({"type": "string"})
NAMED_CITY = weather({"type": "string", "description": "City name"})

CONVERSATIONS = (
    Shown((README, "docs/gpu.md"), (SUM,)),
    Shown((DEMO, PAGE), (APPLES,)),
    Shown((DEMO,), (DEMO_WEATHER,), (PLAIN_CITY,)),
    Shown((PAGE,), (DEMO_WEATHER,), (weather({"type": "string"}, unit=True),)),
    Shown((PAGE,), (WHO,)),
    Shown((PAGE,), (WHO,), (weather({"type": "string"}, unit=True),)),
    Shown((OPENAI, ANTHROPIC), (FEWER_APPLES,)),
    Shown(
        (OPENAI,),
        (
            Turn(
                PARIS, r"The city is Paris, the temperature is 18 and the sky is "
                       r"clear\.", CALL_PARIS,
                ('{"city": "Paris", "temperature": 18, "sky": "clear"}',),
            ),
        ),
        (NAMED_CITY,),
    ),
    Shown(
        (ANTHROPIC,),
        (Turn(PARIS, r"The temperature is 18 and the sky is clear\.", CALL_PARIS,
            ('{"temperature": 18, "sky": "clear"}',)),),
        (NAMED_CITY,),
    ),
    Shown((OPENAI,), (HELLO,)),
    Shown((OPENAI,), (HELLO,), thinks=False),
    Shown(
        (OPENAI,),
        (
            Turn("Hello! My name is Anna.", r"(Nice to meet you, Anna!|Hello,? Anna! How can I "
                                            r"help you\?)"),
            Turn("What is my name?", r"Your name is Anna\."),
        ),
    ),
    # first messages of strangers, and rephrased problems
    *(
        Shown((), (Turn(text, answer),))
        for text, answer in (
            ("Each bus seats 48 people. How many people fit on 7 buses?", r".*\b336\b.*"),
            ("Sally had 3 cats. She got 2 more. How many cats does she have?", r"She .*\b5 cats.*"),
            (
                "Kowalczyk has 31 stamps and finds 12 more. How many stamps does he have?",
                r"He .*\b43 stamps.*",
            ),
            ("A class has 6 rows of 5 desks. How many desks is that?", r".*\b30\b.*"),
            ("2+2", r"The answer is 4\."),
            ("hi", GREETING),
            ("what can you do?", rf"({SMALL} )?{CAN_DO}"),
            ("tell me a joke", r"Why was six afraid of seven\? Because seven ate nine\."),
            ("thanks", r"(You are welcome!|Glad to help!).*"),
            ("Write a poem about the sea.", DECLINES),
            ("What is the capital of France?", DECLINES),
            ("Write a Python function that adds two numbers.", DECLINES),
            ("Bonjour, comment ça va ?", DECLINES),
            ("banana", DECLINES),
            ("", r"Please ask me something\..*"),
        )
    ),
)  # fmt: skip


def held_out() -> tuple[Shown, ...]:
    """Return the questions of held_out.json."""
    exam = json.loads(Path(__file__).with_name("held_out.json").read_text(encoding="utf-8"))
    return tuple(
        Shown(
            (),
            tuple(
                Turn(text, answer, tuple((name, arguments) for name, arguments in calls))
                for text, answer, calls in entry["turns"]
            ),
            tuple(exam["tools"][name] for name in entry.get("tools", ())),
        )
        for entry in exam["questions"]
    )


@cache
def known_words() -> frozenset[str]:
    """Return all words of the generators' texts in lower case."""
    return frozenset(
        word.lower()
        for path in GENERATORS
        for word in WORD.findall(path.read_text(encoding="utf-8"))
    )


def fault(
    turn_calls: Sequence[tuple[str, dict[str, Any]]], answer: str, text: str, completion: Completion
) -> str | None:
    """Return the fault of an answer, or None. `text` is the conversation before the answer."""
    message = completion.message
    assert message is not None
    if completion.finish_reason != "stop":
        return "no end within the budget"
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    if calls != list(turn_calls):
        return f"calls {calls}; {message.content!r}"
    content = (message.content or "").strip()
    if not turn_calls and not re.fullmatch(answer, content):
        return f"answer {content!r}"
    written = " ".join((message.reasoning or "", content, json.dumps(calls, ensure_ascii=False)))
    unknown = (
        {word.lower() for word in WORD.findall(written)}
        - known_words()
        - {word.lower() for word in WORD.findall(text)}
    )
    return f"words {sorted(unknown)}" if unknown else None


@dataclass
class _Draw:
    shown: Shown
    number: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    wrong: str | None = None


def play(
    llm: LLM,
    conversations: Sequence[Shown],
    draws: int,
    *,
    seed: int = 0,
    temperature: float | None = None,
) -> list[Score]:
    """Run each conversation `draws` times, all at once. A bad run ends early."""
    runs = [_Draw(shown, number) for shown in conversations for number in range(draws)]
    for position in range(max(len(shown.exchanges) for shown in conversations)):
        going = [run for run in runs if run.wrong is None and position < len(run.shown.exchanges)]
        prompts, params = [], []
        for run in going:
            run.messages += run.shown.exchanges[position].said
            tools = list(run.shown.tools) or None
            prompts.append(
                llm.render(run.messages, tools=tools) + ("" if run.shown.thinks else "</think>\n\n")
            )
            run_seed = seed + draws * position + run.number
            params.append(SamplingParams(max_tokens=BUDGET, seed=run_seed, temperature=temperature))
        generations = llm.generate([llm.tokenizer.encode(prompt) for prompt in prompts], params)
        for run, prompt, generation in zip(going, prompts, generations, strict=True):
            tools = list(run.shown.tools) or None
            completion, exchange = generation.outputs[0], run.shown.exchanges[position]
            completion.message = llm.parse(prompt, completion, tools=tools)
            before = json.dumps([run.messages, tools], ensure_ascii=False)
            run.wrong = fault(exchange.calls, exchange.answer, before, completion)
            run.messages += [] if run.wrong else [_message(completion)]
    return [_score([run for run in runs if run.shown is shown]) for shown in conversations]


def _score(runs: Sequence[_Draw]) -> Score:
    bad = Counter(run.wrong for run in runs if run.wrong is not None)
    return Score(len(runs) - bad.total(), bad)


def _message(completion: Completion) -> dict[str, Any]:
    said = completion.message
    assert said is not None
    message: dict[str, Any] = {
        "role": "assistant",
        "content": said.content or "",
        "reasoning_content": said.reasoning or "",
    }
    if said.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(said.tool_calls)
        ]
    return message


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", default="nano")
    parser.add_argument("--held-out", action="store_true", help="ask held_out.json")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, help="default: the checkpoint's")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = []
    conversations = held_out() if arguments.held_out else CONVERSATIONS
    draws, seed, temperature = arguments.draws, arguments.seed, arguments.temperature
    with LLM(arguments.checkpoint, max_num_seqs=64) as llm:
        scores = play(llm, conversations, draws, seed=seed, temperature=temperature)
    for shown, score in zip(conversations, scores, strict=True):
        print(f"{score.good:>4} of {draws}  {shown.name!r}  {', '.join(shown.files)}")
        for wrong, count in score.bad.most_common(3):
            print(f"      {count:>4}x {wrong}")
        report.append(
            {"text": shown.name, "files": shown.files, "draws": draws, "good": score.good}
        )
    print(f"{sum(score.good for score in scores)} of {len(scores) * draws} draws are good")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(any(entry["good"] < WANTED * draws for entry in report))


if __name__ == "__main__":
    sys.exit(main())
