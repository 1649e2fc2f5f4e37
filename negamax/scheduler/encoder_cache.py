"""Allocate pages of the worker's pool for the image embeddings that the vision tower computes.

The scheduler decides which images a step encodes. An image keeps its pages until all sequences that
use the image have committed its tokens. Pages of unused images stay cached, indexed by cache salt
and image digest. If another image needs pages, the least recently used image is evicted. The worker
runs plans in order. A later plan may therefore reuse pages that a running plan still reads.

The decodes of a step wait until its images are encoded. Steps with decodes therefore encode a large
image in parts: each step runs a part of the tower's layers. The last part's step runs the tokens of
the image.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from negamax.scheduler.request import ImageInput
from negamax.scheduler.sequence import Sequence
from negamax.scheduler.step import ROWS_PER_PAGE, EncodeJob, ImageRun

# `STEP_PATCHES`: limit of the weighted patches that a rank encodes in a step. The first image may
# exceed the limit. `PART_PATCHES`: the limit of a step with decodes, calculated to take 10 ms on an
# H200. A patch of an image with n patches weighs 1, plus n / `_SQUARE` for attention.
STEP_PATCHES, PART_PATCHES, _SQUARE = 10_000, 3_000, 8_824

_Key = tuple[str, bytes]


@dataclass(eq=False)
class EncodedImage:
    """An image whose embeddings have pages in the pool."""

    key: _Key
    pages: list[int]
    rank: int  # rank that encodes the image
    num_parts: int  # number of parts in which the image is encoded
    num_planned: int = 0  # number of parts that plans contain so far
    step_ids: list[int] = field(default_factory=list)  # ids of the steps that encode the parts
    num_users: int = 0  # number of images in sequences that use these pages

    @property
    def is_planned(self) -> bool:
        """Whether plans so far encode the whole image, so that this plan may use its embeddings."""
        return self.num_planned == self.num_parts


class EncoderCache:
    """Tracks the free pages of the pool, and the pages of each image."""

    def __init__(self, num_tokens: int, *, num_ranks: int) -> None:
        """`num_tokens`: capacity of the pool in image tokens. `num_ranks`: ranks that encode."""
        self.num_hits = 0  # number of images whose embeddings were found in the pool
        self._free = list(range(num_tokens // ROWS_PER_PAGE - 1, -1, -1))
        self._images: dict[_Key, EncodedImage] = {}
        self._unused: OrderedDict[_Key, EncodedImage] = OrderedDict()  # least recently used first
        self._jobs: list[EncodeJob] = []
        self._loads = [0.0] * num_ranks  # weighted patches that each rank encodes in the next plan
        self._limit = STEP_PATCHES  # limit of `_loads`
        self._num_jobs = 0
        # rank -> the image of which the rank has encoded some parts
        self._partial: dict[int, tuple[EncodedImage, ImageInput]] = {}

    @property
    def num_free_pages(self) -> int:
        """Number of pages that no sequence holds, including cached pages."""
        return len(self._free) + sum(len(image.pages) for image in self._unused.values())

    def may_begin(self, sequence: Sequence, start: int) -> bool:
        """Whether the token at `start` of a waiting sequence could run in the next plan."""
        salt = sequence.request.cache_salt
        return all(
            (salt, image.digest) in self._images or self._fits(image)
            for image in sequence.request.images
            if image.offset <= start < image.end
        )

    def continue_images(self, step_id: int, *, has_decodes: bool) -> None:
        """Add the next part of each partly encoded image to plan `step_id`. If the plan has no
        decodes, add all remaining parts.
        """
        self._limit = PART_PATCHES if has_decodes else STEP_PATCHES
        for held, image in list(self._partial.values()):
            num_left = held.num_parts - held.num_planned
            self._add_job(held, image, 1 if has_decodes else num_left, step_id)

    def acquire(self, sequence: Sequence, count: int, step_id: int) -> int:
        """Reserve pages for the images among the next `count` tokens of a sequence. Return how many
        of these tokens may run in plan `step_id`, up to the first image that is not encoded.
        """
        start = sequence.num_computed
        for number, image in enumerate(sequence.request.images):
            if image.offset >= start + count:
                break
            if image.end <= start:
                continue
            held = sequence.held_images.get(number)
            if held is None:
                held = self._hold(image, sequence.request.cache_salt, step_id)
            if held is not None:
                sequence.held_images[number] = held
            if held is None or not held.is_planned:
                return max(0, image.offset - start)
        return count

    def release(self, sequence: Sequence) -> None:
        """Release each image of a sequence if all tokens of the image are committed."""
        for number, held in list(sequence.held_images.items()):
            if sequence.request.images[number].end <= sequence.num_committed:
                del sequence.held_images[number]
                self._drop_user(held, is_valid=True)

    def release_all(self, sequence: Sequence, *, is_valid: bool = True) -> None:
        """Release all images of a sequence that leaves the batch. If `is_valid` is False, the
        embeddings are invalid, and other sequences must encode the images again.
        """
        for held in sequence.held_images.values():
            self._drop_user(held, is_valid=is_valid)
        sequence.held_images.clear()

    def fail(self, step_id: int, running: Iterable[Sequence]) -> list[Sequence]:
        """Drop images that a lost plan encodes. Return `running` sequences with a dropped image."""
        for held in [held for held in self._images.values() if step_id in held.step_ids]:
            del self._images[held.key]
            self._forget_partial(held)
            if self._unused.pop(held.key, None) is not None:
                self._free += held.pages
        return [
            sequence
            for sequence in running
            if any(step_id in held.step_ids for held in sequence.held_images.values())
        ]

    def evict(self) -> None:
        """Drop all images that no sequence holds."""
        while self._unused:
            self._evict_oldest()

    def take_jobs(self) -> list[EncodeJob]:
        """Return the encode jobs of the current plan, and start an empty list for the next plan."""
        jobs, self._jobs = self._jobs, []
        if jobs:
            self._loads = [0.0] * len(self._loads)
        return jobs

    def _hold(self, image: ImageInput, salt: str, step_id: int) -> EncodedImage | None:
        """Reserve pages for an image. If a new image fits, add a job for it, else return None."""
        key = salt, image.digest
        found = self._images.get(key)
        if found is None:
            if not self._fits(image):
                return None
            num_parts = -int(-_weigh(image) // PART_PATCHES) if self._limit == PART_PATCHES else 1
            pages, rank = self._allocate(_count_pages(image)), self._next_rank()
            found = self._images[key] = EncodedImage(key, pages, rank, num_parts)
            self._num_jobs += 1
            self._add_job(found, image, 1, step_id)
        else:
            self.num_hits += 1
            self._unused.pop(key, None)
        found.num_users += 1
        return found

    def _add_job(self, held: EncodedImage, image: ImageInput, num_parts: int, step_id: int) -> None:
        """Add the next `num_parts` parts of an image to the current plan."""
        first, stop = held.num_planned, held.num_planned + num_parts
        pixels, parts = b"" if first else image.pixels, (first, stop, held.num_parts)
        self._jobs.append(EncodeJob(held.rank, held.pages, image.grid, pixels, parts))
        self._loads[held.rank] += _weigh(image) * num_parts / held.num_parts
        held.num_planned = stop
        held.step_ids.append(step_id)
        if held.is_planned:
            self._forget_partial(held)
        else:
            self._partial[held.rank] = held, image

    def _forget_partial(self, held: EncodedImage) -> None:
        if held.rank in self._partial and self._partial[held.rank][0] is held:
            del self._partial[held.rank]

    def _fits(self, image: ImageInput) -> bool:
        """Whether a new image fits this plan. A rank's first image in a plan may have any size."""
        rank = self._next_rank()
        load = self._loads[rank]
        is_due = not load or load + _weigh(image) <= self._limit
        return rank not in self._partial and is_due and _count_pages(image) <= self.num_free_pages

    def _next_rank(self) -> int:
        """Return the rank with the fewest patches in this plan. Equally loaded ranks alternate."""
        ranks = len(self._loads)
        return min(
            range(ranks), key=lambda rank: (self._loads[rank], (rank - self._num_jobs) % ranks)
        )

    def _allocate(self, num_pages: int) -> list[int]:
        while len(self._free) < num_pages:
            self._evict_oldest()
        return [self._free.pop() for _ in range(num_pages)]

    def _evict_oldest(self) -> None:
        key, image = self._unused.popitem(last=False)
        del self._images[key]
        self._free += image.pages

    def _drop_user(self, held: EncodedImage, *, is_valid: bool) -> None:
        held.num_users -= 1
        is_known = self._images.get(held.key) is held
        if held.num_users == 0 and not held.is_planned:
            self._forget_partial(held)
            is_valid = False
        if is_known and not is_valid:
            del self._images[held.key]
            is_known = False
        if held.num_users == 0:
            if is_known:
                self._unused[held.key] = held
            else:
                self._free += held.pages


def list_runs(sequence: Sequence, start: int, stop: int) -> list[ImageRun]:
    """List the image embeddings that a sequence reads at positions `start` to `stop`."""
    held: Mapping[int, EncodedImage] = sequence.held_images
    return [
        ImageRun(
            sequence.slot,
            image.offset,
            max(start, image.offset),
            min(stop, image.end),
            held[number].pages,
        )
        for number, image in enumerate(sequence.request.images)
        if image.offset < stop and start < image.end
    ]


def _count_pages(image: ImageInput) -> int:
    return -(-image.num_tokens // ROWS_PER_PAGE)


def _weigh(image: ImageInput) -> float:
    return image.num_patches * (1 + image.num_patches / _SQUARE)
