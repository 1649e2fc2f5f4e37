"""Word lists, value generators and the evaluation split of the suites.

A `random.Random` drives everything, so a seed gives the same text on all platforms.
"""

# ruff: noqa: E501, SIM905 (word lists and tables read better as text)

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from typing import TypeVar

Problem = TypeVar("Problem")

HELD_OUT_SHARE = 16  # one in this many problems is held out


def is_held_out(canonical_text: str) -> bool:
    """Return whether a problem is held out, which is so for 1/16 of the SHA-256 values."""
    digest = hashlib.sha256(canonical_text.encode("utf-8")).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def distinct_problems(
    generate: Callable[[int], Problem], held_out: Callable[[Problem], bool],
    key: Callable[[Problem], str], *, count: int, seed: int,
) -> list[Problem]:  # fmt: skip
    """Return the first `count` held-out problems of `seed` with different keys."""
    found: dict[str, Problem] = {}
    numbers = itertools.count(seed * 10_000_000)
    while len(found) < count:
        problem = generate(next(numbers))
        if held_out(problem):
            found.setdefault(key(problem), problem)
    return list(found.values())


def normalise(text: str) -> str:
    """Collapse white space and case, which do not make a problem different."""
    return " ".join(text.lower().split())


NAMES = (
    "Ana Ben Clara David Emma Finn Grace Hugo Iris Jack Kira Liam Mia Noah Olga Paul Quinn Rosa "
    "Sam Tara Uma Victor Wendy "
    "Xavier Yara Zoe Adam Bella Carlos Diana Elena Felix Gina Henry Ivan Julia Kevin Laura Marco "
    "Nina Oscar Petra Rita "
    "Simon Tina Ursula Vera Walter Aisha Bruno Chloe Dario Eva Frank Hannah Igor Jonas Karim "
    "Lena Maya Nora Omar Priya "
    "Ravi Sofia Tom Vikram Yuki Amir Bianca Cem Dina Erik Fatima George Helen Ines Jamal Kofi "
    "Lucia Mateo Nadia Otto Pablo "
    "Rania Stefan Theo Valeria Wei Ximena Yusuf Zara Alice Bob Carol Dan Ella Fred Gloria Hans "
    "Ida John Kate Leo Maria "
    "Nick Olivia Peter Rachel Sara Tim Lucas Anna James Robert Linda Michael Sarah Thomas Karen "
    "Daniel Lisa Mark Emily "
    "Mohammed Chen Aiko Sven Ingrid Pedro Juan Luis Marta"
).split()

SURNAMES = (
    "Smith Garcia Novak Rossi Muller Tanaka Silva Kim Patel Lopez Weber Moreau Costa Jensen "
    "Kowalski Brown Ali Hansen "
    "Ivanov Sato Walker Young Lee Martin Becker Fischer Dubois Nguyen Santos Okafor Haddad Cohen "
    "Berg Lind Marino Vargas "
    "Torres Reyes Ahmed Khan"
).split()

CITIES = (
    "Paris|London|Rome|Berlin|Madrid|Lisbon|Vienna|Prague|Oslo|Stockholm|Helsinki|Dublin|Athens|Warsaw|Budapest|Zurich|"
    "Geneva|Amsterdam|Brussels|Copenhagen|New "
    "York|Boston|Chicago|Seattle|Denver|Austin|Dallas|Miami|Toronto|Montreal|"
    "Vancouver|Tokyo|Osaka|Kyoto|Seoul|Beijing|Shanghai|Hong "
    "Kong|Singapore|Bangkok|Hanoi|Manila|Jakarta|Delhi|Mumbai|"
    "Chennai|Dubai|Cairo|Lagos|Nairobi|Accra|Tunis|Lima|Bogota|Quito|Santiago|Sydney|Melbourne|Perth|Auckland|"
    "San Francisco|Los Angeles|San Diego|Las Vegas|Mexico City|Buenos Aires|Rio de Janeiro|Cape "
    "Town|Tel Aviv|Istanbul|"
    "Kyiv|Riga|Vilnius|Tallinn|Sofia|Bucharest|Belgrade|Zagreb|Ljubljana|Porto|Seville|Valencia|Barcelona|Milan|Naples|"
    "Turin|Venice|Florence|Lyon|Nice|Marseille|Bordeaux|Munich|Hamburg|Cologne|Leipzig|Dresden|Basel|Bern|Krakow|Gdansk|"
    "Glasgow|Bristol|Leeds|Oxford|Cardiff|Belfast|Reykjavik|Malmo|Bergen|Tampere|Zürich|São "
    "Paulo|Málaga|Köln|Bogotá|Łódź|"
    "東京|Москва"
).split("|")

