"""Merge the attention results of ranks that store different blocks of a KV head. A program merges
all heads of this rank for one token. Results are added in rank order, not in arrival order.

If the region of peer memory has a row for each token, the same launch exchanges the results by the
LL protocol. Each rank receives only the results of its own heads:

    words of a row and sender    | out [COUNT, DIM / 2], two values each | lse [COUNT] |

If there are more tokens than rows, an all-gather distributes the messages of all ranks.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from negamax.kernels.activations import Hidden
from negamax.kernels.attention.triton_shared import clamp_empty_max, head_outputs, write_heads
from negamax.kernels.cache_shards.op import PartialResults
from negamax.kernels.collectives.triton_ll import add_flag, load_peer_base, load_peer_bases, poll
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options
from negamax.kernels.launch.triton_words import as_words, unpack
from negamax.kernels.peers import Collective, find_region
from negamax.kernels.quantize.native import result


class MergeConstants(NamedTuple):
    """Constants of `_merge_partials_kernel`, passed as one argument `C: tl.constexpr`."""

    RANKS: int
    IS_LL: bool  # whether this kernel receives the results of other ranks by the LL protocol
    ROWS: int  # number of rows of the `PeerRegion`
    SLOT: int  # number of words per row and sender in the `PeerRegion`
    HEADS: int  # number of heads of all ranks together
    COUNT: int  # number of heads of this rank
    COUNT_POW2: int
    DIM: int  # dimension of a head
    WORDS_POW2: int  # DIM / 2, padded to a power of two
    QUANTIZE: bool


@triton.jit
def _load_own(parts, lse, head, word, C: tl.constexpr):
    """Load a token's output words (from `parts`) and `lse` for the heads `head` [rows]."""
    mask = (head < C.HEADS)[:, None] & (word < C.DIM // 2)[None, :]
    at = as_words(parts) + head[:, None] * (C.DIM // 2) + word[None, :]
    return tl.load(at, mask=mask, other=0), tl.load(lse + head, mask=head < C.HEADS, other=0.0)


@triton.jit
def _push(parts, lse, head, word, addresses, offset, rank, flag, C: tl.constexpr):
    """Write the output words and lse of each rank's heads to that rank's copy of the region."""
    RANKS: tl.constexpr = C.RANKS
    mask = (head < C.COUNT)[:, None] & (word < C.DIM // 2)[None, :]
    at = head[:, None] * (C.DIM // 2) + word[None, :]
    sent = ()
    for peer in tl.static_range(RANKS):  # issue all loads first, so that they overlap
        words, weights = _load_own(parts, lse, peer * C.COUNT + head, word, C)
        weights = weights.to(tl.int32, bitcast=True)
        sent = sent + (add_flag(words, flag), add_flag(weights, flag))  # noqa: RUF005
    bases = load_peer_bases(addresses, RANKS)
    for peer in tl.static_range(RANKS):
        to = bases[peer] + offset + rank * C.SLOT
        tl.store(to + at, sent[2 * peer], mask=mask)
        tl.store(to + C.COUNT * (C.DIM // 2) + head, sent[2 * peer + 1], mask=head < C.COUNT)


@triton.jit(do_not_specialize=["first", "rank"])
def _merge_partials_kernel(
    parts,  # [RANKS, T, HEADS * DIM] with rank stride `part_stride`; if IS_LL, [T, HEADS * DIM]
    lse,  # [RANKS, T, HEADS] fp32 with rank stride `lse_stride`; if IS_LL, [T, HEADS]
    out,  # [T, COUNT * DIM], written
    values,  # [T, COUNT * DIM] e4m3, written if QUANTIZE, else None
    scales,  # [T, COUNT] fp32, written if QUANTIZE, else None
    addresses,  # field of the `PeerRegion` that exchanges results; None without IS_LL
    flags,  # field of the `PeerRegion` that exchanges results; None without IS_LL
    part_stride,
    lse_stride,
    first,  # index of the first head of this rank
    rank,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    RANKS: tl.constexpr = C.RANKS  # a copy, as Triton 3.6 accepts no struct field in a shape
    HEADS_POW2: tl.constexpr = C.COUNT_POW2
    WORDS_POW2: tl.constexpr = C.WORDS_POW2
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head, word = tl.arange(0, HEADS_POW2), tl.arange(0, WORDS_POW2)
    is_head = head < C.COUNT
    launch_dependents_then_wait(PDL)
    parts += token * (C.HEADS * C.DIM)
    lse += token * C.HEADS
    weights, words = (), ()
    if C.IS_LL:
        flag = tl.load(flags + token) + 1
        offset = ((flag & 1) * C.ROWS + token) * (RANKS * C.SLOT)
        _push(parts, lse, head, word, addresses, offset, rank, flag, C)
        mask = is_head[:, None] & (word < C.DIM // 2)[None, :]
        at = head[:, None] * (C.DIM // 2) + word[None, :]
        base, control = load_peer_base(addresses, rank) + offset, addresses + RANKS
        for sender in tl.static_range(RANKS):
            slot = sender * C.SLOT
            weight = poll(base, slot + C.COUNT * (C.DIM // 2) + head, flag, is_head, control)
            weights = weights + (weight.to(tl.float32, bitcast=True),)  # noqa: RUF005
            words = words + (poll(base, slot + at, flag, mask, control),)  # noqa: RUF005
        tl.store(flags + token, flag)
    else:
        for sender in tl.static_range(RANKS):
            found = _load_own(
                parts + sender * part_stride, lse + sender * lse_stride,
                tl.where(is_head, first + head, C.HEADS), word, C,
            )  # fmt: skip
            words, weights = words + (found[0],), weights + (found[1],)  # noqa: RUF005
    top = tl.full([HEADS_POW2], float("-inf"), tl.float32)
    for sender in tl.static_range(RANKS):
        top = tl.maximum(top, weights[sender])
    safe = clamp_empty_max(top)
    divisor = tl.zeros([HEADS_POW2], tl.float32)
    even = tl.zeros([HEADS_POW2, WORDS_POW2], tl.float32)
    odd = tl.zeros([HEADS_POW2, WORDS_POW2], tl.float32)
    for sender in tl.static_range(RANKS):
        weight = tl.exp2(weights[sender] - safe)
        low, high = unpack(words[sender], dtype)
        divisor += weight
        even += low * weight[:, None]
        odd += high * weight[:, None]
    scale = tl.where(divisor == 0.0, 0.0, 1.0 / divisor)[:, None]
    merged = tl.reshape(tl.join(even * scale, odd * scale), [HEADS_POW2, 2 * WORDS_POW2])
    column = tl.arange(0, 2 * WORDS_POW2)
    write_heads(merged, token * C.COUNT + head, column, is_head, (out, values, scales), C)


def merge_partials(
    parts: PartialResults,
    group: Collective | None,
    *,
    first: int,
    count: int,
    quantize: bool = False,
) -> Hidden:
    """Run `cache_shards.merge`; with `quantize` also return the result in FP8."""
    num_tokens, heads = parts.lse.shape[-2:]
    head_dim = parts.out.shape[-1] // heads
    assert head_dim % 2 == 0 and parts.out.itemsize == 2
    region = find_region(group, "reduce", num_tokens, count * (head_dim // 2 + 1))
    if group is not None and region is None:
        parts = parts.gathered(group)
    out, lse = parts.out, parts.lse
    output = head_outputs(out.new_empty(num_tokens, count, head_dim), quantize=quantize)
    if num_tokens == 0:
        return result(*output)
    is_ll = region is not None
    constants = MergeConstants(
        RANKS=len(out) if group is None or not is_ll else group.size,
        IS_LL=is_ll,
        ROWS=1 if region is None else region.rows,
        SLOT=1 if region is None else region.words,
        HEADS=heads,
        COUNT=count,
        COUNT_POW2=triton.next_power_of_2(count),
        DIM=head_dim,
        WORDS_POW2=triton.next_power_of_2(max(8, head_dim // 2)),
        QUANTIZE=quantize,
    )
    _merge_partials_kernel[(num_tokens,)](
        out, lse, *output, None if region is None else region.addresses,
        None if region is None else region.flags, 0 if is_ll else out.stride(0),
        0 if is_ll else lse.stride(0), first, 0 if group is None else group.rank, constants,
        num_warps=4, **launch_options(out.device),
    )  # fmt: skip
    return result(*output)
