"""Checks at load for NaN and infinite weights and for invalid scales.

The checks find damaged files, incomplete files and failed conversions. The loader checks each
parameter once, on the parameter's device, after the copy that filled it. The results stay on the
device until the last tensor is written, so that the host waits for a GPU only once. Scales are
checked on the host. Only a tensor that fails its check is searched for invalid values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.checkpoint.holes import ZeroMatrix, check_zeros
from negamax.checkpoint.reader import CheckpointReader, TensorEntry
from negamax.formats.floats import E4M3_FNUZ
from negamax.formats.tensor_format import Role, TensorFormat

_MAX_NAMED = 5  # A message lists at most this number of tensors.
# `_SPECIAL_BITS`: bits that are 1 in NaN and infinity. In E4M3FN only 0x7F and 0xFF are NaN.
_SPECIAL_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
}
_POWERS = (torch.uint8, torch.float8_e8m0fnu)  # dtypes of scales stored as exponents


class _Part(NamedTuple):
    """The check result of one part of a parameter. The loader copied the part from `sources`."""

    sources: tuple[TensorEntry, ...]
    dtype: torch.dtype
    # [] integer: exponent bits of the part's largest magnitude; NaN and infinity set all these bits
    exponent: Tensor


@dataclass(frozen=True)
class BrokenScale:
    entry: TensorEntry
    may_be_negative: bool

    def describe(self, reader: CheckpointReader) -> str:
        """Describe the invalid scales: name, count, first index and first value."""
        values = reader.read(self.entry)
        broken = _find_invalid(values, may_be_negative=self.may_be_negative)
        places = broken.nonzero()
        if not len(places):
            return f"{self.entry.name}: all scales that one rank needs are 0"
        value = _to_fp32(values)[tuple(places[0].tolist())].item()
        return f"{_describe_places(self.entry, places)}: {value:g}"


@dataclass
class FiniteCheck:
    """Collects the checks of all written tensors. Only the loader changes this object."""

    _parts: list[_Part] = field(default_factory=list)
    _scales: dict[str, BrokenScale] = field(default_factory=dict)
    # name of a matrix -> the matrix if all its parts so far contain only zeros, else None
    _zeros: dict[str, ZeroMatrix | None] = field(default_factory=dict)

    def add(self, values: Tensor, *sources: TensorEntry) -> None:
        """Check `values`, which come from the tensors `sources`, without waiting for the device."""
        if values.numel() and values.dtype in _SPECIAL_BITS:
            bits, special = _SPECIAL_BITS[values.dtype]
            # several times as fast as `find_non_finite(values).any()`
            exponent = (values.view(bits) & special).amax()
            self._parts.append(_Part(sources, values.dtype, exponent))

    def add_matrix(self, name: str, zeros: ZeroMatrix | None) -> None:
        """Record a part of the matrix `name`. If the part has a nonzero value, `zeros` is None."""
        self._zeros[name] = zeros and self._zeros.get(name, zeros)

    def add_scale(self, scale: BrokenScale) -> None:
        self._scales[scale.entry.name] = scale

    def finish(self, reader: CheckpointReader) -> None:
        """Raise `CheckpointError` if a tensor is broken.

        The message lists tensor names, the number of broken values and the index of the first
        broken value. Also raises the errors of `check_zeros`.
        """
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, part in enumerate(self._parts):
            alike.setdefault((part.exponent.device, part.dtype), []).append(number)
        broken: list[int] = []
        for (_, dtype), numbers in alike.items():
            stacked = torch.stack([self._parts[number].exponent for number in numbers])
            exponents = stacked.tolist()  # host-sync: the host waits once, after the last tensor
            special = _SPECIAL_BITS[dtype][1]
            broken += [n for n, bits in zip(numbers, exponents, strict=True) if bits == special]
        texts = []
        if self._scales:
            texts.append(_describe_scales(reader, list(self._scales.values())))
            broken = [
                n
                for n in broken
                if not self._scales.keys() & {e.name for e in self._parts[n].sources}
            ]
        if broken:
            found = [_describe(reader, self._parts[n].sources) for n in sorted(broken)[:_MAX_NAMED]]
            names = _join_found(found, len(broken))
            texts.append(f"the checkpoint has values that are NaN or infinite: {names}")
        if texts:
            raise CheckpointError("; ".join(texts), hint=_BROKEN)
        check_zeros(reader, {name: zeros for name, zeros in self._zeros.items() if zeros})


_BROKEN = "download the files again; if they are complete, the checkpoint itself is broken"


def check_tensor(values: Tensor, entry: TensorEntry, role: Role, stored: TensorFormat) -> None:
    """Check the `values` (on the CPU) of `entry`, whose role in the format `stored` is `role`.

    Raises `CheckpointError` for invalid scales, and for values that are NaN or infinite.
    """
    scale = find_broken_scale(values, entry, stored) if role is Role.SCALE else None
    if scale is not None:
        with CheckpointReader() as reader:
            text = _describe_scales(reader, [scale])
        raise CheckpointError(text, hint=_BROKEN)
    # Do not check FNUZ values: their file may declare E4M3FN, which has another code for NaN.
    if role is Role.VALUES and values.dtype in _SPECIAL_BITS and stored.element != E4M3_FNUZ:
        places = find_non_finite(values).nonzero()
        if len(places):
            found = _describe_places(entry, places)
            text = f"the checkpoint has values that are NaN or infinite: {found}"
            raise CheckpointError(text, hint=_BROKEN)


def find_broken_scale(
    values: Tensor, entry: TensorEntry, stored: TensorFormat
) -> BrokenScale | None:
    """Return a `BrokenScale` if a scale in `values`, read from `entry` to the CPU, is invalid."""
    may_be_negative = stored.element.startswith(("int", "uint"))
    if values.numel() == 0:
        return None
    if values.dtype not in _POWERS:
        lowest, highest = torch.aminmax(_to_fp32(values))
        if lowest.item() > 0 and highest.item() < torch.inf:
            return None
    if bool(_find_invalid(values, may_be_negative=may_be_negative).any()):
        return BrokenScale(entry, may_be_negative)
    return None


def _to_fp32(values: Tensor) -> Tensor:
    """Convert scales to fp32. ModelSlim stores the bits of an fp32 scale in an int64."""
    if values.dtype is torch.int64:
        return values.to(torch.int32).view(torch.float32)
    return values.float()


def _find_invalid(values: Tensor, *, may_be_negative: bool) -> Tensor:
    """Return a mask that is True where `values` are invalid as scales.

    Scales above 2^10 are invalid. Real weights have smaller scales, and kernels multiply bf16
    scales by 2^116, so a scale of 2^11 would overflow. The E8M0 exponent 255 means NaN. Some fp16
    or FP8 scales of a tensor may be rounded to 0. A tensor whose scales are all 0 is invalid.
    """
    if values.dtype in _POWERS:
        exponents = values.view(torch.uint8)
        return exponents > 127 + 10 if bool(exponents.any()) else exponents == 0
    numbers = _to_fp32(values)
    broken = ~numbers.isfinite()
    if not may_be_negative:
        broken |= numbers < 0
    zero = numbers == 0
    if values.dtype in (torch.float32, torch.bfloat16, torch.int64) or bool(zero.all()):
        broken |= zero
    return broken


def find_non_finite(values: Tensor) -> Tensor:
    """Return a mask that is True where `values` (fp32, bf16, fp16, e4m3fn) are NaN or infinite."""
    bits, special = _SPECIAL_BITS[values.dtype]
    return (values.view(bits) & special) == special


def _describe(reader: CheckpointReader, sources: tuple[TensorEntry, ...]) -> str:
    """Describe the first broken tensor in `sources`: name, count of broken values, first index."""
    for entry in sources:
        values = reader.read(entry)
        if not values.is_floating_point():
            continue
        is_plain = values.dtype in _SPECIAL_BITS
        places = (find_non_finite(values) if is_plain else ~values.float().isfinite()).nonzero()
        if len(places):
            return _describe_places(entry, places)
    return f"{sources[0].name}: some values are too large for the compute dtype"


def _describe_places(entry: TensorEntry, places: Tensor) -> str:
    size = " x ".join(map(str, entry.shape)) or "1"
    return f"{entry.name} in {len(places)} of {size} ({entry.dtype}), first at {places[0].tolist()}"


def _describe_scales(reader: CheckpointReader, scales: Sequence[BrokenScale]) -> str:
    found = [scale.describe(reader) for scale in scales[:_MAX_NAMED]]
    names = _join_found(found, len(scales))
    return f"the checkpoint has scales that are 0, negative, huge, NaN or infinite: {names}"


def _join_found(found: list[str], total: int) -> str:
    more = f"; and {total - len(found)} more tensors" if total > len(found) else ""
    return "; ".join(found) + more
