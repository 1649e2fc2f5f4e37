import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from foreign_family.checkpoint import CONFIG, random_tensors, save
from foreign_family.config import FAMILY, read_spec

from negamax import LLM, SamplingParams
from negamax.base import log
from negamax.base.errors import ConfigError, EngineDeadError
from negamax.bench.group import Group
from negamax.engine.core import executor
from negamax.engine.core.executor import MultiProcessExecutor
from negamax.engine.core.source import locate
from negamax.models import registry
from negamax.models.memory import expected_distinct_experts
from negamax.models.registry import bundled_spec
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.scheduler.step import StepPlan
from negamax.worker.config import (
    DECODE_SECONDS,
    DISTINCT_EXPERTS,
    OBSERVE_ROUTING,
    RankAddresses,
    WorkerConfig,
)
from negamax.worker.rank_process import PLAN
from tests.dist.engines import COMMON, NAME, assert_same, read_exit_codes, replace_ranks, save_m2
from tests.layouts import parallel
from tests.loop_driver import admitted
from tests.ports import free_port

QUESTIONS = ["Hello!", "What is 47 + 38?", "A box holds 24 pencils. How many are in 13 boxes?"]


@pytest.fixture(scope="module")
def m2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_m2(tmp_path_factory.mktemp("m2"), vocab_size=96, num_layers=5)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[tuple[LLM, Path]]:
    """Yield two tensor-parallel ranks and their folder, whose name needs quoting in URLs."""
    folder = Path(tempfile.mkdtemp(prefix="a b?#%20:&=", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        llm = LLM("nano", **COMMON, tensor_parallel_size=2, max_model_len=512)
    with llm:
        yield llm, folder
    shutil.rmtree(folder)


def test_embedded_model_gives_the_same_text_on_two_ranks(
    two_ranks: tuple[LLM, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    ranks, folder = two_ranks
    assert any(folder.glob("*/rendezvous"))
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1)
    log.setup("warning")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM("nano", **COMMON, max_model_len=512) as one:
        assert_same(ranks.chat(chats, params), one.chat(chats, params))
    assert capfd.readouterr().err == ""  # No step was repeated row by row.


def test_each_rank_writes_a_trace(two_ranks: tuple[LLM, Path]) -> None:
    ranks, folder = two_ranks
    ranks._loop.record_trace(str(folder / "traces" / "now"), num_steps=3)
    ranks.generate("Hello", SamplingParams(max_tokens=8))
    found = sorted(path.name for path in (folder / "traces").iterdir())
    assert found == ["now-rank0.json.gz", "now-rank1.json.gz"]


def test_failed_first_rank_ends_and_is_reported(two_ranks: tuple[LLM, Path]) -> None:
    """Check that the result thread ends with a failed rank. This test ends these ranks."""
    ranks = two_ranks[0]._loop.executor
    assert isinstance(ranks, MultiProcessExecutor)
    ranks._sockets[0].send(PLAN + b"\xc1")  # The rank cannot decode this message.
    with pytest.raises(EngineDeadError, match="rank 0 ended with exit code 1"):
        ranks.receive()


def test_killed_stage_is_reported(m2: str) -> None:
    with LLM(m2, **COMMON, pipeline_parallel_size=2) as llm:
        os.kill(llm._loop.executor._processes[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match="rank 1 ended with exit code -9"):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5))
    assert None not in read_exit_codes(llm)


@pytest.mark.parametrize("layout", [parallel(pp=2), parallel(tp=2)], ids=str)
def test_ranks_that_wait_for_a_mask_can_be_stopped(
    layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "SHUTDOWN_SECONDS", 120.0)
    with LLM(save_m2(tmp_path, num_layers=2), **COMMON, **layout) as llm:
        (request,) = admitted(llm, ["Name:"], [SamplingParams(max_tokens=40, grammar=NAME)])
        llm._loop._scheduler.add(request)
        plans = llm._loop._scheduler.plan()
        assert plans is not None and plans[0].grammar_rows == [0]
        llm._loop.executor.launch(plans)  # The masks of this plan are never sent.
        time.sleep(1.0)
    assert set(read_exit_codes(llm)) <= {0, 1}


def test_refuses_impossible_splits(m2: str) -> None:
    partition = r"adds up to 6 layers; the model has 5 \(use for example 3,2\)"
    for options, words in (
        ({}, r"5 layers .* 6 .*stages \(use --pipeline-.*-size 5 or"),
        ({"pp_layer_partition": "3,3"}, partition),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(m2, **COMMON, **parallel(pp=2 if options else 6), **options)


@pytest.mark.parametrize("layout", [parallel(pp=2), parallel(tp=2)], ids=["missing", "damaged"])
def test_rank_that_cannot_start_is_reported(
    m2: str, tmp_path: Path, layout: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(m2, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    words = next(name for name in weights if ".layers.4." in name)
    del weights[words]
    save_file(weights, file)
    if "tensor_parallel_size" in layout:
        words = "safetensors"
        file.write_bytes(b"\x00" * 100)
    capfd.readouterr()
    with pytest.raises(ConfigError, match=re.escape(words)):
        LLM(str(folder), **COMMON, **layout)
    assert capfd.readouterr().err == ""  # No rank reports the errors of other ranks.


def test_self_check_names_the_rank_with_a_wrong_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_num_seqs": 4}
    with LLM("nano", **sizes, **parallel(tp=2), self_check=True) as llm:
        llm.generate("a", SamplingParams(max_tokens=1))  # The short request raises no false alarm.
    replace_ranks(monkeypatch, "wrong slice")
    with pytest.raises(ConfigError, match="rank 1: layer 0: the keys after K norm") as found:
        LLM("nano", **sizes, **parallel(tp=2), self_check=True)
    assert found.value.exit_code == 2


def test_ranks_of_a_foreign_family_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, FAMILY.architecture, FAMILY)
    replace_ranks(monkeypatch, "foreign")
    folder = str(save(random_tensors(read_spec(CONFIG)), tmp_path))
    prompts = [list(range(3, 3 + length)) for length in (5, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    found = []
    for size in (1, 2):
        options = {"tensor_parallel_size": size, "max_num_batched_tokens": 16}
        with LLM(folder, device="cpu", num_threads=1, **options) as llm:
            found.append(llm.generate(prompts, params))
    assert_same(found[1], found[0])


def test_benchmarks_read_selected_experts_of_every_rank(tmp_path: Path) -> None:
    folder, layout = save_m2(tmp_path, num_layers=4), parallel(dp=2, pp=2, ep=True)
    with LLM(folder, **COMMON, **layout) as llm:
        loop, spec = llm._loop, locate(EngineOptions(folder)).spec
        loop.run_debug_command(OBSERVE_ROUTING, 1)
        llm.generate(["Hello!"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        loop.run_debug_command(DISTINCT_EXPERTS, 1)  # The count covers prompt and answer.
        llm.generate([[5]], SamplingParams(max_tokens=1, ignore_eos=True))
        answers = loop.run_debug_command(DISTINCT_EXPERTS, 1)
        loop.run_debug_command(OBSERVE_ROUTING, 0)
        chosen = [[len(experts) for experts in answer.experts or ()] for answer in answers]
        assert sum(map(len, chosen)) == 2 * spec.num_layers and len(chosen) == 4
        assert sorted(sum(of_rank) for of_rank in chosen)[:2] == [0, 0]
        group = Group(ParallelLayout(pp=2, dp=2, ep=2))
        assert group.distinct_experts(answers) == expected_distinct_experts(spec, 1)
        assert group.stage_milliseconds(loop.run_debug_command(DECODE_SECONDS, 1)) == []  # no GPU


@pytest.mark.parametrize("local", [True, False])
def test_plans_reach_replica(local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ParallelLayout(tp=2, dp=2)
    replace_ranks(monkeypatch, "echo")
    monkeypatch.setattr(executor, "SHUTDOWN_SECONDS", 120.0)
    config = WorkerConfig(
        bundled_spec("minimax-m2"), (1,), None, layout, "cpu", "float32", "auto",
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, block_size=16,
        num_kv_blocks=7, kv_cache_memory=None, gpu_memory_utilization=0.9, cudagraph_size=0,
        num_threads=1, seed=0, show_progress=False, addresses=None,
    )  # fmt: skip
    addresses = None
    if not local:
        plans, results = ([f"tcp://127.0.0.1:{free_port()}" for _ in range(n)] for n in (4, 2))
        files = str(tmp_path / "meet"), str(tmp_path / "beats")
        addresses = RankAddresses(tuple(plans), tuple(results), *files)

    def plan(step_id: int, slot: int) -> StepPlan:
        return StepPlan(step_id, [], [], [], [slot], [1], [0], [True])

    ranks = MultiProcessExecutor(config, addresses)
    try:
        pairs = [(plan(step, 10 * step), plan(step, 10 * step + 1)) for step in (1, 2)]
        for step, handle in enumerate([ranks.launch(list(pair)) for pair in pairs], 1):
            results = handle()
            assert [result.step_id for result in results] == [step, step]
            # The first rank of each replica answers with its plan.
            expected = [[0, 0, 10 * step], [1, 0, 10 * step + 1]]
            assert [result.token_ids for result in results] == expected
    finally:
        ranks.shutdown()
    assert [child.exit_code for child in ranks._processes] == [0] * 4
