"""Images with text or shapes, questions about them, and the problems of nano-vision.

Training uses the fonts of matplotlib and Pillow. The suite uses other fonts, other numbers, and
other places in the image. Training and suite share the words of `WORDS`.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from nano.suites import common

COLORS = {
    "red": (214, 40, 40),
    "green": (40, 160, 70),
    "blue": (40, 80, 215),
    "yellow": (245, 215, 45),
    "orange": (245, 140, 30),
    "purple": (130, 50, 170),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
    "gray": (130, 130, 130),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
KINDS = ("digit", "number", "word", "color", "shape")
SIDES = 64, 256  # minimum and maximum pixels of a side
# files in matplotlib's folder of fonts; "" is Pillow's own font
_FONT_FILES = """
DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSansMono DejaVuSansMono-Bold DejaVuSerif
DejaVuSerif-Bold DejaVuSerif-Italic STIXGeneral STIXGeneralBol STIXGeneralItalic STIXGeneralBolIta
cmr10 cmss10 cmtt10 cmb10
"""
FONTS = ("", *_FONT_FILES.split())
HELD_OUT_FONTS = tuple(
    f"Liberation{family}-{style}"
    for family in ("Sans", "Serif", "Mono", "SansNarrow")
    for style in ("Regular", "Bold", "Italic")
)
HELD_OUT_FOLDER = Path("/usr/share/fonts/truetype/liberation")
# After a space, each of these 293 words is one token of nano-m3.
WORDS = sorted({word for word in common.NOUNS if 3 <= len(word) <= 6})
_GRID = 8  # cells per side; one in seven cells holds the centres of the suite's texts and shapes
_FINE = 3  # shapes are drawn at this multiple of the image's size


@dataclass(frozen=True)
class Item:
    """A text or a shape. `x` and `y` are its centre in pixels."""

    name: str  # text as rendered, or one of `SHAPES`
    color: str
    x: float
    y: float
    size: float  # radius of a shape, or font size


@dataclass(frozen=True)
class Scene:
    """An image of one text or up to three shapes on a plain background."""

    width: int
    height: int
    background: str
    kind: str  # digit, number, word or shape
    items: tuple[Item, ...]
    font: str
    seed: int

    @property
    def answer(self) -> str:
        """Return the text in lower case."""
        return self.items[0].name.lower()


@dataclass(frozen=True)
class Question:
    kind: str
    text: str
    sentence: str  # the whole answer
    answer: str  # the word that counts


def is_place_held_out(x: float, y: float) -> bool:
    """Return whether only the suite has centres in the cell of this place."""
    return (int(x * _GRID) + 2 * int(y * _GRID)) % 7 == 3


def draw_size(rng: random.Random) -> tuple[int, int]:
    """Draw the width and height of an image in pixels."""
    least, most = SIDES
    side = least * (most / least) ** (rng.random() ** 1.4)
    ratio = 1.0 if rng.random() < 0.5 else math.exp(rng.uniform(-0.8, 0.8))
    width, height = (round(side * factor) for factor in (ratio**0.5, ratio**-0.5))
    return max(least, min(most, width)), max(least, min(most, height))


def draw_scene(
    rng: random.Random, kind: str, size: tuple[int, int], *, held_out: bool = False
) -> Scene:
    """Draw a scene. If `held_out`, its font, text and places are those of the suite."""
    width, height = size
    font = rng.choice(HELD_OUT_FONTS if held_out else FONTS)
    background = rng.choice(tuple(COLORS))
    others = [name for name in COLORS if _distance(name, background) > 190]
    rng.shuffle(others)
    items: list[Item] = []
    count = 1
    if kind == "shape" and not held_out:
        count = rng.choices((1, 2, 3), weights=(60, 25, 15))[0]
    names = rng.sample(SHAPES, count) if kind == "shape" else [_draw_text(rng, kind, held_out)]
    while len(items) < count:
        name = names[len(items)]
        if kind == "shape":
            extent = rng.uniform(0.13, 0.42 if count == 1 else 0.24) * min(size)
            half = extent, extent
        else:
            if rng.random() < 0.1:
                name = _draw_text(rng, kind, held_out)  # The other one may fit no place.
            extent = _fit_text(name, font, size, rng.uniform(0.18, 0.95))
            left, top, right, bottom = _load_font(font, extent).getbbox(name, anchor="ls")
            half = (right - left) / 2, (bottom - top) / 2
        x, y = rng.uniform(half[0], width - half[0]), rng.uniform(half[1], height - half[1])
        free = all(math.hypot(x - i.x, y - i.y) > 1.05 * (extent + i.size) for i in items)
        if free and is_place_held_out(x / width, y / height) == held_out:
            items.append(Item(name, others[len(items)], x, y, extent))
    seed = 0 if held_out else rng.getrandbits(32)
    return Scene(width, height, background, kind, tuple(items), font, seed)


def _draw_text(rng: random.Random, kind: str, held_out: bool) -> str:
    if kind == "digit":
        return str(rng.randrange(10))
    while True:
        is_word = kind == "word"
        text = rng.choice(WORDS) if is_word else str(rng.randrange(10, 10 ** rng.randint(2, 4)))
        if is_word or common.is_held_out(f"nano-vision {text}") == held_out:
            cases: tuple[Callable[[str], str], ...] = (str.lower, str.upper, str.capitalize)
            return rng.choice(cases)(text)


def _distance(one: str, other: str) -> int:
    return sum(abs(a - b) for a, b in zip(COLORS[one], COLORS[other], strict=True))


def ask(scene: Scene, rng: random.Random, count: int) -> list[Question]:
    """Draw up to `count` questions of different kinds about a scene."""
    all_of = (
        "What is in the image?",
        "What do you see?",
        "Describe the image.",
        "What is this?",
        "What does the image show?",
    )
    behind = ("What color is the background?", "Which color does the background have?")
    ground = f"The background is {scene.background}."
    found = [
        Question("all", rng.choice(all_of), describe(scene), scene.answer),
        Question("background", rng.choice(behind), ground, scene.background),
        ask_color(scene, rng),
    ]
    weights = [2, 1, 2]
    if scene.kind != "shape":
        found.append(ask_text(scene, rng))
        weights.append(8)
    else:
        number = len(scene.items)
        how_many = rng.choice(("How many shapes are there?", "How many shapes do you see?"))
        answer = "There is 1 shape." if number == 1 else f"There are {number} shapes."
        found += [ask_shape(scene, rng), Question("count", how_many, answer, str(number))]
        weights = [2, 1, 4, 4, 2]
    order = sorted(range(len(found)), key=lambda i: -(rng.random() ** (1 / weights[i])))
    return [found[i] for i in order[:count]]


def describe(scene: Scene) -> str:
    """Return a sentence that says all about a scene."""
    if scene.kind == "shape":
        things = [f"{_article(i.color)} {i.color} {i.name}" for i in scene.items]
        shown = " and ".join([", ".join(things[:-1]), things[-1]] if things[1:] else things)
    elif scene.kind == "word":
        shown = f"a word in {scene.items[0].color}"
    else:
        shown = f"the {scene.kind} {scene.answer} in {scene.items[0].color}"
    background = f"on {_article(scene.background)} {scene.background} background"
    read = f" {_say(scene, 'word')}" if scene.kind == "word" else ""
    return f"The image shows {shown} {background}.{read}"


def _say(scene: Scene, kind: str) -> str:
    """Return a sentence with the text, which is of this kind."""
    # nano-m3's text model copies words after "The text says:", but not after "The word is".
    return f"The text says: {scene.answer}." if kind == "word" else f"The {kind} is {scene.answer}."


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def ask_text(scene: Scene, rng: random.Random) -> Question:
    """Ask for the text."""
    kind = scene.kind if scene.kind != "digit" or rng.random() < 0.7 else "number"
    text = rng.choice(
        (f"Which {kind} is in the image?", f"What {kind} is this?", f"What is the {kind}?",
         f"Read the {kind}.", f"Which {kind} do you see?", f"What {kind} does the image show?",
         "What does the image say?", "What is written in the image?", "Read the text.")
    )  # fmt: skip
    kind = kind if kind in text else scene.kind
    return Question(scene.kind, text, _say(scene, kind), scene.answer)


def ask_color(scene: Scene, rng: random.Random) -> Question:
    """Ask for the color of the text or of one shape."""
    item = rng.choice(scene.items)
    noun = scene.kind if scene.kind != "shape" else item.name
    if len(scene.items) == 1 and scene.kind == "shape" and rng.random() < 0.5:
        noun = "shape"
    text = rng.choice((f"What color is the {noun}?", f"Which color does the {noun} have?"))
    return Question("color", text, f"The {noun} is {item.color}.", item.color)


def ask_shape(scene: Scene, rng: random.Random) -> Question:
    """Ask for the only shape, or for the shape of one color."""
    item = rng.choice(scene.items)
    forms = ("Which shape is in the image?", "What shape is this?", "Which shape do you see?")
    text = rng.choice(forms)
    if len(scene.items) > 1:
        text = rng.choice((f"Which shape is {item.color}?", f"What is the {item.color} shape?"))
    return Question("shape", text, f"The shape is {_article(item.name)} {item.name}.", item.name)


def render(scene: Scene) -> Image.Image:
    """Render a scene to RGB of its size. Images for training vary in form, color and noise."""
    rng = random.Random(scene.seed)
    varies = scene.seed != 0
    size = scene.width, scene.height

    def color(name: str) -> tuple[int, ...]:
        return tuple(c + (rng.randint(-16, 10) if varies else 0) for c in COLORS[name])

    image = Image.new("RGB", size, color(scene.background))
    for item in scene.items:
        if scene.kind == "shape":
            mask = _draw_shape(item, size, rng)
        else:
            mask = _write(item, scene.font, size, rng, varies=varies)
        image.paste(color(item.color), mask=mask)
    if varies and rng.random() < 0.3:
        noise = np.random.default_rng(scene.seed)
        reach = rng.randint(2, 14)
        added = noise.integers(-reach, reach + 1, (scene.height, scene.width, 3), dtype=np.int16)
        image = Image.fromarray((np.asarray(image) + added).clip(0, 255).astype(np.uint8))
    return image


def _draw_shape(item: Item, size: tuple[int, int], rng: random.Random) -> Image.Image:
    mask = Image.new("L", (size[0] * _FINE, size[1] * _FINE))
    draw = ImageDraw.Draw(mask)
    x, y, radius = item.x * _FINE, item.y * _FINE, item.size * _FINE
    turn = rng.uniform(-0.25, 0.25)

    def fill(angles: list[float], radii: list[float]) -> None:
        points = [
            (x + radius * r * math.sin(a + turn), y - radius * r * math.cos(a + turn))
            for a, r in zip(angles, itertools.cycle(radii), strict=False)
        ]
        draw.polygon(points, fill=255)

    def even(count: int, first: float = 0.0) -> list[float]:
        return [first + 2 * math.pi * k / count for k in range(count)]

    match item.name:
        case "circle" | "ring":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
            if item.name == "ring":
                inner = radius * rng.uniform(0.5, 0.7)
                draw.ellipse((x - inner, y - inner, x + inner, y + inner), fill=0)
        case "square":
            fill(even(4, math.pi / 4), [1.0])
        case "triangle":
            fill(even(3), [1.0])
        case "star":
            fill(even(10), [1.0, rng.uniform(0.36, 0.48)])
        case "cross":
            half = rng.uniform(0.2, 0.32)  # angle between an arm's corner and its middle
            angles = [a + b for a in even(4) for b in (-half, half, math.pi / 4)]
            fill(angles, [1.0, 1.0, math.sqrt(2) * math.sin(half)])
    return mask.reduce(_FINE)


@functools.lru_cache(maxsize=4096)
def _load_font(name: str, size: int) -> Any:
    if not name:
        return ImageFont.load_default(size)
    if name in HELD_OUT_FONTS:
        return ImageFont.truetype(HELD_OUT_FOLDER / f"{name}.ttf", size)
    import matplotlib  # only for its fonts

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/{name}.ttf", size)


def _fit_text(text: str, font: str, size: tuple[int, int], share: float) -> int:
    """Return the font size at which a text has this share of the width, if that is legible."""
    left, top, right, bottom = _load_font(font, 64).getbbox(text, anchor="ls")
    per_width, per_height = 64 * size[0] / (right - left), 64 * size[1] / (bottom - top)
    most = min(0.95 * per_width, 0.9 * per_height)
    return int(min(max(share * per_width, 12, 0.075 * min(size)), most))


def _write(
    item: Item, font: str, size: tuple[int, int], rng: random.Random, *, varies: bool
) -> Image.Image:
    """Return the mask of a text."""
    used = _load_font(font, int(item.size))
    mask = Image.new("L", size)
    heavy = int(varies and item.size > 26 and rng.random() < 0.15)
    left, top, right, bottom = used.getbbox(item.name, anchor="ls", stroke_width=heavy)
    start = item.x - (left + right) / 2, item.y - (top + bottom) / 2
    ImageDraw.Draw(mask).text(
        start, item.name, fill=255, font=used, anchor="ls", stroke_width=heavy
    )
    if not varies or rng.random() < 0.5:
        return mask
    # The inverse map around the centre: turn, slant and narrow.
    turn, slant = rng.uniform(-0.08, 0.08), rng.uniform(-0.25, 0.25)
    stretch, tall = rng.uniform(0.95, 1.4), rng.uniform(0.97, 1.25)
    a, b = stretch * math.cos(turn), stretch * (slant - math.sin(turn))
    d, e = tall * math.sin(turn), tall * math.cos(turn)
    x, y = item.x, item.y
    matrix = (a, b, x - a * x - b * y, d, e, y - d * x - e * y)
    return mask.transform(size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


def problems(count: int) -> list[tuple[Scene, Question]]:
    """Return the first `count` problems of the suite, in turn of each kind."""
    found = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        rng = random.Random(f"nano-vision:{number}")
        drawn = kind if kind != "color" else rng.choice(("shape", "digit"))
        scene = draw_scene(rng, drawn, draw_size(rng), held_out=True)
        makers = {"color": ask_color, "shape": ask_shape}
        found.append((scene, makers.get(kind, ask_text)(scene, rng)))
    return found


def build_message(scene: Scene, question: Question) -> dict[str, Any]:
    """Return a user message with the image, as a PNG file of 16 colors, and the question."""
    stream = io.BytesIO()
    image = render(scene).quantize(16, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    image.save(stream, "PNG", optimize=True)
    url = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question.text}]}


def decode(url: str) -> Image.Image:
    """Return the RGB image of a data URL."""
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
