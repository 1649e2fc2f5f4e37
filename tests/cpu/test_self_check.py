import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import m2_checkpoints
import pytest
import torch
from loading_support import spec_of
from m2_checkpoints import random_tensors, tiny_spec
from model_support import build
from stored_formats import EXPORTS, FORMATS, sample, write
from stored_kernels import keeping_stored
from torch import Tensor

from negamax import LLM, SamplingParams
from negamax.base.errors import ConfigError
from negamax.checkpoint.loader import fill
from negamax.checkpoint.plan import plan_load
from negamax.config.model_spec import ModelSpec
from negamax.engine.core.setup import _make_worker_config
from negamax.engine.core.source import locate
from negamax.formats.platform import CPU
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.attention.op import DECODE, PREFILL
from negamax.kernels.gemm.op import LINEAR
from negamax.kernels.moe.op import EXPERTS, NORM_ROUTE, ROUTE, Router
from negamax.kernels.norm.op import ADD_RMS
from negamax.kernels.op import AnyKernel, AnyOp
from negamax.kernels.registry import PLAIN_NORM, KernelTable, resolve
from negamax.layers.weights import WeightSlot
from negamax.options.engine import EngineOptions
from negamax.parallel.context import ParallelContext
from negamax.worker.self_check import SelfCheck

triton = pytest.importorskip("triton")

from negamax.kernels.launch.triton import compiling  # noqa: E402

BF16 = resolve(platform=CPU, dtype=torch.bfloat16)
FP32 = resolve(platform=CPU, dtype=torch.float32)
SIZES = {"hidden_size": 64, "intermediate_size": 64}
TENSORS = random_tensors(tiny_spec(**{**m2_checkpoints.CONFIG, **SIZES}))

Fault = tuple[str, Callable[[Tensor], Tensor]]  # tensor name, and change of what the slot gets
# name -> text in the message, model, kernels and fault
FAULTS: dict[str, tuple[str, str, Fault]] = {
    "K norm of another rank": (
        "layer 0: the keys after K norm",
        "nano",
        (r"layers\.0\..*k_norm\.weight", lambda part: part.roll(len(part) // 2)),
    ),
    "router bias lost": (
        "layer 0: the router",
        "nano",
        (r"layers\.0\..*correction_bias", torch.zeros_like),
    ),
    "index keys shifted": (
        "layer 2: the index keys",
        "nano-m3",
        (r"layers\.2\..*index_k_proj\.weight$", lambda part: part.roll(1, 0)),
    ),
    "FP8 scales swapped": (
        "layer 0: the experts",
        "nano",
        (r"layers\.0\..*experts\.3\.w2\.weight_scale_inv", lambda part: part.flip(-1)),
    ),
}


def plant(patch: pytest.MonkeyPatch, fault: Fault) -> set[str]:
    """Change what the first load writes into a slot, not later loads. Return the changed slots."""
    write_part, planted = WeightSlot.write_part, set[str]()

    def changed(slot: WeightSlot, part: Tensor, *args: Any) -> Tensor:
        if re.search(fault[0], slot.name) and slot.name not in planted and slot.needed:
            planted.add(slot.name)
            wrong = fault[1](part)
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
    cache_dtype: torch.dtype | None = None,
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
        own = SelfCheck(
            config,
            plan,
            kernels=kernels,
            context=ParallelContext.single(),
            cache_dtype=cache_dtype or kernels.dtype,
            device=torch.device("cpu"),
        )
        return own.run(model)


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_weights_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named, model, fault = FAULTS[name]
    planted = plant(monkeypatch, fault)
    with pytest.raises(ConfigError, match=f"rank 0: {named}.*differ from the checkpoint") as found:
        check(model, kernels=keeping_stored(FP32))
    assert len(planted) == 1 and found.value.exit_code == 2


def ignore_bias(kernel: AnyKernel) -> AnyKernel:
    def run(x: Tensor, router: Router, /, **options: Any) -> Any:
        return kernel.run(x, replace(router, bias=torch.zeros_like(router.bias)), **options)

    return replace(kernel, run=run)


def swap_scales(kernel: AnyKernel) -> AnyKernel:
    def prepare(weight: StoredWeight) -> Any:
        scales = {
            name: each.flip(-1) if "scale" in name else each
            for name, each in weight.tensors.items()
        }
        return kernel.prepare(StoredWeight(weight.format, scales))

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
    kernels = keeping_stored(FP32)
    candidates = {op: tuple(map(wrong, kernels.candidates[op]))}
    kernels = replace(kernels, candidates={**kernels.candidates, **candidates})
    with pytest.raises(ConfigError, match=named):
        check("nano", kernels=kernels)


@pytest.mark.parametrize("kernels", [BF16, FP32, keeping_stored(FP32)])
@pytest.mark.parametrize("model", ["nano", "nano-m3"])
def test_right_models_pass(model: str, kernels: KernelTable) -> None:
    assert "are correct" in check(model, kernels=kernels)


@pytest.mark.parametrize(
    "name",
    # The loader refuses fp8-fnuz-dtype, whose config.json declares OCP FP8.
    [each for each in sample([*FORMATS, *EXPORTS], 0, 6) if "fp8-fnuz-dtype" not in str(each)],
)
def test_every_format_passes(name: str, tmp_path: Path) -> None:
    write(tmp_path, {**m2_checkpoints.CONFIG, **SIZES}, TENSORS, {**FORMATS, **EXPORTS}[name])
    spec = spec_of(tmp_path)
    for kernels in (FP32, keeping_stored(FP32)):
        assert "are correct" in check("nano", kernels=kernels, spec=spec, folder=tmp_path)


def test_chosen_providers_run_with_what_depends_on_them() -> None:
    table = BF16.select(
        ["norm.add_rms=reference,moe.experts=sorted+onednn", "attention.prefill=reference"]
    )
    assert (
        table[ADD_RMS].provider == table[NORM_ROUTE].provider == "reference"
    )  # One of the two ops fuses the other op.
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
    with compiling(
        share=0, shares=1, threads=2, progress=lambda done, total: seen.append((done, total))
    ):
        mode = triton.runtime._async_compile.active_mode.get()
        # Versions of Triton differ in how a compilation ends.
        takes = inspect.signature(triton.AsyncCompileMode.submit).parameters
        others = [lambda *_: None] * (len(takes) - 3)
        for name in ("a", "b", "c", "a"):  # The last kernel is already compiled.
            mode.submit(name, lambda: "kernel", *others)
    assert sorted(done for done, _ in seen) == [1, 2, 3] and max(seen)[1] == 3
