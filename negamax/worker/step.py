"""Run one step of a rank: prepare -> execute -> sample -> verify.

A step runs in one of three ways. A decode of a captured shape replays the whole step, including
sampling and verification. Any other batch of a captured size replays only the layers. All other
batches are launched kernel by kernel ("eager").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from negamax.scheduler.step import StepPlan
from negamax.worker.batch import (
    BatchLayout,
    SampleInputs,
    build,
    build_batch_layout,
    is_decode,
    sample_inputs,
)
from negamax.worker.device import HostTensor, indices, upload
from negamax.worker.grammar_bitmask import PendingBitmask
from negamax.worker.graphs import StepGraphs
from negamax.worker.prompt_logprobs import score_prompts
from negamax.worker.proposer import TokenStates
from negamax.worker.sampler import LogprobEntries, Sampled
from negamax.worker.step_output import StepOutput, StepTimes
from negamax.worker.step_shapes import StepShape
from negamax.worker.token_shards import shard_tokens
from negamax.worker.verify import SampledRows, Verification, VerifiedRows, Verifier

if TYPE_CHECKING:
    from negamax.worker.runner import ModelRunner


@dataclass(frozen=True)
class Batch:
    """A prepared step."""

    plan: StepPlan
    layout: BatchLayout
    # graphs and captured shape that run the layers; None: the layers run eagerly
    captured: tuple[StepGraphs, StepShape] | None = None

    @property
    def replay(self) -> tuple[StepGraphs, StepShape] | None:
        """Graphs and shape of the captured step if it also samples and verifies, else None."""
        return self.captured if self.captured and self.captured[1].is_sampled else None


@dataclass(frozen=True)
class Executed:
    """Outputs of the layers. On the last stage, `hidden` has the rows of all token shards."""

    began: torch.cuda.Event | None
    hidden: Tensor  # [T or more, hidden] output of the layers; rows after T are padding
    states: TokenStates | None  # residual streams for the proposer; None: no proposer


class StepRunner:
    """Runs the steps of one rank. A failed step may run again after `restore_lengths`."""

    def __init__(self, runner: ModelRunner, *, needs_eager: Callable[[], bool]) -> None:
        """`needs_eager`: returns whether the next step must run without graphs."""
        self._model, self._caches, self._graphs = runner.model, runner.caches, runner.graphs
        self._requests, self._stage, self._sampler = runner.requests, runner.stage, runner.sampler
        self._runtime, self._device = runner.runtime, runner.device
        self._group, self._needs_eager = runner.context.context_group, needs_eager
        self._encoder = runner.encoder
        self._capture = runner.proposer.capture if runner.proposer else ()
        self._verifier = None
        if runner.proposer is not None and self._stage.is_last:
            self._verifier = Verifier(runner.proposer, runner.requests)
        self._ended: torch.cuda.Event | None = None  # event at the end of the previous step

    def run(self, plan: StepPlan, bitmask: PendingBitmask) -> StepOutput:
        """Launch the step of `plan`, whose new rows are already in the request state."""
        requests = self._requests
        batch = self._prepare(plan)
        executed = self._execute(batch)
        sampled: Sampled | None = None
        prompt_logprobs: dict[int, list[LogprobEntries]] = {}
        if plan.slots and self._stage.is_last:
            if batch.replay is None:
                prompt_logprobs = score_prompts(
                    self._model, plan, executed.hidden, layout=batch.layout, requests=requests
                )
            sampled = self._sample(batch, executed.hidden, bitmask)
        elif plan.slots:
            self._stage.expect(plan, self._sample_inputs(batch))
        if plan.slots and batch.replay is None:
            columns = np.array(plan.slots), np.array(plan.num_scheduled)
            requests.advance(*upload(columns, self._device))
        accepted, verification = self._verify(batch, sampled, executed.states, bitmask)
        if bitmask.postponed:
            postponed = np.array([plan.slots[row] for row in bitmask.postponed])
            again, minus_one = upload((postponed, np.full_like(postponed, -1)), self._device)
            requests.advance(again, minus_one)
            requests.drafts[again] = -1
        if sampled is not None:
            self._stage.send_results(plan, sampled.token_ids, accepted)
        grammar_rows, proposed = plan.grammar_rows if plan.num_proposed else [], None
        if grammar_rows:
            slots = indices([plan.slots[row] for row in grammar_rows], self._device)
            proposed = HostTensor(requests.drafts[slots, : plan.num_proposed])
        previous, self._ended = self._ended, self._runtime.record_event()
        times = None
        if executed.began and self._ended:
            times = StepTimes(executed.began, self._ended, previous)
        return StepOutput(
            plan.step_id,
            [] if sampled is None else batch.layout.sample_rows.tolist(),
            None if sampled is None else HostTensor(sampled.token_ids),
            sampled,
            prompt_logprobs,
            times=times,
            failures=requests.failures_of(plan.slots),
            verification=verification,
            grammar_rows=grammar_rows,
            proposed=proposed,
            confidences=self._copy_confidences(plan),
        )

    def _copy_confidences(self, plan: StepPlan) -> HostTensor | None:
        """Copy the confidences of new drafts to the host if acceptance is not synthetic."""
        if self._verifier is None or not plan.num_proposed or not any(plan.needs_sampling):
            return None
        proposer, num_rows = self._verifier.proposer, sum(plan.needs_sampling)
        if proposer.confidences is None or proposer.acceptance is not None:
            return None
        # copy the confidences, because the next step may overwrite them
        return HostTensor(proposer.confidences[:num_rows, : plan.num_proposed + 1].clone())

    def _prepare(self, plan: StepPlan) -> Batch:
        """Lay out the tokens of `plan`, and choose a captured step for the layout."""
        requests, size, is_replayed = self._requests, plan.of_all, False
        graphs = None if self._needs_eager() else self._graphs
        if graphs is not None:
            is_replayed = size.is_decode if size else is_decode(plan, requests)
        if graphs is not None and is_replayed:
            num_drafts = size.num_drafts if size else max(*plan.num_draft_tokens, plan.num_proposed)
            shape = graphs.find_decodes(size.num_rows if size else len(plan.slots), num_drafts)
            if shape is not None:
                return Batch(plan, BatchLayout.of_decodes(plan), (graphs, shape))
        has_drafts = any(plan.num_draft_tokens)
        if has_drafts:
            requests.place_drafts(plan)
        # For batch-invariant results, each generated token runs as a decode in every step.
        apart = self._runtime.is_batch_invariant
        layout = build_batch_layout(plan, requests, generated_apart=apart)
        if graphs is not None:
            runs = layout
            if has_drafts:
                runs = build_batch_layout(plan, requests, generated_apart=apart, drafts_apart=False)
            num_tokens = size.num_tokens if size else runs.num_tokens
            shape = graphs.find(num_tokens, size.num_rows if size else len(runs.columns.slots))
            if shape is not None:
                return Batch(plan, runs, (graphs, shape))
        return Batch(plan, layout)

    def _execute(self, batch: Batch) -> Executed:
        """Receive the residual stream, launch the layers and send the stream. For a plan without
        rows, launch padding and exchange no residual stream.
        """
        plan, layout, requests, stage = batch.plan, batch.layout, self._requests, self._stage
        is_padding = not plan.slots
        if batch.captured is not None:
            graphs, shape = batch.captured
            graphs.prepare(shape, layout.columns)
            if self._encoder is not None and not shape.is_sampled:
                graphs.place_images(self._encoder.find_rows(plan.images, layout.columns))
            num_tokens, residuals = layout.num_tokens, graphs.residuals(layout.num_tokens)
            entering = stage.receive(
                num_tokens, graphs.entering(shape), residuals, is_padding=is_padding
            )
            began = self._runtime.record_event()
            hidden = graphs.replay(shape).hidden
        else:
            shard = shard_tokens(layout, requests, self._group, size=plan.of_all)
            token_ids, metadata = shard.build()
            num_tokens, images = len(token_ids), None
            if self._encoder is not None:
                images = self._encoder.place_rows(plan.images, shard.columns, num_tokens)
            entering = stage.receive(num_tokens, is_padding=is_padding)
            began = self._runtime.record_event()
            hidden, residuals = self._model.forward(
                token_ids,
                metadata,
                self._caches,
                capture=self._capture,
                entering=entering.stream,
                images=images,
            )
        if not is_padding:
            stage.send(hidden[:num_tokens], entering, residuals)
        states = None
        if is_padding or not stage.is_last or batch.replay is not None:
            return Executed(began, hidden, None)
        if batch.captured is not None:
            if self._verifier is not None:
                states = TokenStates(build(layout, requests)[1], residuals)
            return Executed(began, hidden, states)
        if len(layout.sample_rows) or requests.prompt_logprob_slots:
            hidden = shard.gather(hidden)
        if self._verifier is not None:
            streams = [shard.gather(stream) for stream in (*entering.captured, *residuals)]
            states = TokenStates(shard.describe_all(metadata), streams)
        return Executed(began, hidden, states)

    def _sample_inputs(self, batch: Batch) -> SampleInputs:
        layout = batch.layout
        if batch.replay is not None:
            graphs, shape = batch.replay
            return graphs.sample_inputs(shape, layout.columns)
        return sample_inputs(layout.sample_slots, layout.sample_offsets, self._requests)

    def _sample(self, batch: Batch, hidden: Tensor, bitmask: PendingBitmask) -> Sampled | None:
        """Sample rows as the plan requests, and store the tokens. After a replay, only rows
        that need all logits are sampled again. If a row has a mask, all rows are sampled again,
        because graphs do not read masks.
        """
        layout, requests, slots = batch.layout, self._requests, batch.plan.slots
        num_samples = len(layout.sample_rows)
        if not num_samples:
            return None
        if batch.replay is not None:
            logits = batch.replay[0].buffers.logits[:num_samples]
        else:
            logits = self._compute_logits(layout, hidden)
        picked, masks = None, bitmask.select(layout.sample_rows.tolist(), device=self._device)
        if batch.replay is not None and masks is None:
            graphs, shape = batch.replay
            picked = graphs.buffers.token_ids[:num_samples]
            if not requests.filtered_slots.isdisjoint(slots):
                graphs.draw(shape)
            if not any(map(requests.needs_all_logits, slots)):
                return Sampled(picked, is_captured=True)
        inputs = self._sample_inputs(batch)
        sampled = self._sampler(logits, inputs, picked=picked, masks=masks)
        requests.store(inputs.slots_device, inputs.positions_device, sampled.token_ids)
        return sampled

    def _compute_logits(self, layout: BatchLayout, hidden: Tensor) -> Tensor:
        """Compute the logits [R, V of this rank] of samples. Logits of failed rows are NaN."""
        hidden = hidden[indices(layout.sample_tokens, self._device)]
        failed = list(self._requests.failures_of(layout.sample_slots))
        if failed:
            hidden[indices(failed, self._device)] = torch.nan
        return self._model.local_logits(hidden)

    def _verify(
        self,
        batch: Batch,
        sampled: Sampled | None,
        states: TokenStates | None,
        bitmask: PendingBitmask,
    ) -> tuple[Tensor | None, Verification | None]:
        """Verify the step's drafts, reject drafts after a row's last mask, and propose new drafts.
        Return accepted drafts [R] int64 and a `Verification`, or None without drafts.
        """
        plan, requests, verifier = batch.plan, self._requests, self._verifier
        if verifier is None or not plan.slots:
            return None, None
        has_drafts, are_dropped = any(plan.num_draft_tokens), False
        if batch.replay is not None:
            assert sampled is not None
            graphs, shape = batch.replay
            drafts = graphs.drafts(shape)[: len(plan.slots)]
            are_dropped = has_drafts and bitmask.drop_drafts(drafts, plan)
            if are_dropped or not sampled.is_captured:
                graphs.finish(shape, sampled.token_ids)
            accepted = graphs.buffers.num_accepted[: len(plan.slots)]
        else:
            assert states is not None
            host = SampledRows.of(plan)
            tokens = batch.layout.sample_tokens[host.first_samples]
            slots, counts, *places = upload(
                (host.slots, host.num_drafts + 1, host.first_samples, tokens), self._device
            )
            rows = VerifiedRows(slots, counts, requests.num_computed[slots], *places)
            drafts = requests.drafts[slots]
            are_dropped = has_drafts and bitmask.drop_drafts(drafts, plan)
            # three tensors, not slices of one, because each alignment would need its own kernel
            accepted, lengths, ends = (torch.empty_like(slots) for _ in range(3))
            verifier(
                rows,
                None if sampled is None else sampled.token_ids,
                drafts if has_drafts else None,
                states,
                num_proposed=plan.num_proposed,
                out=(accepted, lengths, ends),
            )
        if not has_drafts:
            return None, None
        has_gaps = are_dropped or verifier.proposer.has_gaps
        return accepted, Verification.of(plan, accepted, drafts if has_gaps else None)
