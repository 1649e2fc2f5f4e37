"""Plant one fault into a checkpoint of each format; the error must name the tensor.

Faults in headers must be refused before data is read. If a format has no scale, faults of the scale
are applied to the values.
"""

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loading_support import conversion, spec_of
from m2_checkpoints import CONFIG, load_weights, quantize_block, random_tensors, tiny_spec
from model_support import H200, build
from safetensors.torch import load_file, save_file
from stored_formats import EXPORTS, FORMATS, in_full, sample, write
from stored_kernels import KEEPING
from torch import Tensor

from negamax import LLM, SamplingParams
from negamax.base.errors import CheckpointError, ConfigError
from negamax.checkpoint.loader import fill
from negamax.checkpoint.plan import plan_load
from negamax.config.model_spec import ModelSpec
from negamax.convert.convert import convert
from negamax.engine.core.setup import _make_worker_config
from negamax.engine.core.source import locate
from negamax.formats.floats import PLAIN
from negamax.formats.platform import CPU
from negamax.formats.tensor_format import Role, StoredWeight
from negamax.kernels.attention.op import DECODE, PREFILL
from negamax.kernels.gemm.op import LINEAR
from negamax.kernels.moe.op import EXPERTS, NORM_ROUTE, ROUTE, Router
from negamax.kernels.norm.op import ADD_RMS
from negamax.kernels.op import AnyKernel, AnyOp
from negamax.kernels.registry import PLAIN_NORM, KernelTable, resolve
from negamax.layers.weights import WeightSlot
from negamax.models.build import build_empty_slots
from negamax.models.registry import read_spec
from negamax.options.engine import EngineOptions
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.detect import detect
from negamax.worker.self_check import SelfCheck

# No matrix is square. In formats with blocks of 128, a matrix has several blocks.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 2}
BLOCKS = {"hidden_size": 256, "intermediate_size": 384}
MOE = "model.layers.0.block_sparse_moe."
MODULE, OTHER = MOE + "experts.1.w1", MOE + "experts.1.w2"


WITH_PLAIN = {"plain": in_full(torch.float32), **FORMATS}


@dataclass
class Checkpoint:
    spec: ModelSpec
    tensors: dict[str, Tensor]
    values: str  # of MODULE
    scale: str  # scale of MODULE, or its values if the checkpoint is unquantized
    other_scale: str  # of OTHER
    slots: tuple[dict[str, WeightSlot], ...]  # slots on the meta device, for a CPU and for an H200


@cache
def _written(name: str) -> Checkpoint:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        config = CONFIG | SIZES | (BLOCKS if name == "fp8-block" else {})
        write(path, config, random_tensors(tiny_spec(**config)), WITH_PLAIN[name])
        spec = read_spec(json.loads((path / "config.json").read_text()), path)
        scheme = detect(spec.quantization)
        stored = scheme.format_of(MODULE) if scheme else PLAIN
        scales = [tensor.name for tensor in stored.tensors if tensor.role is Role.SCALE]
        scale = scales[0] if scales else stored.values.name
        slots = tuple(
            build_empty_slots(
                spec, ParallelLayout(), kernels=resolve(platform=platform, dtype=torch.float32)
            )
            for platform in (CPU, H200)
        )  # fmt: skip
        return Checkpoint(
            spec, load_file(path / "model.safetensors"),
            f"{MODULE}.{stored.values.name}", f"{MODULE}.{scale}", f"{OTHER}.{scale}", slots,
        )  # fmt: skip


def sound(name: str) -> Checkpoint:
    made = _written(name)
    return replace(made, tensors=dict(made.tensors))


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)  # Slots may still map the old file.
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


# --- in the headers -------------------------------------------------------------------------------

Fault = Callable[[Checkpoint], str]  # adds a fault, returns the text that the error must contain
Name = str | Callable[[Checkpoint], str]


