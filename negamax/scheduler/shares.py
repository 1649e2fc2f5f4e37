"""Sizes of the shares of a step that context-parallel ranks compute, as far as they follow without
the tokens. The worker cuts the shares (`worker/token_shares.py`).
"""

from __future__ import annotations


def is_shared_out(longest_run: int, num_shares: int) -> bool:
    """Whether a step is, whose longest run of prompt tokens is so long: that gives each of its
    pieces, two for every rank, a token.
    """
    return num_shares > 1 and longest_run >= 2 * num_shares


def most_of_share(num_tokens: int, *, num_runs: int, num_shares: int) -> int:
    """No share of `num_tokens` has more, of which some are in `num_runs` runs or fewer, each cut
    into two pieces for every rank, and the others are dealt out one by one.
    """
    return min(num_tokens, -(-num_tokens // num_shares) + 2 * num_runs)
