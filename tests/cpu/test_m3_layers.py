from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MiniMaxM3VLTextConfig

from negamax.formats.platform import CPU
from negamax.kernels import registry
from negamax.kernels.activations import SwiGlu
from negamax.layers.basic import RmsNorm
from negamax.layers.mlp import Mlp
from negamax.layers.moe import SparseMoe
from negamax.layers.names import MlpNames
from negamax.models.minimax_m3 import names
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import WeightFormat

HIDDEN, WIDTH, DENSE, EXPERTS, TOP_K = 48, 40, 136, 8, 3
ACTIVATION = SwiGlu(alpha=1.702, limit=7.0, beta=1.0)
SHARED: dict[str, Any] = {
    "kernels": registry.resolve(platform=CPU, dtype=torch.float32),
    "weights": WeightFormat(torch.float32, torch.device("cpu")),
}


def oracle() -> Any:
    """Import the modules of transformers on first use, which takes seconds."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl

    return modeling_minimax_m3_vl


def config(**sizes: int) -> MiniMaxM3VLTextConfig:
    return MiniMaxM3VLTextConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, dense_intermediate_size=DENSE,
        num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, routed_scaling_factor=2.0, **sizes,
    )  # fmt: skip


def randomize(module: torch.nn.Module) -> dict[str, Tensor]:
    """Make gate and up projections so large that the limit clamps some values."""
    generator = torch.Generator().manual_seed(1)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, tensor in sorted(tensors.items()):
            scale = 5.0 if "gate_up" in name else 1.0
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
            if tensor.dim() > 1:
                tensor.mul_(tensor.shape[-1] ** -0.5)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def mlp_tensors(own: MlpNames, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    gate, up = gate_up.chunk(2)
    return {own.gate: gate, own.up: up, own.down: down}


def write(layer: Any, tensors: dict[str, Tensor]) -> Any:
    for slot in layer.slots:
        slot.write(tensors.pop(slot.name))
    assert not tensors
    if not isinstance(layer, RmsNorm):
        layer.finish_loading()
    return layer


def tokens() -> Tensor:
    return torch.randn(29, HIDDEN, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("shared_width", [WIDTH, 2 * WIDTH])  # among the experts, or beside them
def test_a_mixture_of_experts(shared_width: int) -> None:
    block = oracle().MiniMaxM3VLSparseMoeBlock(config(shared_intermediate_size=shared_width))
    t, its = randomize(block), names.moe(0)
    tensors = {its.router: t["gate.weight"], its.router_bias: t["gate.e_score_correction_bias"]}
    assert its.shared is not None
    tensors |= mlp_tensors(
        its.shared, t["shared_experts.gate_up_proj.weight"], t["shared_experts.down_proj.weight"]
    )
    for number in range(EXPERTS):
        tensors |= mlp_tensors(
            its.expert(number), t["experts.gate_up_proj"][number], t["experts.down_proj"][number]
        )
    moe = SparseMoe(
        its, layer=0, hidden_size=HIDDEN, width=WIDTH, num_experts=EXPERTS, top_k=TOP_K,
        activation=ACTIVATION, routed_scaling=2.0, shared_width=shared_width,
        context=ParallelContext.single(), **SHARED,
    )  # fmt: skip
    write(moe, tensors)
    x = tokens()
    for some in (x, x[:1]):
        expected = block(some.unsqueeze(0)).squeeze(0).detach()
        torch.testing.assert_close(moe(some).x, expected, atol=1e-5, rtol=1e-5)


def test_a_dense_mlp() -> None:
    module = oracle().MiniMaxM3VLDenseMLP(config())
    t, own = randomize(module), names.mlp(0)
    mlp = Mlp(
        own, hidden_size=HIDDEN, width=DENSE, activation=ACTIVATION,
        context=ParallelContext.single(), **SHARED,
    )  # fmt: skip
    write(mlp, mlp_tensors(own, t["gate_up_proj.weight"], t["down_proj.weight"]))
    x = tokens()
    gate, up = (x @ t["gate_up_proj.weight"].t()).chunk(2, dim=1)
    assert (gate > 7).any() and (up > 7).any() and (up < -7).any()
    torch.testing.assert_close(mlp(x).x, module(x).detach(), atol=1e-5, rtol=1e-5)
