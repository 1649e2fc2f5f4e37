"""Questions that benchmarks ask a worker between steps: how spread the routing was, what a step
costs without the host, and which kernels take its time."""

from __future__ import annotations

import torch

from negamax.models.registry import CausalModel
from negamax.worker.config import (
    DECODE_SECONDS,
    DISTINCT_EXPERTS,
    OBSERVE_ROUTING,
    START_PROFILE,
    STOP_PROFILE,
    KernelTime,
    Probe,
    ProbeAnswer,
    WorkerConfig,
)
from negamax.worker.graphs import DecodeGraphs

REPLAYS = 20


class Probes:
    """Answers for one worker."""

    def __init__(self, model: CausalModel, config: WorkerConfig, *, device: torch.device) -> None:
        self._model, self._spec, self._device = model, config.spec, device
        self._shape = (
            config.spec.num_layers,
            config.max_num_batched_tokens,
            config.spec.experts_per_token,
        )
        self._routing: torch.Tensor | None = None
        self._profiler: torch.profiler.profile | None = None

    @property
    def need_eager(self) -> bool:
        """Whether steps must run kernel by kernel: captured ones do not know that they are
        watched.
        """
        return self._routing is not None

    def answer(self, probe: Probe, graphs: DecodeGraphs | None) -> ProbeAnswer:
        """The answer to `probe`; an empty one where this worker cannot tell."""
        if probe.name == OBSERVE_ROUTING:
            on = probe.argument == 1
            self._routing = (
                torch.zeros(self._shape, dtype=torch.int32, device=self._device) if on else None
            )
            self._model.observe_routing(self._routing)
        if probe.name == DISTINCT_EXPERTS and self._routing is not None:
            chosen = self._routing[:, : probe.argument].flatten(1).long()  # [layers, rows * top_k]
            hit = torch.zeros(len(chosen), self._spec.num_experts, device=chosen.device).scatter_(
                1, chosen.clamp_min(0), 1.0
            )
            return ProbeAnswer(number=float(hit.sum(1).mean()))
        if probe.name == DECODE_SECONDS and graphs is not None:
            return ProbeAnswer(number=graphs.replay_seconds(probe.argument, repeats=REPLAYS))
        if probe.name == START_PROFILE:
            _synchronize()
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities = [torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        if probe.name == STOP_PROFILE and self._profiler is not None:
            _synchronize()
            self._profiler.stop()
            on_gpu = torch.cuda.is_available()
            kernels = [
                KernelTime(
                    entry.key,
                    entry.count,
                    entry.self_device_time_total if on_gpu else entry.self_cpu_time_total,
                )
                for entry in self._profiler.key_averages()
            ]
            self._profiler = None
            return ProbeAnswer(kernels=[kernel for kernel in kernels if kernel.microseconds > 0])
        return ProbeAnswer()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
