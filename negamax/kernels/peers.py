"""What kernels see of other ranks: a group that sums and concatenates, and memory that every rank
of it can write.

`Collective` is implemented in `negamax.parallel`; kernels get one as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class PeerRegion:
    """A part of symmetric memory through which the ranks of a group exchange rows of 4-byte words
    by the LL protocol (`collectives/triton_ll.py`).

        every rank's copy   [2 buffers, rows, senders, words] int64: flag << 32 | data

    A reader knows from the word itself that it has arrived. The flag is the row's epoch, the number
    of times it was used: the program of row r takes flags[r] + 1, its parity as the buffer, and
    stores it in flags[r] when it is done. Two buffers are enough and nothing is ever cleared: a
    rank writes epoch e + 2 only after every peer has pushed e + 1, which a peer does after it has
    read e.
    """

    # [world + 1] int64: each rank's copy, in the address space of this one; `PollControl.words`
    addresses: Tensor
    flags: Tensor  # [rows] int32, the last of each row, local to this rank
    rows: int
    words: int  # per row and sender


@dataclass(frozen=True)
class ShardRegion:
    """A part of symmetric memory through which the ranks of a group shard the rows of many tokens:
    rank r owns rows r * shard .. (r + 1) * shard - 1, with shard = ceil(T / world).

    Every rank's copy has two parts:

        partials   [world senders, shard, words] int32   what each rank adds to the rows of this one
        gathered   [T, words] int32                      all rows of the norm, or with FP8
                   [T, 2 * words] e4m3, [T, 2 * words / 128] fp32 scales and, from the next multiple
                   of 16 bytes on, what `moe.route` makes of the rows

    There are no flags: a `barrier` follows each of the two kernels that write, and that is enough.
    Whoever writes `partials` has passed the second barrier of the call before, to which the readers
    of `partials` came when they had read; whoever writes `gathered` has passed the first one of
    this call, to which every rank came with all it had read before.
    """

    partials: Tensor  # [world] int64, where each rank's copy begins, in this one's address space
    gathered: Tensor  # [world] int64, likewise
    own_gathered: Tensor  # uint8, this rank's copy
    rows: int  # at most
    words: int  # of a row, two values each: exactly
    # on the stream: when it is over, what every rank wrote before it is there
    barrier: Callable[[], None]

    def own(self, begin: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """A tensor at byte `begin` of this rank's copy of `gathered`."""
        size = shape[0] * shape[1] * dtype.itemsize
        return self.own_gathered[begin : begin + size].view(dtype).view(shape)


@dataclass(frozen=True)
class PeerMemory:
    """The regions of one group, on a GPU whose peers are reachable. `world` is a power of two."""

    rank: int
    world: int
    reduce: PeerRegion  # rows of hidden states, two bf16 a word
    stats: PeerRegion  # two fp32 per token
    pick: PeerRegion  # values and tokens of a sampled row: one each, or the leading ones
    shards: ShardRegion | None = None  # None: large sums go through the group
    tokens: PeerRegion | None = None  # rows on their way to experts; None: they go so, too
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

    def exchange(
        self, *, sent: tuple[Tensor, int] | None, received: tuple[Tensor, int] | None
    ) -> None:
        """A tensor to another rank of the group, and one from another rank."""