def _set(name: Name, change: Callable[[Tensor], Tensor | None]) -> Fault:
    """Replace a tensor, or delete it if `change` returns None. A missing tensor has 3 ones."""

    def fault(made: Checkpoint) -> str:
        key = name if isinstance(name, str) else name(made)
        changed = change(made.tensors.pop(key, torch.ones(3)))
        made.tensors |= {} if changed is None else {key: changed}
        return key

    return fault


def _add(name: str) -> Fault:
    return _set(name, lambda ones: ones)


def _lose(name: Name) -> Fault:
    return _set(name, lambda tensor: None)


def _lose_module(made: Checkpoint) -> str:
    made.tensors = {n: t for n, t in made.tensors.items() if not n.startswith(MODULE + ".")}
    return made.values if made.values != made.scale else MODULE


def _rename(old: str, new: str) -> Fault:
    def fault(made: Checkpoint) -> str:
        made.tensors = {n.replace(old, new): t for n, t in made.tensors.items()}
        return new

    return fault


def _repeat(old: str, new: str, named: str) -> Fault:
    def fault(made: Checkpoint) -> str:
        copies = {n.replace(old, new): t.clone() for n, t in made.tensors.items() if old in n}
        made.tensors |= copies
        return named

    return fault


def _exchange_scales(made: Checkpoint) -> str:
    """Exchange the scales of two matrices; if the shapes are equal, exchange them with a norm."""
    one, two = made.scale, made.other_scale
    if made.tensors[one].shape == made.tensors[two].shape:
        two = "model.norm.weight"
    made.tensors[one], made.tensors[two] = made.tensors[two], made.tensors[one]
    return one


def _spell_twice(made: Checkpoint) -> str:
    spelled = made.values.replace("block_sparse_moe", "mlp")
    made.tensors[spelled] = made.tensors[made.values].clone()
    return spelled


def _of_a_rank(made: Checkpoint) -> str:
    for name, tensor in made.tensors.items():
        if name.startswith((MODULE, OTHER)) and tensor.dim() and len(tensor) > 1:
            made.tensors[name] = tensor[: len(tensor) // 2].clone()
    return MODULE


def _other_format(made: Checkpoint) -> str:
    """Store the module in another format than config.json describes."""
    whole = {n: t for n, t in made.tensors.items() if not n.startswith(MODULE + ".")}
    stored = {"weight": torch.ones(1, 1), "weight_scale_9": torch.ones(1, 1)}
    if made.values == made.scale:
        values, scale = quantize_block(made.tensors[made.values])
        stored = {"weight": values, "weight_scale_inv": scale}
    made.tensors = whole | {f"{MODULE}.{suffix}": tensor for suffix, tensor in stored.items()}
    return MODULE


VALUES, SCALE = attrgetter("values"), attrgetter("scale")
HEADER_FAULTS: Mapping[str, Fault] = {
    "values missing": _lose(VALUES),
    "scale missing": _lose(SCALE),
    "module missing": _lose_module,
    "norm missing": _lose("model.layers.1.self_attn.q_norm.weight"),
    "router's bias missing": _lose(MOE + "e_score_correction_bias"),
    "bias added": _add(MODULE + ".bias"),
    "side tensor added": _add(MODULE + ".weight_scale_9"),
    "unknown tensor": _add("model.layers.0.adapter.weight"),
    "module renamed": _rename(MODULE, MOE + "experts.1.w4"),
    "other family's names": _rename("model.", "transformer.h."),
    "rows missing": _set(VALUES, lambda tensor: tensor[:-1]),
    "rows added": _set(VALUES, lambda tensor: torch.cat([tensor, tensor[:1]])),
    "scale doubled": _set(SCALE, lambda tensor: torch.stack([tensor, tensor])),
    "transposed": _set(VALUES, lambda tensor: tensor.T),
    "flattened": _set(VALUES, lambda tensor: tensor.reshape(-1)),
    "dtype of values": _set(VALUES, lambda tensor: torch.zeros(tensor.shape, dtype=torch.bool)),
    "dtype of scale": _set(SCALE, lambda tensor: torch.zeros(tensor.shape, dtype=torch.bool)),
    "dtype of router": _set(MOE + "gate.weight", lambda tensor: tensor.to(torch.int8)),
    "scales exchanged": _exchange_scales,
    "two spellings": _spell_twice,
    "expert too many": _repeat("experts.1.", "experts.2.", f"{MOE}experts.2.w"),
    "layer too many": _repeat("layers.1.", "layers.2.", "up to layer 2 "),
    "shard of a rank": _of_a_rank,
    "another format": _other_format,
}


# These faults hardly depend on the weight format. `make test-full` runs every fault on all formats.
COMMON_FAULTS = (
    "norm missing", "router's bias missing", "unknown tensor", "other family's names",
    "dtype of router", "layer too many",
)  # fmt: skip


def header_faults() -> Iterator[Any]:
    for each in sample(WITH_PLAIN, 0, 6):
        (name,) = each.values
        own = [fault for fault in HEADER_FAULTS if fault not in COMMON_FAULTS]
        yield pytest.param(name, own, id=name, marks=each.marks)
        marks = () if name == "plain" else pytest.mark.full
        yield pytest.param(name, COMMON_FAULTS, id=f"{name}, common", marks=marks)


def refusal(check: Callable[[], object]) -> str:
    try:
        check()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "faults"), list(header_faults()))
