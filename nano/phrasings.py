"""Training-only word problems with more phrasings, and with pronouns for persons.

A template is (question, plan, answer) as in `nano.suites.arithmetic_templates`. `[a|b]` means one
of the parts a and b.
"""

# ruff: noqa: E501, SIM905 (tables read better as one row per line)
# fmt: off

from __future__ import annotations

import random
import re

from nano.suites import common
from nano.suites.arithmetic_templates import Template

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_FEMALE = frozenset(
    "Ana Clara Emma Grace Iris Kira Mia Olga Rosa Tara Uma Wendy Yara Zoe Bella Diana Elena Gina "
    "Julia Laura Nina Petra Rita Tina "
    "Ursula Vera Aisha Chloe Eva Hannah Lena Maya Nora Priya Sofia Bianca Dina Fatima Helen Ines "
    "Lucia Nadia Rania Valeria Ximena "
    "Zara Alice Carol Ella Gloria Ida Kate Maria Olivia Rachel Sara Anna Linda Sarah Karen Lisa "
    "Emily Aiko Ingrid Marta Grandma Mum".split()
)
PRONOUNS = {"he": ("him", "his"), "she": ("her", "her"), "they": ("them", "their")}

FORMS: tuple[Template, ...] = (
    # groups: multiplication
    ("[Each|Every|One|A] {g1} [seats|carries|takes|fits|transports] {a} "
     "[people|passengers|children|students]. How many [people|of them] [fit on|fit in|fit "
     "into|can ride in|can go in|go on] {b} {g}?", "r=a*b#people", "{r} people fit."),
    ("[Each|Every|One] {g1} [holds|has|contains|carries|needs|comes with|is filled with] {a} "
     "{o}. How many {o} [are in|are there in|do you find in|are on|belong to] {b} {g}[| in "
     "total| altogether]?", "r=a*b#{o}", "There are {r} {o}."),
    ("[Each|Every|One] {g1} [holds|has|contains|carries|needs|uses|gets|produces|makes|takes] "
     "{a} {o}. How many {o} [do|would|will|can] {b} {g} "
     "[hold|have|contain|carry|need|use|get|produce|make|take][| in total| altogether]?", "r=a*b#{o}", "That is {r} {o}."),
    ("If [each|every|one] {g1} [holds|has|contains|needs|gets|uses] {a} {o}, how many {o} [are "
     "there in|are needed for|do we need for|do I need for|are in] {b} {g}?", "r=a*b#{o}", "That is {r} {o}."),
    ("How many {o} [are there in|are in|fit into|do you need for|are needed for|do we need for] "
     "{b} {g} [if|when] [each|every one|each {g1}|every {g1}] [holds|has|needs|takes|contains] "
     "{a}[| {o}| of them]?", "r=a*b#{o}", "That is {r} {o}."),
    ("[There are|We have|I see|You see|They have|Someone has] {b} {g}[, each|, and each one| and "
     "each|. Each {g1}|. Every {g1}] [has|holds|with|carries] {a} {o}. How many {o} [is that|are "
     "there|are there altogether|are there in all|does that make|do they have]?", "r=a*b#{o}", "That is {r} {o}."),
    ("{b} {g} with {a} {o} [each|in each|per {g1}|apiece][. How many {o}|: how many {o}|, how "
     "many {o}] [in total|is that|altogether|are there|are there in all]?", "r=a*b#{o}", "That is {r} {o}."),
    ("[A|One] {g1} [costs|sells for|is sold for|is priced at] [${a}|{a} dollars|{a} euros|{a} "
     "coins]. [How much|What] [do|would|will] {b} [cost|of them cost|{g} cost][| in total| "
     "altogether]?", "r=a*b#cost", "They cost {r}."),
    ("[What is the price of|How much are|What do I pay for|How much must I pay for] {b} {g} at "
     "[${a}|{a} dollars|{a} euros] [each|apiece|per {g1}|a piece]?", "r=a*b#cost", "The price is {r}."),
    ("[A|One|The] [car|train|bus|plane|ship|truck|cyclist|runner|boat] "
     "[goes|travels|moves|drives|covers] {a} [km|miles|metres] [per|each|every|an] hour. How "
     "[far|many km] [does it get|will it go|can it go|does it travel|is that] in {b} "
     "hours?", "r=a*b#distance", "It goes {r} in {b} hours."),
    ("[At|With] a speed of {a} [km/h|km per hour|miles per hour|mph], how far do you "
     "[get|go|travel|drive] in {b} hours?", "r=a*b#distance", "You get {r} far."),
    ("[There are|A hall has|A theater has|A stadium has|A room has|We set up] {a} rows [of|with] "
     "{b} [chairs|seats|{o}][| each| in each row]. How many [chairs|seats|places|{o}] [are "
     "there|is that|are there in all|does it have]?", "r=a*b#in all", "There are {r}."),
    ("[What is|Find|Calculate|Compute] the area of a [rectangle|room|garden|field|wall|floor] "
     "[that is {a} by {b} metres|of {a} by {b} metres|with sides {a} and {b}|{a} m long and {b} "
     "m wide][?|.]", "r=a*b#area", "The area is {r}."),
    ("{A} [does|makes|writes|solves|plants|sells|reads|cooks|paints|drinks|collects|finishes] "
     "{a} {o} [a|per|every|each] [day|week|hour|month]. How many [{o} is that|{o}|is that] in "
     "{b} [days|weeks|hours|months]?", "r=a*b#{o}", "That is {r} {o}."),
    ("{A} [has|owns|keeps|buys|carries|rents] {b} {g}, [each with|and each has|each "
     "holding|every one with] {a} {o}. How many {o} does {A} [have|get|own]?", "r=a*b#{o}", "{A} has {r} {o}."),
    ("{b} [kids|children|people|guests|friends|workers|players] [each eat|each get|each "
     "bring|each need|each buy|all eat|get] {a} {o}[| each]. How many {o} [is that|are that|are "
     "needed|do they need|are eaten]?", "r=a*b#{o}", "That is {r} {o}."),
    ("{A} [works|studies|sleeps|trains|plays] {a} hours [a day|per day|every day|each day]. How "
     "many hours is that in {b} days?", "r=a*b#hours", "That is {r} hours."),
    # addition
    ("{A} has {a} {o} and [gets|finds|receives|buys|earns|picks up|makes|is given] [another "
     "{b}|{b} more|{b} extra ones|{b} new ones]. How many [{o} |]does {A} have "
     "[now|then|altogether|in total|in the end|at the end]?", "r=a+b#{o} now", "{A} has {r} {o}."),
    ("{A} had {a} {o}. [Then|Later|Today|Yesterday|On Monday] {A} "
     "[got|found|received|bought|won|picked up] {b} more. How many {o} does {A} have "
     "now?", "r=a+b#{o} now", "{A} has {r} {o} now."),
    ("{A} [bought|sold|saw|ate|made|found|carried|washed|planted|baked] {a} {o} [on Monday|in "
     "the morning|yesterday|last week|first] and {b} [on Tuesday|in the evening|today|this "
     "week|later]. How many {o} [did {A} [buy|sell|see|eat|make|find|carry|wash|plant|bake] [in "
     "total|altogether|in all]|is that|is that in total]?", "r=a+b#{o}", "That is {r} {o}."),
    ("[There are|We have|I can see|A {s} has] {a} {o} and {b} {p}. How many "
     "[things|items|pieces] [are there|is that|are there in total|do we have|are there "
     "altogether]?", "r=a+b#things", "There are {r}."),
    ("{a} {o} [and|plus|and then] {b} more {o} [is|are|make|gives] how many?", "r=a+b#{o}", "That is {r} {o}."),
    ("[What do I get if I|What happens if you|What do you get when you] add {a} [and|to|plus] "
     "{b}?", "r=a+b#", "The answer is {r}."),
    ("[What is|What's|Find|Give me|Tell me|Calculate] the sum of {a} and {b}[?|.]", "r=a+b#", "The sum is {r}."),
    ("{a} [people|passengers|guests|students|birds] are [on the bus|in the room|on the train|at "
     "the party|in the tree]. {b} [more come|more arrive|more join|more get on]. How many are "
     "there [now|then|in the end]?", "r=a+b#now", "There are {r} now."),
    ("{A} is {a} [years old|today|now] and {B} is {b} years older. How old is {B}?", "r=a+b#age of {B}", "{B} is {r} years old."),
    # subtraction
    ("{A} has {a} {o} and [gives away|eats|loses|sells|uses|drops|throws away|donates|breaks] "
     "{b}[| of them]. How many [{o} |][are left|remain|does {A} have left|does {A} have now|does "
     "{A} still have]?", "r=a-b#{o} left", "{A} has {r} {o} left."),
    ("{A} had {a} {o}. [Then|Later|Today|Yesterday|After lunch] {A} [lost|sold|ate|gave "
     "away|used|broke|sent away] {b}[| of them]. How many [{o} |][are left|remain|does {A} have "
     "left|does {A} have now]?", "r=a-b#{o} left", "{A} has {r} {o} left."),
    ("[There are|There were] {a} {o} [in the {x1}|in the {s}|on the table|here]. [Someone "
     "takes|{A} takes|I take|We eat|You remove|They sell] {b}[| away| of them]. How many [are "
     "left|remain|are still there|{o} are left]?", "r=a-b#{o} left", "There are {r} {o} left."),
    ("[What is|What's|Find|Give me|Tell me|Calculate] the difference [between|of] {a} and "
     "{b}[?|.]", "r=a-b#", "The difference is {r}."),
    ("[What is left if you|What remains when you|What do you get if you] [take {b} from "
     "{a}|subtract {b} from {a}|take {b} away from {a}]?", "r=a-b#", "The answer is {r}."),
    ("{a} [people|passengers|guests|students|birds|workers] are [on the bus|in the room|on the "
     "train|at the party|in the building]. {b} [leave|go home|get off|go away]. How many [are "
     "left|remain|stay|are still there]?", "r=a-b#left", "There are {r} left."),
    ("{A} [weighs|is|has|scored|earned|ran|read] {a}[ kg|| points| dollars| km| pages] and {B} "
     "{b}. [What is the difference|How much more is that|How many more does {A} have]?", "r=a-b#the difference", "The difference is {r}."),
    ("{A} [needs|wants|has to collect|must save] {a} {o} and has {b}[| already| so far]. How "
     "many [more does {A} need|are missing|{o} are missing|are still needed]?", "r=a-b#{o} missing", "{A} needs {r} more {o}."),
    ("A [film|movie|book|trip|race|song|course] [is|lasts|takes] {a} "
     "[minutes|pages|hours|km|days] long[, and| and] {b} are [over|done|behind us]. How "
     "[much|many] [is|are] left?", "r=a-b#left", "There are {r} left."),
    # division
    ("{A} [shares|divides|splits|deals out|distributes] {a} {o} [equally |evenly |fairly "
     "|][among|between|to] {b} [friends|children|people|players|dogs|classes]. How many [does "
     "each get|{o} does each get|per person|does each one get|is that for each]?", "r=a/b#{o} for each", "Each gets {r} {o}."),
    ("{a} {o} [are shared|are divided|are split|get divided] [equally |evenly |]among {b} "
     "[people|children|teams|groups|boxes|classes]. How many [does each get|for each|does each "
     "have|in each one]?", "r=a/b#{o} for each", "Each gets {r} {o}."),
    ("[How many {g} do we need|How many {g} are needed|How many {g} do you need|How many {g} "
     "does it take] for {a} {o} [if each|if each {g1}|when one {g1}|if every {g1}] "
     "[holds|takes|carries|fits|has room for] {b}[| {o}| of them]?", "r=a/b#{g}", "{r} {g} are needed."),
    ("[Each|Every|One|A] {g1} [holds|takes|carries|fits|seats] {b} {o}. How many {g} [are "
     "needed|do we need|do you need|does it take] for {a} {o}?", "r=a/b#{g}", "{r} {g} are needed."),
    ("{a} {o} [in|on|into] {b} {g}[, the same number in each|, equally many in each|, split "
     "evenly]. How many {o} [per {g1}|in each {g1}|are in one {g1}]?", "r=a/b#{o} in one {g1}", "There are {r} {o} in each {g1}."),
    ("{b} {g} [weigh|hold|cost|contain|measure] {a} [kg|dollars|litres|{o}|grams] [together|in "
     "total|altogether]. [How much does one {g1} weigh|How much is one|What about one|How much "
     "is it for one {g1}]?", "r=a/b#for one", "One is {r}."),
    ("[What is|Find|Give me] [half of {a}|the half of {a}|{a} divided by two][?|.]", "r=a/2#", "The answer is {r}."),
    ("[What is|Find|Give me|What's] [twice {a}|double {a}|two times {a}|the double of "
     "{a}][?|.]", "r=a*2#", "The answer is {r}."),
    ("[What is|Find|Give me|What's] [three times {a}|the triple of {a}|triple {a}][?|.]", "r=a*3#", "The answer is {r}."),
    ("[What is|Find|Give me|Calculate|What's] the product of {a} and {b}[?|.]", "r=a*b#", "The product is {r}."),
    ("{A} [drives|walks|runs|rides|travels] {a} [km|miles|metres] in {b} [hours, always equally "
     "fast. How far [in one|per|each] hour|days at a constant speed. How far [in one|per|each] "
     "day|minutes, the same distance in each. How far [in one|per|each] minute]?", "r=a/b#for one", "That is {r}."),
    # the user's own things
    ("I [have|own|got|bought|found] {a} {o} and [my [friend|brother|sister|mother|boss] "
     "[has|gave me|brings me]|{A} [gives me|has|brings me]|then I [buy|find|get]] {b}[| more]. "
     "How many {o} [is that|is that together|is that in total|are there in total|are "
     "that]?", "r=a+b#{o}", "That is {r} {o}."),
    ("I [have|had|own|bought] {a} {o} and [eat|ate|lose|lost|sold|gave away|use|used] {b}[| of "
     "them]. How many [{o} |][do I have left|do I have now|are left|remain|do I still "
     "have]?", "r=a-b#{o} left", "You have {r} {o} left."),
    ("[We are|There are] {b} [friends|people|of us] and [want to share|share|have] {a} {o}. How "
     "many [for each|does each get|for each of us|do we each get]?", "r=a/b#{o} for each", "Each gets {r} {o}."),
    ("I [buy|order|need|take] {b} {g} [at|for] [${a}|{a} dollars|{a} euros] each. [What do I "
     "pay|How much is that|How much do I pay|What is the total]?", "r=a*b#cost", "You pay {r}."),
    # two and three steps
    ("{A} [buys|gets|has|orders] {a} {g} [with|of] {b} {o} each and [eats|loses|sells|uses|gives "
     "away] {c}[| {o}| of the {o}]. How many {o} [are left|remain|does {A} have left|does {A} "
     "have now]?", "x=a*b#{o} in the {g}; r=x-c#{o} left", "{A} has {r} {o} left."),
    ("{A} has {a} {o}. {A} [buys|gets|finds] {b} more and [gives|sells|sends] {c} to {B}. How "
     "many [{o} |]does {A} have [now|left|in the end]?", "x=a+b#{o} at first; r=x-c#{o} left", "{A} has {r} {o}."),
    ("[Each|Every|One] {g1} [seats|carries|holds|has] {a} {o}. [There are|We have|They bring] "
     "{b} {g}, [but|and] {c} [{o} |][are missing|are taken|are broken|do not come|stay empty]. "
     "How many [{o} |][are there|are left|remain]?", "x=a*b#{o} in all; r=x-c#{o} left", "There are {r} {o} left."),
    ("{A} [earns|makes|gets|is paid] [${a}|{a} dollars] [an|per|each] hour. {A} works {b} hours "
     "and [spends|pays] [${c}|{c} dollars] [on|for] {p}. How much [money |][is left|does {A} "
     "have left|remains]?", "x=a*b#dollars earned; r=x-c#dollars left", "{A} has {r} dollars left."),
    ("{A} [starts with|begins with|has] {a} {o}, [loses|gives away|eats] {b}, then "
     "[finds|buys|gets] {c}. How many [{o} |][does {A} have|does {A} have now|is that "
     "now]?", "x=a-b#{o} at first; r=x+c#{o} now", "{A} has {r} {o}."),
    ("{a} {o}, {b} {p} and {c} {g}: how many [things|items|pieces] [is that|are there|in "
     "total|altogether]?", "x=a+b#things at first; r=x+c#things", "There are {r}."),
    ("[What is|Calculate|Find] the perimeter of a [rectangle|garden|field|room] with sides {a} "
     "and {b}[?|.]", "x=a+b#half of the way around; r=x*2#perimeter", "The perimeter is {r}."),
    ("{A} [bakes|makes|packs|buys] {a} {o} [and|, then] {b} more. {A} [puts|packs] them [equally "
     "|evenly |]into {c} {g}. How many {o} [are|go] in each {g1}?", "x=a+b#{o} in all; r=x/c#{o} in each {g1}", "There are {r} {o} in each {g1}."),
)
ASIDES = (
    "It is a {j} day.|{A} lives in {c}.|{A} is from {c}.|The {s} is {j}.|The weather is "
    "nice.|{A} likes {o}.|It is Monday.|Here is a story.|"
    "This happened last year.|I have a question.|Listen.|My homework says:|Math question:|Quick "
    "question:|Please help me with this one."
).split("|")


