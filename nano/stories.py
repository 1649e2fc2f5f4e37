"""Draw training-only word problems: stories of one to three changes, parts, comparisons.

`draw` returns a template as in `nano.suites.arithmetic_templates`. In the tables, `[a|b]` means one
of the parts a and b. `<give gives gave>` holds the forms of a verb: for I or many, for one person,
and in the past.
"""

# ruff: noqa: SIM905 (word lists read better as text)

from __future__ import annotations

import random
import re

from nano import phrasings
from nano.suites.arithmetic_templates import Template

_VERB = re.compile(r"<(\w+) (\w+) (\w+)>")
STARTS = (
    "{A} <have has had> {a} {o}",
    "{A} <own owns owned> {a} {o}",
    "{A} <start starts started> [|the day |the week ]with {a} {o}",
    "In {A}'s [bag|box|house|garden|pocket|room] there <are are were> {a} {o}",
)
PLACES = (
    "There <are are were> {a} {o} [in|at] the {s}",
    "[A|The|Our] {s} <have has had> {a} {o}",
    "{a} {o} <are are were> [in|at] the {s}",
    "A [box|bag|basket|room|bus|shelf|drawer|jar|truck|tree|farm] <hold holds held> {a} {o}",
)
# {n} is a number. The first table of each pair is about an owner, the second about a place.
GAINS = (
    (
        "{A} <get gets got> [{n} more|another {n}|{n} new ones]",
        "{A} <buy buys bought> [{n} more|another {n}|{n}|{n} extra ones]",
        "{A} <find finds found> [{n} more|another {n}|{n} others]",
        "{A} <receive receives received> {n}[| more| from {B}| more from {B}]",
        "{A} <make makes made> {n}[ more| new ones]",
        "{B} <give gives gave> {A} [{n}|{n} more|another {n}|{n} of theirs]",
        "{B} <bring brings brought> {A} {n}[| more]",
        "{A} <win wins won> {n}[| more]",
        "{A} <pick picks picked> up {n}[ more| others]",
    ),
    (
        "{n} more <are are were> [added|delivered|brought|put in|ordered]",
        "{n} [more|new ones|others] <arrive arrives arrived>",
        "{n} more <come comes came>[| in]",
        "{A} <add adds added> [{n}|{n} more|another {n}]",
        "{A} <put puts put> in [{n}|{n} more|another {n}]",
        "{n} [|more |others ]<get gets got> on",
        "{n} [|more |others ]<join joins joined>",
        "it <get gets got> {n} [more|new ones]",
    ),
)
LOSSES = (
    (
        "{A} <give gives gave> {n}[| of them] away",
        "{A} <give gives gave> away {n}[| of them]",
        "{A} <give gives gave> {n}[| of them] to {B}",
        "{A} <give gives gave> {B} {n}[| of them]",
        "{A} <sell sells sold> {n}[| of them| to {B}]",
        "{A} <lose loses lost> {n}[| of them]",
        "{A} <use uses used> {n}[| of them]",
        "{A} <throw throws threw> [{n}[| of them] away|out {n}[| of them| old ones]]",
        "{A} <hand hands handed> out {n}[| of them]",
        "{A} <send sends sent> {n}[| of them] to {B}",
        "{A} <donate donates donated> {n}",
        "{B} <take takes took> {n}[| of them| away]",
        "{B} <borrow borrows borrowed> {n}[| of them]",
    ),
    (
        "{n}[| of them] <are are were> [sold|used|eaten|stolen|removed|taken away|thrown out]",
        "{n}[| of them] <are are were> [given away|lost|moved|broken|picked|sent away]",
        "{n}[| of them] <leave leaves left>",
        "{n}[| of them] <disappear disappears disappeared>",
        "{n}[| of them] <fall falls fell> [off|down|out]",
        "{n}[| of them] <get gets got> [off|lost|stolen|away]",
        "{n}[| of them] <go goes went> [away|home|missing]",
        "{A} <take takes took> {n}[| of them] [away|out]",
        "{A} <remove removes removed> {n}[| of them]",
        "it <sell sells sold> {n}",
    ),
)
SINGULAR = tuple(
    "{A} {B} {s} it It box bag basket room bus shelf drawer jar truck tree farm".split()
)
JOINS = (". ", ". ", ". Then ", ", then ", " and ", ", and ", " but ", ". After that ", ". Later ")

