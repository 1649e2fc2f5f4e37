"""Locate the rows of a decode tile. A tile has the query heads of one KV head for one token. If a
step verifies draft tokens, a tile has QUERIES adjacent tokens, and each key is read once per tile.

    row = query * GROUP + head of the KV head

A sequence of up to MAX_RUN queries has ceil(MAX_RUN / QUERIES) programs. The plan treats the
queries of each program as a sequence. Padding tokens fill a sequence up to MAX_RUN queries. Padding
tokens come after the tokens of all sequences and see no keys, so their results are 0.
"""

from typing import NamedTuple

import triton
import triton.language as tl

MAX_ROWS = 32


def choose_queries_per_program(group: int, max_run: int) -> int:
    """Split `max_run` queries over programs of up to MAX_ROWS rows; return queries per program."""
    most = max(1, MAX_ROWS // group)
    return triton.cdiv(max_run, triton.cdiv(max_run, most))


class Run(NamedTuple):
    """The queries of a program. If QUERIES is 1, kernels read only the field `token`."""

    token: tl.tensor  # index of the token of the first query
    num_queries: tl.tensor
    num_real: tl.tensor  # number of queries before padding queries; at most 0 if all are padding
    shift: tl.tensor  # add this to a padding query's index, because padding follows all sequences


@triton.jit
def load_run(query_starts, num_tokens, seq, C: tl.constexpr):
    """Return the queries of the planned sequence number `seq`."""
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
    return row < C.GROUP if C.QUERIES == 1 else row < run.num_queries * C.GROUP


@triton.jit
def locate_row(run, first_row, row, C: tl.constexpr):
    """Return the index token * heads + head of each row; `first_row` is the index of row 0."""
    if C.QUERIES == 1:
        at = first_row + row
    else:
        query = row // C.GROUP
        token = query + tl.where(query < run.num_real, 0, run.shift)
        at = first_row + token * (C.KV_HEADS * C.GROUP) + row % C.GROUP
    return at


@triton.jit
def count_row_keys(run, row, length, C: tl.constexpr):
    """Return the number of keys that each row sees in a sequence of `length` tokens."""
    query = row // C.GROUP
    return tl.where(query < run.num_real, length - run.num_real + query + 1, 0)
