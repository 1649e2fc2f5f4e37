import re

import pytest
from fastapi.openapi.utils import get_openapi

from tools import api_reference, cli_reference


def test_pages_have_every_route_command_and_unique_headings() -> None:
    page = api_reference.render()
    for route in api_reference.app_routes():
        assert all(f"| `{method} {route.path}` |" in page for method in route.methods)
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert len(headings) == len(set(headings)) > 60
    page = cli_reference.render()
    assert page.count("\n## negamax ") > 10
    assert "| `--port` |" in page and "`--pipeline-parallel-size`" in page


def test_every_field_of_the_api_has_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [line for line in api_reference.render().splitlines() if line.startswith("| `")]
    assert len(rows) > 600
    assert [row for row in rows if not row.removesuffix("|").rpartition("|")[2].strip()] == []
    assert "| `temperature` | number | none | 0 to 2. Sampling temperature; 0 is greedy. |" in rows
    everything = api_reference.field_comments
    monkeypatch.setattr(
        api_reference,
        "field_comments",
        lambda schema: {name: text for name, text in everything(schema).items() if name != "echo"},
    )
    with pytest.raises(ValueError, match="ChatRequest has no remark on echo"):
        api_reference.render()


@pytest.mark.filterwarnings("error")
def test_operations_of_the_openapi_document_have_unique_ids() -> None:
    document = get_openapi(title="Negamax", version="1", routes=api_reference.app_routes())
    ids = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(ids) == len(set(ids)) > 30