KINDS = (
    "boys/girls men/women cats/dogs adults/children cows/horses cars/trucks apples/pears "
    "forks/spoons novels/comics hens/ducks roses/tulips singers/dancers winners/losers"
).split()
LOOKS = (
    "red/blue ripe/green full/empty old/new big/small clean/dirty sweet/sour paid/unpaid "
    "open/closed black/white broken/whole fresh/stale free/taken wet/dry round/square"
).split()
# {u} and {v} are a pair of KINDS.
OF_KINDS: tuple[Template, ...] = (
    ("[A class|A school|A group|A choir|A club|The team|Our village] has {a} "
     "[students|members|people|of them][; |, |. |, and ]{b} [of them |]are {u}. How many {v} are "
     "[there|there in it|in it]?",
     "r=a-b#{v}", "There are {r} {v}."),
    ("[There are|We count|{A} sees] {a} [of them|{u} and {v}][| in the {s}| altogether]. {b} [of "
     "them |]are {u}[|, the rest are {v}|, the others are {v}]. How many [{v} are there|are "
     "{v}|of them are {v}]?",
     "r=a-b#{v}", "There are {r} {v}."),
    ("[Of|Out of] {a} {u} and {v}[| in the {s}], {b} are {u}. How many [are {v}|{v} are there]?",
     "r=a-b#{v}", "There are {r} {v}."),
    ("[There are|We have|{A} has|I see] {a} {u} and {b} {v}[| in the {s}]. How many [is that|are "
     "there|are they] [in all|altogether|in total|together]?",
     "r=a+b#in all", "That is {r} in all."),
)  # fmt: skip
# {u} and {v} are a pair of LOOKS.
OF_LOOKS: tuple[Template, ...] = (
    ("[{A} has|There are|We have|I see] {a} {o}[| in the {s}]. {b} [of them |]are {u}[| and the "
     "rest are {v}|, the others are {v}|, the rest {v}]. How many [{o} |]are {v}?",
     "r=a-b#{v} {o}", "{r} {o} are {v}."),
    ("{b} of [the |{A}'s |my |]{a} {o} are {u}. How many are [not {u}|{v}]?",
     "r=a-b#{v} {o}", "{r} are {v}."),
    ("[Of|Out of|From] {a} {o}, {b} are {u}[|. The rest is {v}]. How many [{o} |]are {v}?",
     "r=a-b#{v} {o}", "{r} are {v}."),
)  # fmt: skip
OTHERS: tuple[Template, ...] = (
    ("A [tank|barrel|pool|bucket|bottle|boiler] [has|holds|contains] {a} litres of "
     "[water|oil|milk|juice|fuel]. {b} [litres |]are [used|drained|poured out|pumped "
     "out|drunk|lost]. How many litres [remain|are left|are still in it|does it still hold]?",
     "r=a-b#litres left", "There are {r} litres left."),
    ("[{A}|I] had [{a} dollars|${a}|{a} euros] and [spent|paid|used] [{b}|{b} of them|${b}][| on "
     "{o}| for {o}| for a {o1}]. How much [money |][is left|remains]?",
     "r=a-b#money left", "{r} are left."),
    ("[{A}'s|My|The|A] [book|report|novel|trip|film|march] is {a} "
     "[pages|km|minutes|miles|steps] long. {A} [has done|did|has finished|is through with|has "
     "read|has walked] {b}[| of them| so far]. How many [are left|remain|are still to go|to go]?",
     "r=a-b#left", "{r} are left."),
    ("{A} has [twice|two times|double] as many {o} as {B}. {B} has {a}[| {o}]. How many [{o} "
     "|]does {A} have?",
     "r=a*2#{o} of {A}", "{A} has {r} {o}."),
    ("{B} has {a} {o}. {A} has [three times|3 times] [as many|as many as {B}|that many]. How many "
     "[{o} |]does {A} have?",
     "r=a*3#{o} of {A}", "{A} has {r} {o}."),
    ("{A} has {b} times as many {o} as {B}. {B} has {a}[| {o}]. How many [{o} |]does {A} have?",
     "r=a*b#{o} of {A}", "{A} has {r} {o}."),
    ("{A} has half as many {o} as {B}. {B} has {a}[| {o}]. How many [{o} |]does {A} have?",
     "r=a/2#{o} of {A}", "{A} has {r} {o}."),
    ("[{B} has {a} {o}. {A} has {b} more than {B}|{A} has {b} more {o} than {B}. {B} has {a}|{B} "
     "has {a} {o} and {A} has {b} more]. How many [{o} |]does {A} have?",
     "r=a+b#{o} of {A}", "{A} has {r} {o}."),
    ("[{B} has {a} {o}. {A} has {b} [fewer|less] than {B}|{A} has {b} fewer {o} than {B}. {B} has "
     "{a}|{B} has {a} {o} and {A} has {b} fewer]. How many [{o} |]does {A} have?",
     "r=a-b#{o} of {A}", "{A} has {r} {o}."),
    ("[{B}|My sister|My brother|{A}'s mother] is {a}[ years old|]. {A} is {b} years "
     "[younger|younger than that]. How old is {A}?",
     "r=a-b#age of {A}", "{A} is {r} years old."),
    ("[{A}|I] [baked|filled|bought|packed|opened|got] {a} {g} [of|with] {b} {o}[| each] and "
     "[ate|sold|lost|used|gave away|dropped] {c}[| of them| {o}]. How many {o} [remain|are "
     "left|are still there]?",
     "x=a*b#{o} in the {g}; r=x-c#{o} left", "{r} {o} are left."),
    ("[{A}|I] [baked|filled|bought|packed|opened|got] {a} {g} [of|with] {b} {o}[| each] and [then "
     "|]{c} [more|extra] {o}. How many {o} [is that|are there|are there in all]?",
     "x=a*b#{o} in the {g}; r=x+c#{o} in all", "There are {r} {o}."),
    ("[What is|Find|Calculate|Give me] the sum of {a}, {b} and {c}[?|.]",
     "x=a+b#; r=x+c#", "The sum is {r}."),
    ("[Add {a} to {b}|Add {a} and {b}|Take {a} plus {b}][,| and| and then] [subtract {c}|take "
     "away {c}|minus {c}].",
     "x=a+b#; r=x-c#", "The answer is {r}."),
    ("{A} [read|made|sold|saw|drove|picked|did] {a} {o} on Monday, {b}[| {o}] on Tuesday and "
     "[{c}|the other {c}] on Wednesday. How many {o} [is that|are there|in total|is that "
     "altogether]?",
     "x=a+b#{o} on two days; r=x+c#{o} on three days", "That is {r} {o}."),
    ("[Three friends pick {o}. |]{A} [picks|has|brings] {a}[| {o}], {B} [picks|has|brings] {b} "
     "and {C} {c}. How many {o} [do they have|are there|is that] [together|all "
     "together|altogether]?",
     "x=a+b#{o} of two; r=x+c#{o} together", "Together they have {r} {o}."),
    ("{A} has {a} {o}[, which|. That] is {b} [fewer|less] than {B} has. How many {o} does {B} "
     "have?",
     "r=a+b#{o} of {B}", "{B} has {r} {o}."),
    ("{A} has {a} {o}[, which|. That] is {b} more than {B} has. How many {o} does {B} have?",
     "r=a-b#{o} of {B}", "{B} has {r} {o}."),
    ("There were some {o} in the {s}. {b} [went away|left|were taken|were sold|flew away] and now "
     "[there are {a}|{a} are left]. How many [{o} |]were there [at first|before|at the start]?",
     "r=a+b#{o} at first", "There were {r} {o} at first."),
    ("{A} had some {o}, [got|found|bought] {b} more and now has {a}. How many [{o} |]did {A} have "
     "[at first|before]?",
     "r=a-b#{o} at first", "{A} had {r} {o} at first."),
    ("[The|My|A] {s} [is|was] {a} [metres long|kg heavy|cm high|years old] and [the other "
     "one|yours|the {o1}] [is |was |]{b}. How much [longer|heavier|higher|older|more] is the "
     "[first|first one]?",
     "r=a-b#difference", "The difference is {r}."),
    ("[The price|The level|The score|My phone|The temperature|The number of {o}] [fell|went "
     "down|dropped|was reduced] from {a} to {b}[. By how much|, by how many is that|. How much is "
     "that|. How much did it fall]?",
     "r=a-b#difference", "The difference is {r}."),
    ("How much [change|money] do [I|you] get [back |]from {c} dollars [if|when] [I|you] buy {a} "
     "{o} [at {b} dollars each|that cost {b} dollars each|for {b} dollars each]?",
     "x=a*b#dollars to pay; r=c-x#dollars of change", "You get {r} dollars back."),
    ("[Of|Out of] [the |]{a} {o}[| in the {s}], {b} are [red|old|big] and {c} are "
     "[blue|new|small]. The [rest is|others are|rest are] [green|white|round]. How many [{o} "
     "|]are [the rest|the others|left|green|white|round]?",
     "x=a-b#{o} then; r=x-c#{o} left", "{r} {o} are left."),
    ("[I|{A}] had {a} [euros|dollars][, then paid|, paid|. I paid] {b} for [a {o1}|{o}|food] and "
     "{c} for [lunch|{p}|a ticket]. [How much is left|What is left|How much money is left]?",
     "x=a-b#money then; r=x-c#money left", "{r} are left."),
    ("Adults pay {b} dollars[| each] and children [pay |]{d}[| dollars]. [What|How much] do {a} "
     "adults and {c} children pay[| in total| together]?",
     "x=a*b#dollars of adults; y=c*d#dollars of children; r=x+y#dollars in total",
     "They pay {r} dollars."),
    ("Each of {a} {g} has {b} {o}. There are also {c} {p}. How many [is that|are there] [in "
     "all|in total|altogether]?",
     "x=a*b#{o}; r=x+c#in all", "There are {r} in all."),
    ("[A|One|Each] {g1} has {b} {o}. {A} [bought|got|took|had] {a} {g} and [used|lost|sold|ate] "
     "{c}[| {o}][, how|. How] many [{o} |]are left?",
     "x=a*b#{o} in the {g}; r=x-c#{o} left", "{r} {o} are left."),
    ("[There are|{A} has|We have|A house has] {a} {g} [with|and each has|, each with] {b} {o}[| in "
     "each {g1}| on each {g1}]. [{c} [{o} |]are [taken|broken|lost|burnt|occupied]. How|If {c} are "
     "[taken|used|gone], how] many [{o} |][are left|are free|remain|are still good]?",
     "x=a*b#{o} in the {g}; r=x-c#{o} left", "{r} {o} are left."),
    ("[From|Out of] [a roll of |]{c} metres of [cable|rope|ribbon|pipe|cloth], {a} pieces of {b} "
     "metres[| each] [were|are] cut off. How many metres are left?",
     "x=a*b#metres cut off; r=c-x#metres left", "{r} metres are left."),
    ("[A box of |]{a} {o} [were|are|was] [divided|shared|split] [evenly |equally "
     "|][between|among] {b} [pupils|children|friends]. [One of them, {A},|One child, {A},|{A} is "
     "one of them and] [gave|then gave|gives] away {c}. How many [{o} |][did {A} keep|does {A} "
     "have]?",
     "x=a/b#{o} for each; r=x-c#{o} left", "{A} has {r} {o}."),
    ("[A|Each|One] [recipe|{g1}|cake|set] [needs|takes|uses] {a} {o} [per|for each|for one|for "
     "every] {p}. How many {o} [for|are needed for|do I need for] {b} {p}?",
     "r=a*b#{o}", "{r} {o} are needed."),
    ("[A shop sells {o}|You get {o}|We order {o}] in [packs|{g}|boxes|bags] of {a}. {A} "
     "[buys|orders|gets] {b} [packs|{g}|boxes|of them] and [hands out|uses|sells|gives away] {c}"
     "[| {o}| of them]. How many {o} [does {A} keep|does {A} have left|are left]?",
     "x=a*b#{o} in all; r=x-c#{o} left", "{A} has {r} {o} left."),
    ("[A ticket|Entry|A seat|A meal] costs {a} [dollars|euros|pounds] for [adults|an adult|men] "
     "and {b}[| dollars| euros] for [children|a child|women]. [What|How much] do {c} "
     "[adults|men] and {d} [children|women] pay[| together| in total]?",
     "x=a*c#dollars of adults; y=b*d#dollars of children; r=x+y#dollars in total",
     "They pay {r} dollars."),
    ("After [giving away|selling|losing|eating|using|dropping] {b}[| of {A}'s| of the] {o}, {A} "
     "has {a} left. How many [{o} |]did {A} have [at first|before|at the start]?",
     "r=a+b#{o} at first", "{A} had {r} {o} at first."),
    ("[{A} wants|I want|I need] a [bike|phone|{o1}|trip] for [{a} dollars|${a}|{a} euros]. "
     "[{A} saves|I save|I put aside] [{b} dollars|${b}|{b} euros] [[each|every|a] month. How many "
     "months|[each|every|a] week. How many weeks|[each|every|a] day. How many days] [will it "
     "take|does it take|are needed]?",
     "r=a/b#of them", "It takes {r}."),
    ("[{A}|I] [picked|bought|had|baked|collected] {a} {o} and put them [equally|evenly|in equal "
     "numbers] [into|on] {b} {g}. Then [{A}|I|somebody] [ate|took|lost|removed] {c}[| {o}] from "
     "[the first|one] {g1}. How many {o} are [in|on] [the first|that] {g1} now?",
     "x=a/b#{o} in each {g1}; r=x-c#{o} left", "There are {r} {o} left."),
    ("{A} has {c} {o}. {A} [makes|fills|needs {o} for|builds] {a} {g}[, using| with| using|. Each "
     "takes| and uses] {b} {o}[ for each| each|]. How many [{o} |][are left|are left over|does {A} "
     "have left|remain]?",
     "x=a*b#{o} used; r=c-x#{o} left", "{r} {o} are left."),
    ("How many {o} [are left|remain|are still to come] if [a trip lasts|there are|we had|{A} had] "
     "{a} {o} and {b}[| of them| {o}] [have passed|have already passed|are gone|are over|are "
     "used]?",
     "r=a-b#{o} left", "{r} {o} are left."),
    ("How many {o} [do I have|does {A} have|are left] if [I|{A}] [bought|got|had] {a} {g} [of|with]"
     " {b}[| {o}| each] and [dropped|lost|ate|used|broke] {c}[| of them| {o}][| on the way home| "
     "yesterday]?",
     "x=a*b#{o} in the {g}; r=x-c#{o} left", "{r} {o} are left."),
    ("[I need|We need|{A} needs] {a} {o}[ and|. I|, I] have [already |][written|made|got|found] "
     "{b}. [My sister|{B}|My friend] [wrote|made|found|brought] [another {c}|{c} more|{c}]. How "
     "many [more |]do we [still |]need?",
     "x=a-b#{o} then; r=x-c#{o} to go", "We need {r} more."),
    ("[{A}|My dad|The {s}] [weighs|is|has] {a} [kg|cm|years|points] and [{B}|his son|the {o1}] "
     "[weighs |is |has |]{b}. How [many|much] [kg |cm |points |years |]"
     "[heavier|taller|more|older|better] is {A}?",
     "r=a-b#more", "The difference is {r}."),
    ("{A} [earns|makes|gets] [{a} dollars|${a}|{a} euros] [an hour|per hour|a day|each day]. "
     "[Last week|This month|Today|Yesterday] {A} worked {b} [hours|days]. [How much did {A} "
     "earn|What did {A} earn|How much money is that]?",
     "r=a*b#dollars earned", "{A} earned {r} dollars."),
    ("[A|My|The] [hose|pump|machine|printer|tap|worker] [gives|makes|prints|moves|fills] {b} "
     "[litres|liters|{o}] [per|a|each|every] [minute. The tub holds {a}[| litres| liters| of "
     "them]. How [many minutes|long]|hour. The job needs {a}[| of them]. How [many hours|long]] "
     "[until it is full|does it take|is that|until it's full]?",
     "r=a/b#time", "It takes {r}."),
    ("{A}'s [rope|ribbon|board|wire] is {c} [meters|metres] long. {A} cuts off {a} pieces of {b}"
     "[| meters| metres][| each]. How [much|many meters|many metres][| of it| of rope] are left?",
     "x=a*b#cut off; r=c-x#left", "{r} are left."),
    ("{A} has {a} [red|old|big] {o} and {b} [blue|new|small] {o}. {B} has {c} [fewer|less] "
     "[{o} |]than {A}. How many {o} does {B} have?",
     "x=a+b#{o} of {A}; r=x-c#{o} of {B}", "{B} has {r} {o}."),
    ("[{A}|The farmer|A farm|A shop] has {a} {o}, twice as many {p} as {o}[,|] and {b} {g}. How "
     "many [animals|things|of them] [is that|are there|are there in all]?",
     "x=a*2#{p}; y=a+x#{o} and {p}; r=y+b#in all", "There are {r} in all."),
    ("[Two|Both] {g} [carry|hold|have|take] {a} {o} each and [a|one|another] {x1} "
     "[carries|holds|has|takes] {b}[| {o}]. How many {o} [is that|are there|are carried] [in "
     "all|altogether|in total]?",
     "x=a*2#{o} in the {g}; r=x+b#{o} in all", "There are {r} {o} in all."),
    ("[What is|What's|Calculate|How much is|] {a} [plus|+|and] {b} [plus|+|and] {c}[?|]",
     "x=a+b#; r=x+c#", "The answer is {r}."),
    ("[What is|What's|Calculate|How much is|] {a} [minus|-] {b} [minus|-] {c}[?|]",
     "x=a-b#; r=x-c#", "The answer is {r}."),
    ("[So |Hey, |OK, |]I had [{a} bucks|${a}|{a} dollars|{a} euros][,| and] spent {b} on "
     "[pizza|food|{o}|a {o1}] and {c} on [a ticket|{p}|a book|gas]. How much [do I have left|is "
     "left|money do I still have][ lol|]?",
     "x=a-b#money then; r=x-c#money left", "You have {r} left."),
    ("[I|{A}] got {a} {g} of {o}, {b} in each, and [my friend|{B}|mum] gave [me|us] {c} more. "
     "[Total|How many in total|How many {o} now|How many is that]?",
     "x=a*b#{o} in the {g}; r=x+c#{o} in total", "That is {r} {o}."),
    ("{A} [scored|made|sold|read|ran|ate] {a} {o} [in the first game|on Monday|yesterday|first] "
     "and twice as many [in the second|on Tuesday|today|later]. How many {o} [is that|did {A} get "
     "in both|in both games|in total|altogether]?",
     "x=a*2#{o} later; r=a+x#{o} in both", "That is {r} {o} in both."),
    ("{A} [collected|has|picked|made] {a} {o} and [packs|packed|puts|put] them [in|into] {g} of "
     "{b}. How many {g} [did {A} need|does {A} need|does {A} fill|are needed|is that]?",
     "r=a/b#{g}", "{r} {g} are needed."),
    ("[My phone|The battery|The tank|It|The score] was at {a}[ percent| points| degrees|] [this "
     "morning|yesterday|before] and [it's|it is|is] at {b} now[. By|, by] how [many points|much] "
     "did it [go down|fall|drop]?",
     "r=a-b#points down", "It went down by {r}."),
    ("{A} has {a} {o}. {A} keeps {b} and [gives|shares] the rest [equally |evenly "
     "|][to|between|among] {c} [students|children|friends|{p}]. How many [{o} |]does each "
     "[student |child |one |]get?",
     "x=a-b#{o} to share; r=x/c#{o} for each", "Each gets {r} {o}."),
    ("[In the morning|At first|On Monday] [the shop|{A}|we] had {a} {o}. {b} were [sold|used|eaten"
     "|given away] [before noon|first|on Tuesday] and {c} [in the afternoon|later|on Wednesday]. "
     "How many [{o} |]were [not sold|not used|left|still there]?",
     "x=a-b#{o} then; r=x-c#{o} left", "{r} {o} were left."),
    ("[My uncle|{A}|My neighbor] [really likes|collects|is crazy about] {o}. [He|She|{A}] had {a} "
     "{o}[,| and| and then] bought {b} more at [a market|the {s}|a shop][,| and] then sold {c}. "
     "How many [{o} |]has [he|she|{A}] [got |]now?",
     "x=a+b#{o} then; r=x-c#{o} left", "That is {r} {o} now."),
    ("[There are|There were] {a} [kids|people|{o}] on the [bus|train|boat][. |, ]{b} [get|got] off "
     "[at the first stop |first |]and {c} [get|got] on. How many are on it now?",
     "x=a-b#then; r=x+c#now", "There are {r} now."),
)  # fmt: skip


