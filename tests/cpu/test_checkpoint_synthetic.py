"""Synthetic weights: reproducible, the same for every tensor-parallel degree, and of a magnitude that a model can run on."""

from __future__ import annotations

import math

import torch
from m2_checkpoints import SlotModel, tiny_spec

from negamax.checkpoint.synthetic import fill_synthetic

SPEC = tiny_spec(hidden_size=64, num_local_experts=16, num_hidden_layers=3)


def filled(*, seed: int = 0, rank: int = 0, size: int = 1) -> dict[str, torch.Tensor]:
    model = SlotModel(SPEC, rank=rank, size=size)
    fill_synthetic(model, SPEC, seed)
    assert all(slot.written for slot in model.weight_slots().values())
    return model.parameters


def test_the_seed_decides_and_tensors_differ() -> None:
    first, again, other = filled(), filled(), filled(seed=1)
    for name, tensor in first.items():
        assert torch.isfinite(tensor).all()
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])
    assert not torch.equal(first["model.layers.0.self_attn.q_proj.weight"], first["model.layers.1.self_attn.q_proj.weight"])


def test_ranks_hold_parts_of_one_model() -> None:
    whole, parts = filled(), [filled(rank=rank, size=4) for rank in range(4)]
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor)


def test_magnitudes_are_those_of_a_trained_model() -> None:
    weights = filled()
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            assert (tensor - 1).abs().max() < 0.5
        elif name.endswith("bias"):
            assert tensor.min() > 6.5 and tensor.max() < 7.5
        elif not name.endswith("embed_tokens.weight"):
            residual = math.sqrt(2 * SPEC.num_layers) if name.endswith(("o_proj.weight", "w2.weight")) else 1.0
            assert abs(tensor.std().item() * math.sqrt(tensor.shape[1]) * residual - 1) < 0.1, name


def test_synthetic_router_uses_all_experts() -> None:
    weights = filled()
    x = torch.randn(512, SPEC.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer in range(SPEC.num_layers):
        prefix = f"model.layers.{layer}.block_sparse_moe."
        scores = torch.sigmoid(x @ weights[prefix + "gate.weight"].T) + weights[prefix + "e_score_correction_bias"]
        counts = torch.bincount(scores.topk(SPEC.experts_per_token).indices.flatten(), minlength=SPEC.num_experts)
        even = 512 * SPEC.experts_per_token / SPEC.num_experts
        assert even / 2 < counts.min() and counts.max() < even * 2
