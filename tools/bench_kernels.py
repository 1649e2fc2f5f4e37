"""`negamax bench kernels`: time every kernel at the sizes of the real models.

The report compares each time with the best that the machine can reach. On a GPU, a measurement is
one CUDA graph of several calls with cold caches. Before each measurement, a read of twice the L2
cache evicts the data. The calls use several copies of the tensors in turn, so that the reads of the
other copies evict a copy's data. On the CPU, the kernels run on the op's small cases, and the wall
clock times one call after another.
"""

import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from negamax.base.errors import ConfigError, check_choice
from negamax.bench.report import environment, gpu_seconds
from negamax.formats.floats import PLAIN
from negamax.kernels.op import FLOAT_DTYPES, AnyKernel, AnyOp
from negamax.kernels.platform import platform_of
from negamax.kernels.registry import OPS, resolve
from negamax.worker.device import choose_device
from tests.kernel_cases import CASES
from tests.kernel_cases.bindings import Call, bind, copy_case, tensors_of
from tests.kernel_cases.case import Case, Cost

SCHEMA = "negamax-bench-kernels/1"
REPLAYS = 25
GRAPH_SECONDS = 500e-6  # time of all calls of one graph, long enough to make the launch negligible
MIN_CALLS, MAX_CALLS = 4, 64
MEMORY_SHARE = 0.5  # share of the free GPU memory that copies of a case may use
CPU_ROUNDS, CPU_SECONDS = 20, 0.2
_RANKS = re.compile(r"\btp ?=? ?(\d+)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Ceilings:
    """The rates that an idle machine reaches."""

    bytes_per_second: float  # bytes that a large copy reads and writes per second
    flops_per_second: float  # rate of a large matrix product in the benchmark's dtype
    l2_bytes: int  # 0 on the CPU

    def seconds(self, kernel: AnyKernel, cost: Cost) -> float:
        """Return the roofline: the longer one of the times for the bytes and for the arithmetic."""
        peak = (2 if kernel.multiplies_8_bits else 1) * self.flops_per_second
        return max(cost.num_bytes / self.bytes_per_second, cost.flops / peak)


@dataclass(frozen=True)
class Timing:
    """The time of a kernel on a case. 100 percent of the roofline is the machine's limit."""

    op: str
    provider: str
    case: str
    dtype: str
    microseconds: float  # median time of a call
    num_bytes: int  # bytes that a call must move at least
    flops: int
    gigabytes_per_second: float
    teraflops_per_second: float
    percent_of_roofline: float
    # whether the L2 cache was cold; None on the CPU, where the benchmark does not control caches
    is_cold: bool | None

    def line(self) -> str:
        """Return the line to print, with the rates of memory traffic and of arithmetic."""
        rate = f"{self.gigabytes_per_second:7.0f} GB/s {self.teraflops_per_second:7.1f} TFLOP/s"
        warm = "  (L2 not cold)" if self.is_cold is False else ""
        name = f"{self.op} {self.provider} {self.dtype}"
        return (
            f"{name:45} {self.microseconds:9.2f} us {rate} {self.percent_of_roofline:5.1f} %  "
            f"{self.case}{warm}"
        )


def run(
    *,
    ops: Sequence[str] = (),
    provider: str | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    ranks: Sequence[int] = (1, 2, 4),
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time every kernel of `ops` (none: all) that runs on `device`, and return the document.

    On a GPU the definitions in PyTorch are timed only if `provider` is "reference". `ranks` selects
    among cases whose label names a TP degree. Raises `ConfigError` for unknown names.
    """
    unknown = [name for name in ops if name not in OPS]
    if unknown:
        raise ConfigError(f"--op is {unknown[0]!r}; known: {', '.join(sorted(OPS))}")
    platform = choose_device(device)
    kind = _dtype(dtype)
    chosen = [
        kernel
        for name in ops or sorted(OPS)
        for kernel in _kernels(name, platform, dtype=kind, provider=provider)
    ]
    if not chosen:
        raise ConfigError(f"no kernel to time: provider {provider!r}, {dtype}, {platform}")
    ceilings = measure_ceilings(platform, dtype=kind)
    say(
        f"{platform}: copy {ceilings.bytes_per_second / 1e12:.3f} TB/s, "
        f"{dtype} product {ceilings.flops_per_second / 1e12:.1f} TFLOP/s, L2 "
        f"{ceilings.l2_bytes / 1e6:.0f} MB"
    )
    timings, failures = [], []
    for kernel in chosen:
        op = kernel.op
        for case in cases(op, platform=platform, dtype=kind, ranks=ranks):
            if kernel.provider != "reference" and not kernel.reads(case.stored):
                continue
            try:
                how = {"dtype": kind, "platform": platform, "ceilings": ceilings}
                timing = time_kernel(kernel, case, **how)
            # An error of one kernel must not prevent the report of the others.
            except Exception as error:
                names = {"op": op, "provider": kernel.provider, "case": case.label}
                failures.append(names | {"error": repr(error)})
                say(f"{op} {kernel.provider}: {case.label}: failed: {error!r}")
                continue
            timings.append(timing)
            say(timing.line())
    return {
        "schema": SCHEMA,
        "ceilings": asdict(ceilings),
        "timings": [asdict(timing) for timing in timings],
        "failures": failures,
        "environment": environment(platform),
    }


def cases(op: AnyOp, *, platform: str, dtype: torch.dtype, ranks: Sequence[int]) -> Iterator[Case]:
    """Yield the cases to time, without empty ones.

    On a GPU these are the real sizes, otherwise the small cases with unquantized weights.
    """
    generator = torch.Generator(device=platform).manual_seed(0)
    if platform == "cuda":
        made: Iterable[Case] = CASES[op].wide(dtype, generator)
    else:
        made = [case for case in CASES[op].small(dtype, generator) if case.stored is PLAIN]
    for case in made:
        degree = _RANKS.search(case.label)
        tensors = (value for value in case.tensors.values() if isinstance(value, Tensor))
        is_empty = any(value.numel() == 0 for value in tensors)
        if not is_empty and (degree is None or int(degree[1]) in ranks):
            yield case


@torch.inference_mode()
def time_kernel(
    kernel: AnyKernel, case: Case, *, dtype: torch.dtype, platform: str, ceilings: Ceilings
) -> Timing:
    cost = CASES[kernel.op].cost(case)
    floor = ceilings.seconds(kernel, cost)
    is_cold: bool | None = None
    if platform == "cuda":
        sizes = {"num_bytes": cost.num_bytes, "l2_bytes": ceilings.l2_bytes}
        seconds, is_cold = _time_on_gpu(kernel, case, floor=floor, **sizes)
    else:
        seconds = _time_on_cpu(bind(kernel, case))
    return Timing(
        op=kernel.op,
        provider=kernel.provider,
        case=case.label,
        dtype=str(dtype).removeprefix("torch."),
        microseconds=1e6 * seconds,
        num_bytes=cost.num_bytes,
        flops=cost.flops,
        gigabytes_per_second=cost.num_bytes / seconds / 1e9,
        teraflops_per_second=cost.flops / seconds / 1e12,
        percent_of_roofline=100 * floor / seconds,
        is_cold=is_cold,
    )


@torch.inference_mode()
def measure_ceilings(platform: str, *, dtype: torch.dtype) -> Ceilings:
    """Measure the rates of a large copy and of a large matrix product of `dtype`."""
    on_gpu = platform == "cuda"
    source = torch.ones(2**29 if on_gpu else 2**26, dtype=torch.uint8, device=platform)
    target = torch.empty_like(source)
    size = 8192 if on_gpu else 1024
    a, b = (torch.randn(size, size, device=platform).to(dtype) for _ in range(2))
    product = torch.empty(size, size, dtype=dtype, device=platform)
    timed = _eager_seconds if on_gpu else _time_on_cpu
    return Ceilings(
        bytes_per_second=2 * source.numel() / timed(lambda: target.copy_(source)),
        flops_per_second=2 * size**3 / timed(lambda: torch.mm(a, b, out=product)),
        l2_bytes=torch.cuda.get_device_properties(platform).L2_cache_size if on_gpu else 0,
    )


def _kernels(
    name: str, platform: str, *, dtype: torch.dtype, provider: str | None
) -> list[AnyKernel]:
    table = resolve(platform=platform_of(torch.device(platform)), dtype=dtype)
    found = list(table.candidates[name])
    if provider is not None:
        return [kernel for kernel in found if kernel.provider == provider]
    return [each for each in found if platform == "cpu" or each.provider != "reference"]


def _dtype(name: str) -> torch.dtype:
    names = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES}
    check_choice("--dtype", name, names)
    return names[name]


def _time_on_cpu(call: Call) -> float:
    """Return the median seconds of a call by the wall clock."""
    call()
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < CPU_ROUNDS or time.perf_counter() - started < CPU_SECONDS:
        before = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds)


def _time_on_gpu(
    kernel: AnyKernel, case: Case, *, floor: float, num_bytes: int, l2_bytes: int
) -> tuple[float, bool]:
    """Return the median seconds of a call, and whether the L2 cache was cold for every call."""
    num_calls = min(MAX_CALLS, max(MIN_CALLS, int(GRAPH_SECONDS / max(floor, 2e-6))))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    # The factor is 2, because a kernel may keep a copy of a weight in its own layout.
    case_bytes = sum(tensor.nbytes for tensor in tensors_of(case.tensors))
    affordable = int(MEMORY_SHARE * free / max(1, 2 * case_bytes))
    wanted = min(num_calls, 1 + -(-2 * l2_bytes // max(1, num_bytes)))
    copies = max(1, min(wanted, 1 + affordable))
    calls = [bind(kernel, case if index == 0 else copy_case(case)) for index in range(copies)]
    other = torch.ones(max(1, 2 * l2_bytes), dtype=torch.uint8, device="cuda").view(torch.int8)
    # The reference may read data on the host, which is not possible in a CUDA graph.
    if kernel.provider == "reference":
        return _eager_seconds(calls[0], between=lambda: other.max()), True
    return _graph_seconds(calls, num_calls=num_calls, between=lambda: other.max()), copies == wanted


def _graph_seconds(calls: Sequence[Call], *, num_calls: int, between: Call) -> float:
    """Return the median seconds of a call in a CUDA graph. `between` runs before replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # The call compiles the kernel and allocates memory that later calls reuse.
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(num_calls):
            calls[index % len(calls)]()
    return _eager_seconds(graph.replay, between=between) / num_calls


def _eager_seconds(call: Call, *, between: Call | None = None) -> float:
    return statistics.median(gpu_seconds(call, rounds=REPLAYS, between=between))
