"""Before the first request, measure the times of captured steps with different numbers of rows and
drafts. The engine uses the measured times to choose the draft length (scheduler/draft_length.py).

Measured rows have no context and start with random tokens, which use as many experts as real
requests. Longer contexts slow down steps of similar size by about the same factor. The engine
adjusts the measured times to the context lengths of real requests.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from negamax.scheduler.draft_length import StepSeconds
from negamax.worker.batch import StepColumns
from negamax.worker.step_shapes import StepShape

if TYPE_CHECKING:
    from negamax.worker.runner import ModelRunner

REPEATS = 3  # number of timed replays per captured step, after one warmup


@torch.inference_mode()
def measure_steps(runner: ModelRunner) -> tuple[StepSeconds, ...]:
    """Measure step times for each number of drafts. Return () if graphs, adaptive draft lengths or
    GPU events are missing. No slot may be in use, and all ranks must call this function.
    """
    graphs, requests, config = runner.graphs, runner.requests, runner.config
    speculation, width = config.speculation, requests.drafts.shape[1]
    if graphs is None or speculation is None or not speculation.adaptive or not width:
        return ()
    most_rows, generator = config.cudagraph_size, torch.Generator().manual_seed(0)
    random = torch.randint(config.spec.vocab_size, (most_rows, 1 + width), generator=generator)
    firsts, drafts = random.to(requests.tokens.device).split([1, width], dim=1)
    found: list[StepSeconds] = []

    def replay(shape: StepShape) -> None:
        requests.num_computed.zero_()  # reset the tensors that each replay changes
        requests.tokens[:most_rows, :1] = firsts.to(requests.tokens.dtype)
        requests.drafts[:most_rows] = drafts
        graphs.replay(shape)

    for length in (0, *speculation.lengths):
        for num_rows in (*(1 << power for power in range((most_rows - 1).bit_length())), most_rows):
            shape = graphs.find_decodes(num_rows, length)
            if shape is None or shape.num_drafts != length:
                continue
            graphs.prepare(shape, StepColumns.of_decodes(range(num_rows), [1 + length] * num_rows))
            seconds = runner.runtime.seconds_of(partial(replay, shape), repeats=REPEATS)
            if seconds is not None:
                found.append((num_rows, length, seconds))
    requests.num_computed.zero_()
    requests.tokens.zero_()
    requests.drafts.fill_(-1)
    return tuple(found)