def test_faults_of_names_shapes_and_dtypes_are_refused_before_data_is_read(
    tmp_path: Path, name: str, faults: Sequence[str]
) -> None:
    for fault in faults:
        made = sound(name)
        named = HEADER_FAULTS[fault](made)
        save(tmp_path, made.tensors)
        for slots in made.slots:
            refused = refusal(partial(plan_load, slots, made.spec, tmp_path))
            assert named in refused, (fault, refused)


# --- in the data ----------------------------------------------------------------------------------


def _filled(tensor: Tensor, number: float) -> Tensor:
    if tensor.dtype == torch.uint8:  # An exponent of 255 is NaN.
        return torch.full_like(tensor, 0 if number == 0 else 255)
    if tensor.dtype == torch.int64:  # The integers are the bits of fp32 numbers.
        return torch.full(tensor.shape, number).view(torch.int32).to(torch.int64)
    return torch.full(tensor.shape, number).to(tensor.dtype)


@pytest.mark.parametrize("name", sample(FORMATS, 2, 6))
def test_scales_that_are_nan_or_0_are_refused(tmp_path: Path, name: str) -> None:
    for number in (torch.nan, 0.0):
        made = sound(name)
        made.tensors[made.scale] = _filled(made.tensors[made.scale], number)
        save(tmp_path, made.tensors)
        with pytest.raises(CheckpointError) as caught:
            load_weights(build(made.spec, loaded=False).weight_slots(), made.spec, tmp_path)
        assert made.scale in str(caught.value)


@pytest.mark.parametrize("name", [name for name in FORMATS if "mxfp" in name])
def test_huge_powers_of_two_are_refused(tmp_path: Path, name: str) -> None:
    made = sound(name)
    scale = made.tensors[made.scale].clone()
    assert scale.dtype == torch.uint8
    made.tensors[made.scale] = scale.view(torch.float8_e8m0fnu) if "p8" in name else scale
    for exponent, is_refused in ((127 + 10, False), (127 + 11, True)):
        scale.view(-1)[-1] = exponent
        save(tmp_path, made.tensors)
        with pytest.raises(CheckpointError, match="huge") if is_refused else nullcontext():
            load_weights(build(made.spec, loaded=False).weight_slots(), made.spec, tmp_path)


