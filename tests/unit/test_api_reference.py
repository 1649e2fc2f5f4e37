"""docs/api-reference.md says what the server does: it is generated, and not stale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.openapi.utils import get_openapi

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import generate_api_reference as reference

SCRIPT = Path(reference.__file__)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *arguments])
    return reference.main()


def test_page_is_what_the_schemas_say() -> None:
    """In a process of its own, as a person runs it: the order of sets must not show."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True, cwd=SCRIPT.parents[1]
    )
    assert done.returncode == 0, done.stderr


def test_stale_page_is_noticed_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    stale = reference.PAGE.read_text(encoding="utf-8").replace(
        "| `temperature` | number | none | 0 to 2; ", "| old | ", 1
    )
    page.write_text(stale, encoding="utf-8")
    assert run(monkeypatch, "--check", "--output", str(page)) == 1
    assert "+| `temperature`" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == stale
    assert run(monkeypatch, "--output", str(page)) == 0
    assert page.read_text(encoding="utf-8") == reference.PAGE.read_text(encoding="utf-8")


def test_route_without_a_place_on_the_page_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "SECTIONS", reference.SECTIONS[1:])
    assert run(monkeypatch, "--check") == 2
    assert "POST /v1/chat/completions" in capsys.readouterr().err


def test_links_lead_to_headings() -> None:
    text = reference.render()
    headings = [
        line.removeprefix("### ").lower() for line in text.splitlines() if line.startswith("### ")
    ]
    targets = {part.partition(")")[0] for part in text.split("](#")[1:]}
    assert targets <= set(headings)
    assert len(headings) == len(set(headings))


def test_every_field_says_what_it_is() -> None:
    rows = [line for line in reference.render().splitlines() if line.startswith("| `")]
    assert len(rows) > 600
    assert [row for row in rows if not row.removesuffix("|").rpartition("|")[2].strip()] == []


def test_field_without_a_remark_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = reference.field_comments
    monkeypatch.setattr(
        reference,
        "field_comments",
        lambda schema: {name: text for name, text in everything(schema).items() if name != "echo"},
    )
    assert run(monkeypatch, "--check") == 2
    assert "ChatRequest says nothing about echo" in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
def test_operations_of_the_openapi_document_have_ids_of_their_own() -> None:
    document = get_openapi(title="Negamax", version="1", routes=reference.app_routes())
    ids = [
        operation["operationId"]
        for path in document["paths"].values()
        for operation in path.values()
    ]
    assert len(ids) == len(set(ids)) == sum(len(section.routes) for section in reference.SECTIONS)
