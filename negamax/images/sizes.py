"""Compute the sizes to which MiniMax-M3 resizes images, by one of two rules.

Height and width become multiples of `SIDE`. One image token represents `SIDE` x `SIDE` pixels.
"""

import math
import struct
from typing import Literal, get_args

from negamax.base.errors import InvalidRequestError

Rule = Literal["longest", "area"]
RULES: tuple[str, ...] = get_args(Rule)
# Header of a decoded image: height and width after resizing, number of pixels before resizing.
HEADER = struct.Struct(">III")
SIDE = 28  # One image token represents a square of 28 x 28 pixels.
LONGEST_SIDE = 2016  # Default of rule "longest" in pixels; requests may set multiples of SIDE.
LONGEST_SIDES = (112, 3584)  # Minimum and maximum of max_long_side_pixel in requests.
MAX_ASPECT_RATIO = 200
_SHORTEST_SIDE = 112
_MAX_PIXELS = LONGEST_SIDES[1] ** 2  # Pixels of the largest image after resizing.
_LEAST_AREA, _MOST_AREA = 3136, 451_584  # Minimum and maximum pixels with rule "area".


def fit(height: int, width: int, *, rule: Rule, longest: int = LONGEST_SIDE) -> tuple[int, int]:
    """Return the height and width after resizing. `longest` has no effect with the rule "area".

    Raises `InvalidRequestError` for an aspect ratio above 200.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise InvalidRequestError(
            f"the image has {width} x {height} pixels; the longer side may be at most "
            f"{MAX_ASPECT_RATIO} times as long as the shorter side"
        )
    return _fit_area(height, width) if rule == "area" else _fit_long_side(height, width, longest)


def count_tokens(height: int, width: int) -> int:
    """Return the number of image tokens of a resized image, excluding its two marker tokens."""
    return height * width // SIDE**2


def _fit_long_side(height: int, width: int, longest: int) -> tuple[int, int]:
    """Limit the long side to `longest`, and enlarge a side below `_SHORTEST_SIDE` if possible."""
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
    """Keep the area between `_LEAST_AREA` and `_MOST_AREA` pixels."""
    high, wide = (round(side / SIDE) * SIDE for side in (height, width))
    if high * wide > _MOST_AREA:
        scale = math.sqrt(height * width / _MOST_AREA)
        high, wide = (max(SIDE, math.floor(side / scale / SIDE) * SIDE) for side in (height, width))
    elif high * wide < _LEAST_AREA:
        scale = math.sqrt(_LEAST_AREA / (height * width))
        high, wide = (math.ceil(side * scale / SIDE) * SIDE for side in (height, width))
    return high, wide
