"""Describe requests and plans for crash dumps by numbers only, without tokens or texts."""

from collections.abc import Iterable
from typing import Any

import msgspec

from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.sequence import Sequence
from negamax.scheduler.step import StepPlan

_MAX_REQUESTS = 1000
# sampling parameters of which a crash dump contains only the length
_COUNTED = ("stop", "stop_token_ids", "allowed_token_ids", "logit_bias")


def describe_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Describe sampling parameters, with lengths in place of texts and token ids."""
    fields = msgspec.structs.asdict(sampling)
    for name in _COUNTED:
        fields[name] = None if fields[name] is None else len(fields[name])
    grammar = sampling.grammar
    if grammar is not None:
        fields["grammar"] = {"kind": grammar.kind, "characters": len(grammar.text)}
    fields["reasoning"] = sampling.reasoning is not None
    return fields


def describe_request(request: GenerateRequest) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "prompt_tokens": len(request.prompt_token_ids),
        "priority": request.priority,
        "sampling": describe_sampling(request.sampling),
    }


def describe_sequences(sequences: Iterable[Sequence]) -> list[dict[str, Any]]:
    """Describe the progress of the first 1,000 unfinished sequences."""
    return [
        {
            **describe_request(sequence.request),
            "output_tokens": len(sequence.tokens) - sequence.prompt_len,
            "computed_tokens": sequence.num_computed,
            "cached_tokens": sequence.num_cached_tokens,
            "slot": sequence.slot,
            "kv_blocks": len(sequence.block_ids),
            "is_postponed": sequence.is_postponed,
        }
        for sequence, _ in zip(sequences, range(_MAX_REQUESTS), strict=False)
    ]


def describe_plan(plan: StepPlan) -> dict[str, Any]:
    return {
        "step_id": plan.step_id,
        "slots": plan.slots,
        "num_scheduled": plan.num_scheduled,
        "num_draft_tokens": plan.num_draft_tokens,
        "num_proposed": plan.num_proposed,
        "needs_sampling": plan.needs_sampling,
        "grammar_rows": plan.grammar_rows,
        "new_rows": [
            {
                "slot": row.slot,
                "tokens": len(row.token_ids),
                "prompt_tokens": row.prompt_len,
                "computed_tokens": row.num_computed,
                "kv_blocks": len(row.block_ids),
                "sampling": describe_sampling(row.sampling),
            }
            for row in plan.new_rows
        ],
        "appended_slots": plan.appended_slots,
        "appended_blocks": plan.appended_blocks,
        "copies": plan.copies and msgspec.structs.asdict(plan.copies),
    }
