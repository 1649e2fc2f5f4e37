import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from negamax import LLM, SamplingParams
from negamax.base import supervision
from tests import row_faults
from tests.row_faults import FAULTS, PROMPT_MARK, asking

NEIGHBOURS = (
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
    SamplingParams(
        temperature=1.0, top_k=40, seed=2**63 - 1, max_tokens=10, ignore_eos=True, logprobs=2
    ),
    SamplingParams(
        temperature=0.0, max_tokens=10, ignore_eos=True, frequency_penalty=1.0, prompt_logprobs=1
    ),
)
PROMPT = list(range(30, 70))


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LLM]:
    with faulty_ranks(tensor_parallel_size=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def two_context_ranks() -> Iterator[LLM]:
    with faulty_ranks(prefill_context_parallel_size=2) as llm:
        yield llm


@contextmanager
def faulty_ranks(**ranks: int) -> Iterator[LLM]:
    spawn = supervision.spawn

    def faulty(_module: str, *args: str) -> subprocess.Popen[bytes]:
        return spawn("tests.dist.ranks", "faulty", *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervision, "spawn", faulty)
        with LLM("nano", device="cpu", num_threads=1, max_model_len=512, **ranks) as llm:
            yield llm


@pytest.fixture(scope="module")
def one_rank() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        row_faults.install(0, patch.setattr)
        with LLM("nano", device="cpu", num_threads=1, max_model_len=512) as llm:
            yield llm


def run(llm: LLM, victim: SamplingParams) -> tuple[list[list[int]], str | None]:
    prompts = [
        PROMPT,
        PROMPT[1:],
        PROMPT[2:],
        [5, PROMPT_MARK, 6, 7] if victim.prompt_logprobs else PROMPT[3:],
    ]
    params = llm._admit(prompts, [*NEIGHBOURS, victim])
    requests = [group[0][1] for group in llm._sequences(prompts, params)]
    for request in requests:
        llm._loop.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    errors: dict[str, str | None] = {}
    while llm._loop.has_work:
        for update in llm._loop.step():
            tokens[update.request_id] += update.token_ids
            errors[update.request_id] = update.error
    *neighbours, last = [request.request_id for request in requests]
    assert [errors[name] for name in neighbours] == [None] * len(neighbours)
    return [tokens[name] for name in neighbours], errors[last]


@pytest.fixture(scope="module")
def undisturbed() -> Callable[[LLM], list[list[int]]]:
    known: dict[int, list[list[int]]] = {}

    def of(llm: LLM) -> list[list[int]]:
        if id(llm) not in known:
            known[id(llm)], error = run(llm, SamplingParams(temperature=0.0, max_tokens=2))
            assert error is None
        return known[id(llm)]

    return of


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_a_fault_in_one_row_ends_that_request_alone(
    ranks: str, fault: str, request: pytest.FixtureRequest, undisturbed: Any
) -> None:
    llm = request.getfixturevalue(ranks)
    alone = undisturbed(llm)
    beside, error = run(llm, asking(fault))
    assert error == "Injected while this request was computed"
    assert beside == alone
    again, error = run(llm, SamplingParams(temperature=0.0, max_tokens=2))  # in the same slots
    assert error is None and again == alone


@pytest.mark.parametrize("fault", ["fill", "late fill", "late edit"])
@pytest.mark.parametrize("ranks", ["two_ranks", "two_context_ranks"])
def test_a_row_that_fails_on_the_second_rank_alone_ends_on_both(
    ranks: str, fault: str, request: pytest.FixtureRequest, undisturbed: Any
) -> None:
    llm = request.getfixturevalue(ranks)
    alone = undisturbed(llm)
    beside, error = run(llm, asking(fault, only_rank=1))
    assert error is not None
    assert beside == alone