def draw(rng: random.Random) -> Template:
    roll = rng.random()
    if roll < 0.45:
        return _story(rng)
    if roll < 0.58:
        table, pairs = rng.choice(((OF_KINDS, KINDS), (OF_LOOKS, LOOKS)))
        pair = rng.choice(pairs).split("/")
        u, v = pair if rng.random() < 0.5 else reversed(pair)
        question, plan, answer = (
            part.replace("{u}", u).replace("{v}", v) for part in rng.choice(table)
        )
        return phrasings.expand(question, rng), plan, answer
    question, plan, answer = rng.choice(OTHERS)
    return phrasings.expand(question, rng), plan, answer


def _story(rng: random.Random) -> Template:
    """Draw a start, one to three changes, and a question."""
    about = rng.choices(("owner", "user", "place"), weights=(45, 15, 40))[0]
    text = rng.choice(PLACES if about == "place" else STARTS)
    changes = rng.choices((1, 2, 3), weights=(45, 43, 12))[0]
    plan: list[str] = []
    value = "a"
    sign = "+"
    for index, number in enumerate("bcd"[:changes]):
        sign = rng.choice("+-")
        of_owner, of_place = GAINS if sign == "+" else LOSSES
        table = of_place if about == "place" or rng.random() < 0.2 else of_owner
        clause = rng.choice(table).replace("{n}", f"{{{number}}}")
        if clause.startswith("it ") and about != "place":
            clause = "{A}" + clause[2:]
        join = rng.choice(JOINS)
        text += join + (clause[0].upper() + clause[1:] if join == ". " else clause)
        result = "r" if index == changes - 1 else "xy"[index]
        meaning = "then" if result != "r" else "now" if sign == "+" else "left"
        plan.append(f"{result}={value}{sign}{number}#{{o}} {meaning}")
        value = result
    ends = "|now|in the end|at the end|after that" + ("|left|still" if sign == "-" else "")
    whose, answer = {
        "owner": ("does {A} have", "{A} has {r} {o}"),
        "user": ("do I have", "You have {r} {o}"),
        "place": ("are there", "There are {r} {o}"),
    }[about]
    answer += rng.choice(("", " now", " left" if sign == "-" else ""))
    text = phrasings.expand(f"{text}. How many [{{o}} |]{whose} [{ends}]", rng).rstrip() + "?"
    return _conjugate(text, about == "user", rng.random() < 0.5), "; ".join(plan), answer + "."


def _conjugate(text: str, is_user: bool, is_past: bool) -> str:
    """Choose the forms of all verbs. If `is_user`, the owner is "I"."""
    if is_user:
        text = re.sub(r"(?<=> ){A}", "me", text).replace("{A}'s", "my").replace("{A}", "I")
    for verb in reversed(list(_VERB.finditer(text))):
        is_one = text[: verb.start()].rstrip().endswith(SINGULAR)
        form = verb.group(3 if is_past else 2 if is_one else 1)
        text = text[: verb.start()] + form + text[verb.end() :]
    return text
