"""Launch and compile kernels. Define functions that kernels of all families call.

Programmatic dependent launch (PDL): after an ordinary launch, a kernel starts when its predecessor
in the stream has ended. The GPU is idle for a few microseconds between two kernels, and a decode
step has hundreds of kernels of 3 to 30 us. From Hopper on, the next kernel may start when all
programs of the running kernel have called `launch_dependents` or have ended. `wait_for_predecessor`
blocks until the predecessor has ended and its results are visible. CUDA graphs keep PDL calls.

    kernel A  ---- launch_dependents ------------------ end
    kernel B            starts, loads weights ... wait_for_predecessor | reads what A wrote

Rules for a kernel that is launched with `launch_options`:

- Every program waits, even a program without work. The wait covers only the direct predecessor;
  earlier kernels have ended, because each kernel waited in turn.
- A program waits before it reads the result of another kernel, and before it writes, because
  predecessors may still read the memory that it writes.
- Before the wait a program may read data that no kernel has written since the last ordinary launch,
  such as weights (PyTorch makes ordinary launches). In a layer a program may also read data that
  kernels wrote before the first layer, because the last of them do not call `launch_dependents`.

A kernel that loads nothing before the wait gains a microsecond by an early start. An early start
may also cost time, most likely because the GPU distributes programs unevenly over multiprocessors
that are still busy. With `starts_early=False` a kernel starts after its predecessor has ended, and
its successor may start early. With `dependent=False` a kernel is launched without PDL.

On GPUs without PDL and in the interpreter PDL is False, and Triton compiles no PDL calls.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any
from zlib import crc32

import torch
import triton
import triton.language as tl

from negamax.base.progress import ShowProgress
from negamax.formats.floats import E4M3_MAX
from negamax.formats.platform import Feature
from negamax.kernels import platform
from negamax.kernels.launch.ptx import INTERPRETED, launch_dependents, wait_for_predecessor
from negamax.kernels.op import Kernel, Op, P, R

TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_IS_LAST_FIRST = tl.constexpr(TRITON_VERSION >= (3, 8))
_E4M3FNUZ_MAX = tl.constexpr(240.0)

# Do not depend on Triton's default: fused multiply-add affects the last bits and the speed.
triton.knobs.language.default_fp_fusion = True


def triton_kernel(
    op: Op[P, R],
    run: R,
    prepare: P = None,  # type: ignore[assignment]  # for ops without `prepare`
    *,
    provider: str = "triton",
    requires: Iterable[Feature] = (),
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
    **fields: Any,
) -> Kernel[P, R]:
    """Return the kernel that runs `op` by `run` on GPUs with Triton and the features `requires`."""
    needs = frozenset({Feature.TRITON, *requires})
    return Kernel(op, provider, run, prepare, requires=needs, dtypes=dtypes, **fields)


@cache
def launch_options(
    device: torch.device,
    *,
    maxnreg: int | None = None,
    starts_early: bool = True,
    dependent: bool = True,
) -> dict[str, Any]:
    """Return the launch options of a kernel with a parameter `PDL: tl.constexpr`.

    `maxnreg` limits the registers per thread on NVIDIA GPUs.
    """
    here = platform.platform_of(device)
    options: dict[str, Any] = {"PDL": False}
    if dependent and Feature.PDL in here.features:
        options = {"PDL": True, "launch_pdl": starts_early}
    if maxnreg is not None and here.vendor == "nvidia":
        options["maxnreg"] = maxnreg
    return options


@triton.jit
def launch_dependents_then_wait(PDL: tl.constexpr):
    """Let the next kernel start, then wait for the predecessor. Most kernels call this function."""
    launch_dependents(PDL)
    wait_for_predecessor(PDL)


@triton.jit
def wait_then_launch_dependents(PDL: tl.constexpr):
    """Wait for the predecessor, then let the next kernel start.

    Kernels that keep the whole GPU busy call this function. With an earlier start, the next kernel
    would compete for bandwidth and occupy registers longer. The tile sizes of experts and of 16-bit
    GEMMs were chosen for kernels that call this function.
    """
    wait_for_predecessor(PDL)
    launch_dependents(PDL)


@triton.jit
def e4m3_max(DTYPE: tl.constexpr):
    """Return the largest finite value of DTYPE, one of the two e4m3 formats."""
    return _E4M3FNUZ_MAX if tl.float8e4b8 == DTYPE else _E4M3_MAX


@triton.jit
def dot(a, b, acc):
    """Return acc + a b. The interpreter multiplies fp32, because its 16-bit products are wrong."""
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def add_last_first(ptrs, offsets, CONTIGUOUS: tl.constexpr, MULTIPLE: tl.constexpr = 0):
    """Return ptrs + offsets, pointers for loads in which Triton assigns threads, then warps, to the
    last dimensions first.

    In the last dimension, runs of CONTIGUOUS elements are adjacent in memory and begin at multiples
    of MULTIPLE bytes (0: unknown). Triton sorts dimensions by the length of contiguous runs. Among
    equal runs, Triton 3.8 starts with the last dimension, and older versions start with the first.
    For older Triton versions, this function declares longer runs, which affect only the order.
    """
    ptrs = ptrs + offsets
    LONGEST: tl.constexpr = CONTIGUOUS if _IS_LAST_FIRST else 64
    TWO: tl.constexpr = 1 if _IS_LAST_FIRST else 2
    FOUR: tl.constexpr = 1 if _IS_LAST_FIRST else 4
    EIGHT: tl.constexpr = 1 if _IS_LAST_FIRST else 8
    if len(ptrs.shape) == 3:
        ptrs = tl.max_contiguous(ptrs, [1, TWO, LONGEST])
    elif len(ptrs.shape) == 4:
        ptrs = tl.max_contiguous(ptrs, [1, TWO, FOUR, LONGEST])
    else:
        ptrs = tl.max_contiguous(ptrs, [1, TWO, FOUR, EIGHT, LONGEST])
        if MULTIPLE > 0:
            ptrs = tl.multiple_of(ptrs, [1, 1, 1, 1, MULTIPLE])
    return ptrs


@triton.jit
def sum_over_threads(sums, NUM: tl.constexpr):
    """Sum NUM (a power of 2) tensors [threads] -> [NUM], by one reduction."""
    for level in tl.static_range(8):
        if NUM >> (level + 1) > 0:
            joined = ()
            for i in tl.static_range(NUM >> (level + 1)):
                joined += (tl.join(sums[i], sums[i + (NUM >> (level + 1))]),)
            sums = joined
    return tl.reshape(tl.sum(sums[0], axis=0), (NUM,))


@contextmanager
def compiling(
    *, share: int, shares: int, threads: int, progress: ShowProgress | None = None
) -> Iterator[None]:
    """Compile kernels instead of launching them, until the context ends.

    Each of `shares` processes compiles its share of the kernels, `threads` kernels at a time.
    Compiling each kernel at its first launch takes several times as long. `progress` receives the
    numbers of kernels compiled and found so far, which are equal when the context ends.
    """
    done, found = count(1), set[str]()  # threads share `done`; its `next` is atomic

    class RankCompilation(triton.AsyncCompileMode):
        def submit(self, key: str, *functions: Callable[..., Any]) -> Any:
            if crc32(key.encode()) % shares != share:
                return None  # another rank compiles this kernel into Triton's cache
            compile_kernel, *rest = functions

            def compile_and_count() -> Any:
                kernel = compile_kernel()
                if progress is not None:
                    progress(next(done), len(found))
                return kernel

            found.add(key)
            return super().submit(key, compile_and_count, *rest)

    with ThreadPoolExecutor(threads) as pool, RankCompilation(pool):
        triton.JITFunction.__getitem__ = lambda kernel, grid: partial(
            kernel.run, grid=grid, warmup=True
        )
        try:
            yield
        finally:
            del triton.JITFunction.__getitem__  # the inherited `__getitem__` launches kernels
