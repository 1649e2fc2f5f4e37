"""What kernels see of other ranks: a group that sums and concatenates, and memory that every rank
of it can write.

`Collective` is implemented in `negamax.parallel`; kernels get one as an argument. The one op of
this family is the sum over ranks of a layer's output, fused with the residual add and the norm that
follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from negamax.kernels.norm import spec as norm_spec
from negamax.kernels.norm.spec import NormWeight
from negamax.kernels.op import Case, Kernel, Op, rounding_tolerance


@dataclass(frozen=True)
class PeerRegion:
    """A part of symmetric memory through which the ranks of a group exchange rows of 4-byte words.

    Every rank's copy is laid out [2 buffers, rows, senders, words] int64; a stored word is `tag <<
    32 | payload`, so a reader knows from the word itself that it has arrived. Row r keeps its own
    epoch: the program of row r reads `epochs[r]`, uses the next number as its tag and `number & 1`
    as its buffer, and stores it back when it is done. Two buffers are enough and nothing is ever
    cleared: a rank writes epoch e + 2 only after every peer has pushed e + 1, which a peer does
    after it has read e.
    """

    # [world + 1] int64: each rank's copy, in the address space of this one; `PollControl.words`
    addresses: Tensor
    epochs: Tensor  # [rows] int32, local to this rank
    rows: int
    words: int  # per row and sender


@dataclass(frozen=True)
class ShardRegion:
    """A part of symmetric memory through which the ranks of a group share out the rows of many
    tokens: rank r completes and normalises rows r * shard .. (r + 1) * shard - 1, with shard =
    ceil(T / world).

    Every rank's copy has two parts. `parts` [world senders, shard, words] int32 takes what each
    rank adds to the rows of this one. `gathered` takes what the ranks make of their rows, for all T
    of them: [T, words] int32 where that is plain values, else [T, 2 * words] e4m3, [T, 2 * words /
    128] fp32 scales and, from the next multiple of 16 bytes on, what `moe.route` makes of them.
    Nothing is tagged: a `barrier` follows each of the two kernels that write, and that is enough.
    Whoever writes `parts` has passed the second barrier of the call before, to which the readers of
    `parts` came when they had read; whoever writes `gathered` has passed the first one of this
    call, to which every rank came with all it had read before.
    """

    parts: Tensor  # [world] int64, where each rank's copy begins, in the address space of this rank
    gathered: Tensor  # [world] int64, likewise
    own_gathered: Tensor  # uint8, this rank's copy
    rows: int  # at most
    words: int  # of a row, two values each: exactly
    # on the stream: when it is over, what every rank wrote before it is there
    barrier: Callable[[], None]


@dataclass(frozen=True)
class PeerMemory:
    """The regions of one group, on a GPU whose peers are reachable. `world` is a power of two."""

    rank: int
    world: int
    reduce: PeerRegion  # rows of hidden states, two bf16 a word
    stats: PeerRegion  # two fp32 per token
    pick: PeerRegion  # values and tokens of a sampled row: one each, or the leading ones
    shards: ShardRegion | None = None  # None: large sums go through the group
    owner: object = None  # keeps the memory behind the addresses alive


class Collective(Protocol):
    """A group of ranks, of which this process is one."""

    size: int
    rank: int
    peers: PeerMemory | None  # None: the ranks have no memory in common

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's `tensor`, on every rank. May be written into `tensor`, or into
        memory that the next call overwrites: use the result, and soon."""

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """tensor [T, ...], T a multiple of the size -> rows rank * T / size .. of the sum, [T /
        size, ...].
        """

    def all_gather(self, tensor: Tensor, *, dim: int) -> Tensor:
        """Every rank's `tensor` (of one shape), concatenated along `dim` in rank order."""


def all_reduce_add_rms(
    # [T, width] or [T, P, width], this rank's partial result; its content is undefined afterwards
    x: Tensor,
    residual: Tensor,  # [T, width], changed in place
    norm: NormWeight,
    group: Collective | None,  # None: one rank
) -> Tensor:  # [T, width]
    """residual += the sum of x over its parts and the ranks, in place; the norm of the residual.

    Rounded after the sum over parts, after the sum over ranks and after the residual add.
    """
    total = norm_spec.sum_parts(x)
    if group is not None and group.size > 1:
        total = group.all_reduce(total)
    return norm_spec.add_rms(total, residual, norm)


def _apply(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    residual = case.tensors["residual"].clone()
    out = kernel.run(
        case.tensors["x"].clone(),
        residual,
        norm_spec.prepare_case(kernel, case),
        case.numbers["group"],
    )
    return (*norm_spec.case_outputs(out, case), residual)


def _cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """Those of `norm.add_rms` on one rank. What several ranks make of it needs several processes:
    tests/gpu and tests/dist.
    """
    return [
        _alone(case)
        for case in (
            *norm_spec.add_cases(dtype, generator),
            *norm_spec.part_cases(dtype, generator),
        )
    ]


def _wide(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [_alone(case) for case in norm_spec.wide_cases(dtype, generator)]


def _alone(case: Case) -> Case:
    return Case(case.label, case.tensors, {**case.numbers, "group": None})


OPS = (
    Op(
        name="collectives.all_reduce_add_rms",
        summary="sum over ranks, residual += it, then RMS norm of the residual",
        reference=Kernel(
            "collectives.all_reduce_add_rms", "reference", all_reduce_add_rms, norm_spec.prepare
        ),
        cases=_cases,
        apply=_apply,
        tolerance=rounding_tolerance(scale=2.0, reason="as norm.add_rms"),
        cost=norm_spec.cost_add,
        wide=_wide,
        wide_error=norm_spec.WIDE_ERROR,
    ),
)
