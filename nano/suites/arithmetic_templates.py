"""Word-problem templates for `arithmetic`: (question, plan, answer).

{A} {B} {C} are names. {o} {p} are plural things, {o1} is the singular of {o}. {x} are containers,
{x1} is the singular. {s} is a place, {a} to {d} are numbers, {r} is the result. A plan is a list of
steps `target = left operator right # meaning`, and the last step gives the answer.
"""

# ruff: noqa: E501, SIM905 (tables read better as one row per line)
# fmt: off

from __future__ import annotations

Template = tuple[str, str, str]

PLACES = (
    "shop market school library farm bakery museum factory warehouse garden hotel office club "
    "park station store cafe "
    "theatre zoo gym workshop hospital kitchen camp stadium"
).split()

ONE_STEP: tuple[Template, ...] = (
    # addition
    ("{A} has {a} {o} and buys {b} more. How many {o} does {A} have now?", "r=a+b#{o} "
                                                                           "now", "{A} now has "
                                                                                  "{r} {o}."),
    ("{A} has {a} {o} and {B} has {b} {o}. How many {o} do they have together?", "r=a+b#{o} "
                                                                                 "together", "Together they have {r} {o}."),
    ("There are {a} {o} in the {s}. {A} brings {b} more {o}. How many {o} are there "
     "now?", "r=a+b#{o} now", "There are {r} {o} now."),
    ("A {s} sold {a} {o} on Monday and {b} on Tuesday. How many {o} did it sell in "
     "total?", "r=a+b#{o} sold", "It sold {r} {o} in total."),
    ("{A} picked {a} {o} and {b} {p}. How many things did {A} pick in all?", "r=a+b#things in "
                                                                             "all", "{A} picked "
                                                                                    "{r} things "
                                                                                    "in all."),
    ("{A} read {a} pages yesterday and {b} pages today. How many pages is that in "
     "total?", "r=a+b#pages", "That is {r} pages in total."),
    ("One {x1} holds {a} {o} and another holds {b}. How many {o} are in both?", "r=a+b#{o} in "
                                                                                "both", "There "
                                                                                        "are {r} "
                                                                                        "{o} in "
                                                                                        "both."),
    ("{A} drove {a} km in the morning and {b} km in the afternoon. How far did {A} "
     "drive?", "r=a+b#km", "{A} drove {r} km."),
    ("A ticket costs {a} dollars and a meal costs {b} dollars. What do they cost "
     "together?", "r=a+b#dollars", "Together they cost {r} dollars."),
    ("{A} had {a} {o}. {B} gave {A} {b} {o}. How many {o} does {A} have?", "r=a+b#{o}", "{A} has "
                                                                                        "{r} {o}."),
    ("How many {o} does {A} have after finding {b} {o}, if {A} had {a} before?", "r=a+b#{o}", "{A} has {r} {o}."),
    ("{A} scored {a} points in the first game and {b} in the second. What is the total "
     "score?", "r=a+b#points", "The total score is {r} points."),
    ("{A} has {a} {o}. {B} has {b} more {o} than {A}. How many {o} does {B} have?", "r=a+b#{o} "
                                                                                    "of "
                                                                                    "{B}", "{B} "
                                                                                           "has "
                                                                                           "{r} "
                                                                                           "{o}."),
    # subtraction
    ("{A} has {a} {o} and gives {b} to {B}. How many {o} does {A} have left?", "r=a-b#{o} "
                                                                               "left", "{A} has "
                                                                                       "{r} {o} "
                                                                                       "left."),
    ("There were {a} {o} in the {s}. {b} of them were sold. How many are left?", "r=a-b#{o} "
                                                                                 "left", "There "
                                                                                         "are "
                                                                                         "{r} "
                                                                                         "{o} "
                                                                                         "left."),
    ("{A} had {a} dollars and spent {b} dollars. How much money is left?", "r=a-b#dollars "
                                                                           "left", "{A} has {r} "
                                                                                   "dollars left."),
    ("{A} has {a} {o} and {B} has {b}. How many more {o} does {A} have than {B}?", "r=a-b#more "
                                                                                   "{o}", "{A} "
                                                                                          "has "
                                                                                          "{r} "
                                                                                          "more "
                                                                                          "{o}."),
    ("A book has {a} pages. {A} has read {b} of them. How many pages are left to read?", "r=a-b#pages left", "There are {r} pages left to read."),
    ("{A} baked {a} {o}. The family took {b}. How many {o} remain?", "r=a-b#{o} that "
                                                                     "remain", "{r} {o} remain."),
    ("{A} had {a} {o} but lost {b} of them. How many {o} does {A} still have?", "r=a-b#{o} "
                                                                                "left", "{A} "
                                                                                        "still "
                                                                                        "has {r} "
                                                                                        "{o}."),
    ("A {s} has {a} seats and {b} are taken. How many seats are free?", "r=a-b#free "
                                                                        "seats", "{r} seats are "
                                                                                 "free."),
    ("{A} wants {a} {o} and already has {b}. How many more are needed?", "r=a-b#{o} "
                                                                         "needed", "{A} needs "
                                                                                   "{r} more {o}."),
    ("A trip is {a} km long. {A} has done {b} km. How many km remain?", "r=a-b#km left", "{r} km "
                                                                                         "remain."),
    ("There are {a} students in a {s}; {b} of them are girls. How many are boys?", "r=a-b#boys", "There are {r} boys."),
    ("{A} pays for a {o1} of {b} dollars with {a} dollars. How much change does {A} "
     "get?", "r=a-b#dollars of change", "{A} gets {r} dollars of change."),
    ("How many {o} are left in the {x1} if there were {a} and {A} took {b}?", "r=a-b#{o} "
                                                                              "left", "There are "
                                                                                      "{r} {o} "
                                                                                      "left."),
    ("{A} has {a} {o}, which is {b} more than {B} has. How many {o} does {B} have?", "r=a-b#{o} "
                                                                                     "of "
                                                                                     "{B}", "{B} "
                                                                                            "has "
                                                                                            "{r} "
                                                                                            "{o}."),
    # comparison
    ("{A} has {a} {o} and {B} has {b} {o}. Who has more, and how many more?", "r=a~b#the "
                                                                              "difference", "{W} "
                                                                                            "has "
                                                                                            "{r} "
                                                                                            "more {o}."),
    ("The {s} sold {a} {o} and {b} {p}. What is the difference?", "r=a~b#the difference", "The "
                                                                                          "difference is {r}."),
    ("{A} ran {a} metres and {B} ran {b} metres. Who ran further, and by how much?", "r=a~b#the "
                                                                                     "difference", "{W} ran {r} metres further."),
    ("{A} is {a} cm tall and {B} is {b} cm tall. Who is taller, and by how many cm?", "r=a~b#the "
                                                                                      "difference", "{W} is {r} cm taller."),
    # multiplication
    ("{A} has {a} {x} with {b} {o} each. How many {o} does {A} have?", "r=a*b#{o}", "{A} has {r} "
                                                                                    "{o}."),
    ("There are {a} {x} and each {x1} holds {b} {o}. How many {o} are there in total?", "r=a*b#{o}", "There are {r} {o} in total."),
    ("A {o1} costs {a} dollars. How much do {b} {o} cost?", "r=a*b#dollars", "They cost {r} "
                                                                             "dollars."),
    ("{A} earns {a} dollars an hour. How much does {A} earn in {b} hours?", "r=a*b#dollars", "{A} earns {r} dollars."),
    ("{A} reads {a} pages every day. How many pages does {A} read in {b} days?", "r=a*b#pages", "{A} reads {r} pages."),
    ("Each of {a} friends brings {b} {o}. How many {o} do they bring?", "r=a*b#{o}", "They bring "
                                                                                     "{r} {o}."),
    ("A {s} has {a} rows of {b} seats. How many seats are there?", "r=a*b#seats", "There are {r} "
                                                                                  "seats."),
    ("A car drives {a} km per hour for {b} hours. How far does it go?", "r=a*b#km", "It goes {r} "
                                                                                    "km."),
    ("{A} buys {a} packs of {o}. Every pack has {b} {o}. How many {o} is that?", "r=a*b#{o}", "That is {r} {o}."),
    ("A machine makes {a} {o} per minute. How many {o} does it make in {b} minutes?", "r=a*b#{o}", "It makes {r} {o}."),
    ("{A} has {a} {o}. {B} has {b} times as many. How many {o} does {B} have?", "r=a*b#{o} of "
                                                                                "{B}", "{B} has "
                                                                                       "{r} {o}."),
    ("How many {o} are in {a} {x} if each one holds {b}?", "r=a*b#{o}", "There are {r} {o}."),
    ("A rectangle is {a} metres long and {b} metres wide. What is its area in square "
     "metres?", "r=a*b#square metres", "The area is {r} square metres."),
    # division
    ("{A} shares {a} {o} equally among {b} friends. How many {o} does each friend get?", "r=a/b#{o} for each", "Each friend gets {r} {o}."),
    ("{a} {o} are packed into {x} of {b}. How many {x} are needed?", "r=a/b#{x}", "{r} {x} are "
                                                                                  "needed."),
    ("{A} splits {a} dollars evenly between {b} people. How much does each person get?", "r=a/b#dollars for each", "Each person gets {r} dollars."),
    ("There are {a} {o} in {b} equal {x}. How many {o} are in one {x1}?", "r=a/b#{o} in one "
                                                                          "{x1}", "There are {r} "
                                                                                  "{o} in one "
                                                                                  "{x1}."),
    ("{b} {o} cost {a} dollars. How much does one {o1} cost?", "r=a/b#dollars for one", "One "
                                                                                        "{o1} "
                                                                                        "costs "
                                                                                        "{r} "
                                                                                        "dollars."),
    ("A book of {a} pages is read in {b} days, the same number each day. How many pages per "
     "day?", "r=a/b#pages per day", "That is {r} pages per day."),
    ("{a} students form groups of {b}. How many groups are there?", "r=a/b#groups", "There are "
                                                                                    "{r} groups."),
    ("{A} drives {a} km in {b} hours. How many km is that per hour?", "r=a/b#km per "
                                                                      "hour", "That is {r} km "
                                                                              "per hour."),
    ("{A} has {a} {o}, {b} times as many as {B}. How many {o} does {B} have?", "r=a/b#{o} of "
                                                                               "{B}", "{B} has "
                                                                                      "{r} {o}."),
    ("How many {x} of {b} {o} can {A} fill with {a} {o}?", "r=a/b#{x}", "{A} can fill {r} {x}."),
    # first person, money and measures
    ("I have {a} {o} and buy {b} more. How many {o} do I have?", "r=a+b#{o}", "You have {r} {o}."),
    ("I have {a} {o} and I give away {b}. How many do I have left?", "r=a-b#{o} left", "You have "
                                                                                       "{r} {o} "
                                                                                       "left."),
    ("If I have {a} {o} and {A} gives me {b} more, how many {o} do I have?", "r=a+b#{o}", "You "
                                                                                          "have "
                                                                                          "{r} "
                                                                                          "{o}."),
    ("If I have {a} {o} and lose {b}, how many remain?", "r=a-b#{o} that remain", "{r} {o} "
                                                                                  "remain."),
    ("I bought {a} {x} of {o} with {b} {o} in each. How many {o} did I buy?", "r=a*b#{o}", "You "
                                                                                           "bought {r} {o}."),
    ("I want to share {a} {o} between {b} people. How many {o} does each one get?", "r=a/b#{o} "
                                                                                    "for "
                                                                                    "each", "Each one gets {r} {o}."),
    ("I had ${a} and spent ${b}. How much do I have left?", "r=a-b#dollars left", "You have {r} "
                                                                                  "dollars left."),
    ("{A} has ${a} and spends ${b} at the {s}. How much money does {A} have left?", "r=a-b#dollars left", "{A} has {r} dollars left."),
    ("{A} earned ${a} on Monday and ${b} on Friday. How much did {A} earn?", "r=a+b#dollars", "{A} earned {r} dollars."),
    ("Each {o1} costs ${a}. What is the price of {b} {o}?", "r=a*b#dollars", "The price is {r} "
                                                                             "dollars."),
    ("{b} friends split a bill of ${a} equally. How much does each friend pay?", "r=a/b#dollars "
                                                                                 "for "
                                                                                 "each", "Each "
                                                                                         "friend "
                                                                                         "pays "
                                                                                         "{r} "
                                                                                         "dollars."),
    ("How many days are in {a} weeks?", "r=a*7#days", "There are {r} days."),
    ("How many hours are in {a} days?", "r=a*24#hours", "There are {r} hours."),
    ("How many minutes are in {a} hours?", "r=a*60#minutes", "There are {r} minutes."),
    ("How many {o} are in {a} dozen?", "r=a*12#{o}", "There are {r} {o}."),
    ("How many months are in {a} years?", "r=a*12#months", "There are {r} months."),
    ("If a train travels {a} km per hour, how far does it travel in {b} hours?", "r=a*b#km", "It "
                                                                                             "travels {r} km."),
    ("A farmer has {a} {o} in one field and {b} {o} in another. How many {o} does the farmer "
     "have?", "r=a+b#{o}", "The farmer has {r} {o}."),
    ("A baker bakes {a} {o} a day. How many {o} does the baker bake in {b} days?", "r=a*b#{o}", "The baker bakes {r} {o}."),
    ("{A} had {a} {o} and ate {b} of them. How many {o} are left?", "r=a-b#{o} left", "There are "
                                                                                      "{r} {o} "
                                                                                      "left."),
    ("{a} people are on a bus and {b} get off. How many people are still on the bus?", "r=a-b#people", "There are {r} people on the bus."),
    ("Sum up {a} {o} and {b} {o}.", "r=a+b#{o}", "That is {r} {o}."),
    ("There are {a} {o} on the table. {A} takes {b}. How many are left?", "r=a-b#{o} "
                                                                          "left", "There are {r} "
                                                                                  "{o} left."),
    ("A school has {a} classes with {b} students each. How many students does it have?", "r=a*b#students", "It has {r} students."),
    ("{A} was born {a} years ago and {B} is {b} years younger. How old is {B}?", "r=a-b#years", "{B} is {r} years old."),
    ("{A} is {a} years old. How old will {A} be in {b} years?", "r=a+b#years", "{A} will be {r} "
                                                                               "years old."),
)

