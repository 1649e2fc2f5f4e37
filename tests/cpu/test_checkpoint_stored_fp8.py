import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from m2_checkpoints import FP8_CONFIG, load_weights, random_tensors, save_single, tiny_spec, to_fp8
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.checkpoint.loader import CheckpointReport
from negamax.checkpoint.synthetic import fill_synthetic
from negamax.config.model_spec import ModelSpec
from negamax.formats.floats import E4M3_GROUPS, PLAIN
from negamax.formats.readable import reads_e4m3_blocks
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.op import Kernel
from negamax.kernels.platform import platform_of
from negamax.kernels.quantize.op import dequantize_block
from negamax.kernels.registry import KernelTable, resolve
from negamax.layers.attention import Attention
from negamax.layers.moe import SparseMoe
from negamax.layers.weights import WeightSlot, slots_by_name
from negamax.models import minimax_names as names
from negamax.models.memory import weight_bytes
from negamax.models.registry import bundled_spec
from negamax.parallel.collectives import SingleRank
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.detect import detect
from negamax.quantization.scheme import WeightFormat

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
# Every TP4 shard is at least one block.
SPEC = tiny_spec(
    hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8,
    num_key_value_heads=4, head_dim=128,
    num_local_experts=4, quantization_config=FP8_CONFIG,
)  # fmt: skip
QUANTIZED = tuple(
    f"{name}.weight" for name in ["q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"]
)


def kernels(prepared: dict[str, list[Any]]) -> KernelTable:
    """Return CPU kernels that only record the weights (plain or FP8) at preparation."""

    def recording(op: str) -> tuple[Kernel, ...]:
        def prepare(*weights: StoredWeight, **constants: object) -> None:
            prepared.setdefault(op, []).append(weights)

        plain = replace(table[op], prepare=prepare)
        return plain, replace(plain, reads=reads_e4m3_blocks, activation=E4M3_GROUPS)

    table = resolve(platform=platform_of(CPU), dtype=torch.float32)
    changed = {op: recording(op) for op in ("gemm.linear", "moe.experts")}
    return replace(table, candidates={**table.candidates, **changed})


@dataclass
class OneLayer:
    """Attention and experts of layer 0 on one rank; all other slots need no data."""

    spec: ModelSpec
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    keep_quantized: bool = True
    device: torch.device = CPU
    prepared: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec, prefix = self.spec, "model.layers.0"
        scheme = detect(spec.quantization)
        weights = WeightFormat(torch.float32, self.device, scheme, self.keep_quantized)
        context = ParallelContext(
            self.layout, attention_group=SingleRank(), expert_group=SingleRank(), world=SingleRank()
        )
        shared: dict[str, Any] = {
            "context": context,
            "kernels": kernels(self.prepared),
            "weights": weights,
        }
        self.attention = Attention(
            names.attention(0), hidden_size=spec.hidden_size, heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, eps=1e-6, **shared,
        )  # fmt: skip
        self.moe = SparseMoe(
            names.moe(0), layer=0, hidden_size=spec.hidden_size,
            width=spec.expert_width,
            num_experts=spec.num_experts, top_k=spec.experts_per_token, **shared,
        )  # fmt: skip
        hidden, vocab = (spec.hidden_size,), (spec.vocab_size, spec.hidden_size)
        rest = {
            "model.embed_tokens.weight": vocab, "lm_head.weight": vocab,
            "model.norm.weight": hidden,
            f"{prefix}.input_layernorm.weight": hidden,
            f"{prefix}.post_attention_layernorm.weight": hidden,
        }  # fmt: skip
        unneeded = [WeightSlot(name, shape, target=None) for name, shape in rest.items()]
        self._slots = slots_by_name([*unneeded, *self.attention.slots, *self.moe.slots])

    def weight_slots(self) -> dict[str, WeightSlot]:
        return self._slots

    def matrices(self) -> dict[str, list[tuple[Tensor, Tensor | None]]]:
        """Return the kernels' qkv, o_proj, gate_up and down as (values, scale) per matrix."""
        self.attention.finish_loading()
        self.moe.finish_loading()
        ((qkv,), (out,)), ((gate_up, down),) = (
            self.prepared["gemm.linear"],
            self.prepared["moe.experts"],
        )
        found = {name: [apart(weight)] for name, weight in (("qkv", qkv), ("o_proj", out))}
        for name, weight in (("gate_up", gate_up), ("down", down)):
            values, scales = apart(weight)
            found[name] = list(
                zip(values, [None] * len(values) if scales is None else scales, strict=True)
            )
        return found


