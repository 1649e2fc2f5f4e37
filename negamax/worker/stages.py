"""Exchange residual streams and results of a step between a rank and other pipeline stages.

Each stage sends the residual stream to the next stage, and also streams of earlier layers that a
draft model reads. The last stage sends the sampled tokens to the first stage. With speculative
decoding, all stages receive the sampled tokens, the new drafts and the number of accepted drafts.
The number of accepted drafts determines the position at which a row continues.

A stage waits for the results of a step only before it runs a later step with the same rows
(decision 41). If the slot of a row belongs to another sequence when the results arrive, the stage
drops the row's results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from negamax.parallel.links import Arrival
from negamax.scheduler.step import StepPlan
from negamax.worker.batch import SampleInputs
from negamax.worker.device import indices, upload
from negamax.worker.verify import SampledRows, Verification

if TYPE_CHECKING:
    from negamax.worker.runner import ModelRunner


@dataclass
class _Expected:
    """A step whose results (S samples of R rows) this stage will receive."""

    plan: StepPlan
    slots: list[int]  # [S] slot of each sample
    slots_device: Tensor  # [S] int64, `slots` on the device
    positions: Tensor  # [S] int64, position of each sampled token
    reassigned: set[int] = field(default_factory=set)  # slots that later plans reassigned
    message: Tensor | None = None  # int64 results from the last stage, see `Stage.send_results`
    arrival: Arrival | None = None


@dataclass(frozen=True)
class Arrived:
    """A verification that this stage has received and applied."""

    plan: StepPlan
    verification: Verification
    reassigned: set[int]  # slots that later plans assigned to other sequences


@dataclass(frozen=True)
class Entering:
    """Inputs of a stage for T tokens. Each rank of the stage receives a part of the tokens."""

    # this rank's part of the residual stream [T, width]; None on the first stage
    stream: Tensor | None
    # residual streams from earlier stages that a draft model reads: [T, width] each on the last
    # stage, [tokens of this rank, width] each on other stages
    captured: list[Tensor]


class Stage:
    """Exchanges data between this rank and other stages. A single stage exchanges nothing."""

    def __init__(self, runner: ModelRunner) -> None:
        """`runner` must have its request state."""
        context, config, layout = runner.context, runner.config, runner.context.layout
        self.is_first, self.is_last = layout.is_first_stage, layout.is_last_stage
        self._links, self._requests, self._num_stages = context.links, runner.requests, layout.pp
        self._place, self._num_places = layout.tp_rank, layout.tp
        self._width, self._dtype = config.spec.hidden_size, runner.kernels.dtype
        self._num_captured = config.num_captured_before
        self._group = context.attention_group
        self._expected: deque[_Expected] = deque()

    def begin(self, plan: StepPlan) -> list[Arrived]:
        """Receive results of old steps and results that `plan` needs. Return verifications."""
        if not self._expected:
            return []
        assigned = {row.slot for row in plan.new_rows}
        needed = set(plan.slots) - assigned
        # `last`: number of expected steps that the last stage has finished. Each launch advances
        # every step by one stage, so these are all steps except the latest `num_stages`.
        last = len(self._expected) - self._num_stages
        for number, step in enumerate(self._expected):
            step.reassigned |= assigned
            if not (needed - step.reassigned).isdisjoint(step.slots):
                last = max(last, number + 1)
        arrived = [self._apply(self._expected.popleft()) for _ in range(last)]
        return [each for each in arrived if each is not None]

    def receive(
        self,
        num_tokens: int,
        out: Tensor | None = None,
        captured: Sequence[Tensor] = (),
        *,
        is_padding: bool = False,
    ) -> Entering:
        """Receive the stage's inputs, into `out` and `captured` if given. If ranks split the
        stream, the rows of other ranks are zeros. With `is_padding`, receive nothing.
        """
        if self._links.previous is None:
            return Entering(None, [])
        if out is None:
            device = self._requests.tokens.device
            allocate = torch.zeros if is_padding else torch.empty
            out = allocate(num_tokens, self._width, dtype=self._dtype, device=device)
        if is_padding:
            return Entering(out, [])
        if self._num_places > 1:
            out.zero_()
        part = out[self._part(num_tokens)]
        if not self._num_captured:
            if len(part):
                self._links.previous.receive(part).wait()
            return Entering(out, [])
        beside = self._num_captured * self._width
        sent = part.new_empty(len(part), self._width + beside)
        if len(part):
            self._links.previous.receive(sent).wait()
        part.copy_(sent[:, : self._width])
        parts = sent[:, self._width :]
        if self.is_last:
            parts = self._whole(parts, num_tokens)
        streams = list(parts.split(self._width, dim=1))
        if self.is_last:
            kept = captured or [torch.empty_like(out[:num_tokens]) for _ in streams]
            streams = [to.copy_(stream) for to, stream in zip(kept, streams, strict=False)]
        return Entering(out, streams)

    def send(self, hidden: Tensor, entered: Entering, captured: Sequence[Tensor]) -> None:
        """Send copies of the stage's output `hidden`, and of the streams that a draft model reads,
        which are `entered.captured` and this stage's `captured`. Each stream is [T, width].
        """
        if self._links.next is None:
            return
        rows = self._part(len(hidden))
        part, own = hidden[rows], [stream[rows] for stream in captured]
        if len(part):
            beside = [*entered.captured, *own]
            self._links.next.send(torch.cat([part, *beside], dim=1) if beside else part.clone())

    def expect(self, plan: StepPlan, inputs: SampleInputs) -> None:
        """Record that the last stage will send samples for the rows `inputs` of the latest step."""
        if self._links.sampled and inputs.slots:
            places = inputs.slots_device.clone(), inputs.positions_device.clone()
            self._expected.append(_Expected(plan, inputs.slots, *places))

    def send_results(self, plan: StepPlan, token_ids: Tensor, num_accepted: Tensor | None) -> None:
        """Send the last stage's results: sampled tokens [S] int64, numbers of accepted drafts [R]
        int64 (if the step has drafts), and new drafts [R, plan.num_proposed].
        """
        if not self._links.sampled:
            return
        parts = [token_ids] if num_accepted is None else [token_ids, num_accepted]
        if plan.num_proposed:
            slots = indices(SampledRows.of(plan).slots, token_ids.device)
            parts.append(self._requests.drafts[slots, : plan.num_proposed].flatten())
        message = torch.cat(parts)  # `cat` copies, because the next step may overwrite the parts
        for link in self._links.sampled:
            link.send(message)

    def start_receiving(self) -> None:
        """Start to receive all expected results, as a sending GPU spins until its peer receives."""
        for step in self._expected:
            self._receive(step)

    def finish(self) -> None:
        """Receive and drop all expected results."""
        while self._expected:
            self._receive(self._expected.popleft())[1].wait()

    def _receive(self, step: _Expected) -> tuple[Tensor, Arrival]:
        """Start to receive the message of a step if no receive has started before."""
        if step.message is None or step.arrival is None:
            plan, num_rows = step.plan, sum(step.plan.needs_sampling)
            per_row = any(plan.num_draft_tokens) + plan.num_proposed
            step.message = step.positions.new_empty(len(step.slots) + num_rows * per_row)
            (link,) = self._links.sampled
            step.arrival = link.receive(step.message)
        return step.message, step.arrival

    def _apply(self, step: _Expected) -> Arrived | None:
        """Write the results of a step into its slots."""
        message, arrival = self._receive(step)
        arrival.wait()
        plan = step.plan
        token_ids, rest = message[: len(step.slots)], message[len(step.slots) :]
        slots, positions = step.slots_device, step.positions
        if step.reassigned:
            kept = [i for i, slot in enumerate(step.slots) if slot not in step.reassigned]
            index = indices(kept, slots.device)
            token_ids, slots, positions = token_ids[index], slots[index], positions[index]
        self._requests.store(slots, positions, token_ids)
        return self._apply_drafts(plan, rest, step.reassigned) if len(rest) else None

    def _apply_drafts(self, plan: StepPlan, rest: Tensor, reassigned: set[int]) -> Arrived | None:
        """Apply the part of a message that follows the tokens: accepted drafts and new drafts."""
        rows, slots, num_drafts, _ = SampledRows.of(plan)
        kept = np.flatnonzero([slot not in reassigned for slot in slots])
        index, slot, count = upload((kept, slots[kept], num_drafts[kept]), rest.device)
        has_drafts = bool(num_drafts.any())
        proposed = rest[len(rows) * has_drafts :].view(len(rows), plan.num_proposed)
        self._requests.drafts[slot, : plan.num_proposed] = proposed[index]
        if not has_drafts:
            return None
        accepted = rest[: len(rows)]
        self._requests.advance(slot, accepted[index] - count)
        return Arrived(plan, Verification.of(plan, accepted), reassigned)

    def _whole(self, part: Tensor, num_tokens: int) -> Tensor:
        """Gather the parts of the stream that all ranks of the stage have received."""
        if self._num_places == 1:
            return part
        rows = part.new_zeros(num_tokens, part.shape[1])
        rows[self._part(num_tokens)] = part
        return self._group.all_reduce(rows)

    def _part(self, num_tokens: int) -> slice:
        """Return the range of rows that this rank exchanges with its peers in other stages."""
        first, stop = (num_tokens * at // self._num_places for at in (self._place, self._place + 1))
        return slice(first, stop)
