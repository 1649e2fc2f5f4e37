from types import SimpleNamespace
from typing import Any

from tests.conftest import mark_full


class Item(SimpleNamespace):
    def add_marker(self, mark: Any) -> None:
        self.mark = mark.name


def test_listed_tests_are_full_and_unmatched_lines_are_found() -> None:
    items: Any = [Item(nodeid=f"a.py::test_{name}", mark="") for name in ("b[1]", "b[2]", "c")]
    starts = ["a.py::test_b[2", "a.py::test_gone", "not_collected.py::test_d"]
    assert mark_full(starts, items) == ["a.py::test_gone"]
    assert [item.mark for item in items] == ["", "full", ""]