def apart(weight: StoredWeight) -> tuple[Tensor, Tensor | None]:
    return weight.values, None if weight.format is PLAIN else weight.scale


def ranks(tp: int, ep: int = 1) -> list[ParallelLayout]:
    return [ParallelLayout(rank=rank, tp=tp, ep=ep) for rank in range(tp)]


def load(model: OneLayer, stored: dict[str, Tensor], folder: Path) -> CheckpointReport:
    return load_weights(model.weight_slots(), model.spec, save_single(folder, stored))


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)])
def test_kept_weights_dequantize_to_the_plain_ones(tmp_path: Path, tp: int, ep: int) -> None:
    stored = to_fp8(random_tensors(SPEC))
    for layout in ranks(tp, ep):
        kept, plain = OneLayer(SPEC, layout), OneLayer(SPEC, layout, keep_quantized=False)
        report, plain_report = load(kept, stored, tmp_path), load(plain, stored, tmp_path)
        count = 4 + 3 * SPEC.num_experts // ep
        assert (report.num_kept, report.num_dequantized) == (count, 0)
        assert (plain_report.num_kept, plain_report.num_dequantized) == (0, count)
        assert f"{count} of them weights kept as fp8_e4m3_block_128x128" in report.summary()
        expected = plain.matrices()
        for name, matrices in kept.matrices().items():
            pairs = zip(matrices, expected[name], strict=True)
            for (values, scale), (dequantized, no_scale) in pairs:
                assert values.dtype == FP8 and no_scale is None
                assert scale is not None and scale.dtype == torch.float32
                assert torch.equal(dequantize_block(values, scale), dequantized), (name, layout)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_rank_reads_the_bytes_of_its_slices_only(tmp_path: Path, ep: int) -> None:
    stored = to_fp8(random_tensors(SPEC))

    def count(*ends: str) -> int:
        found = (name for name in stored if name.removesuffix("_scale_inv").endswith(ends))
        return sum(stored[name].nbytes for name in found)

    split = count(*QUANTIZED, "q_norm.weight", "k_norm.weight")
    replicated = count("gate.weight", "bias")
    for layout in ranks(4, ep):
        assert load(OneLayer(SPEC, layout), stored, tmp_path).num_bytes == split // 4 + replicated


