"""Select the implementation that runs each op.

The selection is resolved once at start into a frozen `KernelTable` and logged. In the forward pass,
layers call the selected functions directly. To add a kernel, write a function in kernels/<family>/
and list it in `KERNELS` there.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module

import torch

from negamax.base.errors import ConfigError
from negamax.formats.floats import PLAIN
from negamax.formats.platform import Feature, Platform
from negamax.formats.tensor_format import TensorFormat
from negamax.kernels.attention import cpu as attention_cpu
from negamax.kernels.attention import op as attention
from negamax.kernels.block_sparse import cpu as block_sparse_cpu
from negamax.kernels.block_sparse import op as block_sparse
from negamax.kernels.cache_shards import op as cache_shards
from negamax.kernels.collectives import op as collectives
from negamax.kernels.dispatch import op as dispatch
from negamax.kernels.drafts import op as drafts
from negamax.kernels.gemm import cpu as gemm_cpu
from negamax.kernels.gemm import op as gemm
from negamax.kernels.gemm.op import LINEAR
from negamax.kernels.kvcache import cpu as kvcache_cpu
from negamax.kernels.kvcache import op as kvcache
from negamax.kernels.mlp import cpu as mlp_cpu
from negamax.kernels.mlp import op as mlp
from negamax.kernels.moe import cpu as moe_cpu
from negamax.kernels.moe import op as moe
from negamax.kernels.moe.op import EXPERTS
from negamax.kernels.native import rows as native_rows
from negamax.kernels.norm import cpu as norm_cpu
from negamax.kernels.norm import op as norm
from negamax.kernels.op import WEIGHT_ONLY, AnyKernel, AnyOp, Kernel, Op, P, R
from negamax.kernels.quantize import op as quantize
from negamax.kernels.sampling import op as sampling
from negamax.kernels.steps import op as steps

_FAMILIES = (
    norm, kvcache, attention, block_sparse, cache_shards, gemm, moe, mlp, quantize, sampling,
    drafts, steps, collectives, dispatch,
)  # fmt: skip
OPS: dict[str, AnyOp] = {
    op: op for family in _FAMILIES for op in vars(family).values() if isinstance(op, Op)
}

# `--kernels plain-norm` runs the reference of every norm and fuses no norm with another op
PLAIN_NORM = "plain-norm"
_NORMS = (
    norm.ADD_RMS, collectives.ALL_REDUCE_ADD_RMS, attention.QK_NORM_ROPE_WRITE,
    attention.HEAD_NORM_ROPE_WRITE, block_sparse.BLOCK_SPARSE_NORM_ROPE_WRITE,
)  # fmt: skip
# `_PAIRS`: one provider must run both ops of a pair, because one op reads data of the other op.
_PAIRS = (
    (collectives.ALL_REDUCE_ADD_RMS, collectives.COMPLETE_RESIDUAL),
    (dispatch.DISPATCH, dispatch.COMBINE),
    (attention.DECODE, attention.PREFILL),
    (block_sparse.BLOCK_SPARSE_DECODE, block_sparse.BLOCK_SPARSE_PREFILL),
)

# CPU kernels in order of preference; the reference of every op is the fallback
KERNELS: tuple[AnyKernel, ...] = (
    *gemm_cpu.KERNELS,
    *(kernel for linear in gemm_cpu.ONEDNN for kernel in native_rows.kernels(linear)),
    *norm_cpu.KERNELS,
    *kvcache_cpu.KERNELS,
    *attention_cpu.KERNELS,
    *mlp_cpu.KERNELS,
    *block_sparse_cpu.KERNELS,
    moe_cpu.ROUTE_KERNEL,
    *(moe_cpu.kernel(linear) for linear in (*gemm_cpu.KERNELS, LINEAR.reference)),
    *(op.reference for op in OPS.values()),
)


def gpu_kernels() -> tuple[AnyKernel, ...]:
    """Return the kernels for GPUs, preferred first. Imports Triton."""
    names = [family.__name__.removesuffix(".op") for family in _FAMILIES]
    return (
        *(kernel for name in names for kernel in import_module(f"{name}.triton").KERNELS),
        *(op.reference for op in OPS.values()),
    )


@dataclass(frozen=True)
class KernelTable:
    """The kernels of each op on one platform in one dtype, the preferred kernel first."""

    platform: Platform
    dtype: torch.dtype
    candidates: Mapping[AnyOp, tuple[AnyKernel, ...]] = field(repr=False)

    @classmethod
    def of(
        cls, kernels: Iterable[AnyKernel], *, platform: Platform, dtype: torch.dtype
    ) -> "KernelTable":
        """Build the table of the `kernels` that compute in `dtype`."""
        found: dict[AnyOp, tuple[AnyKernel, ...]] = {}
        for kernel in kernels:
            if dtype in kernel.dtypes:
                found[kernel.op] = (*found.get(kernel.op, ()), kernel)
        return cls(platform, dtype, found)

    def __getitem__(self, op: Op[P, R]) -> Kernel[P, R]:
        """Return the preferred kernel of `op`; if the op has weights, the kernel for plain ones."""
        kernel = self.choose(op, PLAIN)
        assert kernel is not None, f"no kernel for plain weights of {op}"
        return kernel

    def choose(
        self, op: Op[P, R], stored: TensorFormat, *, columns: int = 0
    ) -> Kernel[P, R] | None:
        """Return the first kernel of `op` for format `stored` and `columns` columns (0: any)."""
        for kernel in self.candidates[op]:
            if kernel.reads(stored) and columns % kernel.columns == 0:
                return kernel
        return None

    def reads_stored(self, stored: TensorFormat) -> bool:
        """Return whether linear layers and experts support weights in the format `stored`."""
        return None not in (self.choose(LINEAR, stored), self.choose(EXPERTS, stored))

    def fusion(self, *sequence: str) -> AnyKernel | None:
        """Return the kernel that fuses the ops of `sequence`; None if only the reference does."""
        for op in OPS.values():
            if op.sequence == sequence and self[op].provider != "reference":
                return self[op]
        return None

    def select(self, choices: Sequence[str]) -> "KernelTable":
        """Apply `choices` in their order; each choice is OP=PROVIDER or `PLAIN_NORM`.

        A fused op runs as separate ops if a choice names the provider of one of the separate ops.
        Raises `ConfigError` for ops and providers that this platform does not have.
        """
        chosen: dict[AnyOp, tuple[AnyKernel, ...]] = {}
        for choice in (part.strip() for given in choices for part in given.split(",")):
            name, _, provider = choice.partition("=")
            if choice == PLAIN_NORM:
                for op in _NORMS:
                    chosen |= self._choose_provider(op, "reference")
                continue
            known = [*sorted(self.candidates), PLAIN_NORM]
            if name not in OPS:
                raise _unknown("op", name, known, choice=choice)
            chosen |= self._choose_provider(OPS[name], provider)
        return replace(self, candidates={**self.candidates, **chosen})

    def _choose_provider(self, op: AnyOp, provider: str) -> dict[AnyOp, tuple[AnyKernel, ...]]:
        """Choose `provider` for `op` and its paired op, and references for ops that fuse `op`."""
        providers = dict.fromkeys(kernel.provider for kernel in self.candidates[op])
        if provider not in providers:
            raise _unknown(f"provider of {op}", provider, providers, choice=f"{op}={provider}")
        found: dict[AnyOp, tuple[AnyKernel, ...]] = {
            fused: (fused.reference,) for fused in OPS.values() if op in fused.sequence
        }
        for one in next((pair for pair in _PAIRS if op in pair), (op,)):
            own = [kernel for kernel in self.candidates[one] if kernel.provider == provider]
            found[one] = (*own, one.reference)  # reference: used if the provider lacks a format
        return found

    def describe(self, formats: Iterable[TensorFormat] = ()) -> str:
        """Describe the table in one line per op: name, provider and summary.

        If a kernel of an op reads one of `formats` as stored, a line below the op shows the kernel.
        The last line names formats whose weights stay packed and are dequantized in registers.
        """
        lines = [f"kernels for {self.platform.label}, {str(self.dtype).removeprefix('torch.')}:"]
        for op in sorted(self.candidates):
            lines.append(f"  {op:30} {self[op].provider:18} {op.summary}")
            for stored in formats:
                kernel = self.choose(op, stored)
                if kernel is not None:
                    lines.append(f"  {'':30} {kernel.provider:18} with {stored.name}")
        packed = [
            stored.name
            for stored in formats
            if (kernel := self.choose(EXPERTS, stored)) and kernel.provider == WEIGHT_ONLY
        ]
        if packed:
            lines.append(
                f"weights in {', '.join(packed)} stay packed; GEMMs dequantize the weights "
                f"and compute in {str(self.dtype).removeprefix('torch.')}"
            )
        return "\n".join(lines)


def _unknown(what: str, name: str, known: Collection[str], *, choice: str) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return ConfigError(
        f"--kernels {choice!r:.80}: unknown {what} {name[:60]!r}; available: {', '.join(known)}",
        hint=f"did you mean {near[0]}?" if near else "choose one of the available names",
    )


def resolve(*, platform: Platform, dtype: torch.dtype) -> KernelTable:
    """Return the table for `platform` and `dtype`; references are the fallback of every op."""
    usable = [
        kernel
        for kernel in (gpu_kernels() if Feature.TRITON in platform.features else KERNELS)
        if kernel.provider == "reference"
        or (dtype in kernel.dtypes and not platform.missing(kernel.requires) and kernel.available())
    ]
    return KernelTable.of(usable, platform=platform, dtype=dtype)
