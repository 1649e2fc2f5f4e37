import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from test_m3_ranks import sizes_of

from tests import tiny, tiny_m3
from tests.layouts import full, parallel
from tests.m3_vision_support import check, draw_prompt, seeing_engine


@pytest.mark.parametrize(
    "ranks",
    [parallel(tp=2), full({"pipeline_parallel_size": 2}), full(parallel(tp=4, ep=True))],
    ids=str,
)
def test_ranks_share_the_images_of_a_step(ranks: dict[str, Any], tmp_path: Path) -> None:
    """Let each rank encode some images, in chunks that cut images, with preemption and hits."""
    rng = random.Random(7)
    model = tiny_m3.make_seeing_model(11, **sizes_of(2))
    prompts = [draw_prompt(rng, 96, text=20, images=3, most=12) for _ in range(3)]
    limits: dict[str, Any] = {"max_num_batched_tokens": 37, "max_num_seqs": 3, "num_kv_blocks": 16}
    with seeing_engine(tiny.save(model, tmp_path), max_model_len=192, **limits, **ranks) as engine:
        answers = engine.run(*prompts, prompt_logprobs=2, max_tokens=20)
        again = engine.run(*prompts)
    for prompt, answer, later in zip(prompts, answers, again, strict=True):
        check(model, prompt, answer)
        check(model, prompt, later)
