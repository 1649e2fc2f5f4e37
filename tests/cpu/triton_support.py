"""Prepare Triton's interpreter; import this module before any kernel.

`tests/conftest.py` enables the interpreter. Without the interpreter, this module skips the test.
"""

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("in this run Triton compiles its kernels for the GPU", allow_module_level=True)

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from negamax.kernels import platform
from negamax.kernels.peers import PeerMemory, PeerRegion, ShardRegion

Result = TypeVar("Result")

# few multiprocessors, so that the interpreter takes little time
MI300X = platform.amd("gfx942", name="MI300X", multiprocessors=2, shared_memory=65536)

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """Convert scalars for `range`, since Triton 3.6 keeps them as arrays that NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_patch_core = interpreter._patch_lang_core


def _patch_core_and_fnuz(lang: Any, scope: Any) -> None:
    """Let kernels name MI300's FP8 type, which the interpreter lists only from Triton 3.8 on."""
    _patch_core(lang, scope)
    to_ir = lang.dtype.to_ir

    def convert(self: Any, builder: Any) -> Any:
        return builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else to_ir(self, builder)

    scope.set_attr(lang.dtype, "to_ir", convert)


interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter._patch_lang_core = _patch_core_and_fnuz

# Checking integers for overflow takes 40 % of the interpreter's time.
# The interpreter reports an overflow only under `debug`.
_builder = interpreter.interpreter_builder
_builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)

_patch_language = interpreter._patch_lang
_patched: set[Any] = set()  # modules of Triton's language that are patched while a kernel runs


@functools.cache
def _language_seen_by(fn: Callable[..., Any]) -> frozenset[Any]:
    return frozenset(
        value for value in fn.__globals__.values() if value is language or value is language.core
    )


class _Patch:
    """Patch the language until `restore` is called."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._modules = _language_seen_by(fn) - _patched
        self._scope = _patch_language(fn) if self._modules else None
        _patched.update(self._modules)

    def restore(self) -> None:
        _patched.difference_update(self._modules)
        if self._scope is not None:
            self._scope.restore()


# Triton patches its language again in every call of a kernel function, a third of all time.
interpreter._patch_lang = _Patch

# These functions are the next most expensive steps per operation.
_dtype_of_scalar = functools.cache(interpreter._get_np_dtype)  # The original is slow.


def _dtype_of(type_: Any) -> Any:
    scalar = type_.scalar
    return _POINTER if isinstance(scalar, language.pointer_type) else _dtype_of_scalar(scalar)


_POINTER = numpy.dtype(numpy.uint64)
interpreter._get_np_dtype = _dtype_of

_unwrap = language.core._unwrap_if_constexpr
_CONSTEXPR, _PLAIN = language.constexpr, {int, bool, float, str, language.tensor, language.dtype}


def _unwrap_by_type(value: Any) -> Any:
    """Replace Triton's own function, which queries the types of all values four times."""
    kind = type(value)
    if kind is _CONSTEXPR:
        return value.value
    return value if kind in _PLAIN else _unwrap(value)


language.core._unwrap_if_constexpr = _unwrap_by_type

_init_block_type, _init_tensor = language.block_type.__init__, language.tensor.__init__
_types_of_shapes: dict[tuple[str, int], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], Any] = {}


def _init_block_type_once(self: Any, element_ty: Any, shape: Any) -> None:
    known = _types_of_shapes.get((element_ty.name, id(shape)))  # an entry of `_shapes`
    if known is None:
        key = tuple([_unwrap_by_type(size) for size in shape])
        _init_block_type(self, element_ty, shape)
        self.shape = _shapes.setdefault(key, self.shape)
        place = element_ty.name, id(self.shape)
        known = _types_of_shapes.setdefault(place, self.__dict__)
    self.__dict__ = known


def _init_tensor_of_known_type(self: Any, handle: Any, type: Any) -> None:
    if "sizes_of_tensor" in type.__dict__:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes_of_tensor
    else:
        _init_tensor(self, handle, type)
        type.sizes_of_tensor = self.numel, self.shape


