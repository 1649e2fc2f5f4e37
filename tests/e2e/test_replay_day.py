from pathlib import Path

import pytest

from tests.tool_reports import report

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
