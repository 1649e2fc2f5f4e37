"""Load the images of a conversation, decode them in a limited process, and expand the prompt."""

import asyncio
import base64
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TypeVar

from msgspec import structs

from negamax.base import env
from negamax.base.errors import (
    CheckpointError,
    ContextLengthError,
    InvalidRequestError,
    NegamaxError,
    PayloadTooLargeError,
    UnavailableError,
)
from negamax.config.vision import VisionSpec
from negamax.images.sizes import HEADER, LONGEST_SIDE, Rule, count_tokens
from negamax.scheduler.request import ImageInput
from negamax.text.confined import IMAGE_DECODER, Confined
from negamax.text.messages import ImagePart

MAX_IMAGES = 200  # Largest number of images in a request.
MAX_IMAGE_BYTES = 30_000_000
MAX_REQUEST_PIXELS = 512_000_000  # Largest sum of pixels of a request's images before resizing.
_RULE_VERSION = b"minimax-m3-1"
_NUM_THREADS = max(2, min(8, env.usable_cores()))
_PER_REQUEST = 2  # Number of images of one request that are decoded in parallel.
_DATA_URL = re.compile(r"data:[^,]{0,256};base64,", re.IGNORECASE)

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=NegamaxError)


@dataclass(frozen=True, slots=True)
class _Image:
    """An image of a message, and the image's size after resizing."""

    part: ImagePart
    data: str  # The image file in base64.
    height: int = 0
    width: int = 0
    num_source_pixels: int = 0
    pixels: bytes = b""


