"""Sizes of context-parallel shards of a step, from token counts alone. The worker builds the shards
(`worker/token_shares.py`).
"""


def is_shared_out(longest_run: int, num_shares: int) -> bool:
    """Whether a step whose longest prompt run is this long is sharded: each piece, two per rank,
    must get a token.
    """
    return num_shares > 1 and longest_run >= 2 * num_shares


def most_of_share(num_tokens: int, *, num_runs: int, num_shares: int) -> int:
    """Upper bound of a rank's tokens in a sharded step.

    Up to `num_runs` runs are cut into two pieces per rank; the other tokens are dealt out one by
    one.
    """
    return min(num_tokens, -(-num_tokens // num_shares) + 2 * num_runs)