@pytest.mark.parametrize("name", ["packed-int4", "awq", "modelopt-nvfp4"])
def test_loads_and_conversions_find_the_same_zeros_in_packed_weights(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, made, folder = CONFIG | SIZES, sound(name), tmp_path / "source"
    folder.mkdir()
    write(folder, config, random_tensors(tiny_spec(**config)), FORMATS[name])
    for key in (made.values, made.scale):
        save(folder, made.tensors | {key: torch.zeros_like(made.tensors[key])})
        for number in range(3):
            caplog.clear()
            if number < 2:
                kernels = KEEPING if number else None
                slots = build(made.spec, loaded=False, kernels=kernels).weight_slots()
                assert (made.scale in slots) is bool(number)
                found = refusal(partial(load_weights, slots, made.spec, folder))
            else:
                found = refusal(partial(convert, conversion(folder, tmp_path / key, "bf16")))
            zeros = [record.getMessage() for record in caplog.records if "zeros" in record.msg]
            if key == made.scale:
                assert f"scales that are 0, negative, huge, NaN or infinite: {key}" in found
            elif name == "packed-int4":
                assert f"{key} contains only zero bytes, but the format packed_int4" in found
            else:
                assert not found and len(zeros) == 1 and MODULE in zeros[0]


triton = pytest.importorskip("triton")

from negamax.kernels.launch.triton import compiling  # noqa: E402

BF16 = resolve(platform=CPU, dtype=torch.bfloat16)
FP32 = resolve(platform=CPU, dtype=torch.float32)
PLANTED_CONFIG = CONFIG | {"hidden_size": 64, "intermediate_size": 64}
TENSORS = random_tensors(tiny_spec(**PLANTED_CONFIG))
# model, layer, part that the message names, name of a tensor, change of the tensor
FAULTS: list[tuple[str, int, str, str, Callable[[Tensor], Tensor]]] = [
    ("nano", 0, "the keys after K norm", r"k_norm\.weight", lambda part: part.roll(len(part) // 2)),
    ("nano", 0, "the router", "correction_bias", torch.zeros_like),
    ("nano-m3", 2, "the index keys", r"index_k_proj\.weight$", lambda part: part.roll(1, 0)),
    ("nano", 0, "the experts", r"experts\.3\.w2\.weight_scale_inv", lambda part: part.flip(-1)),
]


def plant(patch: pytest.MonkeyPatch, pattern: str, change: Callable[[Tensor], Tensor]) -> set[str]:
    """Change what the first load writes into a slot, not later loads. Return the changed slots."""
    write_part, planted = WeightSlot.write_part, set[str]()

    def changed(slot: WeightSlot, part: Tensor, *args: Any) -> Tensor:
        if re.search(pattern, slot.name) and slot.name not in planted and slot.needed:
            planted.add(slot.name)
            wrong = change(part)
            assert not torch.equal(wrong.float(), part.float()), f"{slot.name} is unchanged"
            part = wrong
        return write_part(slot, part, *args)

    patch.setattr(WeightSlot, "write_part", changed)
    return planted


def check(
    name: str,
    *,
    kernels: KernelTable = BF16,
    spec: ModelSpec | None = None,
    folder: Path | None = None,
) -> str:
    options = EngineOptions(name, device="cpu")
    config = _make_worker_config(options, locate(options), None)
    config = replace(config, spec=spec or config.spec, folder=str(folder or config.folder))
    model = build(config.spec, kernels=kernels, loaded=False)
    slots = model.weight_slots()
    plan = plan_load(slots, config.spec, Path(config.folder or ""))
    with torch.inference_mode():
        fill(slots, plan)
        model.finish_loading()
        parts = {"context": ParallelContext.single(), "device": torch.device("cpu")}
        runner = SimpleNamespace(config=config, kernels=kernels, **parts)
        return SelfCheck(runner, plan, cache_dtype=kernels.dtype).run(model)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[2])
def test_wrong_weights_are_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layer, part, name, change = fault
    planted = plant(monkeypatch, rf"layers\.{layer}\..*{name}", change)
    message = f"rank 0: layer {layer}: {part}.*differ from the checkpoint"
    with pytest.raises(ConfigError, match=message) as found:
        check(model, kernels=KEEPING)
    assert len(planted) == 1 and found.value.exit_code == 2


def ignore_bias(kernel: AnyKernel) -> AnyKernel:
    def run(x: Tensor, router: Router, /, **options: Any) -> Any:
        return kernel.run(x, replace(router, bias=torch.zeros_like(router.bias)), **options)

    return replace(kernel, run=run)


def swap_scales(kernel: AnyKernel) -> AnyKernel:
    def prepare(weight: StoredWeight) -> Any:
        tensors = weight.tensors.items()
        swapped = {name: each.flip(-1) if "scale" in name else each for name, each in tensors}
        return kernel.prepare(StoredWeight(weight.format, swapped))

    return replace(kernel, provider="swapped", prepare=prepare)


@pytest.mark.parametrize(
    ("op", "wrong", "named"),
    [
        (ROUTE, ignore_bias, r"layer 0: the router differs .* moe\.route=native"),
        (LINEAR, swap_scales, r"layer 0: the keys after K norm .* gemm\.linear=swapped"),
    ],
)
def test_wrong_kernels_are_found(
    op: AnyOp, wrong: Callable[[AnyKernel], AnyKernel], named: str
) -> None:
    candidates = {op: tuple(map(wrong, KEEPING.candidates[op]))}
    kernels = replace(KEEPING, candidates={**KEEPING.candidates, **candidates})
    with pytest.raises(ConfigError, match=named):
        check("nano", kernels=kernels)


@pytest.mark.parametrize("kernels", [BF16, FP32, KEEPING])
@pytest.mark.parametrize("model", ["nano", "nano-m3"])
def test_right_models_pass(model: str, kernels: KernelTable) -> None:
    assert "are correct" in check(model, kernels=kernels)


@pytest.mark.parametrize(
    "name",
    # The loader refuses fp8-fnuz-dtype, whose config.json declares OCP FP8.
    [each for each in sample([*FORMATS, *EXPORTS], 0, 6) if "fp8-fnuz-dtype" not in str(each)],
)
def test_every_format_passes(name: str, tmp_path: Path) -> None:
    write(tmp_path, PLANTED_CONFIG, TENSORS, {**FORMATS, **EXPORTS}[name])
    spec = spec_of(tmp_path)
    for kernels in (FP32, KEEPING):
        assert "are correct" in check("nano", kernels=kernels, spec=spec, folder=tmp_path)


def test_chosen_providers_run_with_what_depends_on_them() -> None:
    table = BF16.select(
        ["norm.add_rms=reference,moe.experts=sorted+onednn", "attention.prefill=reference"]
    )
    # One of the two ops fuses the other op.
    assert table[ADD_RMS].provider == table[NORM_ROUTE].provider == "reference"
    assert table[DECODE].provider == table[PREFILL].provider == "reference"
    assert BF16[DECODE].provider != "reference" and BF16[EXPERTS].provider != "reference"
    plain = BF16.select([PLAIN_NORM])
    assert plain.fusion("attention.qk_norm", "rope.half_split", "kvcache.write") is None
    llm = LLM("nano", device="cpu", kernels=(PLAIN_NORM, "moe.experts=reference"), self_check=True)
    with llm:
        assert llm.generate("a", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("moe.rout=reference", "did you mean moe.route"),
        ("moe.route=refrence", "native.*reference.*did you mean reference"),
        ("moe.route", "provider of moe.route ''"),
    ],
)
def test_unknown_kernels_are_refused(choice: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        LLM("nano", device="cpu", kernels=(choice,))
    assert found.value.exit_code == 2


def test_compilation_shows_its_progress() -> None:
    seen: list[tuple[int, int]] = []
    with compiling(share=0, shares=1, threads=2, progress=lambda *each: seen.append(each)):
        mode = triton.runtime._async_compile.active_mode.get()
        # Versions of Triton differ in how a compilation ends.
        takes = inspect.signature(triton.AsyncCompileMode.submit).parameters
        others = [lambda *_: None] * (len(takes) - 3)
        for name in ("a", "b", "c", "a"):  # The last kernel is already compiled.
            mode.submit(name, lambda: "kernel", *others)
    assert sorted(done for done, _ in seen) == [1, 2, 3] and max(seen)[1] == 3
