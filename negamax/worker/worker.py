"""One rank: loads its shard of the model, owns the cache and the rows, and executes plans in order."""

from __future__ import annotations

from pathlib import Path

import torch

from negamax.base.log import get_logger
from negamax.checkpoint.loader import load_weights
from negamax.checkpoint.synthetic import fill_synthetic
from negamax.kernels.registry import resolve
from negamax.models.registry import CausalModel, build_model
from negamax.parallel.context import ParallelContext
from negamax.scheduler.step import StepPlan, StepResult, TokenLogprobs
from negamax.worker import batch as batches
from negamax.worker import kv_pool
from negamax.worker.config import WorkerConfig, WorkerReady
from negamax.worker.rows import Rows
from negamax.worker.runner import Runner
from negamax.worker.sampler import sample

logger = get_logger(__name__)


class Worker:
    """The model runtime of one rank. `execute` is called from one thread, plan after plan."""

    def __init__(self, config: WorkerConfig) -> None:
        torch.set_num_threads(config.num_threads)
        self._block_size = config.block_size
        device = torch.device("cpu")
        dtype = choose_dtype(config)
        layout = config.layout
        kv_pool.check_weights_fit(config.spec.num_parameters * dtype.itemsize // layout.world_size, num_ranks=layout.world_size)
        context = _parallel_context(config)
        self._kernels = kernels = resolve(platform="cpu", dtype=dtype)
        model = build_model(config.spec, context=context, dtype=dtype, device=device, kernels=kernels)
        load_summary = _load(model, config)
        num_blocks = config.num_kv_blocks or _profiled_blocks(model, config, dtype=dtype)
        layers, shape = model.kv_shape(num_blocks, config.block_size)
        kv = kv_pool.allocate(layers, shape=shape, dtype=dtype, device=device)
        self._runner = Runner(model, kv)
        self._rows = Rows(
            config.max_num_seqs,
            config.max_model_len,
            max_blocks=-(-config.max_model_len // config.block_size),
            eos_token_ids=config.eos_token_ids,
            device=device,
        )
        self.ready = WorkerReady(
            num_kv_blocks=num_blocks,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            kernels=kernels.describe(),
            load_summary=load_summary,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. A row that fails is reported in `errors` and leaves the other rows as they would be without it."""
        self._rows.apply(plan)
        try:
            return self._run(plan)
        except Exception:
            logger.exception("step %d failed as a batch; running its %d rows one by one", plan.step_id, len(plan.slots))
            return self._run_apart(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        """The step itself: gather, forward, sample, remember. Writes are idempotent, so it may be repeated."""
        batch = batches.build(plan, self._rows, block_size=self._block_size)
        hidden = self._runner.hidden(batch)
        prompt_logprobs = self._runner.prompt_logprobs(plan, hidden, batch=batch, rows=self._rows)
        if not batch.sample_slots:
            return StepResult(plan.step_id, [], {}, prompt_logprobs, {})
        sampled = sample(self._runner.logits(hidden, batch), batch, rows=self._rows, kernels=self._kernels)
        self._rows.tokens[batch.sample_slots_device, batch.sample_positions_device] = sampled.token_ids
        errors = {}
        if sampled.broken:
            rows = [i for i, samples in enumerate(plan.samples) if samples]
            errors = {rows[i]: "the model produced logits that are not finite numbers" for i in sampled.broken}
        return StepResult(plan.step_id, sampled.token_ids.tolist(), sampled.logprobs, prompt_logprobs, errors)

    def _run_apart(self, plan: StepPlan) -> StepResult:
        """The same plan a row at a time, so that only rows that fail by themselves are lost."""
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        for row, samples in enumerate(plan.samples):
            try:
                result = self._run(_single_row(plan, row))
            except Exception as error:
                logger.exception("row %d of step %d failed", row, plan.step_id)
                errors[row] = f"{type(error).__name__} while the model ran this request"
                token_ids += [0] if samples else []
                continue
            if 0 in result.logprobs:
                logprobs[len(token_ids)] = result.logprobs[0]
            if 0 in result.prompt_logprobs:
                prompt_logprobs[row] = result.prompt_logprobs[0]
            if 0 in result.errors:
                errors[row] = result.errors[0]
            token_ids += result.token_ids
        return StepResult(plan.step_id, token_ids, logprobs, prompt_logprobs, errors)


def choose_dtype(config: WorkerConfig) -> torch.dtype:
    """The compute dtype: as asked; "auto" is the checkpoint's, or float32 where this CPU has no bfloat16 arithmetic."""
    name = config.dtype
    if name == "auto":
        name = config.spec.dtype
        if name != "float32" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            logger.info("this CPU has no bfloat16 arithmetic: computing in float32 (--dtype float32)")
            name = "float32"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _parallel_context(config: WorkerConfig) -> ParallelContext:
    if config.layout.world_size == 1:
        return ParallelContext.single()
    assert config.init_method is not None, "several ranks need a rendezvous"
    return ParallelContext.gloo(config.layout, config.init_method)


def _load(model: CausalModel, config: WorkerConfig) -> str:
    """Fill the model's weights and pack them; one line that says what was loaded."""
    if config.folder is None:
        fill_synthetic(model, config.spec, config.seed)
        summary = f"synthetic weights, seed {config.seed}"
    else:
        summary = load_weights(model, config.spec, Path(config.folder)).summary()
    model.finish_loading()
    return summary


def _profiled_blocks(model: CausalModel, config: WorkerConfig, *, dtype: torch.dtype) -> int:
    layers, shape = model.kv_shape(1, config.block_size)
    block_bytes = 2 * layers * int(torch.Size(shape).numel()) * dtype.itemsize
    return kv_pool.choose_num_blocks(
        block_bytes=block_bytes,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        memory=config.kv_cache_memory,
        num_ranks=config.layout.world_size,
    )


def _single_row(plan: StepPlan, row: int) -> StepPlan:
    return StepPlan(
        step_id=plan.step_id,
        new_rows=[],
        appended_slots=[],
        appended_blocks=[],
        slots=[plan.slots[row]],
        starts=[plan.starts[row]],
        counts=[plan.counts[row]],
        samples=[plan.samples[row]],
    )
