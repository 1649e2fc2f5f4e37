"""Collect the outputs of a launched step, which may still be on the device."""

from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor

from negamax.scheduler.step import StepResult
from negamax.worker.device import HostTensor
from negamax.worker.host_pool import LoadProgress
from negamax.worker.sampler import BROKEN, LogprobEntries, Sampled
from negamax.worker.verify import Verification

_NOT_FINITE = "the model produced logits that are not finite numbers"


@dataclass(frozen=True)
class StepTimes:
    """GPU events at the start and end of a step, and at the end of the previous step."""

    began: torch.cuda.Event
    ended: torch.cuda.Event
    previous: torch.cuda.Event | None

    def seconds(self) -> tuple[float, float]:
        """Return the step's seconds, and the GPU's idle seconds before (even without requests)."""
        self.ended.synchronize()  # host-sync: a step without outputs waits only here
        idle = 0.0 if self.previous is None else max(0.0, self.previous.elapsed_time(self.began))
        return self.began.elapsed_time(self.ended) / 1e3, idle / 1e3


@dataclass(frozen=True)
class StepOutput:
    """A launched step. Any thread may call `result`."""

    step_id: int
    # index of the plan's row for each sample; rows with draft tokens have several samples
    sampled_rows: list[int]
    token_ids: HostTensor | None = None  # [R] int64, sampled tokens; None: nothing is sampled
    sampled: Sampled | None = None
    prompt_logprobs: dict[int, list[LogprobEntries]] = field(default_factory=dict)
    times: StepTimes | None = None
    # failed row of the plan -> text of its error, raised before or after the model ran
    failures: dict[int, str] = field(default_factory=dict)
    verification: Verification | None = None  # None: the plan has no draft tokens.
    # `grammar_rows`: indices in the plan of rows with a grammar; [] if the plan proposes no tokens
    grammar_rows: list[int] = field(default_factory=list)
    proposed: HostTensor | None = None  # [grammar rows, tokens] int64, new drafts of grammar rows
    expert_counts: HostTensor | None = None  # [layers, experts] int64, selections of each expert
    loads: LoadProgress | None = None  # None: there are no host blocks
    confidences: HostTensor | None = None  # [R, drafts] fp32, see `Proposer.confidences`

    def result(self) -> StepResult:
        """Wait for the tensors and build the result."""
        token_ids: list[int] = [] if self.token_ids is None else self.token_ids.read().tolist()
        rows, logprobs, num_accepted, num_draft_tokens = self.sampled_rows, {}, {}, {}
        if self.sampled is not None and self.sampled.logprobs is not None:
            logprobs = dict(
                zip(self.sampled.logprob_rows, self.sampled.logprobs.read(), strict=True)
            )
        if self.verification is not None:
            num_accepted = self.verification.accepted()
            rejected = self.verification.rejected_samples()
            num_draft_tokens = self.verification.proposed()
            kept = [i for i in range(len(token_ids)) if i not in rejected]
            rows, token_ids = [rows[i] for i in kept], [token_ids[i] for i in kept]
            logprobs = {place: logprobs[i] for place, i in enumerate(kept) if i in logprobs}
        errors = {
            row: _NOT_FINITE for row, token in zip(rows, token_ids, strict=True) if token == BROKEN
        }
        if errors:
            token_ids = [max(token, 0) for token in token_ids]
        errors |= self.failures
        prompt = {
            row: [entry for tile in tiles for entry in tile.read()]
            for row, tiles in self.prompt_logprobs.items()
            if row not in errors
        }
        proposed = [] if self.proposed is None else self.proposed.read().tolist()
        device_seconds, idle_seconds = (0.0, 0.0) if self.times is None else self.times.seconds()
        return StepResult(
            self.step_id,
            token_ids,
            logprobs,
            prompt,
            errors,
            num_accepted,
            dict(zip(self.grammar_rows, proposed, strict=True)),
            device_seconds,
            idle_seconds,
            b"" if self.expert_counts is None else expert_bytes(self.expert_counts),
            num_draft_tokens,
            -1 if self.loads is None else self.loads.read(),
            [] if self.confidences is None else _expect_accepted(self.confidences.read()),
            None if self.loads is None else self.loads.report_files(),  # no error may follow this
        )


def complete(
    output: StepOutput | StepResult, counts: HostTensor | None, loads: LoadProgress | None
) -> StepOutput | StepResult:
    """Add selection `counts` [layers, experts] int64 and the progress of `loads` to `output`."""
    if not isinstance(output, StepResult):
        return replace(output, expert_counts=counts, loads=loads)
    if counts is not None:
        output = msgspec.structs.replace(output, expert_counts=expert_bytes(counts))
    if loads is None:
        return output
    return msgspec.structs.replace(output, loaded_step=loads.read(), files=loads.report_files())


def _expect_accepted(confidences: Tensor) -> list[float]:
    """Return `StepResult.expected`. Failed rows have non-finite confidences, which become 0."""
    shares: list[float] = confidences.nan_to_num(0.0).cumprod(dim=1).mean(dim=0).tolist()
    return shares


def expert_bytes(counts: HostTensor) -> bytes:
    """Wait for `counts` and return them as bytes for `StepResult`."""
    return counts.read().numpy().tobytes()
