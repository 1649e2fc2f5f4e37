"""Choose the device and the dtype of a rank, and transfer data between host and device.

Only `HostTensor.read` waits for a GPU. Pinned memory on the host makes the copies of inputs and
results asynchronous.
"""

import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from negamax.base.errors import ConfigError, check_choice
from negamax.base.log import get_logger
from negamax.config.model_spec import ModelSpec
from negamax.formats.platform import Feature, Platform
from negamax.kernels.platform import cpu_computes_bf16, platform_of
from negamax.options.engine import DEVICES

logger = get_logger(__name__)


def choose_device(name: str) -> str:
    """Resolve --device to "cpu" or "cuda". Raises `ConfigError` for "cuda" without a GPU."""
    check_choice("--device", name, DEVICES)
    found = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not found):
        return "cpu"
    if not found:
        raise ConfigError(
            "--device is cuda, but PyTorch finds no CUDA device", hint="use --device cpu or auto"
        )
    return "cuda"


def num_gpus(device: str) -> int | None:
    """Return the number of GPUs, or None for the device "cpu", which all ranks share."""
    return torch.cuda.device_count() if device == "cuda" else None


def multiplies_blocks(device: str) -> bool:
    """Return whether cuBLAS supports FP8 GEMMs with block scales on all GPUs (Hopper)."""
    found = (platform_of(torch.device(device, n)) for n in range(torch.cuda.device_count()))
    return all(Feature.CUBLAS_BLOCK_FP8 in each.features for each in found)


def choose_dtype(name: str, *, spec: ModelSpec, device: str) -> torch.dtype:
    """Resolve --dtype. "auto" means the checkpoint's dtype, or float32 if a CPU lacks bfloat16."""
    if name == "auto":
        name = spec.dtype
        if device == "cuda" and name == "float32":
            logger.info("the checkpoint is in float32; the GPU uses bfloat16 (--dtype bfloat16)")
            name = "bfloat16"
        elif device == "cpu" and name != "float32" and not cpu_computes_bf16():
            logger.info(
                "this CPU has no bfloat16 arithmetic and computes in float32 (--dtype float32)"
            )
            name = "float32"
    if device == "cuda" and name == "float32":
        raise ConfigError(
            "--dtype is float32; on a GPU the model runs in bfloat16 or float16",
            hint="remove --dtype, or use --device cpu",
        )
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def kv_dtype(name: str, *, dtype: torch.dtype, device: str) -> torch.dtype:
    """Resolve --kv-cache-dtype. Raises `ConfigError` for FP8 on a CPU and unsupported dtypes."""
    return _cache_dtype(name, "--kv-cache-dtype", dtype=dtype, has_fp8=device == "cuda")


def index_dtype(name: str, *, dtype: torch.dtype) -> torch.dtype:
    """Resolve the dtype of index keys as `kv_dtype` does. FP8 is allowed on every device."""
    return _cache_dtype(name, "--index-cache-dtype", dtype=dtype, has_fp8=True)


def _cache_dtype(name: str, option: str, *, dtype: torch.dtype, has_fp8: bool) -> torch.dtype:
    own = str(dtype).removeprefix("torch.")
    if name in ("auto", own):
        return dtype
    if name in ("fp8", "fp8_e4m3") and has_fp8:
        return torch.float8_e4m3fn
    allowed = f"auto or {own}" + (", fp8" if has_fp8 else "; fp8 needs a GPU")
    raise ConfigError(f"{option} is {name}; allowed on this device: {allowed}")


def check_platform(
    platform: Platform, *, cache_dtypes: Collection[torch.dtype], rank: int = 0
) -> None:
    """Raise `ConfigError` if the GPU cannot run the model. Rank 0 warns of an untested GPU."""
    platform.check(fp8_cache=torch.float8_e4m3fn in cache_dtypes)
    if rank == 0 and not platform.is_measured:
        logger.warning(
            "%s: Negamax has not been tested on this GPU; speed and results are unknown",
            platform.label,
        )


