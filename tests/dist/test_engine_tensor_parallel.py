import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from negamax import LLM, SamplingParams
from negamax.base import log
from negamax.base.errors import EngineDeadError
from negamax.worker.rank_process import PLAN
from tests import tiny

QUESTIONS = [
    "Hello!",
    "What is 47 + 38?",
    "Tom has 47 apples and buys 38 more. How many apples does he have now?",
    "A box holds 24 pencils. How many pencils are in 13 boxes?",
    "Who are you?",
    "What is the capital of France?",
]


def nano(tensor_parallel_size: int, *, expert_parallel_size: int | None = None) -> LLM:
    """Use float32: bfloat16 rounding of sums over ranks decides near ties differently."""
    return LLM(
        "nano",
        device="cpu",
        dtype="float32",
        tensor_parallel_size=tensor_parallel_size,
        expert_parallel_size=expert_parallel_size,
        num_threads=1,
        max_model_len=1024,
    )


@pytest.fixture(scope="module")
def strange_folder() -> Iterator[Path]:
    """Return a temporary folder whose name is not a plain URL path."""
    folder = Path(tempfile.mkdtemp(prefix="a b?#%20:&=", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def two_ranks(strange_folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(strange_folder))
        llm = nano(2)
    with llm:
        yield llm


def test_ranks_connect_with_an_odd_temporary_folder(two_ranks: LLM, strange_folder: Path) -> None:
    assert any(strange_folder.glob("*/rendezvous"))
    assert all(greedy(two_ranks, 1))


def greedy(llm: LLM, max_tokens: int) -> list[list[int]]:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    generations = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return [generation.outputs[0].token_ids for generation in generations]


def test_the_embedded_model_gives_the_same_text_on_1_2_and_4_ranks(
    two_ranks: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cover replicated KV heads, and experts sharded by number and by width.

    Stopped ranks finish a step in flight: an early exit is an error to the others.
    """
    with nano(1) as one:
        expected = greedy(one, 32)
    log.setup("warning")
    assert greedy(two_ranks, 32) == expected
    with nano(4, expert_parallel_size=2) as four:
        assert greedy(four, 12) == [tokens[:12] for tokens in expected]
    assert capfd.readouterr().err == ""  # no step was repeated row by row


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "ranks"), [(6, 3, 3), (4, 1, 2)])
def test_random_models_give_the_same_logprobs_on_several_ranks(
    num_heads: int, num_kv_heads: int, ranks: int, tmp_path: Path
) -> None:
    """Each rank has its own KV head, or all share one; nano is in between."""
    model = tiny.make_model(
        ranks,
        vocab_size=96,
        hidden_size=40,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        rotary_dim=8,
        num_local_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    folder = str(tiny.save(model, tmp_path))
    prompts = [
        torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in (3, 17, 40)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
    results = []
    for size in (1, ranks):
        with LLM(
            folder,
            dtype="float32",
            tensor_parallel_size=size,
            num_threads=1,
            block_size=8,
            max_num_batched_tokens=16,
        ) as llm:
            results.append([generation.outputs[0] for generation in llm.generate(prompts, params)])
    for one, several in zip(*results, strict=True):
        assert several.token_ids == one.token_ids
        for a, b in zip(one.logprobs or [], several.logprobs or [], strict=True):
            assert abs(a.logprob - b.logprob) < 1e-4


def test_a_rank_that_cannot_start_is_reported_and_nothing_is_left_running(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny.make_model(1, **{**tiny.random_sizes(1), "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96,
                                  "intermediate_size": 32})  # fmt: skip
    folder = tiny.save(model, tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    from negamax.base.errors import ConfigError

    capfd.readouterr()
    with pytest.raises(ConfigError, match="safetensors"):
        LLM(str(folder), tensor_parallel_size=2, num_threads=1)
    assert capfd.readouterr().err == ""  # no rank reports an error of the others


def test_a_first_rank_that_fails_in_a_step_ends_and_is_reported(two_ranks: LLM) -> None:
    """The result thread must not keep a failed rank alive. This must be the last test of these
    ranks.
    """
    executor = two_ranks._loop.executor
    executor._sockets[0].send(PLAN + b"\xc1")  # not MessagePack: decoding raises in the rank
    with pytest.raises(EngineDeadError, match="rank 0 ended with exit code 1"):
        executor.receive()
