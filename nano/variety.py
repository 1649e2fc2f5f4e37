"""Draw training-only variety: rephrased word problems, and tools requested with prepositions.

The variety teaches the model to copy unknown words and to read schemas. The evaluated generators
use fixed word lists.
"""

# ruff: noqa: SIM905 (tables of phrases)

from __future__ import annotations

import random
import re
from typing import Any

from nano import phrasings, stories, unseen
from nano.suites import arithmetic, common, tool_calls
from nano.suites.arithmetic_templates import Template
from nano.suites.tool_values import schema_of

PEOPLE = (
    "My friend|My sister|My brother|My uncle|My mother|My neighbor|The teacher|The farmer|The "
    "baker|The driver|The manager|A student|A girl|A boy|"
    "Mr. {s}|Mrs. {s}|Dr. {s}|Ms. {s}|Grandma|Grandpa|Dad|Mum|The captain|The king|The robot|A "
    "dragon|The chef|A gardener|The nurse"
).split("|")
THINGS = (
    "cow/cows pig/pigs horse/horses dog/dogs cat/cats bird/birds lizard/lizards frog/frogs "
    "bee/bees ant/ants spider/spiders wolf/wolves "
    "tree/trees cloud/clouds star/stars planet/planets ship/ships car/cars truck/trucks "
    "train/trains bus/buses plane/planes rocket/rockets "
    "pizza/pizzas burger/burgers salad/salads soup/soups noodle/noodles grape/grapes "
    "berry/berries nut/nuts clip/clips pin/pins stick/sticks "
    "worker/workers child/children man/men woman/women guest/guests friend/friends "
    "player/players soldier/soldiers student/students "
    "euro/euros cent/cents point/points goal/goals page/pages word/words song/songs film/films "
    "email/emails message/messages file/files "
    "litre/litres gram/grams metre/metres mile/miles step/steps second/seconds minute/minutes "
    "hour/hours day/days year/years"
).split()
GROUPS = tuple(
    (pair.split("/")[0], pair.split("/")[1])
    for pair in (
        "bus/buses box/boxes bag/bags car/cars van/vans train/trains boat/boats room/rooms "
        "table/tables class/classes team/teams group/groups "
        "shelf/shelves tray/trays basket/baskets crate/crates house/houses garden/gardens "
        "tree/trees cow/cows dog/dogs hen/hens machine/machines "
        "worker/workers packet/packets bottle/bottles page/pages book/books album/albums "
        "ticket/tickets shirt/shirts pizza/pizzas cake/cakes "
        "plane/planes truck/trucks ship/ships bench/benches tent/tents hotel/hotels "
        "school/schools shop/shops carton/cartons jar/jars row/rows "
        "spider/spiders cat/cats insect/insects bike/bikes hand/hands child/children "
        "player/players guest/guests server/servers rack/racks"
    ).split()
)
WORDS = "two three four five six seven eight nine ten eleven twelve".split()
_SMALL = re.compile(r"(?<![\w$.,])(?:[2-9]|1[0-2])(?![\w%]|[.,]\d| [-+*/x])")
MORE: tuple[Template, ...] = (
    ("{A} sold {o} to {a} friends in April and {b} in May. How many {o} did {A} sell altogether?",
     "r=a+b#{o} sold", "{A} sold {r} {o} altogether."),
    ("{A} has {a} {o} and buys {b} more. How many {o} now?",
     "r=a+b#{o} now", "{A} has {r} {o} now."),
    ("{A} has {a} {o}. {A} gets {b} more. How many {o} does {A} have in total?",
     "r=a+b#{o} in total", "{A} has {r} {o} in total."),
    ("{a} {o} plus {b} {o}: how many {o} is that?", "r=a+b#{o}", "That is {r} {o}."),
    ("First {A} found {a} {o}, then {b} more. How many are there altogether?",
     "r=a+b#{o} altogether", "There are {r} {o} altogether."),
    ("There are {a} {o} on the left and {b} on the right. How many {o} are there?",
     "r=a+b#{o}", "There are {r} {o}."),
    ("In the morning {a} {o} came, in the evening {b}. How many {o} came that day?",
     "r=a+b#{o}", "{r} {o} came that day."),
    ("{A} counted {a} {o} and {B} counted {b}. What is the sum?", "r=a+b#{o}", "The sum is {r}."),
    ("A {s} has {a} {o}. If {b} new {o} arrive, how many will it have?",
     "r=a+b#{o}", "It will have {r} {o}."),
    ("{A} paid {a} dollars for the {o} and {b} dollars for the {p}. What was the total cost?",
     "r=a+b#dollars", "The total cost was {r} dollars."),
    ("{A} walked {a} steps, rested, and walked another {b} steps. How many steps did {A} walk?",
     "r=a+b#steps", "{A} walked {r} steps."),
    ("{A} needs {a} {o} for one cake and {b} for another. How many {o} are needed?",
     "r=a+b#{o} needed", "{r} {o} are needed."),
    ("Out of {a} {o}, {b} are broken. How many {o} still work?",
     "r=a-b#{o} that work", "{r} {o} still work."),
    ("{A} started with {a} {o} and used {b}. How many remain?",
     "r=a-b#{o} that remain", "{r} {o} remain."),
    ("{a} {o} were in the {x1}. Now {b} are gone. How many {o} are in the {x1} now?",
     "r=a-b#{o} left", "There are {r} {o} in the {x1} now."),
    ("There were {a} {o}. {b} flew away. How many are left?",
     "r=a-b#{o} left", "There are {r} {o} left."),
    ("{A} had {a} {o} and sold {b} of them. How many does {A} have now?",
     "r=a-b#{o} left", "{A} has {r} {o} now."),
    ("A tank holds {a} litres. {b} litres leak out. How many litres are left?",
     "r=a-b#litres left", "There are {r} litres left."),
    ("The price was {a} dollars and is now {b} dollars lower. What is the new price?",
     "r=a-b#dollars", "The new price is {r} dollars."),
    ("{A} must do {a} tasks and has done {b}. How many are still to do?",
     "r=a-b#tasks left", "{r} tasks are still to do."),
    ("How much less is {b} {o} than {a} {o}?", "r=a-b#{o} less", "It is {r} less."),
    ("{A} has {b} {o} but needs {a}. How many are missing?",
     "r=a-b#{o} missing", "{r} {o} are missing."),
    ("{A} wins {a} games and {B} wins {b}. How many more games does {A} win?",
     "r=a-b#more games", "{A} wins {r} more games."),
    ("There are {a} {o} and each needs {b} {p}. How many {p} are needed?",
     "r=a*b#{p} needed", "{r} {p} are needed."),
    ("If a {o1} costs ${a} and I buy {b} {o}, how much do I pay?",
     "r=a*b#dollars", "You pay {r} dollars."),
    ("{A} eats {a} {o} a day. How many {o} in {b} days?", "r=a*b#{o}", "{A} eats {r} {o}."),
    ("A {o1} has {a} {p}. How many {p} do {b} {o} have?", "r=a*b#{p}", "They have {r} {p}."),
    ("One {x1} weighs {a} kg. How heavy are {b} {x}?", "r=a*b#kg", "They weigh {r} kg."),
    ("{A} runs {a} km each day for {b} days. How many km is that?", "r=a*b#km", "That is {r} km."),
    ("Every {x1} contains {b} {o}. There are {a} {x}. How many {o} are there altogether?",
     "r=a*b#{o}", "There are {r} {o} altogether."),
    ("{a} children get {b} {o} each. How many {o} are given out?",
     "r=a*b#{o}", "{r} {o} are given out."),
    ("{A} types {a} words per minute. How many words does {A} type in {b} minutes?",
     "r=a*b#words", "{A} types {r} words."),
    ("A garden has {a} rows with {b} {o} in every row. How many {o} grow there?",
     "r=a*b#{o}", "{r} {o} grow there."),
    ("Tickets are ${a} each. What do {b} tickets cost?", "r=a*b#dollars", "They cost {r} dollars."),
    ("{a} {o} are divided among {b} {p}. How many {o} per piece?",
     "r=a/b#{o} for each", "That is {r} {o} each."),
    ("{A} cuts a rope of {a} cm into {b} equal pieces. How long is one piece?",
     "r=a/b#cm", "One piece is {r} cm long."),
    ("{A} puts {a} {o} into {x}, {b} in each. How many {x} does {A} use?",
     "r=a/b#{x}", "{A} uses {r} {x}."),
    ("{a} {o} in {b} equal groups: how many in each group?",
     "r=a/b#{o} in each group", "There are {r} {o} in each group."),
    ("{b} workers earn {a} dollars together and share it fairly. What does each get?",
     "r=a/b#dollars for each", "Each gets {r} dollars."),
    ("It takes {b} minutes to make one {o1}. How many {o} can be made in {a} minutes?",
     "r=a/b#{o}", "{r} {o} can be made."),
    ("{A} has {a} {o} and wants to give each of {b} friends the same number. How many does each "
     "get?",
     "r=a/b#{o} for each", "Each gets {r} {o}."),
    ("A {s} has {a} {o}. {b} are sold and then {c} new ones come in. How many are there?",
     "x=a-b#{o} after the sale; r=x+c#{o} now", "There are {r} {o}."),
    ("{A} has {a} {o}. {B} gives {A} {b} more, but {c} get lost. How many {o} are left?",
     "x=a+b#{o} at first; r=x-c#{o} left", "There are {r} {o} left."),
    ("{A} buys {a} {x}. Each has {b} {o}. {A} eats {c} {o}. How many are left?",
     "x=a*b#{o} bought; r=x-c#{o} left", "There are {r} {o} left."),
    ("{A} has {a} {x} of {b} {o} and {c} loose {o}. How many {o} does {A} have altogether?",
     "x=a*b#{o} in the {x}; r=x+c#{o} altogether", "{A} has {r} {o} altogether."),
    ("{A} earns ${a} per hour and works {b} hours. After paying ${c} for food, how much is left?",
     "x=a*b#dollars earned; r=x-c#dollars left", "{A} has {r} dollars left."),
    ("There are {a} {o} and {b} {p}. They are split evenly into {c} groups. How many are in "
     "each group?",
     "x=a+b#things in all; r=x/c#things in each group", "There are {r} in each group."),
    ("{A} had {a} {o} and gave {b} to {B} and {c} to {C}. How many {o} does {A} have left?",
     "x=a-b#{o} after giving to {B}; r=x-c#{o} left", "{A} has {r} {o} left."),
    ("{A} is {a} years old. {B} is {b} years older than {A}, and {C} is {c} years older than "
     "{B}. How old is {C}?",
     "x=a+b#age of {B}; r=x+c#age of {C}", "{C} is {r} years old."),
    ("{A} reads {a} pages a day. The book has {b} pages. How many pages are left after {c} days?",
     "x=a*c#pages read; r=b-x#pages left", "{r} pages are left."),
    ("A box holds {a} {o}. {A} fills {b} boxes and throws away {c} {o}. How many {o} remain?",
     "x=a*b#{o} in the boxes; r=x-c#{o} that remain", "{r} {o} remain."),
    ("{A} made {a} {o} on Monday and twice as many on Tuesday. How many {o} did {A} make in total?",
     "x=a*2#{o} on Tuesday; r=a+x#{o} in total", "{A} made {r} {o} in total."),
    ("{A} sold {a} {o} in April and half as many in May. How many {o} did {A} sell altogether?",
     "x=a/2#{o} in May; r=a+x#{o} altogether", "{A} sold {r} {o} altogether."),
    ("{A} has three times as many {o} as {B}, who has {a}. How many {o} do they have together?",
     "x=a*3#{o} of {A}; r=x+a#{o} together", "Together they have {r} {o}."),
    ("{A} buys {a} {o} for {b} dollars each. {A} pays with {c} dollars. How much change does "
     "{A} get?",
     "x=a*b#dollars to pay; r=c-x#dollars of change", "{A} gets {r} dollars of change."),
    ("A bus has {a} rows of {b} seats. {c} seats are taken. How many are free?",
     "x=a*b#seats; r=x-c#free seats", "{r} seats are free."),
    ("{A} buys {a} {o} at ${b} each, {c} {p} at ${d} each. What is the total?",
     "x=a*b#dollars for the {o}; y=c*d#dollars for the {p}; r=x+y#dollars in total",
     "The total is {r} dollars."),
    ("{A} has {a} {o}, buys {b} more, gives {c} to {B} and loses {d}. How many {o} are left?",
     "x=a+b#{o} after buying; y=x-c#{o} after giving; r=y-d#{o} left", "There are {r} {o} left."),
    ("{a} {x} hold {b} {o} each and {c} {x} hold {d} each. How many {o} in total?",
     "x=a*b#{o} in the first {x}; y=c*d#{o} in the others; r=x+y#{o} in total",
     "There are {r} {o} in total."),
    ("{A} collects {a} {o} a day, eats {b} and sells the rest for ${c} each. How much is earned "
     "per day?",
     "x=a-b#{o} to sell; r=x*c#dollars per day", "That is {r} dollars per day."),
)  # fmt: skip

