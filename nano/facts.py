"""Facts that users state about themselves and ask for in later turns."""

# ruff: noqa: E501, SIM905 (word lists and tables read better as text)

from __future__ import annotations

import random

from nano import unseen
from nano.suites import common, tool_values

FACTS: dict[str, tuple[str, str, str, str, str]] = {
    # fact -> how the user states it, the reply, the question, the recalled sentence, and the
    # sentence
    # if the fact is unknown
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
        "my dog is called {v}|My dog is called {v}.|I have a dog named {v}.|My dog's name is {v}.|My dog {v} is "
        "sleeping.|This is my dog {v}.",
        "{v} is a lovely name for a dog.",
        "whats the name of my dog|What is my dog called?|What is the name of my dog?|Do you remember my dog's "
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
        "I work as a {v}, by the way.|I work as a {v}.|I am a {v}.|My job is {v}.|I'm a {v} by profession.",
        "Working as a {v} must be interesting.",
        "What is it that I do for a living?|What is my job?|What do I do for a living?|What do I work as?|Do you remember my job?",
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
        "The code for the garage is {v}, keep that in mind.|My lucky number is {v}.|My favorite number is {v}.|Remember the number {v}.|Please "
        "remember {v}.|The code is {v}.|Keep the number {v} in mind.",
        "I will remember {v}.",
        "what was the code again|What was the garage code?|what was the number again|What is my number?|Which number did I tell you?|What was the number?|Do you remember "
        "the number?|What was the code?",
        "The number is {v}.",
        "You have not told me a number yet.",
    ),
    "word": (
        'Remember the word "{v}".|The wifi password is {v}.|The password is {v}.|The secret word is {v}.|Please remember '
        "this word: {v}|Keep in mind: {v}.",
        'I will remember "{v}".',
        "whats the wifi password again?|what was the password again|What is the secret word?|What was the word?|Which word did I tell you?|What is the "
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
        "We are meeting on {v}.|The meeting is on {v}.|My meeting is on {v}.|The meeting starts on {v}.|We have a meeting "
        "on {v}.|There is a meeting on {v}.",
        "I will remember that the meeting is on {v}.",
        "On what day are we meeting?|When is the meeting?|On which day is the meeting?|What day is my meeting?|When is my "
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
        "My sister's name is {v} and she is older than me.|My sister is called {v}.|My sister's name is {v}.|I have a sister named {v}.|{v} is my "
        "sister.",
        "It is nice to have a sister like {v}.",
        "whats my sister's name|What is my sister called?|What is my sister's name?|Who is my sister?|What is the name of "
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
    "place": (
        "I parked on {v}.|I parked the car on {v}.|We are meeting in {v}.|The party is in {v}.|My "
        "office is in {v}.|I left my bag in {v}.",
        "I will remember {v}.",
        "Where is it?|Which place did I tell you?|Where was that again?|On which level did I park?|"
        "Which room are we meeting in?|Where did I park?|Which room is it?",
        "It is {v}.",
        "You have not told me the place yet.",
    ),
    "instrument": (
        "I play the {v}.|My instrument is the {v}.|I am learning the {v}.|I practice the {v} daily.",
        "The {v} is a nice instrument.",
        "Which instrument do I play?|What do I play?|What is my instrument?|What instrument am I "
        "learning?",
        "You play the {v}.",
        "You have not told me your instrument yet.",
    ),
}
JOBS = (
    "teacher doctor nurse baker farmer driver painter engineer lawyer cook pilot writer singer "
    "gardener student designer "
    "plumber beekeeper carpenter librarian dentist tailor chemist florist barber judge clerk guide "
    "miner sailor waiter"
).split()
INSTRUMENTS = (
    "piano guitar violin cello flute drums harp trumpet oboe banjo organ viola tuba".split()
)
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


def draw_value(fact: str, rng: random.Random) -> str:
    """Draw the value that the user states for a fact."""
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
        case "place":
            place = rng.choice(("level", "room", "floor", "hall", "gate", "row"))
            number = str(rng.randint(1, 60)) if rng.random() < 0.6 else common.code(rng)
            return f"{place} {number}"
        case "instrument":
            return rng.choice(INSTRUMENTS)
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
