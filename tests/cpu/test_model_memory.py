import math
from dataclasses import replace

import pytest
import torch
from model_support import build, tiny_config
from stored_kernels import keeping_stored
from transformers import MiniMaxM3VLConfig

from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import QuantizationSpec
from negamax.formats.platform import CPU
from negamax.kernels.registry import resolve
from negamax.layers.weights import WeightSlot
from negamax.models.memory import dequantized, expert_padding, read_bytes, weight_bytes
from negamax.models.registry import import_names, read_spec
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from tests import tiny_m3

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64}
SPEC = read_spec(tiny_config(3, intermediate_size=40, **SIZES))


def m3(shared_width: int) -> ModelSpec:
    sizes = tiny_m3.random_sizes(
        4, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, index_n_heads=4,
        vocab_size=64, num_local_experts=8, intermediate_size=40, dense_intermediate_size=48,
        shared_intermediate_size=shared_width, mlp_layer_types=["dense", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse"],
    )  # fmt: skip
    return read_spec(MiniMaxM3VLConfig(text_config=sizes).to_dict())


def held_bytes(slots: dict[str, WeightSlot]) -> int:
    return sum(
        math.prod(map(len, slot.region)) * slot.dtype.itemsize
        for slot in slots.values()
        if slot.dtype is not None and not slot.optional
    )


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 8, "sym": True}
FAMILIES = {"m2": SPEC, "m3": m3(40), "m3 beside": m3(80)}


@pytest.mark.parametrize("family", ["m2", "m3"])
def test_a_family_names_every_tensor_of_a_model_and_its_shape(family: str) -> None:
    spec = FAMILIES[family]
    said = {
        weight.name.replace("*", str(number)): weight.shape
        for weight in import_names(spec).weights(spec)
        for number in range(weight.count)
    }
    slots = build(spec, loaded=False).weight_slots()
    assert said == {name: slot.shape for name, slot in slots.items() if not slot.optional}
    weights = import_names(spec).weights(spec)
    assert sum(weight.num_elements for weight in weights) == sum(map(math.prod, said.values()))


SPLITS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]
LAYOUTS = [
    *(ParallelLayout(tp=tp, ep=ep) for tp, ep in SPLITS),
    *(ParallelLayout(rank, tp=2, pp=2) for rank in (0, 3)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_slots(family: str, layout: ParallelLayout, dtype: torch.dtype) -> None:
    """On 4 ranks the 2 KV heads are copied. Experts take equal bytes sharded or whole."""
    spec = FAMILIES[family]
    context = replace(ParallelContext.single(), layout=layout)
    slots = build(spec, loaded=False, context=context, dtype=dtype).weight_slots()
    name = str(dtype).removeprefix("torch.")
    assert weight_bytes(spec, dtype=name, kept=dequantized, layout=layout) == held_bytes(slots)


@pytest.mark.parametrize("expert", [r"\d+", "[23]", "(2|3)", "3"])
@pytest.mark.parametrize("bits", [4, 8])
def test_experts_that_no_kernel_takes_together_count_as_held(bits: int, expert: str) -> None:
    name = rf".*layers\.0\.mlp\.experts\.{expert}\.down_proj"
    if expert == "3":
        name = "model.layers.0.mlp.experts.3.down_proj"
    described = AUTO_ROUND | {"extra_config": {name: {"bits": bits}}}
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16}
    config = {**tiny_config(3, intermediate_size=48, **sizes), "quantization_config": described}
    spec = read_spec(config)
    kernels = keeping_stored(resolve(platform=CPU, dtype=torch.float32))
    slots = build(spec, loaded=False, kernels=kernels).weight_slots()
    is_kept = "model.layers.0.block_sparse_moe.experts.0.w1.qweight" in slots
    assert is_kept is (bits == 4)
    assert weight_bytes(spec, dtype="float32") == held_bytes(slots)
    assert (expert_padding(spec, layout=ParallelLayout(tp=12)) is None) is not is_kept


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_each_rank_counts_the_experts_that_it_has(rank: int) -> None:
    """Give rank 1 one of the three experts in 8 bits, and rank 3 the other two."""
    described = AUTO_ROUND | {"extra_config": {r".*\.experts\.[267]\.": {"bits": 8}}}
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64}
    config = tiny_config(3, intermediate_size=48, hidden_size=64, head_dim=16, **sizes)
    spec = read_spec({**config, "quantization_config": described})
    layout = ParallelLayout(rank, tp=4, ep=4)
    context = replace(ParallelContext.single(), layout=layout)
    kernels = keeping_stored(resolve(platform=CPU, dtype=torch.float32))
    slots = build(spec, loaded=False, context=context, kernels=kernels).weight_slots()
    assert weight_bytes(spec, dtype="float32", layout=layout) == held_bytes(slots)


def test_many_tokens_read_all_weights_and_a_packed_head_counts_as_held() -> None:
    everything = weight_bytes(SPEC, dtype="bfloat16") - SPEC.vocab_size * SPEC.hidden_size * 2
    assert read_bytes(SPEC, 10**6, dtype="bfloat16", ranks=1) == pytest.approx(everything)
    assert read_bytes(SPEC, 1, dtype="bfloat16", ranks=1) < everything
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    packed, plain = (
        replace(SPEC, quantization=QuantizationSpec("gptq", {**gptq, "lm_head": lm_head}))
        for lm_head in (True, False)
    )
    assert weight_bytes(packed, dtype="bfloat16") == weight_bytes(plain, dtype="bfloat16")
    assert weight_bytes(plain, dtype="bfloat16") < weight_bytes(SPEC, dtype="bfloat16")
