"""The rows of a tile of decodes: the query heads of one KV head, of one token or, if a step
verifies draft tokens, of QUERIES neighbors of one sequence, which read its keys once.

    row = query * GROUP + head of the KV head

A sequence of up to MAX_RUN queries has ceil(MAX_RUN / QUERIES) programs, which the plan treats as
sequences. Padding tokens fill a sequence up to MAX_RUN queries. They come after the tokens of all
sequences, see no key, and their results are 0.
"""

from typing import NamedTuple

import triton
import triton.language as tl

MAX_ROWS = 32


def choose_queries_per_program(group: int, max_run: int) -> int:
    """Return the queries of a program: at most MAX_ROWS rows, spread evenly over programs."""
    most = max(1, MAX_ROWS // group)
    return triton.cdiv(max_run, triton.cdiv(max_run, most))


class Run(NamedTuple):
    """The queries of a program. If QUERIES is 1, only `token` is used."""

    token: tl.tensor  # of the first query
    num_queries: tl.tensor
    num_real: tl.tensor  # queries from this number on are padding
    shift: tl.tensor  # distance of padding from the tokens of the sequence


@triton.jit
def load_run(query_starts, num_tokens, seq, C: tl.constexpr):
    """Return the run of sequence `seq` of the plan."""
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
    """Return which rows exist."""
    return row < C.GROUP if C.QUERIES == 1 else row < run.num_queries * C.GROUP


@triton.jit
def locate_row(run, first_row, row, C: tl.constexpr):
    """Return token * heads + head of each row; `first_row` is that of row 0."""
    if C.QUERIES == 1:
        at = first_row + row
    else:
        query = row // C.GROUP
        token = query + tl.where(query < run.num_real, 0, run.shift)
        at = first_row + token * (C.KV_HEADS * C.GROUP) + row % C.GROUP
    return at


@triton.jit
def count_row_keys(run, row, length, C: tl.constexpr):
    """Return how many keys of a sequence of `length` tokens each row sees, including its own."""
    query = row // C.GROUP
    return tl.where(query < run.num_real, length - run.num_real + query + 1, 0)
