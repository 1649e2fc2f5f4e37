"""Drive an engine's loop with requests of one choice each."""

from collections.abc import Iterable, Sequence
from typing import Any

from negamax import LLM, SamplingParams
from negamax.engine.llm import Generation
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import SequenceUpdate

Prompts = Sequence[str] | Sequence[list[int]]


def admitted(llm: LLM, prompts: Prompts, params: Sequence[SamplingParams]) -> list[GenerateRequest]:
    tokens = [llm._encode(prompt) for prompt in prompts]
    return [group[0][1] for group in llm._sequences(tokens, llm._admit(tokens, list(params)))]


def drive(
    llm: LLM, requests: Iterable[GenerateRequest], *, num_steps: int | None = None
) -> dict[str, list[SequenceUpdate]]:
    """Add `requests` and run the loop to its end, or for `num_steps`. Return all updates by id."""
    updates: dict[str, list[SequenceUpdate]] = {}
    for request in requests:
        updates[request.request_id] = []
        llm._loop.add(request)
    while llm._loop.has_work and num_steps != 0:
        for update in llm._loop.step():
            updates.setdefault(update.request_id, []).append(update)
        num_steps = None if num_steps is None else num_steps - 1
    return updates


def read_tokens(updates: Iterable[SequenceUpdate]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


def token_ids(made: Iterable[Generation]) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in made]


def generate_tokens(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return token_ids(llm.generate(prompts, params))


def free_all(llm: LLM) -> None:
    """Run the loop to its end, and check that no request, block or grammar is left."""
    drive(llm, ())
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_kv_blocks == stats.num_kv_blocks
    assert not llm._loop._grammars._rules and not llm._loop._grammars._by_key
