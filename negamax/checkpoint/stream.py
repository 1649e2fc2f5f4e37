"""Parallel reading of a rank's weights in large pieces.

Adjacent parts of a file are read as one piece, so disks and networks get requests of megabytes in
file order. Threads read several pieces at a time into reused buffers, which are in pinned memory if
the weights go to a GPU. The threads also dequantize matrices.

The loader needs host memory for BUFFERS pieces, for the scales of a layer, and for the matrices
that THREADS threads dequantize. MiniMax-M2 needs 1 GiB of host memory and the page cache.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from negamax.checkpoint.finite import BrokenScale, find_broken_scale
from negamax.checkpoint.holes import is_zero
from negamax.checkpoint.plan import Move, SourceTensor
from negamax.checkpoint.reader import CheckpointReader, Span
from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import Role, StoredTensor
from negamax.kernels.quantize.stored import dequantize, encode

THREADS = 8
BUFFERS = 16
PIECE_BYTES = 32 * 2**20
GAP_BYTES = 256 * 2**10  # Parts with a gap of up to this size are read in one request.
_ALIGNMENT = 64  # A piece's offsets in the buffer and in the file are equal modulo this number.


class Part(NamedTuple):
    """A rank's part of a tensor. `broken` and `zeros` are results of checks of the part's values.

    `change` is set if a quantized matrix was converted to another quantized format. `change` =
    sum((new - old)^2) / sum(old^2) over the elements of the matrix.
    """

    move: Move
    tensor: Tensor
    broken: list[BrokenScale]
    zeros: bool  # Whether all bytes of the part's values in the file are 0.
    plain: Tensor | None = None  # The part before its quantization; None: not quantized.
    change: Tensor | None = None  # [] fp32, relative squared conversion error; None: no conversion


GiveParts = Callable[[], Sequence[Part]]  # waits for the parts of a move, and returns the parts


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A part of a tensor to read. A matrix that the loader quantizes has several moves per part."""

    moves: list[int]  # indices of the moves that need the part
    stored: StoredTensor
    source: SourceTensor
    shape: tuple[int, ...]
    span: Span


class _Found(NamedTuple):
    """A part that was read. `broken` and `zeros` are results of checks of the part's values."""

    wanted: _Wanted
    tensor: Tensor
    broken: list[BrokenScale]
    zeros: bool


@dataclass(slots=True)
class _Piece:
    """One request: bytes `start` to `stop` of a file, and the parts that these bytes contain."""

    wanted: list[_Wanted] = field(default_factory=list)
    start: int = 0
    stop: int = 0

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def takes(self, span: Span) -> bool:
        """Return whether `span` is in the same file, and near enough to be read with this piece."""
        return (
            self.wanted[0].span.file == span.file
            and self.start <= span.start <= self.stop + GAP_BYTES
            and span.start + span.num_bytes - self.start <= PIECE_BYTES
        )

    def add(self, wanted: _Wanted) -> None:
        span = wanted.span
        self.start = self.start if self.wanted else span.start
        self.stop = max(self.stop, span.start + span.num_bytes)
        self.wanted.append(wanted)


def read_parts(reader: CheckpointReader, moves: Sequence[Move], *, pinned: bool) -> Iterator[Part]:
    """Yield the parts of all `moves`, layer by layer. With `pinned`, parts are in pinned memory.

    The memory of a yielded part is reused. The caller must copy the part on the current CUDA stream
    before it requests the next part. Raises `CheckpointError` for unreadable files.
    """
    with ThreadPoolExecutor(THREADS, "negamax-load") as pool:
        yield from _Stream(reader, moves, pool, pinned=pinned).run()


