"""nano-m3 says the same on one rank and on two, however its prompts are read."""

from __future__ import annotations

from typing import Any

from nano.suites import retrieval, tool_calls
from negamax import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


def answers(**options: Any) -> tuple[list[list[int]], int]:
    """Tokens of greedy answers to a prompt of 2,000 tokens with a fact far back, asked twice, and
    to two with tools; and how many tokens of prompts came from the prefix cache. In float32: sums
    over ranks that are rounded to bfloat16 decide a near tie one way or the other.
    """
    (long,) = retrieval.problems("2k", 1, 5)
    with LLM("nano-m3", device="cpu", dtype="float32", num_threads=1, **options) as llm:
        asked = [llm.render(list(long.messages), tools=list(long.tools) or None)]
        asked += [
            llm.render(list(each.messages), tools=list(each.tools))
            for each in tool_calls.problems(2, 5)
        ]
        made = llm.generate(asked, GREEDY)
        made += llm.generate(asked[:1], GREEDY)
        return [each.outputs[0].token_ids for each in made], made[-1].num_cached_tokens


def test_ranks_chunks_and_cached_prefixes_leave_the_text_as_it_is() -> None:
    """Chunks of 200 tokens end inside blocks; the prompt's 2,000 tokens are four times what each
    query attends to.
    """
    expected, cached = answers(enable_prefix_caching=False, max_num_batched_tokens=4096)
    assert cached == 0 and expected[0] == expected[-1]
    for options in ({}, {"tensor_parallel_size": 2}):
        found, cached = answers(max_num_batched_tokens=200, **options)
        assert found == expected and cached > 1000
