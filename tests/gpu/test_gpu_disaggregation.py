from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import pytest
from test_gpu_engine import AGREEMENT, agreement, skip_without

from negamax import SamplingParams
from negamax.engine.client.output import admit
from negamax.engine.core.loop import EngineLoop
from negamax.engine.core.setup import start_loop
from negamax.engine.wire import ModelInfo
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import GenerateRequest, RemotePrompt
from negamax.scheduler.step import SequenceUpdate
from tests.ports import free_port

DEVICE = "cuda"
LENGTHS = {"nano": (17, 300, 700), "nano-m3": (600, 2500)}  # of prompts
DRAFTS = {"nano": "nano-draft", "nano-m3": "nano-m3-draft"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, seed=1)
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=1)
SECONDS = 60.0
numbers = count()
Engine = tuple[EngineLoop, ModelInfo]


@contextmanager
def engines(model: str, *kinds: dict[str, Any]) -> Iterator[list[Engine]]:
    """Start an engine for each of `kinds`, which holds its further options."""
    sizes = {"num_kv_blocks": 400, "max_model_len": 3000, "max_num_seqs": 8, "num_threads": 1}
    with ExitStack() as stack:
        found = []
        for kind in kinds:
            found.append(start_loop(EngineOptions(model, device=DEVICE, **{**sizes, **kind})))
            stack.callback(found[-1][0].shutdown)
        yield found


def exchange(role: str) -> dict[str, Any]:
    how = {"kv_connector": "TcpConnector", "kv_role": role, "kv_port": free_port()}
    return {"kv_transfer_config": how, "kv_offloading_size": 1.0}


def options_of(model: str, way: str) -> dict[str, Any]:
    if way == "drafts":
        how = {"model": DRAFTS[model], "num_speculative_tokens": 3, "adaptive": False}
        return {"speculative_config": {"method": "eagle3", **how}}
    return {"kv_cache_dtype": "fp8"} if way == "fp8 cache" else {}


def draw(model: str, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.choices(range(300, 1900), k=length)) for length in LENGTHS[model]]


def ask(
    engine: Engine, prompt: tuple[int, ...], sampling: SamplingParams, **fields: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{next(numbers)}",
        prompt_token_ids=prompt,
        sampling=admit(prompt, sampling, info=engine[1]),
        **fields,
    )


def run(
    loops: Sequence[EngineLoop], requests: Sequence[tuple[EngineLoop, GenerateRequest]]
) -> list[list[int]]:
    """Drive all `loops` until the requests have ended. Return the tokens of each request."""
    tokens: dict[str, list[int]] = {request.request_id: [] for _, request in requests}
    unfinished, end = set(tokens), time.monotonic() + SECONDS

    def take(update: SequenceUpdate) -> None:
        assert update.error is None, update.error
        tokens[update.request_id] += update.token_ids
        if update.finish_reason is not None:
            unfinished.discard(update.request_id)

    for loop, request in requests:
        loop.add(request)
    while unfinished:
        assert time.monotonic() < end, f"{len(unfinished)} requests did not end"
        for loop in loops:
            if loop.has_work:
                for update in loop.step():
                    take(update)
            elif loop._sockets is not None:
                loop._sockets.poll()
    return list(tokens.values())


def run_apart(pair: list[Engine], prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Prefill all prompts on the first engine, and decode all prompts together on the second."""
    (first, _), (second, _) = pair
    assert first._transfers is not None
    config, engine_id = first._transfers.config, first._transfers.engine_id
    later = []
    for prompt in prompts:
        lease = f"lease-{next(numbers)}"
        run([first, second], [(first, ask(pair[0], prompt, FIRST, lease_id=lease))])
        remote = RemotePrompt(config.host, config.port, lease, engine_id)
        later.append((second, ask(pair[1], prompt, GREEDY, remote=remote)))
    return run([first, second], later)


def run_alone(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Continue each prompt alone, after a run that has left it in the prefix cache."""
    found = []
    for prompt in prompts:
        for sampling in (FIRST, GREEDY):
            tokens = run([engine[0]], [(engine[0], ask(engine, prompt, sampling))])
        found += tokens
    return found


@pytest.mark.parametrize("model", LENGTHS)
@pytest.mark.parametrize("way", ["plain", "drafts", "fp8 cache"])
def test_tokens_are_those_of_one_engine(model: str, way: str) -> None:
    """Check for equal bits: both engines compute the same tokens after the same prefixes."""
    options = options_of(model, way)
    roles = [exchange(role) for role in ("kv_producer", "kv_consumer")]
    with engines(model, options, *({**options, **role} for role in roles)) as found:
        alone, *pair = found
        rounds = [draw(model, seed) for seed in range(3)]
        for prompts in rounds:
            expected = run_alone(alone, prompts)
            assert [run_apart(pair, [prompt])[0] for prompt in prompts] == expected
        stats = pair[1][0].stats()
        size = pair[1][1].block_size
        blocks = sum((length - 1) // size for length in LENGTHS[model])
        assert stats.num_pulled_blocks == stats.num_host_loads == len(rounds) * blocks
        assert stats.num_remote_prefills == 3 * sum(each > size for each in LENGTHS[model])
        assert stats.num_failed_prefills == 0
        if way == "drafts":
            assert stats.num_accepted_tokens > 0
        # A step with several requests has another size, which changes how values round.
        share = agreement(expected, run_apart(pair, prompts))
        print(f"agreement of {model}, {way}, together: {share:.4f}")
        assert share > 0.5


@pytest.mark.parametrize("model", LENGTHS)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)])
def test_ranks_of_both_engines_share_the_heads(model: str, sizes: tuple[int, int]) -> None:
    """Compare with an engine of the same size that has the prompt in its cache."""
    skip_without({"tensor_parallel_size": 2})
    kinds = [
        {"tensor_parallel_size": size, **exchange(role)}
        for size, role in zip(sizes, ("kv_producer", "kv_consumer"), strict=True)
    ]
    with engines(model, *kinds) as pair:
        prompts = draw(model, 5)
        apart = [run_apart(pair, [prompt])[0] for prompt in prompts]
        stats = pair[1][0].stats()
        assert stats.num_failed_prefills == 0 and stats.num_pulled_blocks > 0
        before = stats.num_pulled_blocks
        alone = run_alone(pair[1], prompts)  # This engine has the blocks of the first engine.
        assert pair[1][0].stats().num_pulled_blocks == before
    assert agreement(alone, apart) >= AGREEMENT
    with engines(model, {"tensor_parallel_size": sizes[1]}) as (plain,):
        share = agreement(run_alone(plain, prompts), apart)
    print(f"agreement of {model}, {sizes}: {share:.4f}")
    assert share > 0.5
