"""Prepare tokens, positions and embeddings of a captured step, and store sampled tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from negamax.kernels.op import EXACT, op


def place(
    columns: Tensor,  # int64, T token_slots, S slots, T token_offsets, S end_offsets, M for `words`
    num_computed: Tensor,  # [slots] int64; position of a token = num_computed + its offset
    tokens: Tensor,  # [slots, width] int32 or int64; draft tokens are written at their positions
    drafts: Tensor | None,  # [slots, K] int64, -1: no draft token; None: a step without drafts
    /,
    *,
    padding_slot: int,
    places: Tensor,  # [T + S] int64, written: positions [T], lengths [S]
    token_ids: Tensor,  # [T] int64, written: the step's tokens; 0 for an absent draft token
    ends: Tensor,  # [T] int64, written: positions + 1; 0 for tokens of the padding slot
    words: Tensor,  # [S + M] int32, written: lengths [S], then the last M of `columns`
) -> None:
    """Compute tokens, positions and lengths of a step with T tokens of S sequences.

    With `drafts`, the token at offset p > 0 of a slot is draft token p - 1 of the slot. The
    function also writes the draft tokens to `tokens`, at their positions.
    """
    size, num_tokens = len(places), len(token_ids)
    torch.add(num_computed[columns[:size]], columns[size : 2 * size], out=places)
    slots, positions, lengths = columns[:num_tokens], places[:num_tokens], places[num_tokens:]
    torch.mul(positions + 1, slots != padding_slot, out=ends)
    num_seqs = len(lengths)
    words[:num_seqs].copy_(lengths)
    words[num_seqs:].copy_(columns[2 * size :][: len(words) - num_seqs])
    token_ids.copy_(tokens[slots, positions])
    if drafts is not None:
        offsets = columns[size : size + num_tokens]
        guessed = drafts[slots, (offsets - 1).clamp_min(0)].clamp_min(0)
        token_ids.copy_(guessed.where(offsets > 0, token_ids))
        tokens[slots, positions] = token_ids.to(tokens.dtype)


class ImageRows(NamedTuple):
    """Image embeddings that replace the embeddings of tokens."""

    at: Tensor  # [T] int32, index in `rows` for each token; -1: the token keeps its embedding
    rows: Tensor  # [P, width], image embeddings


def embed(
    token_ids: Tensor, table: Tensor, images: ImageRows | None = None, /, *, first_id: int
) -> tuple[Tensor, Tensor]:
    """Return the embeddings of token_ids [T] int64 and a residual of zeros, both [T, width].

    Row 1 of table [n + 2, width] is the embedding of token `first_id`. Tokens outside the table get
    its first or last row. `images` replaces the embeddings of some tokens.
    """
    x = table.index_select(0, (token_ids - (first_id - 1)).clamp(0, len(table) - 1))
    if images is not None:
        rows = images.rows.index_select(0, images.at.clamp_min(0).long())
        x = rows.where((images.at >= 0).unsqueeze(1), x)
    return x, torch.zeros_like(x)


def store(
    token_ids: Tensor,  # [T] int64, -1: no token
    slots: Tensor,  # [T] int64, row of each token in `tokens`
    ends: Tensor,  # [T] int64, columns of `tokens` to which the tokens are written
    /,
    *,
    tokens: Tensor,  # [slots, width] int32 or int64, written
    num_computed: Tensor | None,  # [slots] int64, set to `ends`; None: draft verification sets it
    out: Tensor,  # [T] int64, written: a copy of `token_ids`
) -> None:
    """Store the sampled tokens for the next step, and copy them to `out` for the host."""
    tokens[slots, ends] = token_ids.clamp_min(0).to(tokens.dtype)
    if num_computed is not None:
        num_computed[slots] = ends
    out.copy_(token_ids)


PLACE_TOKENS = op("steps.place", place, None, "tokens, positions and lengths of a step", EXACT)
EMBED_TOKENS = op("steps.embed", embed, None, "embeddings, and an empty residual", EXACT)
STORE_TOKENS = op(
    "steps.store", store, None, "sampled tokens to their slots, and the slots' lengths", EXACT
)