# (parameter names, kind, descriptions, ways to say the value)
NATURAL: tuple[tuple[str, str, str, str], ...] = (
    ("person|contact|name|who|guest|customer|attendee|user|client", "string:person",
     "Who it is for|Name of the person||The person", "with {}|for {}|with {}"),
    ("date|day|on_date|when|start_date", "string:date",
     "The day|Date as YYYY-MM-DD||When it happens", "on {}|for {}|on {}"),
    ("time|start_time|at|hour|start", "string:time",
     "Time as HH:MM||When it starts|The hour", "at {}|at {}|starting at {}"),
    ("city|place|location|town|where", "string:city",
     "The city||Where it takes place|Location", "in {}|in {}"),
    ("email|address|recipient|to|mail", "string:email",
     "E-mail address||Where to send it", "to {}|to {}|and send it to {}"),
    ("title|name|label|subject|topic", "string:phrase",
     "The title||What it is called|Short name", 'called "{}"|titled "{}"|named "{}"|about "{}"'),
    ("amount|price|cost|budget|value", "number:1-900",
     "Amount in dollars||How much money", "for {} dollars|for ${}|worth {} dollars"),
    ("count|quantity|number|pieces|copies", "integer:2-60",
     "How many||Number of pieces", "{} times|for {} people|with {} pieces"),
    ("minutes|duration|length|duration_minutes", "integer:5-180",
     "Duration in minutes||How long", "for {} minutes|lasting {} minutes"),
    ("file|path|filename|document", "string:file",
     "The file||Path of the file", "from {}|from the file {}|using {}"),
    ("id|code|number|order_id|reference|key", "string:code",
     "The identifier||Reference code", "with id {}|number {}|with the code {}"),
    ("url|link|website|page", "string:any_url",
     "Web address||The page", "from {}|at {}"),
    ("color|colour|shade", "string:colour",
     "The color|", "in {}|in {}"),
    ("room|zone|area", "string:room",
     "The room||Which room", "in the {}|for the {}"),
)  # fmt: skip