TWO_STEP: tuple[Template, ...] = (
    ("{A} has {a} {x} with {b} {o} each and gives away {c} {o}. How many {o} are left?", "x=a*b#{o} in the {x}; r=x-c#{o} left", "There are {r} {o} left."),
    ("{A} has {a} {o}, buys {b} more and then gives {c} to {B}. How many {o} does {A} "
     "have?", "x=a+b#{o} before giving; r=x-c#{o} left", "{A} has {r} {o}."),
    ("{A} buys {a} {o} at {b} dollars each and a {x1} for {c} dollars. How much does {A} "
     "pay?", "x=a*b#dollars for the {o}; r=x+c#dollars in all", "{A} pays {r} dollars."),
    ("{A} has {a} dollars and buys {b} {o} for {c} dollars each. How much money is "
     "left?", "x=b*c#dollars spent; r=a-x#dollars left", "{A} has {r} dollars left."),
    ("A {s} had {a} {o}. It sold {b} on Monday and {c} on Tuesday. How many {o} are "
     "left?", "x=b+c#{o} sold; r=a-x#{o} left", "There are {r} {o} left."),
    ("{A} and {B} have {a} and {b} {o}. They share them equally among {c} friends. How many {o} "
     "does each friend get?", "x=a+b#{o} together; r=x/c#{o} for each", "Each friend gets {r} "
                                                                        "{o}."),
    ("{A} had {a} {o} and ate {b}. The rest goes into {c} equal {x}. How many {o} are in each "
     "{x1}?", "x=a-b#{o} left; r=x/c#{o} in each {x1}", "There are {r} {o} in each {x1}."),
    ("{A} fills {a} {x} with {b} {o} each and has {c} {o} left over. How many {o} did {A} start "
     "with?", "x=a*b#{o} in the {x}; r=x+c#{o} at the start", "{A} started with {r} {o}."),
    ("There are {a} {x} with {b} {o} each. They are shared equally by {c} people. How many {o} "
     "does each person get?", "x=a*b#{o} in all; r=x/c#{o} for each", "Each person gets {r} {o}."),
    ("{A} has {a} {o}. {B} has {b} more than {A}. How many {o} do they have together?", "x=a+b#{o} of {B}; r=a+x#{o} together", "Together they have {r} {o}."),
    ("{A} has {a} {o}. {B} has {b} fewer than {A}. How many {o} do they have together?", "x=a-b#{o} of {B}; r=a+x#{o} together", "Together they have {r} {o}."),
    ("{A} has {a} {o} and {B} has {b} times as many. How many {o} do they have "
     "together?", "x=a*b#{o} of {B}; r=a+x#{o} together", "Together they have {r} {o}."),
    ("A class of {a} students and {b} teachers rides in vans of {c} people. How many vans are "
     "needed?", "x=a+b#people; r=x/c#vans", "{r} vans are needed."),
    ("{A} saves {a} dollars a week for {b} weeks and then spends {c} dollars. How much money is "
     "left?", "x=a*b#dollars saved; r=x-c#dollars left", "{A} has {r} dollars left."),
    ("{A} reads {a} pages on Monday, {b} on Tuesday and {c} on Wednesday. How many pages in "
     "total?", "x=a+b#pages on two days; r=x+c#pages in total", "{A} reads {r} pages in total."),
    ("A {s} orders {a} {x} of {o}. Each {x1} has {b} {o}, but {c} {o} are broken. How many good "
     "{o} are there?", "x=a*b#{o} ordered; r=x-c#good {o}", "There are {r} good {o}."),
    ("{A} packs {a} {o} into {x} of {b}. Then {c} more {x} arrive. How many {x} are there "
     "now?", "x=a/b#{x} packed; r=x+c#{x} now", "There are {r} {x} now."),
    ("{A} puts {a} {o} into {b} {x} equally and then adds {c} {o} to one {x1}. How many {o} are "
     "in that {x1}?", "x=a/b#{o} in each {x1}; r=x+c#{o} in that {x1}", "That {x1} has {r} {o}."),
    ("{b} {o} cost {a} dollars. How much do {c} {o} cost?", "x=a/b#dollars for one; "
                                                            "r=x*c#dollars", "They cost {r} "
                                                                             "dollars."),
    ("{A} drives {a} km in {b} hours. How far does {A} drive in {c} hours at the same "
     "speed?", "x=a/b#km per hour; r=x*c#km", "{A} drives {r} km."),
    ("A bus starts with {a} people. {b} get off and {c} get on. How many people are on the "
     "bus?", "x=a-b#people after the stop; r=x+c#people now", "There are {r} people on the bus."),
    ("{A} had {a} {o}, lost {b} and gave {c} to {B}. How many {o} are left?", "x=a-b#{o} after "
                                                                              "the loss; "
                                                                              "r=x-c#{o} "
                                                                              "left", "{A} has "
                                                                                      "{r} {o} "
                                                                                      "left."),
    ("A ticket costs {a} dollars for adults and {b} dollars less for children. How much do {c} "
     "child tickets cost?", "x=a-b#dollars per child; r=x*c#dollars", "They cost {r} dollars."),
    ("{A} makes {a} {o} in the morning and {b} in the afternoon, every day for {c} days. How "
     "many {o} is that?", "x=a+b#{o} per day; r=x*c#{o}", "That is {r} {o}."),
    ("{A} has {a} red {o} and {b} blue {o}. {c} of them are sold. How many {o} remain?", "x=a+b#{o} at first; r=x-c#{o} that remain", "{r} {o} remain."),
    ("A rope of {a} metres is cut: first {b} metres are taken off, then the rest is cut into {c} "
     "equal parts. How long is each part?", "x=a-b#metres left; r=x/c#metres", "Each part is {r} "
                                                                               "metres long."),
    ("There are {a} {x} of {b} {o}, and {A} wants {c} {o}. How many {o} are too many?", "x=a*b#{o} there; r=x-c#{o} too many", "There are {r} {o} too many."),
    ("{A} needs {a} {o} and buys {b} {x} of {c} {o}. How many {o} are still missing?", "x=b*c#{o} bought; r=a-x#{o} missing", "{r} {o} are still missing."),
    ("{A} pays {a} dollars in total for a {x1} of {b} dollars and {c} equal {o}. How much is one "
     "{o1}?", "x=a-b#dollars for the {o}; r=x/c#dollars for one", "One {o1} is {r} dollars."),
    ("The {s} has {a} {o}. Twice as many arrive. Then {b} are sold. How many {o} are there "
     "now?", "x=a*3#{o} after the delivery; r=x-b#{o} now", "There are {r} {o} now."),
    ("{A} has twice as many {o} as {B}. {B} has {a} {o}. How many {o} do they have "
     "together?", "x=a*2#{o} of {A}; r=x+a#{o} together", "Together they have {r} {o}."),
    ("{A} collected {a} {o} and gave half of them to {B}. Then {A} found {b} more. How many {o} "
     "does {A} have?", "x=a/2#{o} left; r=x+b#{o} now", "{A} has {r} {o}."),
    ("I have {a} {x} with {b} {o} in each and eat {c} {o}. How many {o} are left?", "x=a*b#{o} "
                                                                                    "in the {x}; "
                                                                                    "r=x-c#{o} "
                                                                                    "left", "There are {r} {o} left."),
    ("I buy {a} {o} for ${b} each and pay with ${c}. How much change do I get?", "x=a*b#dollars "
                                                                                 "to pay; "
                                                                                 "r=c-x#dollars "
                                                                                 "of "
                                                                                 "change", "You "
                                                                                           "get "
                                                                                           "{r} "
                                                                                           "dollars of change."),
    ("I had {a} {o}, found {b} more and lost {c}. How many {o} do I have now?", "x=a+b#{o} after "
                                                                                "finding; "
                                                                                "r=x-c#{o} "
                                                                                "now", "You have "
                                                                                       "{r} {o}."),
    ("{A} buys {a} {o} at ${b} each and {B} pays ${c} of it. How much does {A} pay?", "x=a*b#dollars for all; r=x-c#dollars", "{A} pays {r} dollars."),
    ("A farmer collects {a} {o} a day for {b} days and sells {c} of them. How many {o} are "
     "left?", "x=a*b#{o} collected; r=x-c#{o} left", "There are {r} {o} left."),
    ("{A} has {a} {o} and {B} has {b}. {C} has as many as both together plus {c}. How many {o} "
     "does {C} have?", "x=a+b#{o} of both; r=x+c#{o} of {C}", "{C} has {r} {o}."),
    ("{A} runs {a} km every day. How many km are still missing to {b} km after {c} "
     "days?", "x=a*c#km done; r=b-x#km missing", "{r} km are still missing."),
    ("A train with {a} cars of {b} seats carries {c} people. How many seats are empty?", "x=a*b#seats; r=x-c#empty seats", "{r} seats are empty."),
    ("{A} has ${a} and gets ${b} from {B}. A {o1} costs ${c}. How many {o} can {A} buy?", "x=a+b#dollars; r=x/c#{o}", "{A} can buy {r} {o}."),
)

