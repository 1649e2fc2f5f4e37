"""Decode and resize one image. Runs in a process with limits: the bytes may be hostile."""

import base64
import binascii
import io
import re
import struct
from contextlib import suppress

from PIL import Image, ImageOps

from negamax.base.errors import InvalidRequestError
from negamax.images.sizes import Rule, fit

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
MAX_SOURCE_PIXELS = 64_000_000
HEADER = struct.Struct(">III")  # height and width after resizing, pixels of the source
_SPACE = re.compile(r"\s+")

Image.MAX_IMAGE_PIXELS = None  # `MAX_SOURCE_PIXELS` is checked before anything is decoded


def decode_image(data: str, rule: Rule, longest: int, needs_pixels: bool) -> bytes:
    """Return `HEADER` and uint8 [height, width, 3] of the first frame, upright and on white.

    `data`: base64 of PNG, JPEG, GIF or WEBP; `rule`, `longest`: as of `sizes.fit`. Without
    `needs_pixels` only the file's header is read, and rows and columns may be exchanged.
    Errors: `InvalidRequestError` without the image's place.
    """
    try:
        image = Image.open(io.BytesIO(_decode_base64(data)), formats=FORMATS)
    except InvalidRequestError:
        raise
    except Exception as error:  # decoders raise many types
        raise _refuse(error) from None
    num_pixels = image.width * image.height
    if num_pixels > MAX_SOURCE_PIXELS:
        raise InvalidRequestError(
            f"has {image.width} x {image.height} pixels; allowed: {MAX_SOURCE_PIXELS} in all"
        )
    height, width = fit(image.height, image.width, rule=rule, longest=longest)
    if not needs_pixels:
        return HEADER.pack(height, width, num_pixels)
    try:
        image.load()
        with suppress(Exception):  # of a broken orientation
            image = ImageOps.exif_transpose(image)
        height, width = fit(image.height, image.width, rule=rule, longest=longest)
        pixels = _flatten(image).resize((width, height), Image.Resampling.BICUBIC).tobytes()
    except MemoryError:
        raise
    except Exception as error:
        raise _refuse(error) from None
    return HEADER.pack(height, width, num_pixels) + pixels


def _decode_base64(text: str) -> bytes:
    """Decode base64 with line breaks or without padding, also of the alphabet for URLs."""
    text = _SPACE.sub("", text).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError("is not base64") from None


def _flatten(image: Image.Image) -> Image.Image:
    """Convert to RGB: transparency on white, 16 bits to the nearest 8."""
    if image.mode.startswith("I"):
        image = image.convert("F").point(lambda value: value * (1 / 257) + 0.5).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _refuse(error: Exception) -> InvalidRequestError:
    reason = "it is none of these formats or broken" if isinstance(error, OSError) else "broken"
    return InvalidRequestError(
        f"cannot be decoded ({reason}); allowed: {', '.join(FORMATS)}", code="invalid_image"
    )
