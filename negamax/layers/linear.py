"""Linear layers split by output rows (column parallel) or input columns (row parallel)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from negamax.formats.tensor_format import Axis, StoredWeight
from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.gemm.op import IN_PARTS, LIKE_INPUT, LINEAR, LinearOutput
from negamax.kernels.op import Prepared
from negamax.layers.weights import LayerSetup, MatrixWeight, choose_kernel
from negamax.parallel.collectives import Partial


@dataclass(frozen=True)
class ProjectionPart:
    """One checkpoint tensor in a fused weight: name, number of rows, and this rank's rows."""

    name: str
    total_rows: int
    rows: range


class _Linear:
    """A matrix and its GEMM kernel."""

    def __init__(
        self,
        names: Sequence[str],
        shape: tuple[int, int],
        *,
        setup: LayerSetup,
        shares: Iterable[tuple[Axis, int]],
    ) -> None:
        kernel, held, reason = choose_kernel(LINEAR, names, setup, columns=shape[1], shares=shares)
        self._run, self._prepare = kernel.run, kernel.prepare
        self.activation = kernel.activation  # quantized format of x that the kernel also accepts
        self._matrix = MatrixWeight(shape, held, weights=setup.weights, reason=reason)
        self._weight: Prepared = None

    def finish_loading(self) -> None:
        """Pack the weight for its kernel and free the unpacked copy."""
        self._weight = self._prepare(self._matrix.take())


class ColumnParallel(_Linear):
    """The layer y = x W^T, where W stacks this rank's rows of one or more checkpoint tensors."""

    def __init__(self, parts: Sequence[ProjectionPart], inputs: int, *, setup: LayerSetup) -> None:
        shape = (sum(len(part.rows) for part in parts), inputs)
        is_cut = len(parts) > 1 or len(parts[0].rows) < parts[0].total_rows
        shares = [(Axis.ROWS, len(part.rows)) for part in parts] if is_cut else []
        super().__init__([part.name for part in parts], shape, setup=setup, shares=shares)
        self.slots, first = [], 0
        for part in parts:
            self.slots += self._matrix.slots(
                part.name, (part.total_rows, inputs), region=(part.rows, range(inputs)), at=(first,)
            )
            first += len(part.rows)

    def __call__(
        self, x: Tensor | QuantizedActivations, output: LinearOutput = LIKE_INPUT
    ) -> Tensor:
        """Map x [T, in] to [T, this rank's rows of all parts]."""
        return self._run(x, self._weight, output)


def stack_rows(
    parts: Sequence[tuple[ColumnParallel, range]],
) -> Callable[[Tensor | QuantizedActivations], list[Tensor]]:
    """Return a function that multiplies x [T, in] with `rows` of each part -> list of [T, rows].

    The rows are copied. The weights must be loaded but not packed, and `rows` must not cut a
    quantization group. One GEMM computes all parts if they share a format that can be stacked.
    """
    copies = [part._matrix.copy_rows(rows) for part, rows in parts]
    first, (part, _) = copies[0].format, parts[0]
    kept = [tensor for tensor in first.tensors if tensor.is_kept]
    axes = {tensor.name: [dim.axis for dim in tensor.held().dims] for tensor in kept}
    is_alike = all(copy.format == first for copy in copies)
    if not is_alike or not all(Axis.ROWS in of_tensor for of_tensor in axes.values()):
        pairs = zip(parts, copies, strict=True)
        alone = [(one._run, one._prepare(copy)) for (one, _), copy in pairs]
        return lambda x: [run(x, weight, LIKE_INPUT) for run, weight in alone]
    joined = {
        name: torch.cat([copy.tensors[name] for copy in copies], dim=of_tensor.index(Axis.ROWS))
        for name, of_tensor in axes.items()
    }
    stacked, sizes = part._prepare(StoredWeight(first, joined)), [len(rows) for _, rows in parts]
    return lambda x: list(part._run(x, stacked, LIKE_INPUT).split(sizes, dim=-1))


class ColumnParallels:
    """`ColumnParallel` with one GEMM for each run of adjacent parts in the same format."""

    def __init__(self, parts: Sequence[ProjectionPart], inputs: int, *, setup: LayerSetup) -> None:
        self._products = [
            ColumnParallel(list(run), inputs, setup=setup)
            for _, run in groupby(parts, key=lambda part: setup.weights.stored(part.name))
        ]
        self.slots = [slot for product in self._products for slot in product.slots]
        wanted = {product.activation for product in self._products}
        # if GEMMs need different formats, x stays plain, and each GEMM quantizes x
        self.activation = wanted.pop() if len(wanted) == 1 else None

    def finish_loading(self) -> None:
        for product in self._products:
            product.finish_loading()

    def __call__(self, x: Tensor | QuantizedActivations) -> Tensor:
        """Map x [T, in] to [T, this rank's rows of all parts]."""
        made = [product(x) for product in self._products]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)


class RowParallel(_Linear):
    """The layer y = x W^T over this rank's columns; y is a partial sum of the attention group."""

    def __init__(
        self, name: str, shape: tuple[int, int], *, columns: range, setup: LayerSetup
    ) -> None:
        shares = [(Axis.COLUMNS, len(columns))] if len(columns) < shape[1] else []
        own = shape[0], len(columns)
        super().__init__([name], own, setup=setup, shares=shares)
        self._group = setup.context.attention_group
        self.slots = self._matrix.slots(name, shape, region=(range(shape[0]), columns))

    def __call__(self, x: Tensor | QuantizedActivations, *, in_parts: bool = False) -> Partial:
        """Map x [T, own columns] to [T, out] or, with `in_parts`, to partial sums [T, P, out]."""
        out = self._run(x, self._weight, IN_PARTS if in_parts else LIKE_INPUT)
        return Partial(out, self._group)


def cat_columns(parts: Sequence[Tensor], columns: range) -> Tensor:
    """Return `columns` of the concatenation of `parts` [T, width] along dim 1."""
    width, shares = parts[0].shape[1], []
    for number, part in enumerate(parts):
        ends = (end - number * width for end in (columns.start, columns.stop))
        start, stop = (min(max(end, 0), width) for end in ends)
        shares.append(part[:, start:stop])
    return torch.cat(shares, dim=-1)
