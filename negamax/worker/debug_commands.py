"""Run a benchmark's commands between steps: measure expert load, step times and kernel times."""

from functools import partial
from itertools import repeat
from operator import attrgetter
from pathlib import Path

import torch

from negamax.base.log import get_logger
from negamax.layers.moe import mixtures
from negamax.worker import config
from negamax.worker.config import DebugCommand, DebugResult, KernelTime
from negamax.worker.runner import ModelRunner
from negamax.worker.step_output import expert_bytes

logger = get_logger(__name__)

REPLAYS = 20


class DebugCommands:
    def __init__(self, runner: ModelRunner) -> None:
        self._mixtures, self._experts = mixtures(runner.model.layers), runner.experts
        self._graphs, self._device = runner.graphs, runner.device
        self._max_tokens = runner.config.max_num_batched_tokens
        # expert ids selected in each MoE layer, [max_tokens, top_k] int32; None: not recorded
        self._routing: list[torch.Tensor] | None = None
        self._profiler: torch.profiler.profile | None = None
        self._trace = ""  # path of the trace that STOP_PROFILE writes; empty: no trace
        self._rank = runner.config.layout.rank

    @property
    def needs_eager(self) -> bool:
        """Whether steps must run eagerly, because captured steps record no expert ids."""
        return self._routing is not None

    def run(self, command: DebugCommand) -> DebugResult:
        """Run `command` and return its result, which is empty if this rank has none."""
        if command.name == config.OBSERVE_ROUTING:
            self._routing = None
            if command.argument == 1:
                full = partial(torch.full, fill_value=-1, dtype=torch.int32, device=self._device)
                self._routing = [full((self._max_tokens, moe.top_k)) for moe in self._mixtures]
            for moe, ids in zip(self._mixtures, self._routing or repeat(None), strict=False):
                moe.observe(ids)
        if command.name == config.DISTINCT_EXPERTS and self._routing is not None:
            chosen = [ids[: command.argument] for ids in self._routing]
            experts = [ids[ids >= 0].unique().tolist() for ids in chosen]
            for ids in self._routing:  # clear rows that smaller steps do not overwrite
                ids.fill_(-1)
            return DebugResult(experts=experts)
        if command.name == config.EXPERT_COUNTS and self._experts is not None:
            return DebugResult(counts=expert_bytes(self._experts.counts()))
        if command.name == config.DECODE_SECONDS and self._graphs is not None:
            seconds = self._graphs.replay_seconds(command.argument, repeats=REPLAYS)
            return DebugResult(number=seconds)
        if command.name == config.START_PROFILE:
            _synchronize()
            self._trace = command.path and f"{command.path}-rank{self._rank}.json.gz"
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                # without a trace, only times of kernels are needed
                activities = [*activities * bool(self._trace), torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        if command.name == config.STOP_PROFILE and self._profiler is not None:
            _synchronize()
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            if self._trace:
                self._write_trace(profiler)
                return DebugResult()
            where = "device" if torch.cuda.is_available() else "cpu"
            describe = attrgetter("key", "count", f"self_{where}_time_total")
            kernels = [KernelTime(*describe(entry)) for entry in profiler.key_averages()]
            return DebugResult(kernels=[kernel for kernel in kernels if kernel.microseconds > 0])
        return DebugResult()

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        """Write the trace in Chrome's format. Log an error if the file cannot be written."""
        try:
            Path(self._trace).parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(self._trace)
        except OSError as error:
            logger.error("the profile cannot be written: %s", error)
        else:
            logger.info("a profile was written to %s", self._trace)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
