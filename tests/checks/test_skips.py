import pytest

from tests.conftest import check_skip


@pytest.mark.parametrize(
    ("outcome", "reason", "expected"),
    [
        ("skipped", "Skipped: PyTorch finds no GPU here", "skipped"),
        ("skipped", "Skipped: no Chromium here: none of chrome is on the PATH", "skipped"),
        ("skipped", "Skipped: could not import 'xgrammar'", "failed"),
        ("skipped", "Skipped: the file is not beside this checkout", "failed"),
        ("passed", "", "passed"),
    ],
)
def test_only_listed_reasons_may_skip(outcome: str, reason: str, expected: str) -> None:
    where = ("a.py", 1, reason) if outcome == "skipped" else None
    report = pytest.TestReport("a.py::a", ("a.py", 1, "a"), {}, outcome, where, "call")
    check_skip(report)
    assert report.outcome == expected
    assert ("MAY_SKIP" in str(report.longrepr)) == (expected == "failed")
