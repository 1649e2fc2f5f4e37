"""Draw and encode images for tests, and decode images as the server does."""

import base64
import io
import random
from typing import Any

from PIL import Image, ImageDraw

from negamax.images.decode import decode_image
from negamax.images.sizes import HEADER


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return base64.b64encode(stream.getvalue()).decode()


def draw(width: int, height: int, mode: str = "RGB") -> Image.Image:
    noise = random.Random(width * height)
    image = Image.frombytes("RGB", (width, height), noise.randbytes(width * height * 3))
    ImageDraw.Draw(image).rectangle((0, 0, width // 2, height // 3), fill=(200, 30, 60))
    return image.convert(mode)


def decode(data: str, **options: Any) -> Image.Image:
    given = {"rule": "longest", "longest": 2016, "needs_pixels": True, **options}
    answer = decode_image(data, **given)
    height, width, _ = HEADER.unpack(answer[: HEADER.size])
    return Image.frombytes("RGB", (width, height), answer[HEADER.size :])
