from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from negamax import LLM, SamplingParams
from tests import row_faults
from tests.dist.engines import replace_ranks
from tests.layouts import full
from tests.loop_driver import admitted, drive, read_tokens
from tests.row_faults import FAULTS, PROMPT_MARK, asking

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
OTHERS = (
    GREEDY,
    replace(GREEDY, temperature=1.0, top_k=40, seed=2**63 - 1, logprobs=2),
    replace(GREEDY, frequency_penalty=1.0, prompt_logprobs=1),
)
PROMPT = list(range(30, 70))


def faulty_ranks(**ranks: int) -> Any:
    @pytest.fixture(scope="module")
    def faulty() -> Iterator[LLM]:
        with pytest.MonkeyPatch.context() as patch:
            if ranks:
                replace_ranks(patch, "faulty")
            else:
                row_faults.install(0, patch.setattr)
            with LLM("nano", device="cpu", num_threads=1, max_model_len=512, **ranks) as llm:
                yield llm

    return faulty


one_rank = faulty_ranks()
two_ranks = faulty_ranks(tensor_parallel_size=2)
two_context_ranks = faulty_ranks(prefill_context_parallel_size=2)


def run(llm: LLM, victim: SamplingParams) -> tuple[list[list[int]], str | None]:
    last = [5, PROMPT_MARK, 6, 7] if victim.prompt_logprobs else PROMPT[3:]
    requests = admitted(llm, [PROMPT, PROMPT[1:], PROMPT[2:], last], [*OTHERS, victim])
    updates = drive(llm, requests)
    *concurrent, ended = (updates[request.request_id] for request in requests)
    assert [each[-1].error for each in concurrent] == [None] * 3
    return [read_tokens(each) for each in concurrent], ended[-1].error


@pytest.fixture(scope="module")
def undisturbed() -> Callable[[LLM], list[list[int]]]:
    known: dict[int, list[list[int]]] = {}

    def of(llm: LLM) -> list[list[int]]:
        if id(llm) not in known:
            known[id(llm)], error = run(llm, SamplingParams(temperature=0.0, max_tokens=2))
            assert error is None
        return known[id(llm)]

    return of


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        *(("one_rank", fault) for fault in FAULTS),
        ("two_ranks", "late edit"),
        *(full("two_ranks", fault) for fault in FAULTS if fault != "late edit"),
    ],
)
def test_a_fault_in_one_row_ends_that_request_alone(
    ranks: str, fault: str, request: pytest.FixtureRequest, undisturbed: Any
) -> None:
    llm = request.getfixturevalue(ranks)
    alone = undisturbed(llm)
    beside, error = run(llm, asking(fault))
    assert error == "Injected while this request was computed"
    assert beside == alone
    again, error = run(llm, SamplingParams(temperature=0.0, max_tokens=2))  # The slots are reused.
    assert error is None and again == alone


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        ("two_ranks", "fill"),
        ("two_ranks", "late fill"),
        ("two_context_ranks", "late edit"),
        full("two_ranks", "late edit"),
        full("two_context_ranks", "fill"),
        full("two_context_ranks", "late fill"),
    ],
)
def test_a_row_that_fails_on_the_second_rank_alone_ends_on_both(
    ranks: str, fault: str, request: pytest.FixtureRequest, undisturbed: Any
) -> None:
    llm = request.getfixturevalue(ranks)
    alone = undisturbed(llm)
    beside, error = run(llm, asking(fault, only_rank=1))
    assert error is not None
    assert beside == alone
