import gc
import io
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.bench import offline
from negamax.bench.offline import OfflineWorkload, Repeat, conditions, summarize
from negamax.bench.report import add_comparison, add_limits, read_baseline
from negamax.bench.workload import BatchTimes, RandomPrompts, decode_batch, run_batch
from negamax.cli.main import main
from negamax.engine.core.loop import EngineLoop
from negamax.engine.core.setup import start_loop
from negamax.engine.core.source import locate
from negamax.engine.wire import ModelInfo
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import GenerateRequest

Engine = tuple[EngineLoop, ModelInfo]
OPTIONS = EngineOptions(model="nano", num_threads=1, device="cpu")


def measure(line: str, file: Path | None = None) -> int:
    """Run the benchmark of nano and write its result to `file`. Return the exit code."""
    flags = "bench offline nano --num-threads 1 --device cpu --input-len 40 --output-len 6"
    return main([*flags.split(), *line.split(), *(["--json", str(file)] if file else ())])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loop, info = start_loop(OPTIONS)
    yield loop, info
    loop.shutdown()


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("bench") / "new" / "out.json"
    assert measure("--concurrency 1,3 --repeat 2 --bandwidth-tb-s 0.02", file) == 0
    assert gc.get_freeze_count() == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_document_holds_conditions_and_a_run_per_batch_size(document: dict[str, Any]) -> None:
    (result,) = document["results"]
    assert (result["model"], result["num_layers"], result["tensor_parallel_size"]) == ("nano", 5, 1)
    assert result["options"]["num_threads"] == 1
    assert result["info"]["num_kv_blocks"] > 0
    assert result["environment"]["versions"]["torch"]
    assert result["start_seconds"] > 0
    assert [run["concurrency"] for run in result["runs"]] == [1, 3]
    for run in result["runs"]:
        assert len(run["repeats"]) == 2
        assert run["cached_tokens"] == 0 and run["preemptions"] == 0
        assert 0 < run["ttft_ms_median"] <= run["ttft_ms_max"]
        assert run["prefill_seconds"] > 0 and run["step_ms_median"] > 0
        assert run["limit_tpot_ms"] > 0
        for repeat in run["repeats"]:
            assert len(repeat["ttft"]) == run["concurrency"]


def test_results_can_be_compared_with_those_of_the_same_conditions_only(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "earlier.json"
    document["results"][0]["engine"] = "the one before"
    file.write_text(json.dumps(document))
    out = tmp_path / "out.json"
    assert measure(f"--concurrency 1 --compare {file}", out) == 0
    assert "times the one before" in " ".join(capsys.readouterr().out.split())
    documents = (json.loads(out.read_text()), document)
    run, earlier = (each["results"][0]["runs"][0] for each in documents)
    assert run["times_faster_decode"] == pytest.approx(earlier["tpot_ms"] / run["tpot_ms"])

    workload = OfflineWorkload(input_len=40, output_len=7, concurrency=(1,))
    with pytest.raises(ConfigError, match="has no result for"):
        read_baseline(file, conditions(OPTIONS, workload))
    file.write_text("{}")
    with pytest.raises(ConfigError, match="has no results"):
        read_baseline(file, conditions(OPTIONS, workload))


def test_times_tokens_after_prompts_that_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, batches = tmp_path / "out.json", list[list[GenerateRequest]]()

    def run(loop: EngineLoop, requests: list[GenerateRequest], **rest: Any) -> BatchTimes:
        batches.append(requests)
        return run_batch(loop, requests, **rest)

    monkeypatch.setattr(offline, "run_batch", run)
    line = "--concurrency 2 --cached-prompts --repeat 2"
    assert measure(line, file) == 0
    lengths = [[request.sampling.max_tokens for request in batch] for batch in batches]
    assert lengths == [[1, 1], [8, 8], [6, 6]] * 2
    prompts = [[request.prompt_token_ids for request in batch] for batch in batches]
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3] == prompts[4] == prompts[5]
    (result,) = json.loads(file.read_text())["results"]
    (run_of_two,) = result["runs"]
    assert result["cached_prompts"] and run_of_two["cached_tokens"] == 0
    for repeat in run_of_two["repeats"]:
        tokens = repeat["total_seconds"] - repeat["ttft"][-1]
        assert repeat["tpot"] == pytest.approx(tokens / 5) and tokens > 0
    assert measure(f"{line} --no-enable-prefix-caching") == 2
    assert "prefix cache, which is disabled" in capsys.readouterr().err