class _Stream:
    """Reads and converts pieces in threads. Only the caller of `run` changes this object."""

    def __init__(
        self,
        reader: CheckpointReader,
        moves: Sequence[Move],
        pool: ThreadPoolExecutor,
        *,
        pinned: bool,
    ) -> None:
        self._reader, self._moves, self._pool, self._pinned = reader, moves, pool, pinned
        self._pieces = list(_plan_pieces(moves))
        largest = max((piece.num_bytes for piece in self._pieces), default=0)
        self._buffer_bytes = min(largest, PIECE_BYTES) + _ALIGNMENT
        self._free: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._reads: deque[tuple[_Piece, Tensor, Future[list[_Found]]]] = deque()
        self._made: deque[tuple[Tensor, list[GiveParts]]] = deque()
        # index of a dequantizing or quantizing move -> parts of the move that were read so far
        self._there: dict[int, list[_Found]] = {}
        self._needed = [sum(1 for _ in move.parts()) for move in moves]  # parts of each move

    def run(self) -> Iterator[Part]:
        for piece in self._pieces:
            while len(self._reads) + len(self._made) >= BUFFERS:
                yield from self._advance()
            buffer = self._buffer(piece)
            self._reads.append((piece, buffer, self._pool.submit(self._read, piece, buffer)))
        while self._reads or self._made:
            yield from self._advance()

    def _advance(self) -> Iterator[Part]:
        """Start to convert a piece that was read, or yield the parts of a converted piece."""
        if self._reads and len(self._made) < BUFFERS // 2:
            _, buffer, read = self._reads.popleft()
            self._made.append((buffer, self._make(read.result())))
            return
        buffer, parts = self._made.popleft()
        for give in parts:
            yield from give()
        if len(buffer) == self._buffer_bytes:
            event = torch.cuda.Event() if self._pinned else None
            if event is not None:
                event.record()
            self._free.append((buffer, event))

    def _buffer(self, piece: _Piece) -> Tensor:
        size = max(self._buffer_bytes, piece.num_bytes + _ALIGNMENT)
        if size == self._buffer_bytes and self._free:
            buffer, event = self._free.popleft()
            if event is not None:
                event.synchronize()  # wait until the GPU has copied from this buffer
            return buffer
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def _read(self, piece: _Piece, buffer: Tensor) -> list[_Found]:
        """Read the parts of `piece`. This method runs in a thread of the pool."""
        shift = piece.start % _ALIGNMENT
        data = buffer[shift : shift + piece.num_bytes]
        self._reader.read_into(data, piece.wanted[0].span.file, piece.start)
        return [self._find(wanted, data, piece.start) for wanted in piece.wanted]

    def _find(self, wanted: _Wanted, data: Tensor, start: int) -> _Found:
        """Return the part `wanted` from `data`, the bytes of a file from byte `start` on."""
        move, entry = self._moves[wanted.moves[0]], wanted.source.entry
        tensor = wanted.span.view(data[wanted.span.start - start :])
        if not tensor.is_contiguous():
            tensor = self._pin(tensor) if _is_copied(move) else tensor.contiguous()
        tensor, broken, role = tensor.reshape(wanted.shape), [], wanted.stored.role
        if role is Role.SCALE:
            scale = find_broken_scale(tensor, entry, move.slot.source)
            broken += [] if scale is None else [scale]
        return _Found(wanted, tensor, broken, role is Role.VALUES and is_zero(tensor))

    def _make(self, found: list[_Found]) -> list[GiveParts]:
        """For each move that `found` completes, return a function that returns the move's parts."""
        parts: list[GiveParts] = []
        for one in found:
            moves = [self._moves[number] for number in one.wanted.moves]
            if _is_copied(moves[0]):
                parts.append(partial(list, (Part(moves[0], one.tensor, one.broken, one.zeros),)))
                continue
            number = one.wanted.moves[0]
            there = self._there.setdefault(number, [])
            there.append(one)
            if len(there) < self._needed[number]:
                continue
            del self._there[number]
            if moves[0].is_quantized:
                make = partial(_quantize, moves, there)
                # `make` runs in this thread for a GPU, so that one CUDA stream orders all work.
                parts.append(make if self._pinned else self._pool.submit(make).result)
            else:
                parts.append(self._pool.submit(self._dequantize, moves[0], there).result)
        for one in found:  # copy parts of incomplete moves, because the buffer is reused
            there = self._there.get(one.wanted.moves[0], [])
            for place, other in enumerate(there):
                if other.wanted is one.wanted:
                    there[place] = one._replace(tensor=one.tensor.clone())
        return parts

    def _dequantize(self, move: Move, there: list[_Found]) -> list[Part]:
        """Dequantize a matrix. This method runs in a thread of the pool."""
        plain = dequantize(move.slot.source, _check_tensors(move, there))
        part = self._pin(_crop(plain, move.slot.region, move.read_region))
        return [Part(move, part, _list_broken(there), _has_zeros(there))]

    def _pin(self, part: Tensor) -> Tensor:
        """Return `part`. If the weights go to a GPU, return a copy of `part` in pinned memory."""
        if not self._pinned:
            return part
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)


