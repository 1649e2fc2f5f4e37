from pathlib import Path
from typing import Any

from tests.tool_reports import report

ROOT = Path(__file__).parents[2]
M3_LAYOUT = ROOT / "tests" / "minimax_m3_layout.jinja"


def check_scripted(found: dict[str, Any]) -> None:
    assert found["sessions"] == "6 at once, in 6 ways"
    assert found["turns"] >= 30 and found["calls"] >= 30
    assert found["hung up and asked again"] >= found["broken off in the engine"] >= 1


def test_scripted_day_reaches_every_client_as_written_and_keeps_the_prefix(tmp_path: Path) -> None:
    check_scripted(report("scripted", tmp_path))


def test_scripted_day_of_the_m3_family(tmp_path: Path) -> None:
    check_scripted(report("scripted", tmp_path, "--format", "m3", "--m3-template", str(M3_LAYOUT)))


def test_live_day_makes_calls_that_follow_their_schemas_on_cached_prompts(tmp_path: Path) -> None:
    found = report("live", tmp_path)
    assert found["turns"] == 6 and found["calls"] >= 4
    assert found["prompts found again whole"] >= 2