class ImageLoader:
    """Loads images for a model with a vision tower. Threads may share a loader."""

    def __init__(
        self,
        vision: VisionSpec,
        *,
        max_model_len: int,
        rule: Rule = "longest",
        fetch: Callable[[str], bytes] | None = None,
    ) -> None:
        """`fetch` downloads a URL; without `fetch`, the loader refuses URLs."""
        self._vision = vision
        self._max_model_len = max_model_len
        self._rule = rule
        self._fetch = fetch
        self._decoder = Confined(IMAGE_DECODER, origin="the image decoder", has_secrets=False)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="image")

    async def load(
        self, parts: Sequence[ImagePart], *, needs_pixels: bool = True
    ) -> list[ImageInput]:
        """Return the images in order, without offsets, and with pixels if `needs_pixels` is set.

        Raises `InvalidRequestError` or `PayloadTooLargeError` with the image's position. Raises
        `ContextLengthError`. Raises `UnavailableError` if the decoder process cannot be started.
        """
        if len(parts) > MAX_IMAGES:
            raise InvalidRequestError(
                f"the request has {len(parts)} images; allowed: {MAX_IMAGES}",
                param="messages",
                code="too_many_images",
            )
        measured = await self._map(self._measure, parts)
        num_tokens = sum(count_tokens(image.height, image.width) for image in measured)
        if num_tokens >= self._max_model_len:
            raise ContextLengthError.of_prompt(
                num_tokens, context_length=self._max_model_len, param="messages", is_counted=False
            )
        num_pixels = sum(image.num_source_pixels for image in measured)
        if num_pixels > MAX_REQUEST_PIXELS:
            raise InvalidRequestError(
                f"the images have {num_pixels} pixels in total; allowed: {MAX_REQUEST_PIXELS}",
                param="messages",
                code="invalid_image",
            )
        if needs_pixels:
            measured = await self._map(partial(self._call, needs_pixels=True), measured)
        return [self._make_input(image) for image in measured]

    def expand(
        self, token_ids: Sequence[int], images: Sequence[ImageInput]
    ) -> tuple[list[int], list[ImageInput]]:
        """Replace each image token by a start marker, all tokens of its image, and an end marker.

        Raises `InvalidRequestError` if the prompt does not contain one image token per image.
        """
        vision = self._vision
        count = token_ids.count(vision.image_token_id)
        if count != len(images):
            raise InvalidRequestError(
                f"the prompt has {count} image tokens for {len(images)} images",
                hint="use a template that adds each image once, and texts without image tokens",
                param="messages",
                code="image_count",
            )
        expanded: list[int] = []
        placed: list[ImageInput] = []
        rest = iter(images)
        for token_id in token_ids:
            if token_id != vision.image_token_id:
                expanded.append(token_id)
                continue
            image = next(rest)
            expanded.append(vision.image_start_id)
            placed.append(structs.replace(image, offset=len(expanded)))
            expanded += [vision.image_token_id] * image.num_tokens
            expanded.append(vision.image_end_id)
        return expanded, placed

    def load_blocking(self, parts: Sequence[ImagePart]) -> list[ImageInput]:
        """Return the result of `load`, even if the calling thread already runs an event loop."""
        return self._threads.submit(asyncio.run, self.load(parts)).result()

    async def _map(self, work: Callable[[T], _Image], items: Sequence[T]) -> list[_Image]:
        """Apply `work` to each item in a thread, to `_PER_REQUEST` items at a time."""
        free = asyncio.Semaphore(_PER_REQUEST)
        loop = asyncio.get_running_loop()

        async def run(item: T) -> _Image:
            async with free:
                return await loop.run_in_executor(self._threads, work, item)

        tasks = [asyncio.ensure_future(run(item)) for item in items]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _measure(self, part: ImagePart) -> _Image:
        """Read an image's file, and compute the size of the image after resizing."""
        data = self._read(part)
        if len(data) > MAX_IMAGE_BYTES * 4 // 3 + 4:
            raise _place(build_bytes_error(len(data) * 3 // 4), part)
        return self._call(_Image(part, data), needs_pixels=False)

    def _read(self, part: ImagePart) -> str:
        """Return the image's file in base64."""
        if found := _DATA_URL.match(part.source):
            return part.source[found.end() :]
        scheme = part.source[:8].partition(":")[0].lower()
        if scheme not in ("http", "https"):
            problem = "the image is neither a data URL in base64 nor an http(s) URL"
            raise _place(InvalidRequestError(problem, code="invalid_image"), part)
        if self._fetch is None:
            problem = "the image is a URL; this server opens no URLs (--allowed-media-domains)"
            hint = "send the image as a data URL"
            raise _place(InvalidRequestError(problem, hint=hint, code="url_not_allowed"), part)
        try:
            return base64.b64encode(self._fetch(part.source)).decode()
        except (InvalidRequestError, PayloadTooLargeError) as error:
            raise _place(error, part) from None

    def _call(self, image: _Image, *, needs_pixels: bool) -> _Image:
        """Let a process with resource limits decode or measure an image."""
        longest = image.part.longest or LONGEST_SIDE
        try:
            answer = self._decoder.call(image.data, self._rule, longest, needs_pixels)
        except CheckpointError as error:
            raise UnavailableError(
                "the image decoder cannot be started", hint="retry later", code="no_image_decoder"
            ) from error
        except InvalidRequestError as error:
            raise _place(error, image.part) from None
        height, width, num_pixels = HEADER.unpack_from(answer)
        pixels = answer[HEADER.size :]
        return _Image(image.part, image.data, height, width, num_pixels, pixels)

    def _make_input(self, image: _Image) -> ImageInput:
        height, width, patch = image.height, image.width, self._vision.patch_size
        size = height.to_bytes(4) + width.to_bytes(4)
        return ImageInput(
            offset=0,
            num_tokens=count_tokens(height, width),
            grid=(height // patch, width // patch),
            digest=blake2b(_RULE_VERSION + size + image.pixels, digest_size=32).digest(),
            pixels=image.pixels,
        )


def build_bytes_error(num_bytes: int) -> PayloadTooLargeError:
    """Return the error of an image with too many bytes. The caller adds the image's position."""
    return PayloadTooLargeError(
        f"the image has {num_bytes} bytes; allowed: {MAX_IMAGE_BYTES}", code="image_too_large"
    )


def _place(error: ErrorT, part: ImagePart) -> ErrorT:
    """Add the position of an image to an error message."""
    error.message, error.param = f"{part.place}: {error.message}", part.place
    return error
