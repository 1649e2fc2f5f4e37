"""Choose the shapes of captured steps. Each shape has its own CUDA graph."""

from collections.abc import Sequence
from typing import NamedTuple

ROWS, DRAFTS, TOKENS = "rows", "drafts", "tokens"
# Kind -> ranges (first, last, increment) of captured sizes; None stands for the largest size.
# ROWS: all sizes up to 16, then at most an eighth of a step is padding. DRAFTS, for
# each draft length: fewer sizes, because experts skip padding. TOKENS: at most a fifth is padding.
_SIZES = {
    ROWS: ((1, 16, 1), (20, 64, 4), (72, 128, 8), (144, 256, 16), (288, None, 32)),
    DRAFTS: ((1, 2, 1), (4, 8, 4), (16, 64, 16), (96, 128, 32), (192, None, 64)),
    TOKENS: ((128, 1024, 128), (1280, 2048, 256), (2560, 4096, 512), (5120, None, 1024)),
}


class StepShape(NamedTuple):
    """Capacity of a captured step."""

    num_tokens: int
    num_seqs: int
    max_query_len: int  # maximum tokens of one sequence
    is_sampled: bool  # whether the graph samples after every token; False: it runs only layers

    @classmethod
    def of_decodes(cls, num_rows: int, num_drafts: int) -> "StepShape":
        """Return the shape of decodes with up to `num_drafts` draft tokens each."""
        return cls(num_rows * (num_drafts + 1), num_rows, num_drafts + 1, is_sampled=True)

    @property
    def num_drafts(self) -> int:
        """Number of draft tokens of each row, if the shape is for decodes."""
        return self.max_query_len - 1


def capture_sizes(kind: str, largest: int) -> list[int]:
    """List the sizes of `kind` to capture, up to `largest`."""
    sizes = {
        size
        for first, last, step in _SIZES[kind]
        for size in range(first, (last or largest) + 1, step)
        if size < largest
    }
    return sorted(sizes | {largest})


def capture_shapes(
    *, max_rows: int, max_tokens: int, max_num_seqs: int, draft_lengths: Sequence[int] = ()
) -> dict[str, list[StepShape]]:
    """List shapes by kind. ROWS, and DRAFTS for each of `draft_lengths`, have shapes of up to
    `max_rows` rows. TOKENS has shapes of up to `max_tokens` tokens of `max_num_seqs` sequences.
    """
    most_rows = {length: min(max_rows, max_tokens // (length + 1)) for length in draft_lengths}
    return {
        ROWS: [StepShape.of_decodes(size, 0) for size in capture_sizes(ROWS, max_rows)],
        DRAFTS: [
            StepShape.of_decodes(size, length)
            for length, most in most_rows.items()
            if most
            for size in capture_sizes(DRAFTS, most)
        ],
        # the largest size is at least 2 tokens, because a step of one token is a decode
        TOKENS: [
            StepShape(size, max_num_seqs, size, is_sampled=False)
            for size in capture_sizes(TOKENS, max(2, max_tokens))
        ],
    }