def _check_tensors(move: Move, there: Sequence[_Found]) -> dict[str, Tensor]:
    """Check the tensors of a matrix. Return the tensors from which the matrix is computed."""
    tensors = {}
    for wanted, tensor, *_ in there:
        stored, part = wanted.stored, wanted.stored.part(move.read_region)
        wanted.source.check(stored, tensor, part, move.slot.matrix_shape)
        if stored.is_kept:
            tensors[stored.name] = tensor
    return tensors


def _list_broken(there: Sequence[_Found]) -> list[BrokenScale]:
    return [scale for found in there for scale in found.broken]


def _has_zeros(there: Sequence[_Found]) -> bool:
    return any(found.zeros for found in there)


def _quantize(moves: Sequence[Move], there: Sequence[_Found]) -> list[Part]:
    """Quantize a matrix, and return a part for each resulting tensor."""
    source, device = moves[0].slot.source, moves[0].slot.device
    assert source.made_of is not None
    tensors = {name: tensor.to(device) for name, tensor in _check_tensors(moves[0], there).items()}
    plain = tensors[PLAIN.values.name]
    plain = plain if source.made_of is PLAIN else dequantize(source.made_of, tensors)
    made = encode(source, plain.float())
    change = None if source.made_of is PLAIN else _relative_change(dequantize(source, made), plain)
    parts = []
    for move in moves:
        slot, whole = move.slot, move.read_region
        if slot.stored is None:
            found = _crop(dequantize(slot.source, made), slot.matrix_region, whole)
        else:
            region, outer = slot.stored.part(slot.matrix_region), slot.stored.part(whole)
            found = _crop(made[slot.stored.name], region, outer)
        is_first = move.is_of_values
        broken, zeros = _list_broken(there) if is_first else [], _has_zeros(there)
        about = (plain, change) if is_first else ()
        parts.append(Part(move, found, broken, zeros, *about))
    return parts


def _relative_change(made: Tensor, plain: Tensor) -> Tensor:
    whole = plain.float()
    tiny = torch.finfo(torch.float32).tiny  # avoids 0 / 0 for a matrix of zeros
    return (made.float() - whole).square().sum() / whole.square().sum().clamp_min(tiny)


def _is_copied(move: Move) -> bool:
    return not (move.is_dequantized or move.is_quantized)


def _crop(found: Tensor, part: tuple[range, ...], whole: tuple[range, ...]) -> Tensor:
    """Return the ranges `part` of a tensor from `found`, which contains its ranges `whole`."""
    places = (
        slice(wanted.start - outer.start, wanted.stop - outer.start)
        for wanted, outer in zip(part, whole, strict=True)
    )
    return found[tuple(places)]


def _plan_pieces(moves: Sequence[Move]) -> Iterator[_Piece]:
    """Yield the pieces to read, layer by layer and in file order.

    In each layer, the scales of matrices to dequantize are first. Scales are small, so they can
    wait in memory for the values.
    """
    wanted: list[tuple[tuple[int, bool, str, int], _Wanted]] = []
    quantized: dict[tuple[SourceTensor, tuple[range, ...]], _Wanted] = {}
    for number, move in enumerate(moves):
        for stored, source, part in move.parts():
            if move.is_quantized and (known := quantized.get((source, part))) is not None:
                known.moves.append(number)
                continue
            span = Span.of(source.entry, source.region(part))
            each = _Wanted([number], stored, source, tuple(map(len, part)), span)
            if move.is_quantized:
                quantized[source, part] = each
            waits = not _is_copied(move) and stored is not move.tensors[0][0]
            wanted.append(((move.layer, not waits, str(span.file), span.start), each))
    wanted.sort(key=lambda each: each[0])
    piece = _Piece()
    for _, each in wanted:
        if piece.wanted and not piece.takes(each.span):
            yield piece
            piece = _Piece()
        piece.add(each)
    if piece.wanted:
        yield piece
