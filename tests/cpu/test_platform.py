import json
import logging
import platform
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from negamax.base.errors import ConfigError
from negamax.cli import doctor_probe
from negamax.cli.doctor import _judge_models, check_hardware
from negamax.formats.floats import E4M3_BLOCKS, PLAIN, nvfp4
from negamax.formats.platform import CPU, Feature, nvidia
from negamax.formats.readable import is_kept
from negamax.kernels.launch.triton import launch_options
from negamax.kernels.platform import platform_of
from negamax.kernels.registry import OPS, resolve
from negamax.models.registry import bundled_spec
from negamax.planner.gpus import GIB
from negamax.worker.device import check_platform, choose_dtype

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
M2 = bundled_spec("minimax-m2")  # FP8 weights
FakeGpu = Callable[..., torch.device]
A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    def fake(name: str, capability: tuple[int, int], hip: str | None = None) -> torch.device:
        found = SimpleNamespace(
            name=name, major=capability[0], minor=capability[1], multi_processor_count=132,
            shared_memory_per_multiprocessor=233472,
            gcnArchName=f"gfx{'906' if 'MI50' in name else '942'}:sramecc+:xnack-",
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(torch.version, "hip", hip)
        return torch.device("cuda", 0)

    platform_of.cache_clear()
    launch_options.cache_clear()
    yield fake
    platform_of.cache_clear()
    launch_options.cache_clear()


NO_BF16 = "has no bfloat16 arithmetic; use compute capability 8.0 or higher"
UNKNOWN = "(gfx906) is an unknown AMD GPU; allowed: gfx90a, gfx942, gfx950"


@pytest.mark.parametrize(
    ("name", "capability", "hip", "words"),
    [
        ("Tesla V100", (7, 0), None, f"(compute capability 7.0) {NO_BF16}"),
        ("Tesla T4", (7, 5), None, f"(compute capability 7.5) {NO_BF16}"),
        ("AMD Instinct MI50", (9, 0), "6.2", UNKNOWN),
    ],
)
def test_refuses_unsupported_gpus_by_name(
    gpu: FakeGpu, name: str, capability: tuple[int, int], hip: str | None, words: str
) -> None:
    found = platform_of(gpu(name, capability, hip))
    with pytest.raises(ConfigError) as caught:
        check_platform(found, cache_dtypes=(BF16,))
    assert f"{name} {words}" in str(caught.value) and "--device cpu" in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("device", [A100, ("AMD Instinct MI300X", (9, 4), "7.0")], ids=str)
def test_untested_gpus_run_with_a_warning_and_without_an_fp8_cache(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture, device: tuple[Any, ...]
) -> None:
    found = platform_of(gpu(*device))
    with caplog.at_level(logging.WARNING, logger="negamax"):
        for rank in range(2):
            check_platform(found, cache_dtypes=(BF16,), rank=rank)
    (record,) = caplog.records
    assert device[0] in record.message and "not been tested" in record.message
    with pytest.raises(
        ConfigError,
        match=r"cannot use an FP8 KV cache; compute capability 8.9 or gfx950 is needed .remove",
    ):
        check_platform(found, cache_dtypes=(BF16, FP8))


def test_doctor_finds_amd_gpus(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu("AMD Instinct MI300X", (9, 4), "7.0")
    for name, answer in {
        "is_available": True, "device_count": 2, "can_device_access_peer": True,
        "mem_get_info": (190 * GIB, 192 * GIB), "get_device_name": "AMD Instinct MI300X",
        "get_device_capability": (9, 4),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    doctor_probe.main()
    probe = json.loads(capsys.readouterr().out)
    assert "error" not in probe
    details = {check.name: check.detail for check in check_hardware(probe)}
    assert details["GPUs"] == "PyTorch for ROCm 7.0"
    assert details["GPU 1"] == "AMD Instinct MI300X, 190.0 of 192.0 GiB free, gfx942"
    commands = [each.command for each in _judge_models(probe)]
    assert "negamax serve MiniMaxAI/MiniMax-M2 --tensor-parallel-size 2" in commands


def test_weights_stay_packed_where_a_kernel_reads_them_and_the_start_says_so() -> None:
    a100, h200 = (nvidia(capability, name="") for capability in ((8, 0), (9, 0)))
    native, weight_only = "triton", "triton_weight_only"
    formats = (E4M3_BLOCKS, nvfp4())
    for found, dtype, fp8, fp4 in (
        (h200, BF16, native, weight_only),
        (h200, torch.float32, None, None),
        (a100, BF16, weight_only, weight_only),
        (CPU, BF16, None, None),
    ):
        table = resolve(platform=found, dtype=dtype)
        for stored, provider in zip(formats, (fp8, fp4), strict=True):
            for op in ("gemm.linear", "moe.experts"):
                kernel = table.choose(op, stored)
                assert (kernel and kernel.provider) == provider
                assert table[op].activation is None and table[op].reads(PLAIN)
            if dtype is BF16:
                assert is_kept(stored, found) == (provider is not None)
        text = table.describe(formats)
        assert ("with fp8_e4m3_block_128x128" in text) == (fp8 is not None)
        assert ("weights in nvfp4 stay packed" in text) == (fp8 == native)
        assert ("weights in fp8_e4m3_block_128x128, nvfp4 stay packed" in text) == (
            fp8 == weight_only
        )


def test_measured_platforms_run_everything(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    platforms = [platform_of(gpu("NVIDIA H200", (9, 0))), platform_of(torch.device("cpu"))]
    with caplog.at_level(logging.DEBUG, logger="negamax"):
        for found in platforms:
            check_platform(found, cache_dtypes=(BF16, FP8))
    assert not caplog.records
    assert platforms[0] == nvidia((9, 0), name="NVIDIA H200", shared_memory=233472)


@pytest.mark.parametrize("op", list(OPS))
def test_rocm_which_says_cuda_never_gets_a_kernel_that_needs_nvidia(gpu: FakeGpu, op: str) -> None:
    nvidias = {Feature.SPIN_WAIT, Feature.PEER_MEMORY, Feature.PDL, Feature.TMA}
    found = platform_of(gpu("AMD Instinct MI300X", (9, 4), "6.2"))
    assert (found.arch, found.warp_size) == ("gfx942", 64) and not found.features & nvidias
    assert not any(
        kernel.requires & nvidias for kernel in resolve(platform=found, dtype=BF16).candidates[op]
    )
    assert resolve(platform=found, dtype=BF16)[op].provider


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), True), ((10, 0), True), ((8, 9), False)]
)
def test_launches_overlap(gpu: FakeGpu, capability: tuple[int, int], expected: bool) -> None:
    assert launch_options(gpu("NVIDIA", capability))["PDL"] is expected
    assert launch_options(torch.device("cpu")) == {"PDL": False}


@pytest.mark.parametrize(
    ("machine", "onednn", "instructions", "dtype"),
    [
        ("x86_64", True, True, BF16),
        ("x86_64", True, False, torch.float32),  # oneDNN widens every value.
        ("x86_64", False, False, torch.float32),
        ("aarch64", True, False, BF16),
    ],
)
def test_a_cpu_computes_in_bf16_only_where_it_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    onednn: bool,
    instructions: bool,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    assert choose_dtype("auto", spec=M2, device="cpu") == dtype
    assert choose_dtype("bfloat16", spec=M2, device="cpu") == BF16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_native_kernels_run_in_both_dtypes_of_the_cpu(dtype: torch.dtype) -> None:
    if resolve(platform=CPU, dtype=dtype)["gemm.linear"].provider != "onednn":
        pytest.skip(f"no oneDNN linear here in {dtype}")
    table = resolve(platform=CPU, dtype=dtype)
    native = [op for op in OPS if table[op].provider.startswith("native")]
    assert len(native) == 12 and table["attention.decode"].provider == "native"
