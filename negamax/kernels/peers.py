"""Define how kernels communicate between ranks: by collectives, and by memory that all ranks write.

`negamax.parallel` implements `Collective`; kernels get a `Collective` as an argument.
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

    The flag in a word tells the reader that the word has arrived (`collectives/triton_ll.py`). A
    flag is the row's epoch, which counts the uses of the row. The program of row r uses epoch
    flags[r] + 1. The parity of the epoch selects the buffer. At the end the program stores the
    epoch in flags[r]. The exchange needs only two buffers, because a rank writes epoch e + 2 after
    it has received epoch e + 1 of every peer, and a peer sends epoch e + 1 after reading epoch e.
    """

    # [world + 1] int64: pointers to all ranks' copies of the region; last, to `PollControl.words`
    addresses: Tensor
    flags: Tensor  # [rows] int32, latest epoch of each row on this rank
    rows: int
    words: int  # number of words per row and sender


@dataclass(frozen=True)
class ShardRegion:
    """Symmetric memory through which ranks shard the rows of many tokens.

    Rank r owns rows r * shard .. (r + 1) * shard - 1, with shard = ceil(T / world). Every rank's
    copy has two parts:

        partials   [world senders, shard, words] int32   all ranks' sums for this rank's rows
        gathered   [T, words] int32                      all rows of the norm, or with FP8
                   [T, 2 * words] e4m3, [T, 2 * words / 128] fp32 scales and, from the next multiple
                   of 16 bytes on, the outputs of `moe.route` for the rows

    The region needs no flags: a `barrier` follows each of the two kernels that write. All ranks
    read `partials` before the second barrier of a call, and write the next `partials` after this
    barrier. All ranks read `gathered` before the first barrier of the next call, and write the next
    `gathered` after this barrier.
    """

    partials: Tensor  # [world] int64, addresses, valid on this rank, of all ranks' `partials`
    gathered: Tensor  # [world] int64, addresses, valid on this rank, of all ranks' `gathered`
    own_gathered: Tensor  # uint8, this rank's copy of `gathered`
    rows: int  # maximum number of rows in one exchange
    words: int  # number of 32-bit words per row; a word holds two values.
    # `barrier` runs on the stream, and makes all earlier writes of all ranks visible.
    barrier: Callable[[], None]

    def own(self, begin: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """View this rank's copy of `gathered`, from byte `begin` on, as a tensor of `shape`."""
        size = shape[0] * shape[1] * dtype.itemsize
        return self.own_gathered[begin : begin + size].view(dtype).view(shape)


@dataclass(frozen=True)
class PeerMemory:
    """Regions that the GPUs of a group share by peer access. `world` is a power of two."""

    rank: int
    world: int
    reduce: PeerRegion  # for sums of hidden states over ranks; a word has two bf16 values
    stats: PeerRegion  # per token, the sums of squares of q and k in fp32
    pick: PeerRegion  # per sampled row, the best score and token or the leading logits and tokens
    shards: ShardRegion | None = None  # for sums of many rows; None: such sums use collectives
    tokens: PeerRegion | None = None  # rows dispatched to experts; None: dispatch uses collectives
    owner: object = None  # object that owns the memory behind the addresses


class Collective(Protocol):
    """A group of ranks to which this process belongs."""

    size: int
    rank: int
    peers: PeerMemory | None  # shared memory of the ranks; None: the ranks share no memory

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, in memory that the next call may overwrite."""

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sum tensor [size * n, ...] over ranks, and return this rank's rows [n, ...]."""

    def all_gather(self, tensor: Tensor, *, dim: int) -> Tensor:
        """Concatenate the ranks' `tensor`s of equal shape along `dim`, in rank order."""

    def exchange(
        self, *, sent: tuple[Tensor, int] | None, received: tuple[Tensor, int] | None
    ) -> None:
        """Send a tensor to one rank of the group, and receive a tensor from another rank."""


def find_region(
    group: Collective | None,
    name: Literal["reduce", "stats", "pick", "tokens"],
    rows: int,
    words: int,
) -> PeerRegion | None:
    """Return the group's region `name` if `rows` rows of `words` words fit into it, or None."""
    peers = None if group is None else group.peers
    region: PeerRegion | None = None if peers is None else getattr(peers, name)
    fits = region is not None and rows <= region.rows and words <= region.words
    return region if fits else None