THREE_STEP: tuple[Template, ...] = (
    ("{A} has {a} {x} with {b} {o} each. {A} gives {c} {o} to {B} and buys {d} more. How many "
     "{o} does {A} have now?", "x=a*b#{o} at first; y=x-c#{o} after giving; r=y+d#{o} "
                               "now", "{A} now has {r} {o}."),
    ("{A} buys {a} {o} at {b} dollars each and {c} {p} at {d} dollars each. How much does {A} "
     "pay in total?", "x=a*b#dollars for the {o}; y=c*d#dollars for the {p}; r=x+y#dollars in "
                      "total", "{A} pays {r} dollars in total."),
    ("A {s} has {a} {x} with {b} {o} each and {c} {x} with {d} {o} each. How many {o} are "
     "there?", "x=a*b#{o} in the first {x}; y=c*d#{o} in the others; r=x+y#{o} in all", "There "
                                                                                        "are {r} "
                                                                                        "{o}."),
    ("{A} has {a} dollars. {A} buys {b} {o} for {c} dollars each and a {x1} for {d} dollars. How "
     "much money is left?", "x=b*c#dollars for the {o}; y=x+d#dollars spent; r=a-y#dollars "
                            "left", "{A} has {r} dollars left."),
    ("{A}, {B} and {C} have {a}, {b} and {c} {o}. They share all of them equally among {d} "
     "children. How many {o} does each child get?", "x=a+b#{o} of {A} and {B}; y=x+c#{o} in all; "
                                                    "r=y/d#{o} for each", "Each child gets {r} "
                                                                          "{o}."),
    ("{A} has {a} {o}. {B} has {b} more than {A}, and {C} has {c} times as many as {A}. How many "
     "{o} do {B} and {C} have together?", "x=a+b#{o} of {B}; y=a*c#{o} of {C}; r=x+y#{o} "
                                          "together", "{B} and {C} have {r} {o} together."),
    ("A {s} had {a} {o}. It sold {b} on Monday, {c} on Tuesday and got {d} new ones. How many "
     "{o} does it have now?", "x=a-b#{o} after Monday; y=x-c#{o} after Tuesday; r=y+d#{o} "
                              "now", "It has {r} {o} now."),
    ("{A} works {a} hours a day for {b} days and earns {c} dollars an hour. Then {A} spends {d} "
     "dollars. How much is left?", "x=a*b#hours; y=x*c#dollars earned; r=y-d#dollars "
                                   "left", "{A} has {r} dollars left."),
    ("{A} picks {a} {o} and {B} picks {b}. They give away {c} and put the rest into {x} of {d}. "
     "How many {x} do they fill?", "x=a+b#{o} picked; y=x-c#{o} left; r=y/d#{x}", "They fill {r} "
                                                                                  "{x}."),
    ("There are {a} {x} of {b} {o}. {c} {o} are bad. The good ones are shared by {d} people. How "
     "many {o} does each person get?", "x=a*b#{o} in all; y=x-c#good {o}; r=y/d#{o} for "
                                       "each", "Each person gets {r} {o}."),
    ("{A} reads {a} pages a day for {b} days and then {c} pages a day for {d} days. How many "
     "pages is that?", "x=a*b#pages first; y=c*d#pages later; r=x+y#pages", "That is {r} pages."),
    ("{A} has {a} {o}, {B} has {b} and {C} has {c}. Together they want {d} {o}. How many are "
     "missing?", "x=a+b#{o} of {A} and {B}; y=x+c#{o} in all; r=d-y#{o} missing", "{r} {o} are "
                                                                                  "missing."),
    ("A theatre has {a} rows of {b} seats. {c} seats are sold online and {d} at the door. How "
     "many seats are free?", "x=a*b#seats; y=c+d#seats sold; r=x-y#free seats", "{r} seats are "
                                                                                "free."),
    ("{A} buys {a} {o} for {b} dollars each and sells them for {c} dollars each. What is the "
     "profit?", "x=c-b#dollars of profit per {o1}; r=x*a#dollars of profit", "The profit is {r} "
                                                                             "dollars."),
    ("{A} has {a} {o} and gets {b} {x} of {c} {o}. {A} then gives {d} {o} away. How many {o} "
     "does {A} keep?", "x=b*c#new {o}; y=a+x#{o} in all; r=y-d#{o} kept", "{A} keeps {r} {o}."),
    ("A {s} bakes {a} {o} and packs them into {x} of {b}. It sells {c} {x} for {d} dollars each. "
     "How many {x} are left?", "x=a/b#{x}; r=x-c#{x} left", "There are {r} {x} left."),
    ("{A} saves {a} dollars, {B} saves {b} times as much. They buy a gift for {c} dollars. How "
     "much money do they have left together?", "x=a*b#dollars of {B}; y=a+x#dollars together; "
                                               "r=y-c#dollars left", "They have {r} dollars left "
                                                                     "together."),
    ("I buy {a} {o} for ${b} each and {c} {p} for ${d} each. How much do I pay?", "x=a*b#dollars "
                                                                                  "for the {o}; "
                                                                                  "y=c*d#dollars "
                                                                                  "for the {p}; "
                                                                                  "r=x+y#dollars "
                                                                                  "in "
                                                                                  "total", "You "
                                                                                           "pay "
                                                                                           "{r} "
                                                                                           "dollars."),
    ("I have {a} {o}. I buy {b} {x} with {c} {o} each and then give {d} {o} to {A}. How many {o} "
     "do I have?", "x=b*c#new {o}; y=a+x#{o} in all; r=y-d#{o} left", "You have {r} {o}."),
    ("{A} has {a} {o}, {B} has twice as many, and {C} has {b} more than {B}. How many {o} do {A} "
     "and {C} have together?", "x=a*2#{o} of {B}; y=x+b#{o} of {C}; r=a+y#{o} together", "{A} "
                                                                                         "and "
                                                                                         "{C} "
                                                                                         "have "
                                                                                         "{r} "
                                                                                         "{o} "
                                                                                         "together."),
    ("A farmer has {a} {o} and harvests {b} more each day for {c} days. Then {d} are sold. How "
     "many are left?", "x=b*c#harvested {o}; y=a+x#{o} in all; r=y-d#{o} left", "There are {r} "
                                                                                "{o} left."),
    ("{A} earns ${a} a day for {b} days, spends ${c} on food and ${d} on rent. How much is "
     "left?", "x=a*b#dollars earned; y=c+d#dollars spent; r=x-y#dollars left", "{A} has {r} "
                                                                               "dollars left."),
)

