"""How kernels are launched and compiled, and functions that kernels of all families call.

Programmatic dependent launch (PDL): after an ordinary launch a kernel starts when the one before it
in the stream has ended, which leaves the GPU idle for a few microseconds, and a decode step is
hundreds of kernels of 3 to 30 us. NVIDIA GPUs from Hopper on can start the next kernel as soon as
every program of the running one has allowed it (`launch_dependents`, or its end); that kernel waits
(`wait_for_predecessor`) until the one before it has ended and what it wrote can be read. CUDA
graphs keep both.

    kernel A  ---- launch_dependents ------------------ end
    kernel B            starts, loads weights ... wait_for_predecessor | reads what A wrote

A kernel that is launched with `launch_options`

- waits in every program, also in those that have nothing to do: the wait is for the kernel before
  it alone, so all that came earlier has ended only because each of them waited in turn;
- waits before it reads what a kernel has computed, and before it writes anything at all: memory it
  writes may still be read by its predecessors, of which several may be running;
- may read before the wait what no kernel since the last ordinary launch has written, such as
  weights (PyTorch launches all its kernels in the ordinary way), and in a layer whatever the step
  prepared ahead of the first one: the last kernels that prepare it let nobody start before their
  end.

A kernel that loads nothing before the wait gains a microsecond by an early start, and may lose
more, most likely since its programs go to multiprocessors where the kernel before it has left room,
several to one and none to another, and stay there. With `starts_early=False` it is launched behind
the kernel before it, and the next one may still start early; with `dependent=False` that may not,
either: these are ordinary launches.

Elsewhere, and in Triton's interpreter, PDL is False and none of this is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from zlib import crc32

import torch
import triton
import triton.language as tl

from negamax.formats.floats import E4M3_MAX
from negamax.formats.platform import Feature
from negamax.kernels import platform
from negamax.kernels.launch.ptx import INTERPRETED, launch_dependents, wait_for_predecessor
from negamax.kernels.op import Kernel, OpName, P, R

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_E4M3FNUZ_MAX = tl.constexpr(240.0)

# Triton's default may change; without it the kernels' last bits and speed are others
triton.knobs.language.default_fp_fusion = True


def triton_kernel(
    op: OpName[P, R],
    run: R,
    prepare: P = None,  # type: ignore[assignment]  # of the ops whose `P` is None
    *,
    provider: str = "triton",
    requires: Iterable[Feature] = (),
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
    **fields: Any,
) -> Kernel[P, R]:
    """A provider of `op` for GPUs that have the features `requires`."""
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
    """What a kernel with a parameter `PDL: tl.constexpr` is launched with on `device`, besides its
    own arguments. `maxnreg`: per thread at most, where that can be said. `starts_early` and
    `dependent`: see above.
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
    """What most kernels do: the next one starts up while this one waits for the one before it."""
    launch_dependents(PDL)
    wait_for_predecessor(PDL)


@triton.jit
def wait_then_launch_dependents(PDL: tl.constexpr):
    """The other order, for kernels that keep all of the GPU busy: what the next one loads at its
    start does not take bandwidth from the one before this, and its programs do not hold registers
    for as long. The tiles of the experts and of products with 16-bit weights were chosen with it.
    """
    wait_for_predecessor(PDL)
    launch_dependents(PDL)


@triton.jit
def e4m3_max(DTYPE: tl.constexpr):
    """The largest finite value of DTYPE, one of the two forms of e4m3."""
    return _E4M3FNUZ_MAX if tl.float8e4b8 == DTYPE else _E4M3_MAX


@triton.jit
def dot(a, b, acc):
    """acc + a b; in fp32 in the interpreter, whose 16-bit products are wrong."""
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def sum_over_threads(sums, NUM: tl.constexpr):
    """A tuple of NUM (a power of 2) tensors [threads] -> their sums [NUM], by one reduction over
    [threads, 2, 2, ...] for all of them.
    """
    for level in tl.static_range(8):
        if NUM >> (level + 1) > 0:
            joined = ()
            for i in tl.static_range(NUM >> (level + 1)):
                joined += (tl.join(sums[i], sums[i + (NUM >> (level + 1))]),)
            sums = joined
    return tl.reshape(tl.sum(sums[0], axis=0), (NUM,))


@contextmanager
def compiling(*, share: int, shares: int, threads: int) -> Iterator[None]:
    """Inside, launches run nothing: this process compiles its share of their kernels, `threads` of
    them at a time, and has done so when the context ends. One by one, at their first launches, they
    take several times as long.
    """

    class Share(triton.AsyncCompileMode):
        def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Any) -> Any:
            if crc32(key.encode()) % shares != share:
                return None  # found in Triton's cache, once its rank has compiled it
            return super().submit(key, compile_fn, finalize_fn)

    with ThreadPoolExecutor(threads) as pool, Share(pool):
        triton.JITFunction.__getitem__ = lambda kernel, grid: partial(
            kernel.run, grid=grid, warmup=True
        )
        try:
            yield
        finally:
            del triton.JITFunction.__getitem__  # what it has inherited launches
