import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from split_models import answers, check_mixed_run, check_nano, check_nano_m3, skip_without
from test_gpu_engine import prompts

from negamax import LLM, SamplingParams

RANKS: list[dict[str, Any]] = [
    {"data_parallel_size": 2},
    {"data_parallel_size": 2, "enable_expert_parallel": True},
    {"data_parallel_size": 2, "enable_expert_parallel": True, "enforce_eager": True},
    {"data_parallel_size": 2, "max_num_batched_tokens": 48},
    {"data_parallel_size": 4, "enable_expert_parallel": True},
    {"data_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel_size": 2},
    {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": {"step_interval": 8, "window_size": 8, "num_redundant_experts": 2},
    },
]


@pytest.fixture(scope="module")
def of_one_rank() -> list[list[int]]:
    return answers()[0]


@pytest.mark.parametrize("options", RANKS, ids=str)
def test_ranks_agree_with_one(of_one_rank: list[list[int]], options: dict[str, Any]) -> None:
    check_nano(of_one_rank, options)


@pytest.mark.parametrize("options", [RANKS[0], RANKS[1], RANKS[4], RANKS[5], RANKS[6]], ids=str)
def test_nano_m3_agrees_with_one_rank(options: dict[str, Any]) -> None:
    check_nano_m3(options)


def test_a_seed_gives_the_same_text_on_either_rank() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=11, ignore_eos=True)
    skip_without(RANKS[1])
    with LLM("nano", device="cuda", **RANKS[1]) as llm:
        prompt = prompts(llm)[0]
        made = llm.generate([prompt] * 4, params)
        texts = [each.outputs[0].token_ids for each in made]
        assert min(rank.generated_tokens for rank in llm._loop._scheduler.ranks) > 0
    for text in texts[1:]:
        same = sum(a == b for a, b in zip(texts[0], text, strict=True))
        assert same >= 36  # another batch size's rounding may change a token near a tie


@pytest.mark.parametrize("options", [RANKS[1], RANKS[4], RANKS[5], RANKS[6]], ids=str)
def test_a_long_mixed_run_ends_with_every_block_free(options: dict[str, Any]) -> None:
    check_mixed_run("minimax-m2", options)