def _broadcast_where_shapes_differ(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    shape = left.type.__dict__.get("shape")
    if shape is not None and shape is right.type.__dict__.get("shape"):
        return left, right
    return _broadcast(self, left, right)


_TENSOR, _NUMBERS = language.tensor, {int, float, bool}
MOST_CONSTANTS = 4096
_HALF = {language.float16, language.bfloat16}  # types that are divided in float32
_operands = TritonSemantic.binary_op_type_checking_impl
_constants: dict[tuple[Any, ...], Any] = {}  # (number, type of the other operand) -> tensor


def _operands_of_known_types(
    self: Any, left: Any, right: Any, *flags: bool, **more: bool
) -> tuple[Any, Any]:
    """Do not convert equal types, and reuse one read-only tensor per number."""
    if type(left) is not _TENSOR or more:
        return _operands(self, left, right, *flags, **more)
    if type(right) is _TENSOR:
        scalar = left.type.scalar
        is_kept = type(scalar) is language.dtype and not (flags[3:] == (True,) and scalar in _HALF)
        if scalar is right.type.scalar and is_kept:
            return _broadcast_where_shapes_differ(self, left, right)
    elif type(right) in _NUMBERS:
        key = (left.type.name, type(right), right, flags)
        if (constant := _constants.get(key)) is not None:
            return left, constant
        found = _operands(self, left, right, *flags)
        if found[0] is left:
            found[1].handle.data.flags.writeable = False
            if len(_constants) == MOST_CONSTANTS:
                _constants.clear()
            _constants[key] = found[1]
        return found
    return _operands(self, left, right, *flags)


language.block_type.__init__ = _init_block_type_once
language.tensor.__init__ = _init_tensor_of_known_type
_broadcast = TritonSemantic.broadcast_impl_value
TritonSemantic.broadcast_impl_value = _broadcast_where_shapes_differ
TritonSemantic.binary_op_type_checking_impl = _operands_of_known_types

_reduce = interpreter.ReduceOps.apply_impl


def _reduce_or_xor(self: Any, operands: Any) -> Any:
    """Vectorize `xor_sum`, which sorting needs and the interpreter computes number by number."""
    if self.combine_fn is not language.standard._xor_combine:
        return _reduce(self, operands)
    numbers = operands[0].handle.data
    found = numpy.bitwise_xor.reduce(numbers, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(found, operands[0].dtype)


interpreter.ReduceOps.apply_impl = _reduce_or_xor

_TORCH = {
    language.float32: torch.float32,
    language.float16: torch.float16,
    language.bfloat16: torch.bfloat16,
    language.float8e4nv: torch.float8_e4m3fn,
    language.float8e4b8: torch.float8_e4m3fnuz,
}
_convert = interpreter._convert_float


def _convert_float(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Round as a GPU does; the interpreter's own function truncates and is slow."""
    if source not in _TORCH or target not in _TORCH:
        return _convert(values, source, target, rounding_mode)
    stored = torch.frombuffer(bytearray(values.tobytes()), dtype=torch.uint8)
    converted = stored.view(_TORCH[source]).to(_TORCH[target]).view(torch.uint8).numpy()
    bits = getattr(numpy, f"uint{target.primitive_bitwidth}")
    return converted.view(bits).reshape(values.shape)


interpreter._convert_float = _convert_float


def _addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


class Ranks:
    """Hold the memory of `world` ranks. One rank runs; `arrive` writes the words of the others."""

    def __init__(self, world: int, *, rows: int, words: int) -> None:
        self.world, self.rows, self.words = world, rows, words
        self.copies = [torch.zeros(2, rows, world, words, dtype=torch.int64) for _ in range(world)]
        self.epochs = [torch.zeros(rows, dtype=torch.int32) for _ in range(world)]
        self.control = torch.zeros(3, dtype=torch.int64)  # as `PollControl.words`

    def region(self, rank: int) -> PeerRegion:
        addresses = _addresses([*self.copies, self.control])
        return PeerRegion(addresses, self.epochs[rank], self.rows, self.words)

    def peers(self, rank: int) -> PeerMemory:
        region = self.region(rank)
        return PeerMemory(rank=rank, world=self.world, reduce=region, stats=region, pick=region)

    def arrive(
        self, at: int, *, sender: int, row: int, payload: torch.Tensor, first_word: int = 0
    ) -> None:
        """Write `payload` [N] int32 as words from `sender` to rank `at`, in the next epoch."""
        tag = int(self.epochs[at][row]) + 1
        words = (tag << 32) | (payload.to(torch.int64) & 0xFFFFFFFF)
        self.copies[at][tag & 1, row, sender, first_word : first_word + len(payload)] = words


class Group:
    """Stand in for a group on rank `rank`. `tokens` is the memory for tokens sent to experts."""

    def __init__(self, ranks: Ranks, rank: int, *, tokens: Ranks | None = None) -> None:
        self.size, self.rank = ranks.world, rank
        self.peers: PeerMemory | None = ranks.peers(rank)
        if tokens is not None:
            self.peers = dataclasses.replace(self.peers, tokens=tokens.region(rank))

    def all_reduce(self, tensor: torch.Tensor, **_options: int) -> torch.Tensor:
        raise AssertionError("the rows must fit in the region")

    all_gather = reduce_scatter = all_reduce


class Threads:
    """Run ranks as threads that take turns. Kernels that wait for other ranks cannot run."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._turn, self._meeting = threading.Lock(), threading.Barrier(world, timeout=120)
        self._said: list[Any] = [None] * world

    def run(self, rank_code: Callable[[int], Result]) -> list[Result]:
        def one(rank: int) -> Result:
            with self._turn:
                try:
                    return rank_code(rank)
                except BaseException:
                    self._meeting.abort()
                    raise

        with ThreadPoolExecutor(self.world) as pool:
            return [
                done.result() for done in [pool.submit(one, rank) for rank in range(self.world)]
            ]

    def barrier(self) -> None:
        self._turn.release()
        try:
            self._meeting.wait()
        finally:
            self._turn.acquire()

    def say(self, rank: int, what: Any) -> list[Any]:
        self._said[rank] = what
        self.barrier()
        heard = list(self._said)
        self.barrier()
        return heard


SharedRows = tuple[list[torch.Tensor], list[torch.Tensor]]  # partial sums and rows of each rank


class ThreadGroup:
    """Stand in for a group of `threads`, with or without shared memory for many rows."""

    def __init__(self, threads: Threads, rank: int, *, memory: SharedRows | None) -> None:
        self.size, self.rank, self._threads = threads.world, rank, threads
        self.peers: PeerMemory | None = None
        if memory is not None:
            parts, gathered = memory
            own = gathered[rank].view(torch.uint8).flatten()
            regions = _addresses(parts), _addresses(gathered), own
            shards = ShardRegion(*regions, *gathered[rank].shape, barrier=threads.barrier)
            flags = torch.zeros(0, dtype=torch.int32)
            none = PeerRegion(torch.zeros(threads.world, dtype=torch.int64), flags, 0, 0)
            self.peers = PeerMemory(
                rank, threads.world, reduce=none, stats=none, pick=none, shards=shards
            )

    @staticmethod
    def memory(world: int, *, rows: int, words: int) -> SharedRows:
        shard = -(-rows // world)
        parts = [torch.full((world, shard, words), -1, dtype=torch.int32) for _ in range(world)]
        return parts, [torch.full((rows, words), -1, dtype=torch.int32) for _ in range(world)]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(tensor.shape)
        for part in self._threads.say(self.rank, tensor):
            total += part.float()
        return total.to(tensor.dtype)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(tensor).chunk(self.size)[self.rank]

    def all_gather(self, tensor: torch.Tensor, *, dim: int) -> torch.Tensor:
        return torch.cat(self._threads.say(self.rank, tensor), dim=dim)


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    names: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.name()
            if not func.is_view and "empty" not in name:
                names.append(name)
            return func(*args, **(kwargs or {}))

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__.removesuffix("_kernel"))
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    original = interpreter.InterpretedFunction.run
    with monkeypatch.context() as patch, Watching():
        patch.setattr(interpreter.InterpretedFunction, "run", run)
        yield names


def paged(
    lengths: Sequence[int],
    *,
    heads: int,
    dtype: torch.dtype = torch.bfloat16,
    dim: int = 32,
    block_size: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache whose unused cells hold large values, and block tables in int32."""
    generator = torch.Generator().manual_seed(len(lengths))
    width = -(-max(lengths) // block_size)
    tables = torch.randperm(width * len(lengths), generator=generator).view(len(lengths), width)
    cache = torch.full((tables.numel(), heads, block_size, dim), 400.0)
    for row, length in zip(tables.tolist(), lengths, strict=True):
        for position in range(length):
            key = torch.randn(heads, dim, generator=generator)
            cache[row[position // block_size], :, position % block_size] = key
    return cache.to(dtype), tables.int()


def words_of(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())
