import random
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_support import PERSON, reasoning, regex, require_call, schema, seeded, tool

from negamax import LLM
from negamax.engine.grammar import wire
from negamax.engine.grammar.client import GrammarClient
from tests.layouts import full
from tests.loop_driver import admitted, drive, free_all, read_tokens

CALL = require_call([tool("note", text={"type": "string", "maxLength": 16})])
Answer = tuple[list[int], str | None]
# With more requests than rows and few blocks, some requests wait and some are preempted.
SIZES: dict[str, Any] = {
    "num_threads": 1, "max_model_len": 192, "block_size": 8, "max_num_seqs": 8,
    "max_num_batched_tokens": 96, "num_kv_blocks": 34,
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    draft = {"method": "eagle3", "model": "nano-draft", "num_speculative_tokens": 3}
    with LLM("nano", speculative_config=draft | {"adaptive": False}, **SIZES) as engine:
        yield engine


def load(llm: LLM) -> list[Any]:
    asked = [llm.render([{"role": "user", "content": f"What is {n} + 8?"}]) for n in range(18)]
    thought = {"reasoning": reasoning(), "thinking_token_budget": 12}
    kinds: list[dict[str, Any]] = [
        {"grammar": CALL, **thought},
        {"grammar": schema(PERSON), **thought},
        {"grammar": schema(PERSON), "temperature": 0.0, "logprobs": 1},
        {"grammar": regex("[a-z ]{30,40}")},
        {"temperature": 0.0, "ignore_eos": True, "logit_bias": {}},
        {"grammar": regex(r"(.|\n){1,40}"), "temperature": 0.0, "logit_bias": {}},
    ]
    params = [seeded(n, **{"max_tokens": 50, **kinds[n % len(kinds)]}) for n in range(18)]
    return admitted(llm, asked, params)


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    with LLM("nano", **SIZES) as llm:
        requests = load(llm)
        updates = drive(llm, requests)
        return [answer(updates[request.request_id]) for request in requests]


def answer(updates: list[Any]) -> Answer:
    return read_tokens(updates), updates[-1].finish_reason if updates else None


@pytest.mark.parametrize("seed", [0, full(1)])
def test_aborts_do_not_change_other_requests(
    llm: LLM, alone: list[Answer], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: set[int] = set()
    send = GrammarClient.send

    def noting(self: GrammarClient, message: wire.ToGrammars) -> None:
        send(self, message)
        if isinstance(message, wire.OpenGrammar):
            followed.add(message.key)  # The message follows again, from a worker.
        elif isinstance(message, wire.CloseGrammars):
            for key in message.keys:
                followed.remove(key)

    monkeypatch.setattr(GrammarClient, "send", noting)
    chance, loop = random.Random(seed), llm._loop
    before = loop.stats()
    requests = load(llm)
    updates: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    # Some requests are aborted at once, during compilation, or after this number of tokens.
    leaving = {name: chance.choice((0, 1, 6, 14, 25)) for name in chance.sample([*updates], 10)}
    late, there = list(requests), set[str]()
    while loop.has_work or late:
        for request in late[:3]:  # Some requests arrive while others are aborted.
            loop.add(request)
            there.add(request.request_id)
        del late[:3]
        going = [name for name in there if len(answer(updates[name])[0]) >= leaving.get(name, 99)]
        loop.abort(going)
        for name in going:
            del leaving[name]
        for update in loop.step():
            assert update.request_id in there  # No update follows the end of a request.
            updates[update.request_id].append(update)
            if update.finish_reason:
                there.remove(update.request_id)
    free_all(llm)
    assert not followed
    num_aborted = 0
    for request, expected in zip(requests, alone, strict=True):
        tokens, reason = answer(updates[request.request_id])
        if reason == "abort":
            assert tokens == expected[0][: len(tokens)]
            num_aborted += len(tokens) > 0
        else:
            assert (tokens, reason) == expected
    assert num_aborted >= 3
    assert loop.stats().num_accepted_tokens > before.num_accepted_tokens + 50
    # Later requests get the same texts as before.
    updates = drive(llm, requests := load(llm))
    assert [answer(updates[request.request_id]) for request in requests] == alone
    assert loop.stats().preemption_count > 0
    free_all(llm)