@pytest.mark.parametrize(
    ("tp", "ep"), [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (16, 16)]
)
def test_ranks_tile_the_blocks_of_minimax_m2(tp: int, ep: int) -> None:
    """At published sizes, the ranks' regions tile all quantized tensors; a rank's bytes are as
    planned.
    """
    spec, meta = replace(bundled_spec("minimax-m2"), num_layers=1, num_experts=16), "meta"
    layers = [OneLayer(spec, each, device=torch.device(meta)) for each in ranks(tp, ep)]
    slots = [layer.weight_slots() for layer in layers]
    quantized = [name for name in slots[0] if name.endswith(QUANTIZED)]
    assert len(quantized) == 4 + 3 * 16
    for name in quantized:
        copies = max(1, tp // 8) if name.endswith(("k_proj.weight", "v_proj.weight")) else 1
        for key, unit in ((name, 1), (name + "_scale_inv", 128)):
            shape = slots[0][key].shape
            assert shape == tuple(size // unit for size in slots[0][name].shape)
            cells = Counter(
                cell
                for each in slots
                if each[key].needed
                for cell in product(*(part[:: 128 // unit] for part in each[key].region))
            )
            every = product(*(range(0, size, 128 // unit) for size in shape))
            assert cells == dict.fromkeys(every, copies)
    others = 4 * spec.hidden_size * (2 * spec.vocab_size // tp + 3)  # weights without slots here
    for layer, own in zip(layers, slots, strict=True):
        held = sum(
            math.prod(map(len, slot.region)) * 4
            for slot in own.values()
            if slot.needed and slot.source is PLAIN and not slot.optional
        )
        layer.matrices()
        held += sum(
            tensor.nbytes
            for calls in layer.prepared.values()
            for weights in calls
            for weight in weights
            for tensor in weight.tensors.values()
        )
        assert held + others == weight_bytes(
            spec, dtype="float32", layout=ParallelLayout(tp=tp, ep=ep)
        )


@pytest.mark.parametrize(("head_dim", "kept"), [(128, True), (64, True), (16, False)])
def test_heads_smaller_than_blocks_are_dequantized(head_dim: int, kept: bool) -> None:
    """Four query heads and a KV head on each of 4 ranks."""
    for layout in ranks(4):
        spec = replace(SPEC, num_heads=16, head_dim=head_dim, rotary_dim=16)
        attention = OneLayer(spec, layout).attention
        slots = slots_by_name(attention.slots)
        assert ("model.layers.0.self_attn.o_proj.weight_scale_inv" in slots) is kept
        qkv = kept and head_dim == 128
        assert ("model.layers.0.self_attn.q_proj.weight_scale_inv" in slots) is qkv
        assert (attention.activation is not None) is qkv
        for part, is_held in (("o", kept), ("q", qkv)):
            reason = slots[f"model.layers.0.self_attn.{part}_proj.weight"].reason
            assert ("cuts blocks or groups with one scale" in reason) is not is_held


def test_excluded_modules_stay_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {
        **FP8_CONFIG,
        "modules_to_not_convert": ["gate", "model.layers.0.self_attn.o_proj", "q_proj"],
    }
    spec = replace(SPEC, quantization=tiny_spec(quantization_config=config).quantization)
    mixed = OneLayer(spec)  # FP8 parts of a matrix with plain parts are dequantized
    assert mixed.attention.activation is None and mixed.moe.activation == E4M3_GROUPS
    stored, tensors = to_fp8(random_tensors(spec)), random_tensors(spec)
    for part in ("o_proj", "q_proj"):
        name = f"model.layers.0.self_attn.{part}.weight"
        stored[name] = tensors[name]
        del stored[name + "_scale_inv"]
    with caplog.at_level("INFO", logger="negamax"):
        report = load(mixed, stored, tmp_path)
    assert report.num_dequantized == 2
    assert "2 of them fp8_e4m3_block_128x128, dequantized to the compute dtype" in report.summary()
    (line,) = [text for text in caplog.messages if "are dequantized" in text]
    assert re.fullmatch(
        r"2 weights \(fp8_e4m3_block_128x128, .* MiB\) are dequantized to the compute dtype, one "
        "at a time: fused with weights in another format",
        line,
    )
    values, scale = mixed.matrices()["qkv"][0]
    assert scale is None and torch.equal(values[: 8 * 128], stored[name])
    with pytest.raises(CheckpointError, match=r"q_proj.weight has dtype F8_E4M3; supported: BF16"):
        load(OneLayer(spec), to_fp8(tensors), tmp_path)
    config["modules_to_not_convert"] = ["gate", "model.layers.0.self_attn.o_proj"]
    spec = replace(SPEC, quantization=tiny_spec(quantization_config=config).quantization)
    attention = OneLayer(spec).attention
    assert attention.activation == E4M3_GROUPS and not attention.gives_quantized


def test_synthetic_fp8_weights_do_not_depend_on_the_split() -> None:
    whole = OneLayer(SPEC)
    fill_synthetic(whole.weight_slots(), SPEC, 5)
    expected = whole.matrices()
    parts = []
    for layout in ranks(4):
        part = OneLayer(SPEC, layout)
        fill_synthetic(part.weight_slots(), SPEC, 5)
        parts.append(part.matrices())
    for name, axis in (("o_proj", 1), ("down", 1)):
        for index, (values, scale) in enumerate(expected[name]):
            found = [part[name][index] for part in parts]
            assert torch.equal(
                torch.cat([v.view(torch.uint8) for v, _ in found], axis), values.view(torch.uint8)
            )
            assert scale is not None and torch.equal(torch.cat([s for _, s in found], axis), scale)
    for index, (values, _) in enumerate(expected["gate_up"]):
        halves = [part["gate_up"][index][0].view(torch.uint8).chunk(2) for part in parts]
        stacked = torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        assert torch.equal(stacked, values.view(torch.uint8))
