import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.browser import Browser
from tests.e2e.chat_page import ask
from tests.e2e.conftest import MODEL, Server, eventually
from tests.e2e.scripted_server import Script, call

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
FIGURE = "document.querySelectorAll('.tile')[index].querySelector('strong')?.textContent"


def test_status_page_shows_the_load(page: Browser, server: Server, http: httpx.Client) -> None:
    page.open(f"{server.url}/status")
    page.wait(f"{FIGURE} === '0'", index=0)
    assert page.text("#state") == "running"
    page.wait("document.querySelector('#model').textContent === model", model=MODEL)
    question = {"model": MODEL, "messages": [{"role": "user", "content": "What is 47 + 38?"}]}

    # tokens per second, times to the first token, and times between tokens
    shown = (
        f"const [speed, ...times] = [3, 6, 7].map((index) => {FIGURE}); "
        "return Number(speed) > 0 && times.every((text) => / m?s$/.test(text))"
    )

    def is_shown() -> bool:
        """Return whether the next update of the page shows a request."""
        assert http.post("/v1/chat/completions", json=question).status_code == 200
        return bool(page.run(shown))

    assert eventually(is_shown)
    page.wait(
        "document.querySelectorAll('.tile')[3].querySelector('.line').getAttribute('d').includes('L')"
    )
    lines = "[...document.querySelectorAll('.sparkline')]"
    said = page.run(f"return {lines}.map((e) => e.getAttribute('aria-label'))")
    assert said[0].startswith("Running: now ")
    assert int(page.text("#requests").replace(",", "")) >= 1
    kept = "JSON.parse(sessionStorage.getItem('negamax-status')).kept.length"
    before = page.run(f"return {kept}")
    page.open(f"{server.url}/status")
    page.wait(f"{kept} > before", before=before)  # A reload keeps the charts.
    assert page.problems == []


def test_quantiles_are_computed_from_the_gain_of_a_histogram(page: Browser, script: Script) -> None:
    text = """
        # HELP t seconds
        t_bucket{le="0.1",model_name="a,b"} FIRST
        t_bucket{le="0.2",model_name="a,b"} SECOND
        t_bucket{le="+Inf",model_name="a,b"} SECOND
        n{reason="x"} 2
        n{reason="y"} 3
    """.replace("        ", "")
    before, after = (
        text.replace("FIRST", a).replace("SECOND", b) for a, b in (("100", "100"), ("110", "120"))
    )
    answer = page.run(
        """
        const { parseMetrics, quantile } = await import('/playground/prometheus.js');
        const [a, b] = [parseMetrics(before), parseMetrics(after)];
        const of = (share) => quantile(a.buckets.get('t'), b.buckets.get('t'), share);
        return [b.values.get('n'), of(0.25), of(0.75), quantile(a.buckets.get('t'), a.buckets.get('t'), 0.5)];
        """,
        before=before,
        after=after,
    )
    assert answer == [5, pytest.approx(0.05), pytest.approx(0.15), None]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible(page: Browser, script: Script, server: Server, scheme: str) -> None:
    page.look(width=1360, height=860, scheme=scheme)
    script.steps = [
        {"reasoning_content": "Hm."},
        {"content": "# A\n\n$x$ `b` [c](https://e.example/)\n\n```py\nd = 'e'  # f\n```"},
    ]
    script.steps += [{"content": "\n\n|g|\n|-|\n|h|\n\n- [x] i\n\n$$j$$"}, *call("f", "{}")]
    ask(page, "One")
    page.click(".thinking summary")
    assert violations(page) == []
    page.open(f"{server.url}/status")
    page.wait(f"{FIGURE}", index=0)
    assert violations(page) == []


def violations(page: Browser) -> list[dict[str, Any]]:
    page.call("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
    found = page.run("return JSON.stringify((await axe.run()).violations)")
    return [
        {"rule": each["id"], "at": [node["target"] for node in each["nodes"]]}
        for each in json.loads(found)
    ]
