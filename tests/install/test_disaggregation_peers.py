import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.api_support import CHAT, QUESTION
from tests.e2e.test_disaggregation import COMPLETIONS, find_kv_port, run_alone, serving_pair
from tests.install.routers import ROOT, install, running_router

PAGE = (ROOT / "docs" / "disaggregation.md").read_text().replace("\\\n", "")
COMMANDS = re.findall(
    r"^(\S+|python -m \S+) (--\S*pd-.*) --port 8000 +# pip install (\S+)$", PAGE, re.M
)
pytestmark = pytest.mark.timeout(900)  # for downloads


@pytest.mark.parametrize(("program", "line", "requirement"), COMMANDS)
def test_a_router_from_pypi_drives_a_pair(
    program: str, line: str, requirement: str, tmp_path: Path
) -> None:
    """Run the commands of docs/disaggregation.md."""
    with serving_pair(tmp_path, kv_load_failure_policy="fail") as (first, second):
        places = {"http://127.0.0.1:8100": first.url, "http://127.0.0.1:8200": second.url}
        places["5600"] = find_kv_port(first)
        options = [places.get(word, word) for word in line.split()]
        with running_router(tmp_path, requirement, program, *options) as http:
            bodies: list[tuple[str, dict[str, Any]]] = [
                (COMPLETIONS, {"prompt": "One apple. " * 90, "max_tokens": 20, "temperature": 0}),
                (CHAT, {"messages": QUESTION, "max_tokens": 20, "temperature": 0.8, "seed": 5}),
            ]
            for path, body in bodies:
                answer = http.post(path, json={"model": "nano", **body})
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"] == run_alone(first, path, body)["choices"]
                with http.stream("POST", path, json={"model": "nano", **body, "stream": True}) as s:
                    assert list(s.iter_lines())[-2] == "data: [DONE]"
        assert second.gauge("negamax:remote_prefills_total") == 4
        for kind in ("failed_remote", "local"):
            assert second.gauge(f"negamax:{kind}_prefills_total") == 0


def test_nixl_from_pypi_moves_the_blocks_of_a_pair(tmp_path: Path) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    install(
        "--quiet", "--no-deps", "--target", tmp_path, *(each for each in lines if "nixl" in each)
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "nixl", "-rs"]
    files = [ROOT / "tests" / "cpu" / "test_host_pool.py"]
    files += [ROOT / "tests" / "e2e" / "test_disaggregation.py"]
    found = subprocess.run(
        [*command, *files],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert found.returncode == 0 and "3 passed, 1 skipped" in found.stdout, found.stdout
