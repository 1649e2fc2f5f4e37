"""Edit the logits of single rows before the sampler samples a token.

To add a sampling parameter that changes logits, add a field to `SamplingParams`, write a
`LogitEdit` and append the edit to `EDITS`. Other code does not read the new field.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from negamax.kernels.sampling import op as ops
from negamax.scheduler.request import SamplingParams


@dataclass(frozen=True)
class EditedRow:
    """The prompt and output tokens of a row that precede the token to sample."""

    prompt_ids: Tensor  # [P] int64, tokens of the prompt
    output_ids: Tensor  # [O] int64, generated tokens, padded with -1
    num_outputs: Tensor  # [] int64, number of generated tokens in `output_ids`
    is_masked: bool  # whether a grammar bitmask is applied after the edits


ApplyEdit = Callable[[Tensor, EditedRow], None]  # changes the logits [V] fp32 of a row in place


class LogitEdit(Protocol):
    """An edit of logits that implements one or several sampling parameters."""

    def applies(self, params: SamplingParams, eos_token_ids: Collection[int]) -> bool:
        """Whether the edit changes logits. The result depends only on the arguments."""

    def prepare(
        self, params: SamplingParams, eos_token_ids: Collection[int], device: torch.device
    ) -> ApplyEdit:
        """Return a function that edits the row's logits. `prepare` is called once per row."""


class Penalties:
    """Implements `repetition_penalty`, `frequency_penalty` and `presence_penalty`."""

    def applies(self, params: SamplingParams, eos_token_ids: Collection[int]) -> bool:
        return bool(
            params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        )

    def prepare(
        self, params: SamplingParams, eos_token_ids: Collection[int], device: torch.device
    ) -> ApplyEdit:
        repetition = params.repetition_penalty
        assert repetition is not None

        def apply(logits: Tensor, row: EditedRow) -> None:
            penalized = ops.apply_penalties(
                logits,
                row.prompt_ids,
                row.output_ids,
                repetition=repetition,
                frequency=params.frequency_penalty,
                presence=params.presence_penalty,
            )
            logits.copy_(penalized)

        return apply


class Bias:
    """Implements `logit_bias`."""

    def applies(self, params: SamplingParams, eos_token_ids: Collection[int]) -> bool:
        return bool(params.logit_bias)

    def prepare(
        self, params: SamplingParams, eos_token_ids: Collection[int], device: torch.device
    ) -> ApplyEdit:
        bias = params.logit_bias or {}
        ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

        def apply(logits: Tensor, row: EditedRow) -> None:
            logits[ids] += values

        return apply


class AllowedTokens:
    """Implements `allowed_token_ids`."""

    def applies(self, params: SamplingParams, eos_token_ids: Collection[int]) -> bool:
        return bool(params.allowed_token_ids)

    def prepare(
        self, params: SamplingParams, eos_token_ids: Collection[int], device: torch.device
    ) -> ApplyEdit:
        ids = torch.tensor(params.allowed_token_ids, dtype=torch.int64, device=device)

        def apply(logits: Tensor, row: EditedRow) -> None:
            kept = logits[ids]
            logits.fill_(float("-inf"))
            logits[ids] = kept

        return apply


class MinTokens:
    """For `min_tokens`, forbids tokens that end a sequence, unless a row has a grammar bitmask."""

    def applies(self, params: SamplingParams, eos_token_ids: Collection[int]) -> bool:
        if not params.min_tokens:
            return False
        blocked, allowed = {*eos_token_ids, *params.stop_token_ids}, params.allowed_token_ids
        # do not block end tokens if `allowed_token_ids` allows no other token
        return bool(blocked) and (allowed is None or not blocked.issuperset(allowed))

    def prepare(
        self, params: SamplingParams, eos_token_ids: Collection[int], device: torch.device
    ) -> ApplyEdit:
        blocked = sorted({*eos_token_ids, *params.stop_token_ids})
        ids = torch.tensor(blocked, dtype=torch.int64, device=device)

        def apply(logits: Tensor, row: EditedRow) -> None:
            if not row.is_masked:
                is_early = row.num_outputs < params.min_tokens
                logits[ids] = logits[ids].masked_fill(is_early, float("-inf"))

        return apply


EDITS: list[LogitEdit] = [Penalties(), Bias(), AllowedTokens(), MinTokens()]  # applied in order
