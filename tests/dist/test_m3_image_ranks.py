import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from test_m3_ranks import sizes_of

from negamax.scheduler import encoder_cache
from tests import tiny, tiny_m3
from tests.dist.machines import Agent, OneMachine
from tests.dist.nodes import key, meeting_at
from tests.layouts import full, parallel
from tests.m3_vision_support import LIMITS, check, draw_prompt, seeing_engine
from tests.ports import free_port

__all__ = ["key"]  # fixture


@pytest.mark.parametrize(
    "ranks",
    [
        parallel(tp=2),
        parallel(dp=2, ep=True),
        parallel(pcp=2),
        full({"pipeline_parallel_size": 2}),
        full(parallel(tp=4, ep=True)),
        full(parallel(tp=2, pcp=2)),
        full(parallel(dp=2, pcp=2, pp=2)),
    ],
    ids=str,
)
def test_ranks_share_the_images_of_a_step(
    ranks: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let each rank encode images, some in parts, in chunks that cut images, with preemption and
    hits.
    """
    monkeypatch.setattr(encoder_cache, "PART_PATCHES", 30)
    rng = random.Random(7)
    model = tiny_m3.make_seeing_model(11, **sizes_of(2))
    prompts = [draw_prompt(rng, 96, text=20, images=3, most=12) for _ in range(3)]
    limits: dict[str, Any] = {"max_num_batched_tokens": 37, "max_num_seqs": 3, "num_kv_blocks": 16}
    with seeing_engine(tiny.save(model, tmp_path), max_model_len=192, **limits, **ranks) as engine:
        answers = engine.run(*prompts, prompt_logprobs=2, max_tokens=20)
        again = engine.run(*prompts)
        assert all(each._num_jobs for each in engine.encoders)
    for prompt, answer, later in zip(prompts, answers, again, strict=True):
        check(model, prompt, answer)
        check(model, prompt, later)


def test_ranks_on_two_nodes_share_images(tmp_path: Path) -> None:
    """Send pixels to a rank on another node."""
    model = tiny_m3.make_seeing_model(11, **sizes_of(2))
    prompts = [draw_prompt(random.Random(n), 96, text=20, images=2, most=12) for n in range(3)]
    folder, network = tiny.save(model, tmp_path), OneMachine(free_port(), reason="")
    limits = LIMITS | {"max_model_len": 192, "data_parallel_size": 2, "nnodes": 2}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    agent = Agent(network, 1, *options, model=str(folder))
    try:
        with seeing_engine(folder, **limits | meeting_at(network, 2)) as engine:
            for prompt, answer in zip(prompts, engine.run(*prompts), strict=True):
                check(model, prompt, answer)
            assert all(each._num_jobs for each in engine.encoders)
        assert agent.end() == 0, agent.log
    finally:
        agent.kill()
