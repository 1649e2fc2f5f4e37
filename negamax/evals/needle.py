"""Generate long texts with one requested fact, for suites such as `needle-128k`."""

import random
from collections.abc import Callable, Iterator

PROBLEMS = 20  # default number of problems of a suite
_SAMPLE = 256  # number of lines in the sample that measures tokens per line
_QUESTION = "What is the number of the {thing}?"
_FACT = "The number of the {thing} is {number}."
_NUM_FACTS = 4  # number of facts per text: the requested fact, and unrelated facts
_LINES = (
    "{person} {verb} the {thing} near {city}.",
    "In {city} there is a {thing} for every {thing2}.",
    "Some say that {city} has the best {thing} in the country.",
    "{person} and {person2} talk about the {thing}.",
)
_PERSONS = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jana", "Kim", "Leo")
_VERBS = ("moved", "painted", "sold", "found", "liked", "lost", "kept", "saw")
_CITIES = ("Oslo", "Lima", "Rome", "Cairo", "Quito", "Delhi", "Accra", "Turin", "Perth", "Kyoto")
_KINDS = ("small", "old", "new", "tall", "good", "simple", "short", "early", "spare", "daily")
_NOUNS = ("box", "book", "boat", "table", "house", "clock", "train", "garden", "market", "room")


def draw(
    rng: random.Random, num_tokens: int, count: int, count_tokens: Callable[[str], int]
) -> Iterator[tuple[str, str]]:
    """Yield `count` pairs: a prompt of about `num_tokens` tokens, and its answer. The depths of the
    requested facts are evenly distributed.
    """
    sample = "\n".join(_draw_line(rng) for _ in range(_SAMPLE))
    num_lines = max(_NUM_FACTS, (num_tokens - 200) * _SAMPLE // count_tokens(sample))
    for index in range(count):
        lines = [_draw_line(rng) for _ in range(num_lines)]
        things = rng.sample([f"{kind} {noun}" for kind in _KINDS for noun in _NOUNS], _NUM_FACTS)
        numbers = [str(each) for each in rng.sample(range(10_000, 100_000), _NUM_FACTS)]
        facts = [_FACT.format(thing=a, number=b) for a, b in zip(things, numbers, strict=True)]
        for other in facts[1:]:
            lines.insert(rng.randrange(num_lines), other)
        lines.insert(int((index + 0.5) / count * num_lines), facts[0])
        yield "\n".join((*lines, "", _QUESTION.format(thing=things[0]))), numbers[0]


def _draw_line(rng: random.Random) -> str:
    things = [f"{rng.choice(_KINDS)} {rng.choice(_NOUNS)}" for _ in range(2)]
    return rng.choice(_LINES).format(
        person=rng.choice(_PERSONS), person2=rng.choice(_PERSONS), verb=rng.choice(_VERBS),
        city=rng.choice(_CITIES), thing=things[0], thing2=things[1],
    )  # fmt: skip