def draw_problem(rng: random.Random) -> arithmetic.MathProblem:
    """Draw a word problem with unusual people and objects. Half of the problems are rephrased."""
    roll = rng.random()
    templates: tuple[Template, ...] | None = MORE if roll < 0.2 else None
    if roll > 0.65:
        templates = (stories.draw(rng),)
    elif roll > 0.35:
        question, plan, answer = rng.choice(phrasings.FORMS)
        templates = ((phrasings.expand(question, rng), plan, answer),)
    people: list[str] = []

    def recall(words: dict[str, str], rng: random.Random) -> None:
        rename(words, rng)
        people[:] = [words["A"]]

    problem = arithmetic.draw(rng, templates=templates, rename=recall)
    text, sentence = (
        re.sub(
            r"(?<=[a-z,;:] )(?:My|The|A|Grandma|Grandpa|Dad|Mum)\b", lambda m: m.group().lower(), t
        )
        for t in (problem.text, problem.sentence)
    )
    name = next(
        (form for form in (people[0], people[0][0].lower() + people[0][1:]) if form in text),
        people[0],
    )
    if rng.random() < 0.5:
        text, sentence = phrasings.with_pronouns(text, sentence, name, rng)
    if rng.random() < 0.1:
        text = _SMALL.sub(_in_words, text)
    if rng.random() < 0.06:
        text = f"{phrasings.aside(people[0], rng)} {text}"
    return arithmetic.MathProblem(
        ({"role": "user", "content": text},), (), problem.answer, problem.steps, sentence
    )


