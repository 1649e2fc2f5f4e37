from pathlib import Path

import pytest

from tests.speed import slowness
from tests.tool_reports import report


def count(number: int) -> list[object]:
    """Return the options for the gate's size, and no options for the size of the scenario."""
    return [("--count", str(number)), pytest.param((), marks=pytest.mark.full)]


def test_mixed_load_leaves_no_error_and_no_open_request(tmp_path: Path) -> None:
    for seconds in ("2", "20", "60"):  # The time grows until this machine is fast enough.
        found = report("soak", tmp_path, "--seconds", seconds, "--kv-offloading-size", "0.01")
        assert found["errors"] == 0 and found["bytes to and from main memory"] > 0
        if found["answers"].get("chat stream", 0) > 5 and "hung up" in found["answers"]:
            break
    assert found["answers"]["chat stream"] > 5 and found["answers"]["hung up"] > 0


@pytest.mark.full
def test_long_load_of_both_families_leaves_no_open_request(tmp_path: Path) -> None:
    for model in ("nano", "nano-m3"):
        found = report("soak", tmp_path, "--seconds", "60", "--model", model)
        assert found["errors"] == 0 and found["answers"]["chat stream"] > 5


@pytest.mark.full
def test_overload_is_refused_and_the_accepted_are_served(tmp_path: Path) -> None:
    """Require one success in four tries, since the rate comes from an earlier measurement."""
    errors = []
    for _ in range(4):
        try:
            found = report("overload", tmp_path)["overload"]
            statuses = found["statuses"]
            assert statuses["429"] > statuses["200"] > 0
            assert found["p99 ratio"] < 5.0
            return
        except AssertionError as error:
            errors.append(error)
    raise errors[-1]


@pytest.mark.parametrize("options", count(80))
def test_aborts_release_all_and_change_no_text(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = report("aborts", tmp_path, *options)
    assert found["sequences aborted"] > 15
    assert found["greedy answers compared"] >= (2 if options else 8)


@pytest.mark.parametrize("options", count(150))
def test_server_survives_invalid_bodies(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = report("fuzz", tmp_path, *options)["statuses"]
    size = int(options[1]) if options else 1000
    assert found["400"] > 0.3 * size and found["200"] > 0.1 * size


@pytest.mark.full
def test_server_alone_streams_every_tool_call_at_a_small_cost(tmp_path: Path) -> None:
    found = report("frontend", tmp_path)
    for name in ("64 streams, a step every 10 ms", "64 streams, at once"):
        assert found[name]["streams without their tool call"] == 0
        assert found[name]["server CPU us per token"] < 300 * slowness()


M3_LAYOUT = Path(__file__).parents[1] / "minimax_m3_layout.jinja"
M3 = ("--format", "m3", "--m3-template", str(M3_LAYOUT))


@pytest.mark.parametrize("options", [pytest.param((), id="m2", marks=pytest.mark.full), M3])
def test_scripted_day_reaches_clients_as_written(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = report("scripted", tmp_path, *options)
    assert found["sessions"] == "6 at once, in 6 ways"
    assert found["turns"] >= 30 and found["calls"] >= 30
    assert found["hung up and asked again"] >= found["broken off in the engine"] >= 1


@pytest.mark.full
def test_live_day_makes_calls_that_follow_their_schemas_on_cached_prompts(tmp_path: Path) -> None:
    found = report("live", tmp_path)
    assert found["turns"] == 6 and found["calls"] >= 4
    assert found["prompts found again whole"] >= 2
