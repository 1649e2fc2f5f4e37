"""Mixture of experts: every rank routes every token, runs its share of the experts, and the group adds up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from negamax.kernels.registry import KernelTable
from negamax.layers.weights import WeightSlot
from negamax.parallel.context import ParallelContext


class SparseMoe:
    """Router (replicated, fp32) and SwiGLU experts, split by expert and by width as the layout's expert view says."""

    def __init__(
        self,
        prefix: str,
        *,
        hidden_size: int,
        width: int,
        num_experts: int,
        top_k: int,
        context: ParallelContext,
        kernels: KernelTable,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        view = context.layout.experts
        self._experts, self._group, self._top_k = view.experts(num_experts), context.expert_group, top_k
        rows = view.width(width)
        self._route, experts_kernel = kernels["moe.route"].run, kernels["moe.experts"]
        assert experts_kernel.prepare is not None
        self._run, self._prepare = experts_kernel.run, experts_kernel.prepare
        self._gate = torch.empty(num_experts, hidden_size, dtype=torch.float32, device=device)
        self._bias = torch.empty(num_experts, dtype=torch.float32, device=device)
        local = len(self._experts)
        self._gate_up = torch.empty(local, 2 * len(rows), hidden_size, dtype=dtype, device=device)  # gate rows, then up rows
        self._down = torch.empty(local, hidden_size, len(rows), dtype=dtype, device=device)
        self._prepared: Any = None
        self.slots = [
            WeightSlot(f"{prefix}.gate.weight", (num_experts, hidden_size), target=self._gate),
            WeightSlot(f"{prefix}.e_score_correction_bias", (num_experts,), target=self._bias),
        ]
        everything = range(hidden_size)
        for expert in range(num_experts):
            mine = expert in self._experts
            index = expert - self._experts.start
            gate = self._gate_up[index, : len(rows)] if mine else None
            up = self._gate_up[index, len(rows) :] if mine else None
            down = self._down[index] if mine else None
            name = f"{prefix}.experts.{expert}"
            self.slots += [
                WeightSlot(f"{name}.w1.weight", (width, hidden_size), target=gate, region=(rows, everything)),
                WeightSlot(f"{name}.w3.weight", (width, hidden_size), target=up, region=(rows, everything)),
                WeightSlot(f"{name}.w2.weight", (hidden_size, width), target=down, region=(everything, rows)),
            ]

    def finish_loading(self) -> None:
        """Put the expert weights into the kernel's layout; the plain copies are freed."""
        self._prepared = self._prepare(self._gate_up, self._down)
        del self._gate_up, self._down

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        ids, weights = self._route(x, self._gate, self._bias, top_k=self._top_k)
        out = self._run(x, ids, weights, self._prepared, first=self._experts.start, count=len(self._experts))
        return self._group.all_reduce(out)
