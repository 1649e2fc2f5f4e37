"""Other ranks as kernels see them: a group of collectives, and memory that all its ranks can write.

`negamax.parallel` implements `Collective`; kernels get one as an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class PeerRegion:
    """Symmetric memory through which ranks exchange rows of 4-byte words by the LL protocol.

        every rank's copy   [2 buffers, rows, senders, words] int64: flag << 32 | data

    The flag in a word tells the reader that it has arrived (`collectives/triton_ll.py`). It is the
    row's epoch, its number of uses. The program of row r takes epoch flags[r] + 1, uses its parity
    as the buffer, and stores it in flags[r] at the end. Two buffers suffice and nothing is cleared:
    a rank writes epoch e + 2 only after every peer has pushed e + 1, and a peer does so after it
    has read e.
    """

    # [world + 1] int64: each rank's copy, in the address space of this one; `PollControl.words`
    addresses: Tensor
    flags: Tensor  # [rows] int32, the last of each row, local to this rank
    rows: int
    words: int  # per row and sender


@dataclass(frozen=True)
class ShardRegion:
    """Symmetric memory through which ranks shard the rows of many tokens.

    Rank r owns rows r * shard .. (r + 1) * shard - 1, with shard = ceil(T / world). Every rank's
    copy has two parts:

        partials   [world senders, shard, words] int32   what each rank adds to the rows of this one
        gathered   [T, words] int32                      all rows of the norm, or with FP8
                   [T, 2 * words] e4m3, [T, 2 * words / 128] fp32 scales and, from the next multiple
                   of 16 bytes on, the outputs of `moe.route` for the rows

    There are no flags: a `barrier` after each of the two writing kernels suffices. A writer of
    `partials` has passed the second barrier of the previous call, which the readers of `partials`
    reach after reading. A writer of `gathered` has passed the first barrier of this call, which
    every rank reaches after its reads of the previous one.
    """

    partials: Tensor  # [world] int64, addresses of the ranks' copies in this rank's address space
    gathered: Tensor  # [world] int64, the same
    own_gathered: Tensor  # uint8, this rank's copy
    rows: int  # at most
    words: int  # of a row, two values each: exactly
    # on the stream: afterwards all earlier writes of all ranks are visible
    barrier: Callable[[], None]

    def own(self, begin: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return a view at byte `begin` of this rank's copy of `gathered`."""
        size = shape[0] * shape[1] * dtype.itemsize
        return self.own_gathered[begin : begin + size].view(dtype).view(shape)


@dataclass(frozen=True)
class PeerMemory:
    """The regions of one group on GPUs that reach each other. `world` is a power of two."""

    rank: int
    world: int
    reduce: PeerRegion  # rows of hidden states, two bf16 a word
    stats: PeerRegion  # two fp32 per token
    pick: PeerRegion  # values and tokens of a sampled row: one each, or the leading ones
    shards: ShardRegion | None = None  # None: large sums go through the group
    tokens: PeerRegion | None = None  # rows dispatched to experts; None: they go through the group
    owner: object = None  # keeps the memory behind the addresses alive


class Collective(Protocol):
    """A group of ranks, of which this process is one."""

    size: int
    rank: int
    peers: PeerMemory | None  # None: the ranks share no memory

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, maybe in memory that the next call overwrites."""

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sum tensor [T, ...] over ranks, T % size == 0, and return this rank's [T / size, ...]."""

    def all_gather(self, tensor: Tensor, *, dim: int) -> Tensor:
        """Concatenate every rank's `tensor` (of one shape) along `dim` in rank order."""

    def exchange(
        self, *, sent: tuple[Tensor, int] | None, received: tuple[Tensor, int] | None
    ) -> None:
        """Send a tensor to one rank of the group and receive one from another."""


def find_region(
    group: Collective | None,
    name: Literal["reduce", "stats", "pick", "tokens"],
    rows: int,
    words: int,
) -> PeerRegion | None:
    """Return the region of the group's peer memory if it has room for `rows` rows, else None."""
    peers = None if group is None else group.peers
    region: PeerRegion | None = None if peers is None else getattr(peers, name)
    fits = region is not None and rows <= region.rows and words <= region.words
    return region if fits else None
