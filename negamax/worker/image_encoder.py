"""Encode images on one rank before a step, which reads the image rows in place of embeddings.

Each tensor-parallel rank has the whole vision tower and encodes some of a step's images. For each
image, ranks that did not encode the image add zeros, so the sum over ranks is exact. With prefill
context parallelism, all ranks with the encoding rank's weights get the image rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from negamax.base.errors import EngineDeadError
from negamax.config.vision import VisionSpec
from negamax.kernels.steps.op import ImageRows
from negamax.models.decoder import ImageTower, PartialImages
from negamax.scheduler.step import ROWS_PER_PAGE, EncodeJob, ImageRun, StepPlan
from negamax.worker.batch import Column, StepColumns
from negamax.worker.device import indices, upload

if TYPE_CHECKING:
    from negamax.worker.runner import ModelRunner

# One run of the tower encodes at most 5184 image tokens (2016 x 2016 pixels) or one larger image.
_RUN_TOKENS = 5184
_MOST_TOKENS = 16_384  # image tokens of the largest image (3584 x 3584 pixels)


class ImageEncoder:
    """The vision tower of a rank, and the pool with the rows of encoded images."""

    def __init__(self, tower: ImageTower, spec: VisionSpec, runner: ModelRunner) -> None:
        """Allocate the pool. `runner` must have its request state."""
        self._tower, self._spec, self._requests = tower, spec, runner.requests
        self._rank = runner.config.layout.encoder_rank  # the value of `EncodeJob.rank`
        self._copies = runner.context.context_group  # ranks with the same weights
        self._runtime, self._device = runner.runtime, runner.device
        self.num_tokens = runner.config.encoder_tokens  # rows of the pool
        shape = (self.num_tokens // ROWS_PER_PAGE, ROWS_PER_PAGE, spec.text_hidden)
        self._pool = torch.zeros(shape, dtype=runner.kernels.dtype, device=self._device)
        # pool pages of each image that could not be encoded, and the error
        self._broken: list[tuple[frozenset[int], Exception]] = []
        self._partial: PartialImages | None = None  # image of which some parts are encoded

    @property
    def rows(self) -> Tensor:
        """The pool of image rows, [rows, text hidden]."""
        return self._pool.flatten(0, 1)

    def encode(self, plan: StepPlan) -> None:
        """Encode the images of `plan`. Fail requests whose image could not be encoded."""
        own = [job for job in plan.encodes if job.rank == self._rank]
        last = [job for job in plan.encodes if job.is_last]
        for job in plan.encodes:
            if not job.parts[0]:
                self._broken = [each for each in self._broken if each[0].isdisjoint(job.pages)]
        for job in last:
            if job.rank != self._rank:
                self._pool[indices(job.pages, self._device)] = 0
        for jobs in self._split(own):
            try:
                self._encode(jobs)
            except EngineDeadError:
                raise
            except Exception as error:
                self._partial = None
                for job in jobs:
                    self._pool[indices(job.pages, self._device)] = 0
                    self._broken.append((frozenset(job.pages), error))
        if last and self._copies.size > 1:
            at = indices([page for job in last for page in job.pages], self._device)
            self._pool[at] = self._copies.all_reduce(self._pool[at])
        for run in plan.images:
            for pages, error in self._broken:
                if not pages.isdisjoint(run.pages):
                    self._requests.fail(run.slot, error)

    def find_rows(self, runs: Sequence[ImageRun], columns: StepColumns) -> Column | None:
        """Return each token's image row, [T] (-1: no image), or None if `runs` is empty."""
        if not runs:
            return None
        rows = np.full(len(columns.token_slots), -1, dtype=np.int64)
        # `num_computed_bound` is exact for prompts, which have no unverified drafts
        computed = self._requests.num_computed_bound[columns.token_slots]
        positions = computed + columns.token_offsets
        for run in runs:
            is_read = (columns.token_slots == run.slot) & (positions >= run.start)
            (tokens,) = np.nonzero(is_read & (positions < run.stop))
            page, place = np.divmod(positions[tokens] - run.offset, ROWS_PER_PAGE)
            rows[tokens] = np.array(run.pages)[page] * ROWS_PER_PAGE + place
        return rows

    def place_rows(
        self, runs: Sequence[ImageRun], columns: StepColumns, num_tokens: int
    ) -> ImageRows:
        """Return the image rows of an eager step's `num_tokens` tokens, as a tensor on the device.
        The tokens are those of `columns`, or padding.
        """
        found = self.find_rows(runs, columns)
        if found is None or not len(found):
            index = torch.full((num_tokens,), -1, dtype=torch.int32, device=self._device)
        else:
            index = upload((found,), self._device)[0].int()
        return ImageRows(index, self.rows)

    def run_tower(self, tokens: int) -> None:
        """Encode a black image of `tokens` image tokens, to compile or measure the tower."""
        side = self._spec.token_pixels
        self._tower([torch.zeros(side, tokens * side, 3, dtype=torch.uint8, device=self._device)])

    def peak_bytes(self) -> int:
        """Measure the GPU bytes of one run of the tower."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self.run_tower(min(_RUN_TOKENS, self.num_tokens))
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        torch.cuda.empty_cache()
        return peak

    def partial_bytes(self) -> int:
        """Return the bytes of the largest image that is encoded in parts."""
        spec, item = self._spec, self._pool.dtype.itemsize
        patches = spec.patches_per_token * min(self.num_tokens, _MOST_TOKENS)
        return patches * (spec.hidden_size * item + 2 * 4 * spec.head_dim)

    def _split(self, jobs: list[EncodeJob]) -> Iterator[list[EncodeJob]]:
        """Group images into runs of the tower, to limit the memory of each run. An image that is
        encoded in parts runs alone. If results must not depend on the batch, each image runs alone.
        """
        most = 0 if self._runtime.is_batch_invariant else _RUN_TOKENS
        run, size = list[EncodeJob](), 0
        for job in jobs:
            if job.parts[2] > 1:
                yield [job]
                continue
            tokens = self._count_tokens(job)
            if run and size + tokens > most:
                yield run
                run, size = [], 0
            run.append(job)
            size += tokens
        if run:
            yield run

    def _count_tokens(self, job: EncodeJob) -> int:
        return job.grid[0] * job.grid[1] // self._spec.patches_per_token

    def _encode(self, jobs: list[EncodeJob]) -> None:
        """Run `jobs[0].parts` of the tower for all `jobs`. The last part stores the image rows."""
        state = self._partial if jobs[0].parts[0] else self._tower.start(self._load(jobs))
        if state is None:
            return  # an earlier part failed
        state = self._tower.run_part(state, *jobs[0].parts)
        if jobs[0].parts[2] > 1:
            self._partial = None if jobs[0].is_last else state
        if not jobs[0].is_last:
            return
        sizes = [self._count_tokens(job) for job in jobs]
        for job, rows in zip(jobs, self._tower.finish(state).split(sizes), strict=True):
            room = rows.new_zeros(len(job.pages) * ROWS_PER_PAGE, rows.shape[1])
            room[: len(rows)] = rows
            self._pool[indices(job.pages, self._device)] = room.view(-1, *self._pool.shape[1:])

    def _load(self, jobs: list[EncodeJob]) -> list[Tensor]:
        """Copy the pixels of images to the device, each uint8 [height, width, 3]."""
        side = self._spec.patch_size
        images = []
        for job in jobs:
            height, width = (side * patches for patches in job.grid)
            pixels = torch.frombuffer(bytearray(job.pixels), dtype=torch.uint8)
            if self._device.type != "cpu":
                pixels = pixels.pin_memory().to(self._device, non_blocking=True)
            images.append(pixels.view(height, width, 3))
        return images
