"""Decode and resize one image in a process with limits, because an image may be malicious."""

import base64
import binascii
import io
import re
from contextlib import suppress

from PIL import Image, ImageOps

from negamax.base.errors import InvalidRequestError
from negamax.images.sizes import HEADER, Rule, fit

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
MAX_SOURCE_PIXELS = 64_000_000
_SPACE = re.compile(r"\s+")

Image.MAX_IMAGE_PIXELS = None  # no limit, because `decode_image` checks `MAX_SOURCE_PIXELS`


def decode_image(data: str, rule: Rule, longest: int, needs_pixels: bool) -> bytes:
    """Return a packed `HEADER`, followed by the first frame as uint8 [height, width, 3].

    `data` is a PNG, JPEG, GIF or WEBP file in base64. `rule` and `longest` are arguments of
    `sizes.fit`. The frame is rotated upright and drawn on a white background. If `needs_pixels` is
    false, return only the `HEADER`, with the height and width of the unrotated frame. Raises
    `InvalidRequestError`; the caller adds the image's position in the request to the message.
    """
    try:
        image = Image.open(io.BytesIO(_decode_base64(data)), formats=FORMATS)
    except InvalidRequestError:
        raise
    except Exception as error:  # decoders raise many exception types
        raise _refuse(error) from None
    num_pixels = image.width * image.height
    if num_pixels > MAX_SOURCE_PIXELS:
        raise InvalidRequestError(
            f"the image has {image.width} x {image.height} pixels; the limit is {MAX_SOURCE_PIXELS}"
        )
    height, width = fit(image.height, image.width, rule=rule, longest=longest)
    if not needs_pixels:
        return HEADER.pack(height, width, num_pixels)
    try:
        image.load()
        with suppress(Exception):  # ignore a broken EXIF orientation
            image = ImageOps.exif_transpose(image)
        height, width = fit(image.height, image.width, rule=rule, longest=longest)
        image = _flatten(image)
        for size in ((width, image.height), (width, height)):  # in the order of torchvision
            image = image.resize(size, Image.Resampling.BICUBIC)
        pixels = image.tobytes()
    except MemoryError:
        raise
    except Exception as error:
        raise _refuse(error) from None
    return HEADER.pack(height, width, num_pixels) + pixels


def _decode_base64(text: str) -> bytes:
    """Decode standard or URL-safe base64. Line breaks and missing padding are allowed."""
    text = _SPACE.sub("", text).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError("the image data is not base64") from None


def _flatten(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit RGB. Draw transparent pixels on white, and round 16-bit values."""
    if image.mode.startswith("I"):
        image = image.convert("F").point(lambda value: value * (1 / 257) + 0.5).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _refuse(error: Exception) -> InvalidRequestError:
    reason = "broken file or other format" if isinstance(error, OSError) else "broken file"
    return InvalidRequestError(
        f"the image cannot be decoded ({reason}); allowed formats: {', '.join(FORMATS)}",
        code="invalid_image",
    )
