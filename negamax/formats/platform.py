"""Devices, their features, and the check whether Negamax supports a device."""

from dataclasses import dataclass
from enum import StrEnum

from negamax.base.errors import ConfigError


class Feature(StrEnum):
    """A device feature that a kernel may require (`Kernel.requires`)."""

    CPU = "cpu"  # The device runs oneDNN and the C functions of `kernels/native`.
    TRITON = "triton"  # Triton compiles kernels for the device.
    BF16 = "bf16"  # Tensor cores multiply bf16.
    INT8 = "int8"  # Tensor cores multiply int8.
    FP8 = "fp8"  # Tensor cores multiply e4m3fn or e4m3fnuz.
    E4M3FN = "e4m3fn"  # Tensor cores multiply e4m3fn, the FP8 type of checkpoints.
    SPIN_WAIT = "spin_wait"  # Programs of one launch can wait for each other's writes.
    PEER_MEMORY = "peer_memory"  # Kernels can write to the memory of other GPUs.
    PDL = "pdl"  # The device has programmatic dependent launch.
    TMA = "tma"  # The device has a tensor memory accelerator.
    CUBLAS_BLOCK_FP8 = "cublas_block_fp8"  # cuBLAS multiplies FP8 with scales per block.


# feature -> lowest compute capability of NVIDIA GPUs with this feature
_NVIDIA = {
    Feature.SPIN_WAIT: (7, 0),
    Feature.PEER_MEMORY: (7, 0),
    Feature.BF16: (8, 0),
    Feature.INT8: (8, 0),
    Feature.FP8: (8, 9),
    Feature.E4M3FN: (8, 9),
    Feature.PDL: (9, 0),
    Feature.TMA: (9, 0),
}
_AMD = {
    "gfx90a": frozenset({Feature.BF16}),
    "gfx942": frozenset({Feature.BF16, Feature.FP8}),
    "gfx950": frozenset({Feature.BF16, Feature.FP8, Feature.E4M3FN}),
}
MEASURED_ARCHS = ("sm_90",)  # GPU architectures on which kernels were tested and measured


@dataclass(frozen=True)
class Platform:
    vendor: str  # "cpu", "nvidia", "amd"
    name: str
    arch: str  # "cpu", "sm_90", "gfx942"
    warp_size: int
    multiprocessors: int
    shared_memory: int  # bytes of shared memory per multiprocessor
    features: frozenset[Feature]

    @property
    def capability(self) -> tuple[int, int]:
        assert self.vendor == "nvidia", self
        return divmod(int(self.arch.removeprefix("sm_")), 10)

    @property
    def is_measured(self) -> bool:
        """Whether the kernels were tested and measured on devices of this architecture."""
        return self.vendor == "cpu" or self.arch in MEASURED_ARCHS

    @property
    def label(self) -> str:
        if self.vendor == "cpu":
            return self.name
        if self.vendor == "amd":
            return f"{self.name} ({self.arch})"
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"

    def missing(self, requires: frozenset[Feature]) -> list[str]:
        return sorted(requires - self.features)

    def check(self, *, fp8_cache: bool) -> None:
        """Refuse devices that Negamax does not support. Raises `ConfigError`."""
        if self.vendor == "amd" and self.arch not in _AMD:
            raise ConfigError(
                f"{self.label} is an unknown AMD GPU; allowed: {', '.join(_AMD)}",
                hint="use another GPU, or --device cpu",
            )
        if self.vendor != "cpu":
            self.check_arithmetic(fp8_cache=fp8_cache)

    def check_arithmetic(self, *, fp8_cache: bool) -> None:
        """Refuse GPUs without bf16, and FP8 caches on GPUs without FP8. Raises `ConfigError`."""
        if Feature.BF16 not in self.features:
            raise ConfigError(
                f"{self.label} has no bfloat16 arithmetic; use compute capability 8.0 or higher",
                hint="use another GPU, or --device cpu",
            )
        if fp8_cache and Feature.E4M3FN not in self.features:
            raise ConfigError(
                f"{self.label} cannot use an FP8 KV cache; compute capability 8.9 or gfx950 is "
                "needed",
                hint="remove --kv-cache-dtype",
            )


# Warp size 32 and 2 multiprocessors describe the small GPU that Triton's interpreter simulates.
CPU = Platform("cpu", "CPU", "cpu", 32, 2, 2**20, frozenset({Feature.CPU}))


def nvidia(
    capability: tuple[int, int], *, name: str, multiprocessors: int = 132, shared_memory: int = 0
) -> Platform:
    """Describe an NVIDIA GPU. `shared_memory` is in bytes per multiprocessor."""
    features = {feature for feature, least in _NVIDIA.items() if capability >= least}
    if capability == (9, 0):
        features.add(Feature.CUBLAS_BLOCK_FP8)
    arch = f"sm_{capability[0]}{capability[1]}"
    return Platform(
        "nvidia", name, arch, 32, multiprocessors, shared_memory,
        frozenset({Feature.TRITON, *features}),
    )  # fmt: skip


def amd(arch: str, *, name: str, multiprocessors: int, shared_memory: int) -> Platform:
    """Describe an AMD GPU of architecture `arch`, for example "gfx942"."""
    features = _AMD.get(arch, frozenset())
    return Platform(
        "amd", name, arch, 64, multiprocessors, shared_memory, features | {Feature.TRITON}
    )