def _in_words(number: re.Match[str]) -> str:
    """Write a small number in words, with a capital at the start of a sentence."""
    word = WORDS[int(number.group()) - 2]
    before = number.string[: number.start()].rstrip()
    return word.capitalize() if not before or before.endswith((".", "?", "!", ":")) else word


def rename(words: dict[str, str], rng: random.Random) -> None:
    """Replace the listed words by others, in place."""
    taken: set[str] = set()
    for slot in "ABC":
        while words[slot] in taken or slot not in taken:
            roll = rng.random()
            if roll < 0.2:
                words[slot] = rng.choice(PEOPLE).format(s=rng.choice(common.SURNAMES))
            elif roll < 0.3:
                words[slot] = common.pseudo_word(rng).capitalize()
            elif roll < 0.75:
                words[slot] = unseen.name(rng)
            taken.add(slot)
            if words[slot] not in taken:
                break
        taken.add(words[slot])
    pairs: list[tuple[str, str]] = []
    while len(pairs) < 4:
        roll = rng.random()
        if roll < 0.4:
            one, many = rng.choice(THINGS).split("/")
        elif roll < 0.75:
            one = rng.choice(common.NOUNS)
            many = _plural(one)
        elif roll < 0.85:
            noun = rng.choice(common.NOUNS)
            one, many = (
                f"{rng.choice(common.ADJECTIVES)} {form}" for form in (noun, _plural(noun))
            )
        else:
            one = common.pseudo_word(rng) if rng.random() < 0.4 else unseen.word(rng)
            many = _plural(one)
        if many not in [pair[1] for pair in pairs]:
            pairs.append((one, many))
    words["o1"], words["o"] = pairs[0]
    words["p"] = pairs[1][1]
    words["g1"], words["g"] = pairs[3] if rng.random() < 0.4 else rng.choice(GROUPS)
    if rng.random() < 0.5:
        words["x1"], words["x"] = pairs[2]
    if rng.random() < 0.5:
        words["s"] = rng.choice(common.NOUNS)