def test_batches_that_cannot_run_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure("--concurrency 9 --max-num-seqs 8") == 2
    assert "or more; it is 8" in capsys.readouterr().err
    assert measure("--concurrency 1,two") == 2
    assert "--concurrency is '1,two'" in capsys.readouterr().err


def test_prompts_fit_the_engine_and_are_all_different(engine: Engine) -> None:
    _, info = engine
    prompts = RandomPrompts(info, seed=1, temperature=1.0)
    size = {"input_len": 20, "output_len": 2}
    requests = prompts.batch(3, **size) + prompts.batch(3, **size)
    assert len({request.prompt_token_ids for request in requests}) == 6
    assert len({request.request_id for request in requests}) == 6
    assert {(each.sampling.top_k, each.sampling.top_p) for each in requests} == {(0, 1.0)}
    again = RandomPrompts(info, seed=1, temperature=1.0).batch(3, **size)
    first, second = ([each.prompt_token_ids for each in batch] for batch in (again, requests[:3]))
    assert first == second
    with pytest.raises(ConfigError, match="exceed the context length"):
        prompts.batch(1, input_len=info.max_model_len, output_len=1)
    with pytest.raises(ConfigError, match="is too large: --max-num-seqs"):
        prompts.batch(info.max_num_seqs + 1, input_len=1, output_len=1)


def test_a_batch_is_timed_from_its_start_to_its_last_token(engine: Engine) -> None:
    loop, info = engine
    requests = RandomPrompts(info, seed=2, temperature=0.0).batch(2, input_len=30, output_len=5)
    seen: list[int] = []
    before = loop.stats().generated_tokens
    times = run_batch(loop, requests, on_decode=lambda: seen.append(loop.stats().num_running))
    assert loop.stats().generated_tokens - before == 10
    assert len(times.ttft) == 2 and 0 < times.ttft[0] <= times.ttft[-1] < times.seconds
    assert len(times.steps) == 4
    assert seen and not loop.has_work
    assert sum(times.steps) == pytest.approx(times.seconds - times.ttft[-1])


def test_pause_between_steps_is_untimed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, info = engine
    pause, found, commit = 0.3, [], loop._scheduler.commit

    def noted(*given: Any, seconds: float) -> Any:
        found.append(seconds)
        return commit(*given, seconds=seconds)

    monkeypatch.setattr(loop._scheduler, "commit", noted)
    monkeypatch.setattr(loop.executor, "run_debug_command", lambda command: time.sleep(pause))
    requests = RandomPrompts(info, seed=5, temperature=0.0).batch(1, input_len=10, output_len=4)
    run_batch(loop, requests, on_decode=lambda: loop.run_debug_command("none"))
    assert len(found) >= 4 and statistics.median(found) < pause / 2


def test_cached_prompts_are_noticed_and_decode_steps_go_on_until_closed(engine: Engine) -> None:
    loop, info = engine
    counts = []
    for _ in range(2):
        batch = RandomPrompts(info, seed=3, temperature=0.0).batch(1, input_len=64, output_len=3)
        counts.append(run_batch(loop, batch).cached_tokens)
    assert counts[0] == 0 < counts[1]
    prompts = RandomPrompts(info, seed=4, temperature=0.0)
    stepper = decode_batch(loop, prompts.batch(2, input_len=10, output_len=50))
    next(stepper)
    before = loop.stats()
    for _ in range(5):
        next(stepper)
    assert loop.stats().step_count - before.step_count == 5
    assert loop.stats().generated_tokens - before.generated_tokens == 10
    stepper.close()
    assert not loop.has_work
    assert loop.stats().num_free_kv_blocks == loop.stats().num_kv_blocks


