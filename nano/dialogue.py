"""Training conversations: all kinds of turns, combined over shared facts."""

# ruff: noqa: E501, SIM905 (word lists and tables read better as text)

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano import more_tools, openings, reasoning, results, talk, unseen, variety
from nano.suites import arithmetic, common, tool_calls, tool_values
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
    declared: Sequence[Any] = ()  # the source of `tools`
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


# False: this turn does not fit here
Turn = Callable[[Conversation, random.Random], bool]

FACTS: dict[str, tuple[str, str, str, str, str]] = {
    # fact: (how the user tells it, the reply, how the user asks, the recalled sentence, the unknown
    # sentence)
    "name": (
        "My name is {v}.|I am {v}.|I'm {v}.|Call me {v}.|Hi, I am {v}.|Hello, my name is "
        "{v}.|Hello! My name is {v}.|Hi! My name is {v}.|Hello! I am {v}.|Hi, my name is {v}.|hi "
        "I'm {v}|My name's {v}|You can call me {v}.|Hey, {v} here.",
        "Nice to meet you, {v}!|Hello {v}! How can I help you?",
        "What is my name?|Do you remember my name?|What's my name?|Who am I?|Do you know my "
        "name?|How am I called?|Say my name.",
        "Your name is {v}.",
        "You have not told me your name yet.",
    ),
    "colour": (
        "My favorite color is {v}.|I like the color {v}.|My favourite colour is {v}.|I love {v}, "
        "it is my favorite color.|The color I like most is {v}.",
        "{v} is a nice color.",
        "What is my favorite color?|Which color do I like?|What's my favourite colour?|Do you "
        "know my favorite color?|Which color do I like most?",
        "Your favorite color is {v}.",
        "You have not told me your favorite color yet.",
    ),
    "city": (
        "I live in {v}.|I am from {v}.|My city is {v}.|I'm from {v}.|My home is in {v}.|I moved "
        "to {v}.|I come from {v}.",
        "{v} sounds like a nice place.",
        "Where do I live?|Which city do I live in?|Where am I from?|What is my city?|Do you "
        "remember where I live?|Which city am I from?",
        "You live in {v}.",
        "You have not told me where you live yet.",
    ),
    "pet": (
        "My dog is called {v}.|I have a dog named {v}.|My dog's name is {v}.|My dog {v} is "
        "sleeping.|This is my dog {v}.",
        "{v} is a lovely name for a dog.",
        "What is my dog called?|What is the name of my dog?|Do you remember my dog's "
        "name?|What's my dog's name?",
        "Your dog is called {v}.",
        "You have not told me the name of your dog yet.",
    ),
    "friend": (
        "My best friend is {v}.|I have a friend named {v}.|My friend is called {v}.|{v} is my "
        "best friend.",
        "It is good to have a friend like {v}.",
        "Who is my best friend?|What is the name of my friend?|Who is my friend?|Do you remember "
        "my friend's name?",
        "Your friend is {v}.",
        "You have not told me about your friend yet.",
    ),
    "job": (
        "I work as a {v}.|I am a {v}.|My job is {v}.|I'm a {v} by profession.",
        "Working as a {v} must be interesting.",
        "What is my job?|What do I do for a living?|What do I work as?|Do you remember my job?",
        "You work as a {v}.",
        "You have not told me your job yet.",
    ),
    "food": (
        "I like {v}.|My favorite food is {v}.|I love to eat {v}.|I could eat {v} every day.",
        "{v}, good choice.",
        "What is my favorite food?|What do I like to eat?|Which food do I like?",
        "You like {v}.",
        "You have not told me what you like to eat yet.",
    ),
    "age": (
        "I am {v} years old.|I'm {v} years old.|My age is {v}.|I turned {v} last week.|I just "
        "turned {v}.",
        "Thank you for telling me that you are {v}.",
        "How old am I?|What is my age?|Do you remember how old I am?|Do you know my age?",
        "You are {v} years old.",
        "You have not told me your age yet.",
    ),
    "number": (
        "My lucky number is {v}.|My favorite number is {v}.|Remember the number {v}.|Please "
        "remember {v}.|The code is {v}.|Keep the number {v} in mind.",
        "I will remember {v}.",
        "What is my number?|Which number did I tell you?|What was the number?|Do you remember "
        "the number?|What was the code?",
        "The number is {v}.",
        "You have not told me a number yet.",
    ),
    "word": (
        'Remember the word "{v}".|The password is {v}.|The secret word is {v}.|Please remember '
        "this word: {v}|Keep in mind: {v}.",
        'I will remember "{v}".',
        "What is the secret word?|What was the word?|Which word did I tell you?|What is the "
        "password?|What should you remember?",
        'The word is "{v}".',
        "You have not told me a word yet.",
    ),
    "thing": (
        "The {k} is {v}.|My {k} is {v}.|Remember that the {k} is {v}.|I tell you that the {k} is {v}.",
        "I will remember that the {k} is {v}.",
        "What is the {k}?|What was the {k}?|what was the {k} again|Do you remember the {k}?|Which {k} "
        "did I tell you?|Tell me the {k}.",
        "The {k} is {v}.",
        "You have not told me that yet.",
    ),
    "meeting": (
        "The meeting is on {v}.|My meeting is on {v}.|The meeting starts on {v}.|We have a meeting "
        "on {v}.|There is a meeting on {v}.",
        "I will remember that the meeting is on {v}.",
        "When is the meeting?|On which day is the meeting?|What day is my meeting?|When is my "
        "meeting?|Do you know when the meeting is?",
        "The meeting is on {v}.",
        "You have not told me about a meeting yet.",
    ),
    "birthday": (
        "My birthday is in {v}.|I was born in {v}.|I have my birthday in {v}.",
        "{v} is a good month for a birthday.",
        "When is my birthday?|In which month is my birthday?|Which month was I born in?|Do you "
        "know my birthday?",
        "Your birthday is in {v}.",
        "You have not told me your birthday yet.",
    ),
    "cat": (
        "My cat is called {v}.|I have a cat named {v}.|My cat's name is {v}.|This is my cat {v}.",
        "{v} is a lovely name for a cat.",
        "What is my cat called?|What is the name of my cat?|What's my cat's name?|How is my cat "
        "called?",
        "Your cat is called {v}.",
        "You have not told me the name of your cat yet.",
    ),
    "sister": (
        "My sister is called {v}.|My sister's name is {v}.|I have a sister named {v}.|{v} is my "
        "sister.",
        "It is nice to have a sister like {v}.",
        "What is my sister called?|What is my sister's name?|Who is my sister?|What is the name of "
        "my sister?",
        "Your sister is {v}.",
        "You have not told me about your sister yet.",
    ),
    "car": (
        "My car is {v}.|I drive a {v} car.|I have a {v} car.|The color of my car is {v}.",
        "A {v} car, nice.",
        "What color is my car?|Which color does my car have?|What is the color of my car?",
        "Your car is {v}.",
        "You have not told me about your car yet.",
    ),
    "flight": (
        "My flight is at {v}.|My train leaves at {v}.|I leave at {v}.|I have to leave at {v}.",
        "I will remember {v}.",
        "When do I leave?|At what time do I leave?|When do I have to leave?|What time do I leave?",
        "You leave at {v}.",
        "You have not told me when you leave yet.",
    ),
}
JOBS = (
    "teacher doctor nurse baker farmer driver painter engineer lawyer cook pilot writer singer "
    "gardener student designer "
    "plumber"
).split()
TAILS = (
    ", keep that in mind.|, please remember it.| with my family.| since last year.| and I like it."
    "|, as you may know.| now.|, and it is raining today.|, just so you know.| again!"
).split("|")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
MEALS = (
    "pizza|pasta|rice|soup|salad|sushi|bread|cheese|curry|tacos|noodles|pancakes|apples|cake|ice "
    "cream|fish|potatoes"
).split("|")