def _plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh", "z")):
        return noun + "es"
    if noun.endswith("y") and noun[-2:-1] not in tuple("aeiou"):
        return noun[:-1] + "ies"
    return noun + "s"


def natural_tool(rng: random.Random) -> Any:
    """Draw a tool whose values follow prepositions: 'schedule a call with Maria at 15:30'."""
    verb = rng.choice(tool_calls.VERBS)
    noun = rng.choice(common.NOUNS)
    article = "an" if noun[0] in "aeiou" else "a"
    chosen = rng.sample(NATURAL, rng.choices((1, 2, 3, 4), weights=(22, 36, 30, 12))[0])
    names: list[str] = []
    parameters: list[Any] = []
    ways: list[list[str]] = []
    for options, kind, descriptions, forms in chosen:
        name = rng.choice(
            [option for option in options.split("|") if option not in names]
            or [f"{options.split('|')[0]}_{len(names)}"]
        )
        if rng.random() < 0.2:
            name = f"{noun}_{name}"
        names.append(name)
        description = rng.choice(descriptions.split("|"))
        parameters.append(
            tool_calls.Parameter(name, kind, schema_of(kind, description, rng), True, ())
        )
        ways.append(forms.split("|"))
    requests: list[str] = []
    for _ in range(6):
        order = list(range(len(parameters)))
        rng.shuffle(order)
        said = " ".join(rng.choice(ways[index]).replace("{}", f"{{{index}}}") for index in order)
        opening = rng.choice(
            (
                f"Please {verb}",
                verb.capitalize(),
                f"I want to {verb}",
                f"Can you {verb}",
                f"I need to {verb}",
                f"Could you {verb}",
                f"Let us {verb}",
            )
        )
        requests.append(
            f"{opening} {article} {noun} {said}{{opt}}"
            + rng.choice((".", ".", "", "?", ", please."))
        )
    description = rng.choice(
        (
            f"{verb.capitalize()} {article} {noun}.",
            f"{verb.capitalize()} {article} {noun}",
            f"Use this to {verb} {article} {noun}.",
        )
    )
    name = rng.choice(
        (f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}")
    )
    return tool_calls.Tool(name, description, tuple(parameters), tuple(requests), (), "")