COUNTRIES = (
    "France Spain Italy Germany Portugal Japan China India Brazil Canada Mexico Egypt Kenya "
    "Norway Sweden Poland Greece "
    "Turkey Peru Chile Ireland Iceland Australia Vietnam Thailand Morocco Finland Austria "
    "Belgium Denmark"
).split()

COLOURS = (
    "red blue green yellow orange purple black white silver gold pink brown grey teal violet navy"
).split()

# singular and plural of countable things
OBJECTS = tuple(
    (pair.split("/")[0], pair.split("/")[1])
    for pair in (
        "apple/apples pear/pears orange/oranges lemon/lemons plum/plums peach/peaches "
        "banana/bananas cherry/cherries egg/eggs "
        "cookie/cookies cake/cakes muffin/muffins sandwich/sandwiches pen/pens pencil/pencils "
        "book/books notebook/notebooks "
        "card/cards stamp/stamps coin/coins marble/marbles sticker/stickers button/buttons "
        "bead/beads shell/shells "
        "stone/stones leaf/leaves flower/flowers rose/roses tulip/tulips tree/trees seed/seeds "
        "plant/plants candle/candles "
        "lamp/lamps chair/chairs table/tables cup/cups plate/plates bottle/bottles glass/glasses "
        "spoon/spoons toy/toys "
        "ball/balls balloon/balloons kite/kites puzzle/puzzles game/games ticket/tickets "
        "poster/posters photo/photos "
        "letter/letters magazine/magazines newspaper/newspapers shirt/shirts hat/hats "
        "scarf/scarves sock/socks shoe/shoes "
        "glove/gloves ribbon/ribbons brick/bricks tile/tiles nail/nails screw/screws "
        "battery/batteries cable/cables "
        "phone/phones laptop/laptops bowl/bowls fork/forks mug/mugs flag/flags ladder/ladders "
        "drum/drums robot/robots "
        "bike/bikes crayon/crayons brush/brushes towel/towels blanket/blankets pillow/pillows "
        "key/keys medal/medals "
        "badge/badges token/tokens ring/rings necklace/necklaces bracelet/bracelets "
        "potato/potatoes tomato/tomatoes "
        "carrot/carrots onion/onions pumpkin/pumpkins melon/melons mango/mangoes bagel/bagels "
        "roll/rolls pie/pies "
        "doughnut/doughnuts pancake/pancakes cupcake/cupcakes candy/candies chocolate/chocolates"
    ).split()
)

CONTAINERS = tuple(
    (pair.split("/")[0], pair.split("/")[1])
    for pair in (
        "box/boxes bag/bags basket/baskets crate/crates shelf/shelves tray/trays jar/jars "
        "pack/packs drawer/drawers "
        "carton/cartons row/rows table/tables bucket/buckets case/cases folder/folders "
        "album/albums sack/sacks bin/bins "
        "cabinet/cabinets page/pages"
    ).split()
)