# In bare calculations, {a} and {b} are the operands.
BARE: tuple[Template, ...] = tuple(
    (question, plan, answer)
    for plan, sign_forms in (
        ("r=a+b", ("{a} + {b}", "{a} plus {b}", "the sum of {a} and {b}", "{a}+{b}")),
        ("r=a-b", ("{a} - {b}", "{a} minus {b}", "the difference between {a} and {b}", "{a}-{b}")),
        ("r=a*b", ("{a} * {b}", "{a} times {b}", "the product of {a} and {b}", "{a} x "
                                                                               "{b}", "{a}*{b}", "{a} multiplied by {b}")),
        ("r=a/b", ("{a} / {b}", "{a} divided by {b}", "{a}/{b}")),
    )
    for form in sign_forms
    for question, answer in (
        (f"What is {form}?", "The answer is {r}."),
        (f"Calculate {form}.", "The answer is {r}."),
        (f"How much is {form}?", "The answer is {r}."),
        (f"what's {form}", "The answer is {r}."),
        (f"Can you compute {form}?", "The answer is {r}."),
        (f"{form} = ?", "The answer is {r}."),
        (form, "The answer is {r}."),
    )
) + tuple(
    (question, plan, "The answer is {r}.")
    for plan, form in (
        ("x=a+b; r=x+c", "{a} + {b} + {c}"),
        ("x=a+b; r=x-c", "{a} + {b} - {c}"),
        ("x=a-b; r=x+c", "{a} - {b} + {c}"),
        ("x=a*b; r=x+c", "{a} * {b} + {c}"),
        ("x=a*b; r=x-c", "{a} * {b} - {c}"),
        ("x=b*c; r=a+x", "{a} + {b} * {c}"),
        ("x=a+b; r=x*c", "({a} + {b}) * {c}"),
        ("x=a-b; r=x*c", "({a} - {b}) * {c}"),
        ("x=a+b; r=x/c", "({a} + {b}) / {c}"),
        ("x=a/b; r=x+c", "{a} / {b} + {c}"),
    )
    for question in (f"What is {form}?", f"Calculate {form}.", f"{form} = ?", form)
)