def _fact_value(fact: str, rng: random.Random) -> str:
    match fact:
        case "meeting":
            return rng.choice(DAYS)
        case "birthday":
            return rng.choice(MONTHS)
        case "flight":
            return tool_values.draw_value("string:clock", rng)
        case "name" | "friend" | "sister":
            return common.person(rng) if rng.random() < 0.5 else unseen.name(rng)
        case "pet" | "cat":
            return unseen.word(rng).capitalize() if rng.random() < 0.6 else unseen.name(rng)
        case "colour" | "car":
            return rng.choice(common.COLOURS)
        case "city":
            return (
                rng.choice(common.CITIES) if rng.random() < 0.7 else unseen.word(rng).capitalize()
            )
        case "job":
            return rng.choice(JOBS)
        case "food":
            return rng.choice(MEALS)
        case "age":
            return str(rng.randint(5, 99))
        case "number":
            return str(rng.randint(1, 9999))
        case _:
            return rng.choice(
                (
                    common.pseudo_word(rng),
                    unseen.word(rng),
                    unseen.letters(rng),
                    rng.choice(common.NOUNS),
                    common.code(rng),
                )
            )


def talk_turn(chat: Conversation, rng: random.Random) -> bool:
    """Small talk."""
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
    """A question beyond the model."""
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
    """A rephrased greeting, or a message without content."""
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
    """The user states a fact or asks for it."""
    known = [fact for fact in FACTS if fact in chat.facts]
    fact = rng.choice(known) if known and rng.random() < 0.6 else rng.choice(list(FACTS))
    thing = (
        chat.facts.get("noun") or f"{rng.choice(common.NOUNS)}{rng.choice(('', ' code', ' name'))}"
    )
    tells, replies, asks, recalled, unknown = (part.replace("{k}", thing) for part in FACTS[fact])
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
    value = _fact_value(fact, rng)
    chat.facts[fact] = value
    if fact == "thing":
        chat.facts["noun"] = thing
    reply = rng.choice(replies.split("|")).format(v=value)
    text = rng.choice(tells.split("|")).format(v=value)
    if rng.random() < 0.2:
        text = text.rstrip(".!") + rng.choice(TAILS)
    chat.user(text)
    chat.answer(f"The user tells me the {name}: {value}", reply[0].upper() + reply[1:])
    return True


