"""Generate training conversations from all kinds of turns, which share facts."""

# ruff: noqa: E501 (word lists and tables read better as text)

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano import facts, more_tools, openings, reasoning, results, talk, variety
from nano.suites import arithmetic, common, tool_calls
from nano.suites.arithmetic import Step

Message = dict[str, Any]
CALL_BOUND = (
    "open the", "read the", "what is in", "play", "call", "send", "book", "order", "set", "turn", "what is the weather", "what time", "translate",
    "how do you say", "what is the date", "what day", "what is the news", "how far", "convert", "create", "make", "write", "draft", "plan", "draw",
    "generate", "show", "find", "list", "count", "sort", "name", "spell", "give", "roll", "where",
    "what's the weather", "how is the weather", "weather", "remind", "search", "delete", "define", "what does", "rename", "switch", "tell",
)  # fmt: skip


@dataclass
class Conversation:
    """Messages and tools of one training example."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    declared: Sequence[Any] = ()  # tools from which `tools` was made
    persona: str | None = None
    facts: dict[str, str] = field(default_factory=dict)
    stock: dict[str, int] = field(default_factory=dict)  # objects that the user owns
    numbers: list[int] = field(default_factory=list)  # earlier results of arithmetic
    # (key words, value) of earlier tool results
    findings: list[tuple[str, str]] = field(default_factory=list)

    def user(self, text: str) -> None:
        """Add a user message."""
        self.messages.append({"role": "user", "content": text})

    def answer(self, thought: str, text: str) -> None:
        """Add a final answer with its reasoning."""
        self.messages.append({"role": "assistant", "content": text, "reasoning_content": thought})


# returns False if this turn does not fit the conversation
Turn = Callable[[Conversation, random.Random], bool]


def talk_turn(chat: Conversation, rng: random.Random) -> bool:
    question, answer, thought = talk.draw_talk(rng)
    if chat.persona:
        if "am I talking" in question or "call me" in question:
            return False
        answer = answer.replace(talk.IDENTITY, f"I am {chat.persona}.").replace(
            "I am Nano.", f"I am {chat.persona}."
        )
        question = question.replace("Nano", chat.persona)
    chat.user(question)
    chat.answer(thought, answer)
    return True


def unknown_turn(chat: Conversation, rng: random.Random) -> bool:
    """Add a question that the model cannot answer."""
    question, answer, thought = talk.draw_unknown(rng)
    if rng.random() < 0.5:
        question = (
            openings.draw_ask(rng)
            if rng.random() < 0.3
            else talk.noisy(openings.draw_ask(rng), rng)
        )
    if chat.tools and question.lower().startswith(CALL_BOUND):
        return False
    chat.user(question)
    chat.answer(thought, answer)
    return True


def opening_turn(chat: Conversation, rng: random.Random) -> bool:
    if rng.random() < 0.35:
        chat.user(rng.choice(openings.EMPTY))
        chat.answer(openings.EMPTY_THOUGHT, openings.EMPTY_ANSWER)
        return True
    _, answers, thought = talk.TALK[0]
    chat.user(openings.fill(rng.choice(openings.REQUESTS), rng))
    answer = rng.choice(answers.split("|")).replace(
        "I am Nano.", f"I am {chat.persona or talk.NAME}."
    )
    chat.answer(thought, answer)
    return True


def fact_turn(chat: Conversation, rng: random.Random) -> bool:
    """Add a turn in which the user states a fact or asks for it."""
    known = [fact for fact in facts.FACTS if fact in chat.facts]
    fact = rng.choice(known) if known and rng.random() < 0.6 else rng.choice(list(facts.FACTS))
    thing = (
        chat.facts.get("noun") or f"{rng.choice(common.NOUNS)}{rng.choice(('', ' code', ' name'))}"
    )
    tells, replies, asks, recalled, unknown = (
        part.replace("{k}", thing) for part in facts.FACTS[fact]
    )
    name = thing if fact == "thing" else fact
    if fact in chat.facts or rng.random() < 0.12:
        question = rng.choice(asks.split("|"))
        chat.user(question.lower() if rng.random() < 0.15 else question)
        if fact in chat.facts:
            value = chat.facts[fact]
            chat.answer(f"The user told me the {name}: {value}", recalled.format(v=value))
        else:
            chat.answer(f"The user did not tell me the {name}.", unknown)
        return True
    value = facts.draw_value(fact, rng)
    chat.facts[fact] = value
    if fact == "thing":
        chat.facts["noun"] = thing
    reply = rng.choice(replies.split("|")).format(v=value)
    text = rng.choice(tells.split("|")).format(v=value)
    if rng.random() < 0.2:
        text = text.rstrip(".!") + rng.choice(facts.TAILS)
    chat.user(text)
    chat.answer(f"The user tells me the {name}: {value}", reply[0].upper() + reply[1:])
    return True


def stock_turn(chat: Conversation, rng: random.Random) -> bool:
    """Add a turn in which the user owns objects, changes their number or asks for the number."""
    if not chat.stock or rng.random() < 0.25:
        things = rng.choice(common.OBJECTS)[1]
        if things in chat.stock:
            return False
        number = rng.randint(2, 500) if rng.random() < 0.5 else rng.randint(2, 60)
        chat.stock[things] = number
        chat.user(
            rng.choice(
                (
                    "I have {n} {o}.",
                    "I own {n} {o}.",
                    "I bought {n} {o} today.",
                    "There are {n} {o} on my table.",
                )
            ).format(n=number, o=things)
        )
        chat.answer(
            f"The user has {number} {things}.", f"Good to know: you have {number} {things}."
        )
        return True
    things = rng.choice(list(chat.stock))
    number = chat.stock[things]
    if rng.random() < 0.3:
        chat.user(
            rng.choice(
                (
                    f"How many {things} do I have?",
                    f"How many {things} are there?",
                    f"What is the number of my {things}?",
                )
            )
        )
        chat.answer(f"The user has {number} {things}.", f"You have {number} {things}.")
        return True
    if number > 3 and rng.random() < 0.5:
        change = rng.randint(2, number - 1)
        step = Step(number, "-", change, number - change, f"{things} left")
        forms = (
            "I gave away {c} of my {o}. How many do I have left?",
            "I lost {c} {o}. How many {o} are left?",
            "If I sell {c} {o}, how many are left?",
        )
        reply = "You have {r} {o} left."
    else:
        change = rng.randint(2, 99)
        step = Step(number, "+", change, number + change, f"{things} now")
        forms = (
            "I buy {c} more {o}. How many do I have now?",
            "I got {c} more {o}. How many {o} is that?",
            "If I find {c} {o}, how many {o} will I have?",
        )
        reply = "You have {r} {o}."
    chat.user(rng.choice(forms).format(c=change, o=things))
    chat.answer(
        f"The user has {number} {things}.\n{reasoning.explain([step])}",
        reply.format(r=step.result, o=things),
    )
    chat.stock[things] = step.result
    chat.numbers.append(step.result)
    return True


def math_turn(chat: Conversation, rng: random.Random) -> bool:
    problem = variety.draw_problem(rng) if rng.random() < 0.6 else arithmetic.draw(rng)
    if arithmetic.held_out(problem):
        return False
    text = problem.text
    roll = rng.random()
    if roll < 0.08:
        text = (
            rng.choice(
                (
                    "Solve this: ",
                    "Please help me with this: ",
                    "Here is a problem: ",
                    "A question: ",
                    "Hi! ",
                    "Can you solve this? ",
                    "Math: ",
                )
            )
            + text
        )
    elif roll < 0.12:
        text += rng.choice(
            (
                " Thanks!",
                " Explain.",
                " Think step by step.",
                " Give only the number.",
                " Please.",
                " Show your work.",
            )
        )
    elif roll < 0.15:
        text = text.lower()
    elif roll < 0.165:
        text = f"{openings.paste(rng, rng.randint(2, 40))}\n\n{text}"
    chat.user(text)
    chat.answer(reasoning.explain(problem.steps), problem.sentence)
    chat.numbers.append(problem.answer)
    return True


def beyond_turn(chat: Conversation, rng: random.Random) -> bool:
    """Add a calculation beyond the evaluated ones.

    Such calculations have four digits, long products, remainders or comparisons.
    """
    kind = rng.choice(
        ("sum", "sum", "difference", "difference", "product", "remainder", "negative", "larger")
    )
    left, right = rng.randint(100, 9999), rng.randint(2, 9999)
    if rng.random() < 0.4:
        left, right = rng.randint(2, 99), rng.randint(2, 20)
    if kind == "product":
        left, right = rng.randint(100, 999), rng.randint(10, 999)
    elif kind == "remainder":
        right = rng.randint(2, 12)
        left = rng.randint(right + 1, 999)
    elif kind in ("negative", "larger"):
        left, right = rng.randint(2, 999), rng.randint(2, 999)
    if left == right:
        return False
    large, small = max(left, right), min(left, right)
    if kind == "larger":
        forms = (
            "Which is larger, {a} or {b}?",
            "Which number is bigger: {a} or {b}?",
            "Is {a} or {b} larger?",
            "What is more, {a} or {b}?",
        )
        chat.user(rng.choice(forms).format(a=left, b=right))
        chat.answer(f"{left} or {right}, {large} is larger.", f"{large} is larger.")
        return True
    operator = {"sum": "+", "product": "*", "remainder": "/"}.get(kind, "-")
    if kind == "difference":
        left, right = large, small
    elif kind == "negative":
        left, right = small, large
    word = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[operator]
    forms = (
        "What is {a} {o} {b}?",
        "{a} {o} {b}",
        "Calculate {a} {o} {b}.",
        "How much is {a} {w} {b}?",
        "what's {a}{o}{b}",
        "{a}{o}{b}=",
        "{a} {o} {b} = ?",
        "{a}{o}{b}",
        "{a}{o}{b}?",
        "{a} {w} {b}",
        "{a} {w} {b}?",
        "what is {a}{o}{b}?",
        "What's {a} {w} {b}?",
        "Compute {a}{o}{b}",
        "{a}{o}{b} is?",
        "can you calculate {a} {o} {b}?",
        "How much is {a} {o} {b}?",
    )
    chat.user(rng.choice(forms).format(a=left, b=right, o=operator, w=word))
    _answer_beyond(chat, left, operator, right)
    return True


def _answer_beyond(chat: Conversation, left: int, operator: str, right: int) -> None:
    if operator == "-" and left < right:
        thought = reasoning.explain([Step(right, "-", left, right - left, "")])
        chat.answer(
            f"{left} - {right}: {right} is larger, so the result is negative.\n{thought}",
            f"The answer is -{right - left}.",
        )
        return
    if operator == "/":
        whole, rest = divmod(left, right)
        thought = f"{left} / {right}\n{reasoning.division(left, right)}\n= {whole}"
        chat.answer(
            f"{thought} left {rest}" if rest else thought,
            f"The answer is {whole} remainder {rest}." if rest else f"The answer is {whole}.",
        )
        if not rest:
            chat.numbers.append(whole)
        return
    result = {"+": left + right, "-": left - right, "*": left * right}[operator]
    chat.answer(
        reasoning.explain([Step(left, operator, right, result, "")]), f"The answer is {result}."
    )
    chat.numbers.append(result)


def follow_up_turn(chat: Conversation, rng: random.Random) -> bool:
    """Add arithmetic on the last one or two results."""
    if not chat.numbers:
        return False
    last = chat.numbers[-1]
    options: list[tuple[str, Step]] = []
    other = rng.randint(2, 9) if rng.random() < 0.3 else rng.randint(2, 200)
    forms = (
        f"Now add {other} to that.|Add {other}.|And if you add {other}?|Plus {other}?|What "
        f"is that plus {other}?|Add {other} to the result."
    )
    options.append((forms, Step(last, "+", other, last + other, "")))
    if last > 3:
        less = rng.randint(2, min(last - 1, 200))
        forms = (
            f"Subtract {less} from that.|Now take away {less}.|Minus {less}?|What is that "
            f"minus {less}?|And {less} less?|Now subtract {less}."
        )
        options.append((forms, Step(last, "-", less, last - less, "")))
    if last <= 999:
        factor = rng.randint(2, 9)
        forms = (
            f"Multiply that by {factor}.|Times {factor}?|Now multiply the result by "
            f"{factor}.|What is {factor} times that?"
        )
        options.append((forms, Step(last, "*", factor, last * factor, "")))
        options.append(
            (
                "Double it.|Double that.|And twice as much?|What is the double of that?",
                Step(last, "*", 2, last * 2, ""),
            )
        )
        divisors = [number for number in range(2, 10) if last % number == 0 and last > number]
        if divisors:
            part = rng.choice(divisors)
            options.append(
                (
                    f"Divide that by {part}.|Now divide by {part}.|What is that divided by {part}?",
                    Step(last, "/", part, last // part, ""),
                )
            )
            if 2 in divisors:
                options.append(
                    (
                        "What is half of that?|Half of it?|Now halve it.",
                        Step(last, "/", 2, last // 2, ""),
                    )
                )
    if len(chat.numbers) > 1:
        before = chat.numbers[-2]
        options.append(
            (
                "Add the last two results.|What is the sum of the last two answers?",
                Step(before, "+", last, before + last, ""),
            )
        )
    forms, step = rng.choice(options)
    if step.result > 99999:
        return False
    chat.user(rng.choice(forms.split("|")))
    chat.answer(
        f"The last result is {last}.\n{reasoning.explain([step])}", f"The answer is {step.result}."
    )
    chat.numbers.append(step.result)
    return True


def age_turn(chat: Conversation, rng: random.Random) -> bool:
    if "age" not in chat.facts:
        return False
    age = int(chat.facts["age"])
    years = rng.randint(2, 40)
    if rng.random() < 0.6 or age - years < 1:
        step = Step(age, "+", years, age + years, "age then")
        chat.user(
            rng.choice(
                (f"How old will I be in {years} years?", f"What will my age be in {years} years?")
            )
        )
        chat.answer(
            f"The user is {age}.\n{reasoning.explain([step])}",
            f"You will be {step.result} years old.",
        )
    else:
        step = Step(age, "-", years, age - years, "age then")
        chat.user(
            rng.choice((f"How old was I {years} years ago?", f"What was my age {years} years ago?"))
        )
        chat.answer(
            f"The user is {age}.\n{reasoning.explain([step])}", f"You were {step.result} years old."
        )
    return True


def declare_tools(chat: Conversation, rng: random.Random) -> None:
    """Give the conversation one to four tools."""
    chat.declared = tool_calls.draw_tools(
        rng, rng.choices((1, 2, 3, 4), weights=(30, 30, 24, 16))[0]
    )
    if rng.random() < 0.56:
        chat.declared = more_tools.mixed(chat.declared, variety.natural_tool, rng)
    chat.tools = [tool_calls.as_json(tool, rng) for tool in chat.declared]
    if rng.random() < 0.15:
        chat.tools = more_tools.longer(chat.tools, rng)


def plan_text(calls: Sequence[tool_calls.Call]) -> str:
    """Write the reasoning before calls: one line per call with the values of the request."""
    lines = []
    for call in calls:
        values = ", ".join(f"{key} = {_raw(value)}" for key, value in call.arguments.items())
        lines.append(f"I call {call.name}: {values}" if values else f"I call {call.name}.")
    return "\n".join(lines)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tool_turn(chat: Conversation, rng: random.Random) -> bool:
    """Add a request for calls, mostly with results and a report."""
    if not chat.tools:
        return False
    text, calls = more_tools.draw_request(chat.declared, rng)
    problem = tool_calls.ToolProblem(({"role": "user", "content": text},), tuple(chat.tools), calls)
    if tool_calls.held_out(problem):
        return False
    roll = rng.random()
    if roll < 0.015:
        text = f"{openings.paste(rng, rng.randint(2, 30))}\n\n{text}"
    elif roll < 0.1:
        remark = rng.choice(openings.REMARKS)
        text = (
            f"{remark} {text}"
            if roll < 0.05
            else f"{text}{'' if text[-1] in '.?!' else '.'} {remark}"
        )
    chat.user(text)
    _call_and_report(chat, calls, rng)
    return True


def home_turn(chat: Conversation, rng: random.Random) -> bool:
    """Add a request without the city, which the user stated before."""
    if "city" not in chat.facts or not chat.tools:
        return False
    for tool in chat.declared:
        required = [parameter for parameter in tool.parameters if parameter.required]
        if (
            len(required) == 1
            and required[0].kind in ("string:city", "string:town")
            and tool.requests
        ):
            text = rng.choice(tool.requests).format("my city", opt="")
            chat.user(text)
            _call_and_report(
                chat, (tool_calls.Call(tool.name, {required[0].name: chat.facts["city"]}),), rng
            )
            return True
    return False


def missing_turn(chat: Conversation, rng: random.Random) -> bool:
    """Add a request without required values. The model asks for the missing values."""
    lacking = [
        tool for tool in chat.declared if any(parameter.required for parameter in tool.parameters)
    ]
    if not lacking:
        return False
    tool = rng.choice(lacking)
    names = [parameter.name for parameter in tool.parameters if parameter.required]
    action = tool.action or f"use {tool.name}"
    weather = any("weather in" in request for request in tool.requests)
    if weather and rng.random() < 0.7:
        chat.user(
            rng.choice(
                (
                    "What is the weather?",
                    "How is the weather?",
                    "What's the weather like?",
                    "weather?",
                    "What is the weather today?",
                )
            )
        )
    else:
        chat.user(
            rng.choice(
                (
                    f"Please {action}.",
                    f"I want to {action}.",
                    f"{action[0].upper()}{action[1:]}",
                    f"Can you {action}?",
                    f"Use {tool.name}.",
                )
            )
        )
    listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    chat.answer(
        f"{tool.name} needs {listed}, and the user did not give any.",
        f"Please tell me the {listed} for that.",
    )
    return True


def _call_and_report(
    chat: Conversation, calls: Sequence[tool_calls.Call], rng: random.Random
) -> None:
    entries = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    message: Message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": plan_text(calls),
        "tool_calls": entries,
    }
    chat.messages.append(message)
    chat.messages += _answers(calls, rng, chat)


def _answers(
    calls: Sequence[tool_calls.Call], rng: random.Random, chat: Conversation
) -> list[Message]:
    sentences: list[str] = []
    messages: list[Message] = []
    for _ in calls:
        text, sentence = results.draw_result(rng)
        messages.append({"role": "tool", "content": text})
        sentences.append(sentence)
    failed = any(sentence.startswith("The call failed") for sentence in sentences)
    thought = (
        "A call failed. I tell the user."
        if failed
        else "The tool answered. I report it."
        if len(calls) == 1
        else "The tools answered. I report it."
    )
    messages.append(
        {
            "role": "assistant",
            "content": results.report(list(calls), sentences),
            "reasoning_content": thought,
        }
    )
    if len(calls) == 1 and sentences[0].startswith("The "):
        chat.findings.append(("last", sentences[0]))
    return messages


def again_turn(chat: Conversation, rng: random.Random) -> bool:
    """Add a turn in which the user asks for the last tool result again."""
    if not chat.findings or chat.messages[-1]["content"] != chat.findings[-1][1]:
        return False
    chat.user(
        rng.choice(
            (
                "What was the result again?",
                "Can you repeat that?",
                "Say that again, please.",
                "What did the tool say?",
                "Once more please.",
            )
        )
    )
    chat.answer("The user wants the last result again.", chat.findings[-1][1])
    return True