def expand(text: str, rng: random.Random) -> str:
    """Choose one part of each `[a|b]`, starting with inner ones."""
    while True:
        text, count = _CHOICE.subn(lambda found: rng.choice(found.group(1).split("|")), text)
        if not count:
            return text


def aside(name: str, rng: random.Random) -> str:
    """Draw a sentence without numbers that does not concern the problem."""
    return rng.choice(ASIDES).format(
        A=name, j=rng.choice(common.ADJECTIVES), c=rng.choice(common.CITIES), s=rng.choice(common.NOUNS), o=rng.choice(common.OBJECTS)[1]
    )


def with_pronouns(text: str, sentence: str, name: str, rng: random.Random) -> tuple[str, str]:
    """Replace `name` by a pronoun after its first mention in `text`, and in the answer."""
    mentions = list(re.finditer(rf"(?<!\w){re.escape(name)}(?:'s)?(?!\w)", text))
    if len(mentions) < 2:
        return text, sentence
    roll = rng.random()
    subject = "they" if roll < 0.12 else "she" if (name in _FEMALE if rng.random() < 0.9 else roll < 0.55) else "he"
    last = False
    for number, mention in reversed(list(enumerate(mentions))):
        if number == 0 or (number < len(mentions) - 1 and rng.random() < 0.3):
            continue
        text = _replace(text, mention.start(), mention.end(), subject)
        last = last or number == len(mentions) - 1
    found = re.search(rf"(?<!\w){re.escape(name)}(?:'s)?(?!\w)", sentence, flags=re.IGNORECASE) if last else None
    return (text, _replace(sentence, found.start(), found.end(), subject)) if found else (text, sentence)