NOUNS = (
    "account address agent alarm album animal answer apple archive area article artist asset "
    "badge balance band bank batch "
    "bike bill board boat body bonus book border bottle branch bridge budget bug building bus "
    "button cable calendar camera "
    "camp car card cart case channel chart check city claim class client clock cloud club code "
    "collection comment company "
    "concert contact contract course crew customer data date deal debt delivery desk device diet "
    "dish doctor document dog "
    "domain door draft dress drive driver drone email employee engine entry event exam expense "
    "factory farm farmer fee "
    "festival field file film filter fine fire flag flight floor flower folder food forecast "
    "forest form friend game "
    "garage garden gate gift goal grade graph group guest guide habit harbor header heater "
    "history hotel hour house image "
    "invoice island issue item job journal journey key kitchen label lake lamp language layer "
    "league lesson letter level "
    "library license light limit link list loan location lock log lot lunch machine map market "
    "match meal medal meeting "
    "member memo menu message meter milestone mine mission mode model module monitor mountain "
    "movie museum name network "
    "node note number nurse office offer order owner package page paint paper parcel park part "
    "partner party patient "
    "payment pen permit person pet phone photo pickup picture pilot pipe place plan plant plate "
    "player playlist plot point "
    "policy pool port post price printer prize process product profile project promo proof "
    "property quest question queue "
    "quiz quote race rack radio range rate reading receipt recipe record refund region release "
    "reminder rental repair "
    "report request reservation review reward ride ring river road robot role room route rule "
    "sale sample schedule school "
    "score screen season seat section sensor server service session shelf shift ship shop show "
    "signal site skill slot song "
    "sound source space sport spot stage station statement statue step stock store storm story "
    "street student subject "
    "survey switch system table tag target task tax team tenant test theme thread ticket tide "
    "timer title token tool topic "
    "tour tower town toy track trade train transfer tree trip truck unit update user vehicle "
    "vendor venue version video "
    "village visa visit voice vote voucher walk wall wallet warehouse warranty watch wave "
    "website week window wine word "
    "worker workout zone"
).split()

ADJECTIVES = (
    "active annual average basic big blue brief bright broad calm cheap clean clear cold cool "
    "current daily dark deep "
    "default digital direct dry early easy empty exact extra fair fast final first flat free "
    "fresh front full future "
    "general global golden good great green hard heavy hidden high home hot inner internal joint "
    "key large last late legal "
    "light local long loose low main major manual maximum medium minimum minor mobile modern "
    "monthly narrow national new "
    "next night normal north old online open outer outside paid partial past plain primary prime "
    "private public quick "
    "quiet rare raw real recent regular remote rich safe second secret secure senior sharp short "
    "silent simple single slow "
    "small smart soft solid south special spare standard steady strong sweet tall target tiny "
    "top total travel urgent "
    "usual valid visible warm weekly west wide wild working yearly young"
).split()

SYLLABLES = (
    "ba be bi bo bu ca ce co cu da de di do du fa fe fi fo ga ge gi go gu ha he hi ho ja jo ka "
    "ke ki ko la le li lo lu ma "
    "me mi mo mu na ne ni no nu pa pe pi po qua ra re ri ro ru sa se si so su ta te ti to tu va "
    "ve vi vo wa we wi xa xi ya "
    "yo za ze zi zo bra cre dro fla gri kla pre pru sha sno sta tri ver zor tan lin mor dex nal "
    "rik ton bel gar hum jet "
    "kov lum"
).split()

WORDS = (
    "about above after again all also always and answer any around ask away back because been "
    "before begin best better "
    "between big both bring build busy buy call came can care carry change check clear close "
    "cold come could cut day did "
    "different do done down draw drink drive each early easy eat end enough even ever every face "
    "fall family far fast feel "
    "few find first follow for friend from full game gave get give go good got great grow had "
    "half hand happy hard has "
    "have head hear help her here high him his hold home hot hour house how hundred if important "
    "in into is it just keep "
    "kind know large last late laugh lead learn leave left less let life light like line listen "
    "little live long look love "
    "made make man many may me mean meet might mind more morning most move much must my name "
    "near need never new next "
    "night nothing now of off often old on once one only open or other our out over own part pay "
    "people place plan play "
    "point put quick rain read ready really rest right room run said same saw say school see "
    "send set shall she short "
    "should show side simple since sing sit sleep slow small so some something soon speak stand "
    "start stay still stop "
    "story strong such sun sure table take talk tell than thank that the their them then there "
    "these they thing think this "
    "those through time to today together told tomorrow too took town travel try turn under "
    "until up use very visit wait "
    "walk want warm was wash watch water way we week well went were what when where which while "
    "white who why will wind "
    "with without woman word work world would write year you young"
).split()