def stock_turn(chat: Conversation, rng: random.Random) -> bool:
    """The user owns objects, changes their number or asks for it."""
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
    """A word problem that is not held out."""
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
    """Calculations beyond the evaluated ones: four digits, long products, remainders, comparisons."""
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
    """Arithmetic on the last one or two results."""
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
    """The user's age in another year."""
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
    """The reasoning before calls: one line per call with the values of the request."""
    lines = []
    for call in calls:
        values = ", ".join(f"{key} = {_raw(value)}" for key, value in call.arguments.items())
        lines.append(f"I call {call.name}: {values}" if values else f"I call {call.name}.")
    return "\n".join(lines)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tool_turn(chat: Conversation, rng: random.Random) -> bool:
    """A request for calls, mostly with results and a report."""
    if not chat.tools:
        return False
    text, calls = more_tools.draw_request(chat.declared, rng)
    problem = tool_calls.ToolProblem(({"role": "user", "content": text},), tuple(chat.tools), calls)
    if tool_calls.held_out(problem):
        return False
    if rng.random() < 0.015:
        text = f"{openings.paste(rng, rng.randint(2, 30))}\n\n{text}"
    chat.user(text)
    _call_and_report(chat, calls, rng)
    return True


def home_turn(chat: Conversation, rng: random.Random) -> bool:
    """A request without the city, which the user stated before."""
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
    """A request without required values, which the model asks for."""
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
    """The user asks for the last tool result again."""
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