def _replace(text: str, start: int, end: int, subject: str) -> str:
    """Replace the name at [start, end) by a pronoun, and adapt its verb."""
    before, name, after = text[:start], text[start:end], text[end:]
    words = before.split()
    previous = words[-1].lower() if words else ""
    if name.endswith("'s"):
        word = PRONOUNS[subject][1]
    elif previous in ("gives", "gave", "give", "than", "to", "from", "for", "with", "of"):
        word = PRONOUNS[subject][0]
    else:
        word = subject
        if subject == "they":
            if previous in ("does", "is", "was", "has"):
                plural = {"does": "do", "is": "are", "was": "were", "has": "have"}[previous]
                head = before.rstrip()[: -len(previous)]
                kept = before.rstrip()[-len(previous) :]
                before = head + (plural.capitalize() if kept[0].isupper() else plural) + " "
            else:
                after = re.sub(r"^( (?:now|still|already))? (\w+)", lambda m: (m.group(1) or "") + " " + _plural_verb(m.group(2)), after)
    starts = not before.strip() or before.rstrip()[-1] in ".?!:"
    return before + (word.capitalize() if starts else word) + after


def _plural_verb(verb: str) -> str:
    known = {"has": "have", "does": "do", "is": "are", "was": "were", "goes": "go"}
    if verb in known:
        return known[verb]
    if verb.endswith(("ches", "shes", "sses")):
        return verb[:-2]
    return verb[:-1] if verb.endswith("s") and not verb.endswith("ss") else verb
