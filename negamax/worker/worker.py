"""One rank: loads its shard of the model, owns the cache and the rows, and executes plans in
order.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from negamax.base.errors import EngineDeadError
from negamax.base.log import get_logger
from negamax.checkpoint.plan import LoadPlan
from negamax.kernels.platform import platform_of
from negamax.kernels.registry import resolve
from negamax.layers.kv_scales import describe_kv_scales
from negamax.models.build import build_model
from negamax.quantization.detect import detect
from negamax.scheduler.step import StepPlan, StepResult, StepSize
from negamax.worker import batch as batches
from negamax.worker import kv_cache
from negamax.worker.config import DebugCommand, DebugResult, WorkerConfig, WorkerReady
from negamax.worker.debug_commands import DebugCommands
from negamax.worker.device import (
    HostTensor,
    check_platform,
    choose_dtype,
    index_dtype,
    indices,
    kv_dtype,
    runtime_of,
    upload,
)
from negamax.worker.eager_steps import compile_eager_steps
from negamax.worker.expert_weights import load_recorder
from negamax.worker.grammar_bitmask import PendingBitmask, WaitForBitmask
from negamax.worker.graphs import StepGraphs
from negamax.worker.loading import load_weights, plan_loading
from negamax.worker.profile import peak_bytes
from negamax.worker.prompt_logprobs import score_prompts
from negamax.worker.proposer import TokenStates
from negamax.worker.request_state import RequestState
from negamax.worker.sampler import Sampled, Sampler
from negamax.worker.separate_rows import run_rows_separately
from negamax.worker.speculation import Verification, load_proposer
from negamax.worker.stages import Arrived, Stage
from negamax.worker.startup import capture_graphs, open_context, take_device
from negamax.worker.step_output import StepOutput, StepTimes, with_expert_counts
from negamax.worker.step_shapes import LONGEST_DECODE, StepShape
from negamax.worker.step_times import measure_steps
from negamax.worker.token_shares import share_tokens

logger = get_logger(__name__)


class Worker:
    """The model runtime of one rank. Everything is called from one thread; a `StepOutput` may be
    read from another.
    """

    def __init__(self, config: WorkerConfig) -> None:
        torch.set_num_threads(config.num_threads)
        self._device = device = take_device(config)
        self._runtime = runtime_of(device)
        dtype = choose_dtype(config.dtype, spec=config.spec, device=config.device)
        cache_dtype = kv_dtype(config.kv_cache_dtype, dtype=dtype, device=config.device)
        of_index = index_dtype(config.index_cache_dtype, dtype=dtype)
        index_name = str(of_index).removeprefix("torch.")
        self._config = config = replace(config, index_cache_dtype=index_name)
        platform = platform_of(device)
        check_platform(platform, cache_dtypes=(cache_dtype, of_index), rank=config.layout.rank)
        self._kernels = kernels = resolve(platform=platform, dtype=dtype)
        kv_cache.check_weights_fit(
            config.spec,
            draft=config.own_draft.spec if config.own_draft else None,
            kernels=kernels,
            device=device,
            layout=config.layout,
        )
        kv_cache.check_rows_fit(config, device=device)
        # made, and the checkpoint checked, before the weights take memory
        load_plan = plan_loading(config, kernels=kernels, cache_dtype=cache_dtype)
        self._proposer = load_proposer(config, kernels=kernels)
        num_draft_tokens = self._proposer.num_draft_tokens if self._proposer else 0
        self._context = context = open_context(config, device, num_draft_tokens)
        self._group = context.attention_group
        self.poll_control = context.poll_control
        self._model = model = build_model(
            config.spec, context=context, dtype=dtype, device=device, kernels=kernels
        )
        with torch.inference_mode():
            load_summary = self._load(load_plan, cache_dtype)
            self._requests = RequestState(
                config.max_num_seqs,
                config.max_model_len,
                max_blocks=-(-(config.max_model_len + num_draft_tokens) // config.block_size),
                eos_token_ids=config.eos_token_ids,
                device=device,
                num_draft_tokens=num_draft_tokens,
            )
            self._stage = Stage(context, self._requests, config, dtype=kernels.dtype)
            self._sampler = Sampler(
                self._requests,
                kernels=kernels,
                group=self._group,
                first_id=model.vocab_range.start,
                on_shards=self._runtime.samples_on_shards,
            )
            self._experts = load_recorder(config, model, context, device)
            self._debug_commands = DebugCommands(model, config, self._experts, device=device)
            num_blocks = self._allocate_caches(cache_dtype)
            if self._runtime.graph_pool is not None:
                compile_eager_steps(
                    model,
                    self._kv,
                    config,
                    self._requests,
                    self._sampler,
                    self._proposer,
                    context=context,
                )
            self._graphs, graph_summary = capture_graphs(
                config,
                model=model,
                caches=self._kv,
                requests=self._requests,
                kernels=kernels,
                context=context,
                runtime=self._runtime,
                proposer=self._proposer,
            )
            if self._experts is not None:
                self._experts.reset()
        # whose residual streams the proposer reads
        self._layers = self._proposer.capture if self._proposer else ()
        self._ended: torch.cuda.Event | None = None  # of the step before
        # steps with draft tokens, and the launch that made or met their results, which may be on
        # their way to the host
        self._unverified: deque[tuple[int, Arrived]] = deque()
        self._num_steps = 0
        scheme = detect(config.spec.quantization)
        self.ready = WorkerReady(
            num_kv_blocks=num_blocks,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            kernels=kernels.describe(scheme.formats if scheme else ()),
            load_summary=load_summary,
            memory_summary=kv_cache.describe(num_blocks, config, dtype=cache_dtype) + graph_summary,
            num_draft_tokens=num_draft_tokens,
            step_seconds=measure_steps(self._graphs, self._requests, self._runtime, config),
        )

    def _load(self, plan: LoadPlan | None, cache_dtype: torch.dtype) -> str:
        """Fill the weights of the model and of the proposer; a line for the log."""
        summary = load_weights(self._model, self._config, plan, device=self._device)
        if self._proposer:
            summary += self._proposer.load(self._model, self._context, self._device)
        summary += describe_kv_scales(self._model.layers, cache_dtype)
        self._runtime.release_memory()  # of what only loading needed
        return summary

    def _allocate_caches(self, dtype: torch.dtype) -> int:
        """The KV caches; for how many blocks of the scheduler all ranks have room."""
        config, workspace = self._config, 0
        # On a GPU a full prefill step runs first: what it needs beside the cache is measured, and
        # its kernels are compiled.
        if self._runtime.graph_pool is not None:
            workspace = peak_bytes(
                self._model,
                config,
                self._requests,
                self._proposer,
                dtype=dtype,
                context=self._context,
                device=self._device,
            )
        affordable = kv_cache.choose_blocks(
            config, dtype=dtype, workspace=workspace, device=self._device
        )
        num_blocks = self._context.world_min(affordable)
        # One block more than the scheduler knows of: rows write it that stand for nobody.
        self._kv = kv_cache.allocate(
            config.kv_caches,
            num_blocks + 1,
            block_size=config.block_size,
            dtype=dtype,
            ranks=config.layout.attention.size,
            device=self._device,
        )
        self._requests.set_spare_block(num_blocks)
        if self._proposer:
            self._proposer.use_caches(self._kv[len(self._model.layers) :])
        return num_blocks

    @torch.inference_mode()
    def launch(self, plan: StepPlan, wait_for_bitmask: WaitForBitmask) -> StepOutput | StepResult:
        """Run one plan; on a GPU it has only been enqueued when this returns. Where the plan has
        grammar rows, their bitmask is waited for between the model and the sampling.

        A row that fails is reported in `errors` and leaves the other rows as they would be without
        it: one that cannot be prepared, sampled or described, and on the CPU one that makes the
        model raise. On a GPU a model that raises fails the whole step. Errors: `EngineDeadError`
        where another rank is gone.
        """
        for arrived in self._stage.begin(plan):
            self._unverified.append((self._num_steps, arrived))
        self._num_steps += 1
        # The results of the step before the last one are there, or nearly; of the last one they
        # are not waited for.
        settled = self._num_steps - self._runtime.is_asynchronous
        while self._unverified and self._unverified[0][0] < settled:
            _, step = self._unverified.popleft()
            accepted = step.verification.accepted()
            self._requests.lower_bounds(step.plan, accepted, step.reassigned)
        expert_counts = None
        if self._experts is not None and plan.experts is not None:
            expert_counts = self._experts.apply(plan.experts)
        self._requests.apply(plan)
        vocab_size = self._config.spec.vocab_size
        bitmask = PendingBitmask.of_plan(
            plan, wait_for_bitmask, vocab_size=vocab_size, requests=self._requests
        )
        output = self._run_rows_together(plan, bitmask)
        if plan.slots:
            self._requests.raise_bounds(plan, postponed=bitmask.postponed)
        if isinstance(output, StepResult):
            self._requests.lower_bounds(plan, output.num_accepted)
        elif output.verification is not None:
            self._unverified.append((self._num_steps, Arrived(plan, output.verification, set())))
        return output if expert_counts is None else with_expert_counts(output, expert_counts)

    def _run_rows_together(
        self, plan: StepPlan, bitmask: PendingBitmask
    ) -> StepOutput | StepResult:
        """The step as one batch; on the CPU, where that fails, row by row, unless other
        data-parallel ranks, stages or context-parallel ranks are in the step.
        """
        layout = self._config.layout
        if self._runtime.is_asynchronous or layout.pp > 1:
            return self._run(plan, bitmask)
        if plan.of_all is not None or layout.cp > 1:
            return self._run(plan, bitmask).result()
        try:
            return self._run(plan, bitmask).result()
        except EngineDeadError:  # another rank is gone: there is nothing to repeat
            raise
        except Exception:
            logger.exception(
                "step %d failed as a batch; running its %d rows one by one",
                plan.step_id,
                len(plan.slots),
            )
            self._requests.restore_lengths()
            for row in plan.grammar_rows:  # masks belong to drafts that may have been replaced
                self._requests.drafts[plan.slots[row]] = -1
            return run_rows_separately(plan, bitmask, self._run)

    @torch.inference_mode()
    def run_debug_command(self, command: DebugCommand) -> DebugResult:
        """Answer a benchmark's question. Every rank must be asked the same, between steps."""
        return self._debug_commands.run(command, self._graphs)

    @torch.inference_mode()
    def idle(self) -> None:
        """No plan has come for a while: what is on its way here may come."""
        if self._runtime.is_asynchronous:
            self._stage.post()

    def take_row_failures(self) -> dict[int, str]:
        """Rows that failed since the last call: why, by slot."""
        return self._requests.take_failures()

    @torch.inference_mode()
    def close(self) -> None:
        """Give the memory back and leave the other ranks in order. Nothing else may be called
        afterwards.
        """
        with suppress(EngineDeadError):  # ranks that end together need not wait for each other
            self._stage.finish()
        del (
            self._graphs,
            self._kv,
            self._model,
            self._debug_commands,
            self._requests,
            self._stage,
        )
        self._runtime.release_memory()
        self._context.close()

    def _run(self, plan: StepPlan, bitmask: PendingBitmask) -> StepOutput:
        """The step itself: gather, forward, sample, store. Writes are idempotent, so it may be
        repeated.
        """
        graphs = None if self._debug_commands.need_eager else self._graphs
        shape = None if graphs is None else self._shape_of_decodes(plan, graphs)
        if not plan.slots:
            began, outcome = self._run_nothing(plan, graphs, shape)
        elif graphs is not None and shape is not None:
            began, outcome = self._replay_decodes(plan, bitmask, graphs, shape)
        else:
            began, outcome = self._forward(plan, bitmask, graphs)
            columns = np.array(plan.slots), np.array(plan.num_scheduled)
            self._requests.advance(*upload(columns, self._device))
        if bitmask.postponed:
            columns = np.array([plan.slots[row] for row in bitmask.postponed])
            again, minus_one = upload((columns, np.full_like(columns, -1)), self._device)
            self._requests.advance(again, minus_one)
            self._requests.drafts[again] = -1
        self._stage.give_back(plan)
        proposed, grammar_rows = None, plan.grammar_rows if plan.num_proposed else []
        if grammar_rows:
            slots = indices([plan.slots[row] for row in grammar_rows], self._device)
            proposed = HostTensor(self._requests.drafts[slots, : plan.num_proposed])
        previous, self._ended = self._ended, self._runtime.record_event()
        times = StepTimes(began, self._ended, previous) if began and self._ended else None
        return replace(
            outcome,
            failures=self._requests.failures_of(plan.slots),
            times=times,
            grammar_rows=grammar_rows,
            proposed=proposed,
        )

    def _shape_of_decodes(self, plan: StepPlan, graphs: StepGraphs) -> StepShape | None:
        """The captured step for rows that all run a generated token; None: this is no such step."""
        size = plan.of_all
        if size is not None:
            return graphs.find_decodes(size.num_rows, size.num_drafts) if size.is_decode else None
        if not batches.is_decode(plan, self._requests):
            return None
        num_drafts = max(*plan.num_draft_tokens, plan.num_proposed)
        return graphs.find_decodes(len(plan.slots), num_drafts)

    def _run_nothing(
        self, plan: StepPlan, graphs: StepGraphs | None, shape: StepShape | None
    ) -> tuple[torch.cuda.Event | None, StepOutput]:
        """The part of a data-parallel rank without rows in the others' step: the same launches."""
        size = plan.of_all
        assert size is not None
        if graphs is not None and shape is None and size.longest_decode <= LONGEST_DECODE:
            shape = graphs.find(size.num_tokens, size.num_rows)
        if graphs is not None and shape is not None:
            graphs.prepare(shape, batches.StepColumns.of_decodes([], []))
            began = self._runtime.record_event()
            graphs.replay(shape)
        else:
            token_ids, metadata = batches.build_padding(
                self._requests,
                most_tokens=size.largest_share or size.num_tokens,
                is_share=size.largest_share > 0,
            )
            entering = self._stage.padding(len(token_ids))
            began = self._runtime.record_event()
            self._model.forward(token_ids, metadata, self._kv, entering=entering)
        return began, StepOutput(plan.step_id, [], None)

    def _forward(
        self, plan: StepPlan, bitmask: PendingBitmask, graphs: StepGraphs | None
    ) -> tuple[torch.cuda.Event | None, StepOutput]:
        """A step of any shape, and when it began."""
        has_drafts, size = any(plan.num_draft_tokens), plan.of_all
        if has_drafts:
            self._requests.place_drafts(plan)
        # Which kernel computes a token must not depend on the step it runs in, where that decides
        # about bits.
        build = partial(
            batches.build_batch_layout,
            plan,
            self._requests,
            generated_apart=self._runtime.is_batch_invariant,
        )
        layout = build()
        longest = size.longest_decode if size else layout.longest_decode
        if graphs is not None and longest <= LONGEST_DECODE:
            runs = build(drafts_apart=False) if has_drafts else layout
            columns = runs.columns
            shape = graphs.find(
                size.num_tokens if size else len(columns.token_slots),
                size.num_rows if size else len(columns.slots),
            )
            if shape is not None:
                began, hidden, states = self._replay_mix(runs, graphs, shape)
                return began, self._sample(plan, bitmask, runs, hidden, states)
        began, hidden, states = self._run_eagerly(layout, size)
        return began, self._sample(plan, bitmask, layout, hidden, states)

    def _replay_mix(
        self, layout: batches.BatchLayout, graphs: StepGraphs, shape: StepShape
    ) -> tuple[torch.cuda.Event | None, torch.Tensor, TokenStates | None]:
        """A step whose layers are captured, as `_run_eagerly`; hidden states of padding are behind
        those of its tokens.
        """
        graphs.prepare(shape, layout.columns)
        num_tokens = len(layout.columns.token_slots)
        captured = graphs.residuals(num_tokens)
        entering = self._stage.receive(num_tokens, graphs.entering(shape), captured)
        began = self._runtime.record_event()
        hidden = graphs.replay(shape).hidden
        self._stage.send(hidden[:num_tokens], entering, captured)
        if self._proposer is None:
            return began, hidden, None
        _, metadata = batches.build(layout, self._requests)
        return began, hidden, TokenStates(metadata, captured)

    def _run_eagerly(
        self, layout: batches.BatchLayout, size: StepSize | None
    ) -> tuple[torch.cuda.Event | None, torch.Tensor, TokenStates | None]:
        """A step launched kernel by kernel: when it began, the hidden states and what a proposer is
        told of the tokens, of those of this rank's share where nobody asks for the others'.
        """
        share = share_tokens(layout, self._requests, self._context.context_group, size=size)
        token_ids, metadata = share.build()
        entering = self._stage.receive(len(token_ids))
        began = self._runtime.record_event()
        hidden, captured = self._model.forward(
            token_ids, metadata, self._kv, capture=self._layers, entering=entering.stream
        )
        self._stage.send(hidden, entering, captured)
        if self._stage.is_last and (layout.sample_rows or self._requests.prompt_logprob_slots):
            hidden = share.gather(hidden)
        if self._proposer is None or not self._stage.is_last:
            return began, hidden, None
        captured = [share.gather(stream) for stream in (*entering.captured, *captured)]
        return began, hidden, TokenStates(share.describe_all(metadata), captured)

    def _sample(
        self,
        plan: StepPlan,
        bitmask: PendingBitmask,
        layout: batches.BatchLayout,
        hidden: torch.Tensor,
        states: TokenStates | None,
    ) -> StepOutput:
        """What follows the layers of a step: samples, and what becomes of drafts."""
        if not self._stage.is_last:
            slots, offsets = layout.sample_slots, layout.sample_offsets
            self._stage.expect(plan, batches.sample_inputs(slots, offsets, self._requests))
            return StepOutput(plan.step_id, [], None)
        prompt_logprobs = score_prompts(
            self._model, plan, hidden, layout=layout, requests=self._requests
        )
        rows = layout.sample_rows
        if not rows:
            self._verify(plan, bitmask, indices([], self._device), states, layout)
            return StepOutput(plan.step_id, [], None, prompt_logprobs=prompt_logprobs)
        inputs = batches.sample_inputs(layout.sample_slots, layout.sample_offsets, self._requests)
        hidden = hidden[indices(layout.sample_tokens, self._device)]
        failed = list(self._requests.failures_of(layout.sample_slots))
        if failed:  # on this rank, perhaps alone: no rank may find a token for these rows
            hidden[indices(failed, self._device)] = torch.nan
        logits = self._model.local_logits(hidden)
        sampled = self._sampler(logits, inputs, masks=bitmask.of(rows, device=self._device))
        self._store_sampled(sampled, inputs)
        self._stage.keep(sampled.token_ids)
        return StepOutput(
            plan.step_id,
            rows,
            HostTensor(sampled.token_ids),
            sampled,
            prompt_logprobs,
            verification=self._verify(plan, bitmask, sampled.token_ids, states, layout),
        )

    def _verify(
        self,
        plan: StepPlan,
        bitmask: PendingBitmask,
        token_ids: torch.Tensor,
        states: TokenStates | None,
        layout: batches.BatchLayout,
    ) -> Verification | None:
        """Compare the drafts of a step with what was sampled in their places, `token_ids` of all
        samples; take back those that are wrong, and have the next ones proposed.
        """
        if self._proposer is None or states is None:
            return None
        rows = np.flatnonzero(plan.needs_sampling)
        slots, num_scheduled, num_drafts = (
            np.array(column)[rows]
            for column in (plan.slots, plan.num_scheduled, plan.num_draft_tokens)
        )
        firsts = (num_drafts + 1).cumsum() - num_drafts - 1
        ends = np.array(layout.sample_tokens, dtype=np.int64)[firsts]
        columns = slots, num_scheduled - num_drafts, firsts, num_drafts, ends
        slot, offset, first, count, end = upload(columns, self._device)
        drafts, seeds = self._requests.drafts[slot], self._requests.seeds[slot]
        has_gaps = self._proposer.has_gaps
        if num_drafts.any():
            has_gaps |= bitmask.drop_drafts(drafts, plan)
        lengths = self._requests.num_computed[slot] + offset
        accepted = self._proposer.accept(token_ids, drafts, first, count, seeds, lengths)
        lengths = lengths + accepted + 1
        self._requests.drafts[slot, : plan.num_proposed] = self._proposer.propose(
            states, slot, lengths, end + accepted, self._requests, plan.num_proposed
        )
        self._requests.advance(slot, accepted - count)
        if not num_drafts.any():
            return None
        self._stage.keep(token_ids, accepted)
        return Verification(
            rows.tolist(),
            num_drafts.tolist(),
            firsts.tolist(),
            HostTensor(accepted),
            HostTensor(drafts) if has_gaps else None,
        )

    def _replay_decodes(
        self, plan: StepPlan, bitmask: PendingBitmask, graphs: StepGraphs, shape: StepShape
    ) -> tuple[torch.cuda.Event | None, StepOutput]:
        """A captured step of generated tokens and their drafts. Only rows that ask for more are
        sampled again, and all where some have masks, of which the graph knows nothing.
        """
        columns = batches.StepColumns.of_decodes(plan.slots, plan.num_scheduled)
        graphs.prepare(shape, columns)
        num_tokens = len(columns.token_slots)
        captured = graphs.residuals(num_tokens)
        entering = self._stage.receive(num_tokens, graphs.entering(shape), captured)
        began = self._runtime.record_event()
        buffers = graphs.replay(shape)
        if not self._stage.is_last:
            self._stage.send(buffers.hidden[:num_tokens], entering, captured)
            self._stage.expect(plan, graphs.sample_inputs(shape, columns))
            return began, StepOutput(plan.step_id, [], None)
        rows = np.arange(len(plan.slots)).repeat(plan.num_scheduled).tolist()
        token_ids, sampled = buffers.token_ids[: len(rows)], None
        masks = bitmask.of(rows, device=self._device)
        if masks is None and not self._requests.filtered_slots.isdisjoint(plan.slots):
            graphs.draw(shape)
        if masks is not None or any(map(self._requests.needs_all_logits, plan.slots)):
            inputs = graphs.sample_inputs(shape, columns)
            picked = token_ids if masks is None else None
            sampled = self._sampler(buffers.logits[: len(rows)], inputs, picked=picked, masks=masks)
            self._store_sampled(sampled, inputs)
            token_ids = sampled.token_ids
        has_drafts = any(plan.num_draft_tokens)
        drops = has_drafts and bitmask.drop_drafts(graphs.drafts(shape, len(plan.slots)), plan)
        if sampled is not None or drops:
            graphs.finish(shape, token_ids)
        num_accepted = buffers.num_accepted[: len(plan.slots)] if has_drafts else None
        self._stage.keep(token_ids, num_accepted)
        verification = None
        if num_accepted is not None:
            has_gaps = drops or (self._proposer is not None and self._proposer.has_gaps)
            verified = graphs.drafts(shape, len(plan.slots))
            verification = Verification(
                list(range(len(plan.slots))),
                plan.num_draft_tokens,
                columns.query_starts[:-1].tolist(),
                HostTensor(num_accepted),
                HostTensor(verified) if has_gaps else None,
            )
        output = StepOutput(
            plan.step_id, rows, HostTensor(token_ids), sampled, verification=verification
        )
        return began, output

    def _store_sampled(self, sampled: Sampled, inputs: batches.SampleInputs) -> None:
        """Write the sampled tokens into their rows, where the next step finds them."""
        tokens = self._requests.tokens
        tokens[inputs.slots_device, inputs.positions_device] = sampled.token_ids.clamp_min(0).to(
            tokens.dtype
        )
