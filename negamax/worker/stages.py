"""What a rank exchanges with other stages of the pipeline in a step: the residual stream that its
layers begin with or leave, and the sampled tokens, which go from the last stage to the first.

The first stage does not wait for the tokens of a step before it runs the next one, but before it
runs a step whose rows they belong to (decision 42). A slot may have gone to another sequence
meanwhile: its token is dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from negamax.parallel.context import ParallelContext
from negamax.parallel.links import Arrival
from negamax.scheduler.step import StepPlan
from negamax.worker.batch import SampleInputs
from negamax.worker.device import indices
from negamax.worker.request_state import RequestState


@dataclass
class _Expected:
    """The tokens of a step on their way here. R rows."""

    slots: list[int]  # [R]
    slots_device: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    reassigned: set[int] = field(default_factory=set)  # slots that have other sequences since
    token_ids: Tensor | None = None  # [R] int64, once they are received
    arrival: Arrival | None = None


class Stage:
    """This rank's side of the exchange; a pipeline of one stage exchanges nothing."""

    def __init__(
        self, context: ParallelContext, rows: RequestState, *, width: int, dtype: torch.dtype
    ) -> None:
        """Rows of the residual stream are `width` wide and in `dtype`."""
        layout = context.layout
        self.is_first, self.is_last = layout.is_first_stage, layout.is_last_stage
        self._links, self._rows, self._num_stages = context.links, rows, layout.pp
        self._place, self._num_places = layout.tp_rank, layout.tp
        self._width, self._dtype = width, dtype
        self._expected: deque[_Expected] = deque()

    def begin(self, plan: StepPlan) -> None:
        """Before `plan` is applied: on the first stage take in the tokens that its rows need."""
        if not self._expected:
            return
        assigned = {row.slot for row in plan.new_rows}
        needed = set(plan.slots) - assigned
        last = len(self._expected) - self._num_stages  # older ones are there: a step a stage
        for number, step in enumerate(self._expected):
            step.reassigned |= assigned
            if not (needed - step.reassigned).isdisjoint(step.slots):
                last = max(last, number + 1)
        for _ in range(last):
            self._take_in(self._expected.popleft())

    def receive(self, num_tokens: int, out: Tensor | None = None) -> Tensor | None:
        """This rank's part of the stream that enters the stage, [num_tokens, width], at the front
        of `out` where given, before zeros where ranks share it; None on the first stage.
        """
        if self._links.previous is None:
            return None
        if out is None:
            device = self._rows.tokens.device
            out = torch.empty(num_tokens, self._width, dtype=self._dtype, device=device)
        if self._num_places > 1:
            out.zero_()
        part = out[self._part(num_tokens)]
        if len(part):
            self._links.previous.receive(part).wait()
        return out

    def padding(self, num_tokens: int) -> Tensor | None:
        """In place of what `receive` gives, for tokens that stand for nobody, which no stage sends
        and the next does not receive.
        """
        if self._links.previous is None:
            return None
        shape, device = (num_tokens, self._width), self._rows.tokens.device
        return torch.zeros(shape, dtype=self._dtype, device=device)

    def send(self, hidden: Tensor) -> None:
        """The stream [T, width] that leaves the stage; a copy travels."""
        part = hidden[self._part(len(hidden))]
        if self._links.next is not None and len(part):
            self._links.next.send(part.clone())

    def expect(self, inputs: SampleInputs) -> None:
        """The last stage will sample these rows of the step that was just sent."""
        if self.is_first and inputs.slots:
            places = inputs.slots_device.clone(), inputs.positions_device.clone()
            self._expected.append(_Expected(inputs.slots, *places))

    def give_back(self, token_ids: Tensor) -> None:
        """On the last stage: the sampled tokens [R] int64 of a step, in the order of its rows.
        `token_ids` must stay as it is.
        """
        if self.is_last and self._links.sampled is not None:
            self._links.sampled.send(token_ids)

    def post(self) -> None:
        """Receive all that is expected, without waiting for it: a GPU that sends spins until it is
        received.
        """
        for step in self._expected:
            self._receive_tokens(step)

    def finish(self) -> None:
        """Take in all that is expected."""
        while self._expected:
            self._take_in(self._expected.popleft())

    def _receive_tokens(self, step: _Expected) -> None:
        if step.token_ids is None:
            assert self._links.sampled is not None
            step.token_ids = torch.empty_like(step.positions)
            step.arrival = self._links.sampled.receive(step.token_ids)

    def _take_in(self, step: _Expected) -> None:
        self._receive_tokens(step)
        assert step.token_ids is not None and step.arrival is not None
        step.arrival.wait()
        token_ids, slots, positions = step.token_ids, step.slots_device, step.positions
        if step.reassigned:
            kept = [i for i, slot in enumerate(step.slots) if slot not in step.reassigned]
            index = indices(kept, slots.device)
            token_ids, slots, positions = token_ids[index], slots[index], positions[index]
        tokens = self._rows.tokens
        tokens[slots, positions] = token_ids.clamp_min(0).to(tokens.dtype)

    def _part(self, num_tokens: int) -> slice:
        """The rows that ranks in this place of their stages exchange."""
        first, stop = (num_tokens * at // self._num_places for at in (self._place, self._place + 1))
        return slice(first, stop)