def test_summary_takes_medians_and_the_idle_share_of_all_repeats() -> None:
    def repeat(prefill: float, tpot: float, idle: float) -> Repeat:
        return Repeat(prefill, (0.1, 0.2, 0.6), 9.0, *[tpot] * 3, 1.0 - idle, idle, 0, 0)

    repeats = [repeat(2.0, 0.01, 0.1), repeat(1.0, 0.02, 0.0), repeat(4.0, 0.03, 0.2)]
    summary = summarize(repeats, num_requests=3, input_len=10)
    assert summary["prefill_seconds"] == 2.0 and summary["prefill_tokens_per_second"] == 15.0
    assert summary["tpot_ms"] == 20.0 and summary["decode_tokens_per_second"] == 150.0
    assert summary["ttft_ms_median"] == 200.0 and summary["ttft_ms_max"] == 600.0
    assert summary["gpu_idle_share"] == pytest.approx(0.1)
    # If tokens take no time, there is no decode time.
    repeats = [repeat(2.0, tpot, 0.1) for tpot in (-0.01, 0.0)]
    short = summarize(repeats, num_requests=3, input_len=9)
    assert short["tpot_ms"] is short["decode_tokens_per_second"] is None
    result = {"engine": "negamax", "runs": [short]}
    add_comparison(result, {"engine": "negamax", "runs": [summary]})
    assert "times_faster_decode" not in short and short["times_faster_prefill"] == 1.0


def test_limit_counts_the_kv_cache_in_its_own_dtype() -> None:
    spec = locate(EngineOptions(model="minimax-m2", load_format="synthetic")).spec
    limits = []
    for kv_dtype in ("auto", "fp8"):
        runs = [{"concurrency": 100, "tpot_ms": milliseconds} for milliseconds in (20.0, 8.0)]
        runs[1]["spec_decode_num_drafts"] = 7
        result: dict[str, Any] = {"input_len": 1000, "output_len": 128, "tensor_parallel_size": 4}
        result |= {"info": {"dtype": "bfloat16"}, "options": {"kv_cache_dtype": kv_dtype}}
        result["runs"] = runs
        add_limits(result, spec, bytes_per_second=4e12)
        limits.append(result["runs"][0]["limit_tpot_ms"])
        assert "limit_tpot_ms" not in result["runs"][1]  # The steps yield several tokens.
        assert result["runs"][0]["share_of_limit"] == pytest.approx(limits[-1] / 20.0)
    assert limits[0] - limits[1] == pytest.approx(1e3 * 100 * 1064 * 62 * 2 * 8 * 128 / 4 / 4e12)


def test_plot_is_written_or_asks_for_matplotlib(document: dict[str, Any], tmp_path: Path) -> None:
    from negamax.bench.plots import plot_offline

    plot_offline(tmp_path / "out.png", document["results"])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_shares_are_steps_and_ticks_plain_numbers() -> None:
    from negamax.bench import plots

    figure = plots.blank_figure((5, 4))
    axes = figure.subplots()
    plots._histogram(axes, [0.6, 1.1, 2.4, 2.4], title="")
    figure.savefig(io.BytesIO())
    (share, *_) = figure.axes[1].lines
    assert share.get_drawstyle() == "steps-post"
    assert list(share.get_ydata()) == [0, 0.25, 0.5, 0.75, 1]
    assert "1,000" in [label.get_text() for label in axes.get_xticklabels()]
    assert all(count == int(count) for count in axes.get_yticks())
