from typing import Any

import pytest

from nano.suites import retrieval, tool_calls
from negamax import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def answers(**options: Any) -> tuple[list[list[int]], int]:
    """Return greedy tokens and the number of cached prompt tokens.

    Prompts: 2,000 tokens with a fact far back, asked twice, and two with tools. In float32:
    bfloat16 sums over ranks would decide near ties differently.
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


@pytest.mark.full  # `test_m3_ranks.py` compares shorter contexts with Transformers
def test_ranks_chunks_and_cached_prefixes_keep_the_tokens() -> None:
    """Chunks of 200 tokens end inside blocks; 2,000 tokens are four times the attended context."""
    expected, cached = answers(enable_prefix_caching=False, max_num_batched_tokens=4096)
    assert cached == 0 and expected[0] == expected[-1]
    found, cached = answers(max_num_batched_tokens=200, tensor_parallel_size=2)
    assert found == expected and cached > 1000
