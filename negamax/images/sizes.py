"""The sizes to which MiniMax-M3 resizes images, by two rules. Pure.

Sides become multiples of `SIDE` pixels, of which a square is one image token.
"""

import math
from typing import Literal, get_args

from negamax.base.errors import InvalidRequestError

Rule = Literal["longest", "area"]
RULES: tuple[str, ...] = get_args(Rule)
SIDE = 28  # pixels of each side of the square that an image token stands for
LONGEST_SIDE = 2016  # default; requests may set another multiple of SIDE
LONGEST_SIDES = (112, 3584)  # that requests may set
MAX_ASPECT_RATIO = 200
_SHORTEST_SIDE = 112
_MAX_PIXELS = LONGEST_SIDES[1] ** 2  # of a resized image
_LEAST_AREA, _MOST_AREA = 3136, 451_584  # of the area rule


def fit(height: int, width: int, *, rule: Rule, longest: int = LONGEST_SIDE) -> tuple[int, int]:
    """Return the height and width after resizing; `longest` counts for the rule "longest".

    Errors: `InvalidRequestError` for an aspect ratio above 200.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise InvalidRequestError(
            f"has {width} x {height} pixels; the longer side may have at most "
            f"{MAX_ASPECT_RATIO} times the pixels of the shorter one"
        )
    return _fit_area(height, width) if rule == "area" else _fit_long_side(height, width, longest)


def count_tokens(height: int, width: int) -> int:
    """Return the image tokens of a resized image, without the two markers around them."""
    return height * width // SIDE**2


def _fit_long_side(height: int, width: int, longest: int) -> tuple[int, int]:
    """Shrink to the longest side, or enlarge to the shortest one within the longest."""
    long, short = max(height, width), min(height, width)
    scale = 1.0
    if long > longest:
        scale = longest / long
    elif short < _SHORTEST_SIDE:
        scale = min(_SHORTEST_SIDE / short, longest / long)
    high, wide = (max(SIDE, round(side * scale / SIDE) * SIDE) for side in (height, width))
    assert high * wide <= _MAX_PIXELS
    return high, wide


def _fit_area(height: int, width: int) -> tuple[int, int]:
    """Keep the area within its limits."""
    high, wide = (round(side / SIDE) * SIDE for side in (height, width))
    if high * wide > _MOST_AREA:
        scale = math.sqrt(height * width / _MOST_AREA)
        high, wide = (max(SIDE, math.floor(side / scale / SIDE) * SIDE) for side in (height, width))
    elif high * wide < _LEAST_AREA:
        scale = math.sqrt(_LEAST_AREA / (height * width))
        high, wide = (math.ceil(side * scale / SIDE) * SIDE for side in (height, width))
    return high, wide