def upload(
    columns: Sequence[NDArray[np.int64]], device: torch.device, *, out: Tensor | None = None
) -> list[Tensor]:
    """Send all columns in one transfer. Return int64 tensors, which are views of `out` if given."""
    if device.type == "cpu" and out is None:  # no transfer is needed
        return [torch.from_numpy(np.ascontiguousarray(column)) for column in columns]
    packed = torch.from_numpy(np.concatenate(columns))
    if device.type != "cpu":
        packed = packed.pin_memory()
    if out is None:
        packed = packed.to(device, non_blocking=True)
    else:
        packed = out[: len(packed)].copy_(packed, non_blocking=True)
    return list(torch.split(packed, [len(column) for column in columns]))


def indices(members: Sequence[int] | NDArray[np.int64], device: torch.device) -> Tensor:
    return upload((np.array(members, dtype=np.int64),), device)[0]


class Graph(Protocol):
    """A captured sequence of kernels."""

    def replay(self) -> None:
        """Run the kernels again on the current contents of their inputs."""


class GraphPool(Protocol):
    """Captures sequences of kernels as graphs that share memory."""

    def capture(self, step: Callable[[], None]) -> Graph:
        """Run `step` once, then capture it, because a capture must not compile or allocate."""

    def num_bytes(self) -> int:
        """Return the memory of the graphs captured so far, in bytes."""


class CudaGraphPool:
    """CUDA graphs in one memory pool."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may call CUDA during the capture.
        with torch.cuda.graph(
            graph,
            pool=self._handle,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            step()
        return graph

    def num_bytes(self) -> int:
        torch.cuda.synchronize()
        return pool_bytes(self._handle)


def pool_bytes(pool: tuple[int, int]) -> int:
    """Return the GPU memory of the graphs in `pool`, in bytes."""
    segments = torch.cuda.memory_snapshot()
    own = (each for each in segments if tuple(each["segment_pool_id"]) == tuple(pool))
    return sum(segment["total_size"] for segment in own)


@dataclass(frozen=True)
class Runtime:
    """How steps run on one kind of device."""

    # Whether a launch returns before its step has run. If an asynchronous step fails, all rows of
    # the step fail. If a synchronous step fails, the worker repeats the step row by row.
    is_asynchronous: bool
    # creates the memory pool of CUDA graphs; None: steps are not captured
    graph_pool: Callable[[], GraphPool] | None
    # Whether a token's result must be independent of other tokens in the step. If True, generated
    # tokens always run as decodes.
    is_batch_invariant: bool
    samples_on_shards: bool  # whether each rank samples from its shard of the logits if possible

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event after the launched kernels. Return None if launches are synchronous."""
        if not self.is_asynchronous:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_of(self, run: Callable[[], None], *, repeats: int) -> float | None:
        """Return the mean device time of `repeats` calls after a warmup, or None on a CPU."""
        run()
        began = self.record_event()
        for _ in range(repeats):
            run()
        ended = self.record_event()
        if began is None or ended is None:
            return None
        ended.synchronize()
        milliseconds: float = began.elapsed_time(ended)
        return milliseconds / 1e3 / repeats

    def release_memory(self) -> None:
        """Free the cached memory of deleted tensors."""
        if self.is_asynchronous:
            gc.collect()
            torch.cuda.empty_cache()


_RUNTIMES = {
    "cpu": Runtime(
        is_asynchronous=False, graph_pool=None, is_batch_invariant=True, samples_on_shards=False
    ),
    "cuda": Runtime(
        is_asynchronous=True,
        graph_pool=CudaGraphPool,
        is_batch_invariant=False,
        samples_on_shards=True,
    ),
}


def runtime_of(device: torch.device) -> Runtime:
    return _RUNTIMES[device.type]


class HostTensor:
    """A device tensor that is being copied to the host. A CPU tensor is not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Tensor:
        """Wait for the copy and return the values."""  # host-sync: waits for the step
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor
