"""Exchange of rows of 4-byte words between ranks through symmetric memory: NCCL's LL protocol.

A rank writes its words into the memory of every peer. A word takes 8 bytes: the data and a flag.
The reader polls the words in its own memory until all words have the expected flag. The protocol
needs no barriers, no fences and no second kernel. `PeerRegion` documents the layout.

    rank 0   push --->  [data | flag] in the memory of rank 0, 1, ...      int64: flag << 32 | data
    rank 1   poll       until flag == the row's last flag + 1
"""

import triton
import triton.language as tl

from negamax.kernels.launch.ptx import agree

# number of times that a word is polled (about 1 ms) before the abort flag in host memory is read
_SPINS = tl.constexpr(1024)


@triton.jit
def load_peer_base(addresses, rank):
    """Return the address of the copy of a region that `rank` reads."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def load_peer_bases(addresses, WORLD: tl.constexpr):
    """Return `load_peer_base` of every rank as a tuple."""
    bases = ()
    for peer in tl.static_range(WORLD):
        bases = bases + (load_peer_base(addresses, peer),)  # noqa: RUF005
    return bases


@triton.jit
def add_flag(data, flag):
    """Combine `data` (int32) and `flag` into an int64 word."""
    return (flag.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def push(addresses, offset, index, data, flag, mask, WORLD: tl.constexpr):
    """Store `data` (int32) with `flag` at words `offset + index` of the region on every rank."""
    word = add_flag(data, flag)
    bases = load_peer_bases(addresses, WORLD)
    for peer in tl.static_range(WORLD):
        tl.store(bases[peer] + offset + index, word, mask=mask)


@triton.jit
def _any_missing(word, flag, mask):
    """Return whether any word has a flag other than `flag`; two instructions per word suffice."""
    differs = tl.where(mask, (word >> 32).to(tl.int32) ^ flag.to(tl.int32), 0)
    return tl.max(agree(differs).to(tl.uint32, bitcast=True)) != 0


@triton.jit
def _timed_out(control, since, is_first):
    """Return whether polling must stop, and its start time; set the abort flag after a time-out."""
    clock = tl.load(control, volatile=True)
    since = tl.where(is_first, clock, since)
    if clock - since > tl.load(control + 1):
        tl.store(control + 2, 1)
    is_aborted = tl.load(control + 2 + tl.arange(0, 1), volatile=True) != 0
    return tl.max(agree(is_aborted.to(tl.int32))), since


@triton.jit
def poll(base, index, flag, mask, control):
    """Return the data (int32) at `base + index` of this rank's copy when all words have `flag`, or
    the current data after a time-out.

    `control` points to the address of `PollControl.words`. If programs of the same launch write the
    words, `control` is None; these programs all run at once, so their words always arrive.
    """
    word = tl.load(base + index, mask=mask, other=0, volatile=True)
    is_missing = _any_missing(word, flag, mask)
    spins = 0
    since = tl.full((), 0, tl.int64)
    while is_missing:
        word = tl.load(base + index, mask=mask, other=0, volatile=True)
        is_missing = _any_missing(word, flag, mask)
        if control is not None:
            spins += 1
            if spins % _SPINS == 0:
                timed_out, since = _timed_out(load_peer_base(control, 0), since, spins == _SPINS)
                is_missing = is_missing & (timed_out == 0)
    return word.to(tl.int32)
