"""The rows of a decode's tile: the query heads of one KV head, of one token or, where a step
verifies draft tokens, of QUERIES neighbours of one sequence, which read its keys once.

    row = query * GROUP + head of the KV head

A sequence of up to MAX_RUN queries has ceil(MAX_RUN / QUERIES) programs in place of one, which the
plan knows as sequences. What a sequence has fewer of than MAX_RUN are tokens of padding, which lie
behind those of all sequences: they see no key, and their results are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

MAX_ROWS = 32


def queries_per_program(group: int, max_run: int) -> int:
    """So that the rows are MAX_ROWS at most, and all programs of a sequence have as many, or
    nearly.
    """
    most = max(1, MAX_ROWS // group)
    return triton.cdiv(max_run, triton.cdiv(max_run, most))


class Run(NamedTuple):
    """The queries of a program. With QUERIES of 1 only `token` has a meaning."""

    token: tl.tensor  # of the first one
    num_queries: tl.tensor
    num_real: tl.tensor  # from this one on they are padding
    shift: tl.tensor  # how many tokens further behind padding lies


@triton.jit
def load_run(query_starts, num_tokens, seq, C: tl.constexpr):
    """What sequence `seq` of the plan stands for."""
    if C.QUERIES == 1:
        run = Run(seq, 1, 1, 0)
    else:
        PARTS: tl.constexpr = (C.MAX_RUN + C.QUERIES - 1) // C.QUERIES
        number, first = seq // PARTS, seq % PARTS * C.QUERIES
        start = tl.load(query_starts + number).to(tl.int32)
        end = tl.load(query_starts + number + 1).to(tl.int32)
        run = Run(
            start + first,
            tl.minimum(C.QUERIES, C.MAX_RUN - first),
            end - start - first,
            num_tokens - (number + 1) * C.MAX_RUN,
        )
    return run


@triton.jit
def is_row(run, row, C: tl.constexpr):
    """Which rows there are."""
    return row < C.GROUP if C.QUERIES == 1 else row < run.num_queries * C.GROUP


@triton.jit
def head_of_row(run, first_row, row, C: tl.constexpr):
    """token * heads + head of each row, where that of row 0 is `first_row`."""
    if C.QUERIES == 1:
        at = first_row + row
    else:
        query = row // C.GROUP
        token = query + tl.where(query < run.num_real, 0, run.shift)
        at = first_row + token * (C.KV_HEADS * C.GROUP) + row % C.GROUP
    return at


@triton.jit
def keys_of_row(run, row, length, C: tl.constexpr):
    """How many keys each row sees, of a sequence of `length` tokens, its own among them."""
    query = row // C.GROUP
    return tl.where(query < run.num_real, length - run.num_real + query + 1, 0)