def person(rng: random.Random) -> str:
    """Draw a first name, sometimes with a surname."""
    return (
        rng.choice(NAMES) if rng.random() < 0.5 else f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"
    )


def pseudo_word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))


def phrase(rng: random.Random) -> str:
    """Draw two to six words, sometimes capitalised."""
    pool = (WORDS, NOUNS, ADJECTIVES)
    words = [rng.choice(rng.choice(pool)) for _ in range(rng.randint(2, 6))]
    text = " ".join(words)
    return text[0].upper() + text[1:] if rng.random() < 0.5 else text


def iso_date(rng: random.Random) -> str:
    return f"{rng.randint(2019, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def clock_time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50, 55, rng.randint(0, 59))):02d}"


def email(rng: random.Random) -> str:
    user = rng.choice(
        (rng.choice(NAMES), pseudo_word(rng), f"{rng.choice(NAMES)}.{rng.choice(SURNAMES)}")
    ).lower()
    return f"{user}@{rng.choice((pseudo_word(rng), 'example', 'mail', rng.choice(NOUNS)))}.{rng.choice(('com', 'org', 'net', 'io', 'de'))}"


def code(rng: random.Random) -> str:
    """Draw an identifier such as INV-4821, a8f3k2 or order_77."""
    kind = rng.randrange(5)
    if kind == 0:
        letters = "".join(
            rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(1, 4))
        )
        return f"{letters}-{rng.randint(1, 99999)}"
    if kind == 1:
        return "".join(
            rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(4, 9))
        )
    if kind == 2:
        return f"{rng.choice(NOUNS)}_{rng.randint(1, 999)}"
    if kind == 3:
        return "".join(
            rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(rng.randint(4, 8))
        )
    return f"{rng.choice(NOUNS)}-{rng.choice(NOUNS)}"


def file_name(rng: random.Random) -> str:
    """Draw a file name or a path."""
    stem = "_".join(rng.choice(NOUNS) for _ in range(rng.randint(1, 2)))
    name = f"{stem}{rng.choice(('', '', str(rng.randint(1, 99))))}.{rng.choice(('txt', 'csv', 'json', 'py', 'md', 'pdf', 'png', 'log', 'yaml'))}"
    folder = rng.choice(
        (
            "",
            "",
            f"/{rng.choice(NOUNS)}/",
            f"{rng.choice(NOUNS)}/",
            "/tmp/",
            f"/home/{rng.choice(NAMES).lower()}/",
        )
    )
    return folder + name


def url(rng: random.Random) -> str:
    path = rng.choice(("", f"/{rng.choice(NOUNS)}", f"/{rng.choice(NOUNS)}/{rng.randint(1, 999)}"))
    return f"https://{rng.choice((pseudo_word(rng), rng.choice(NOUNS)))}.{rng.choice(('com', 'org', 'io'))}{path}"


def phone(rng: random.Random) -> str:
    return rng.choice(("+{}{}", "{}-{}", "0{} {}")).format(
        rng.randint(10, 999), rng.randint(10000, 9999999)
    )


TEXT_VALUES: tuple[Callable[[random.Random], str], ...] = (
    person,
    lambda rng: rng.choice(CITIES),
    lambda rng: rng.choice(COUNTRIES),
    lambda rng: rng.choice(COLOURS),
    phrase,
    phrase,
    pseudo_word,
    iso_date,
    clock_time,
    email,
    code,
    code,
    file_name,
    url,
    phone,
    lambda rng: rng.choice(NOUNS),
    lambda rng: f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}",
)


def text_value(rng: random.Random) -> str:
    """Draw a string of any of the kinds above."""
    return rng.choice(TEXT_VALUES)(rng)
